"""Queries whose keys are all hidden by a large finite number, where the attention was told which keys each query sees.

A model that hides keys with its dtype's lowest number, and not with minus infinity, weighs all T keys alike where none
is left: all scores are one number. An attention that is told a list of keys does not read the others, so what it gives
there is put right afterwards, with ``v`` [B,T,Lv] the rows that are summed:

    out[b,s,h,:] = 1/T sum_t v[b,t,:]     where lse[b,s,h] <= lowest, which no score of a visible key is

Such rows are padding in most calls, and most calls have none. So the rows ``v`` are read only where one is found: on a
CPU that is looked up first, on a GPU the kernel does it, and nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_compile.errors import InputError
from mla_compile.kernels import launch
from mla_compile.kernels.call import ALIKE
from mla_compile.kernels.reference import compute_dtype


def weigh_alike(out: Tensor, lse: Tensor, values: Tensor, lowest: float) -> Tensor:
    """A copy of ``out`` [B,S,H,Lv], with the mean of ``values`` [B,T,Lv] where ``lse`` [B,S,H] is at most ``lowest``.

    ``out`` and ``values`` may have different floating dtypes; the mean is taken in float32 (float64 of float64).

    Raises :class:`InputError`: shapes that do not fit together, or a row width of ``values`` that is not ``out``'s.
    """
    check(out, lse, values)
    hidden = lse <= lowest
    wanted = hidden.flatten(1).any(1)  # [B]
    if out.is_cuda and launch.available() and values.dtype != torch.float64:
        mean = _means(values, wanted)
    elif out.is_cuda:
        mean = mean_of(values)
    elif not wanted.any():
        return out.clone()
    else:
        mean = mean_of(values)
    return torch.where(hidden[..., None], mean[:, None, None, :].to(out.dtype), out)


def mean_of(values: Tensor) -> Tensor:
    """[B,Lv], of [B,T,Lv]; zeros where there are no keys."""
    return values.to(compute_dtype(values)).sum(1) / max(values.shape[1], 1)


def check(out: Tensor, lse: Tensor, values: Tensor) -> None:
    """Raises :class:`InputError` where the arguments do not fit together."""
    fit = out.dim() == 4 and values.dim() == 3 and lse.shape == out.shape[:3]
    if not fit or (values.shape[0], values.shape[2]) != (out.shape[0], out.shape[3]):
        given = ", ".join(f"{n} {list(x.shape)}" for n, x in (("out", out), ("lse", lse), ("values", values)))
        raise InputError(f"{ALIKE}: got {given}; expected out [B,S,H,Lv], lse [B,S,H], values [B,T,Lv]")


def _means(values: Tensor, wanted: Tensor) -> Tensor:
    """:func:`mean_of` the batch entries that are ``wanted``; the others are not read and are 0."""
    from mla_compile.kernels.triton.mean_triton import BLOCK_T, BLOCK_V, means

    B, T, width = values.shape
    mean = values.new_zeros(B, width, dtype=torch.float32)
    if mean.numel() and T:
        grid = (B, -(-width // BLOCK_V))
        means[grid](values, wanted.to(torch.int32), mean, T, width, *values.stride(), BLOCK_T=BLOCK_T, BLOCK_V=BLOCK_V)
    return mean
