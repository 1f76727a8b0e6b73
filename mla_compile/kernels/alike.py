"""Corrects sparse attention for queries whose keys are all hidden by a large finite number.

Some models hide keys with their dtype's lowest number instead of minus infinity. If a query has no visible key, all its
T scores are then the same number, so all T keys have the same weight. Attention that reads only the listed keys gives
another result. This module writes the right result, with the values ``v`` [B,T,Lv]:

    out[b,s,h,:] = 1/T sum_t v[b,t,:]     if lse[b,s,h] <= lowest, a bound below any score of a visible key

If the caller also has a ``mask`` [B,H,S,T] of arbitrary values, only the keys with the greatest mask value have weight:

    n[b,h,s,t] = mask[b,h,s,t] if indices[b,s] name t, else fill;     m[b,h,s] = max_t n[b,h,s,t]
    out[b,s,h,:] = the mean of v[b,t,:] over t with n[b,h,s,t] = m[b,h,s]

The other keys have weight 0, because two different numbers of that magnitude are very far apart.

Queries without a visible key are usually padding. Most calls have no such query, and then ``v`` is not read. On a CPU,
this module checks for such queries. On a GPU, the kernel checks, so that the host does not wait. (For now, a GPU always
reads ``v`` if there is a mask, in float64, or without Triton.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_compile.errors import InputError
from mla_compile.kernels import launch
from mla_compile.kernels.call import ALIKE
from mla_compile.kernels.reference import compute_dtype


def weigh_alike(
    out: Tensor,
    lse: Tensor,
    values: Tensor,
    lowest: float,
    mask: Tensor | None = None,
    indices: Tensor | None = None,
    fill: float = 0.0,
) -> Tensor:
    """Copy ``out`` [B,S,H,Lv], but replace rows with ``lse`` [B,S,H] <= ``lowest`` by a mean of ``values`` [B,T,Lv].

    ``out`` and ``values`` may have different floating dtypes; the mean is computed in float32 (float64 for float64).
    ``mask`` [B,H,S,T] of floats (B, H, S may be 1) requires ``indices`` int32 [B,S,k], where -1 names no key. Keys that
    are not listed have the mask value ``fill``.

    Raises :class:`InputError` if shapes do not fit together.
    """
    check(out, lse, values, mask, indices)
    hidden = lse <= lowest
    wanted = hidden.flatten(1).any(1)  # [B]
    if mask is not None and indices is not None and values.shape[1]:
        if not out.is_cuda and not wanted.any():
            return out.clone()
        return torch.where(hidden[..., None], _greatest(values, mask, indices, fill).to(out.dtype), out)
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
    """Return the mean of [B,T,Lv] over T, [B,Lv]; zeros if there are no keys."""
    return values.to(compute_dtype(values)).sum(1) / max(values.shape[1], 1)


def _greatest(values: Tensor, mask: Tensor, indices: Tensor, fill: float) -> Tensor:
    """Return the mean of the rows with the greatest ``n`` (see the module's docstring), [B,S,H|1,Lv]."""
    (B, S, k), T = indices.shape, values.shape[1]
    given = mask.expand(B, mask.shape[1], S, T)
    others = torch.full_like(given, fill)
    # An extra first column takes the entries that name no key.
    at = torch.where(indices < T, indices.long() + 1, 0).clamp(min=0)[:, None].expand(B, mask.shape[1], S, k)
    before = others[..., :1]
    listed = torch.cat([before, given], 3).gather(3, at)
    numbers = torch.cat([before, others], 3).scatter(3, at, listed)[..., 1:]
    weights = (numbers == numbers.amax(3, keepdim=True)).to(compute_dtype(values))
    total = torch.einsum("bhst,btv->bshv", weights, values.to(weights.dtype))
    return total / weights.sum(3).transpose(1, 2)[..., None]


def check(out: Tensor, lse: Tensor, values: Tensor, mask: Tensor | None = None, indices: Tensor | None = None) -> None:
    """Raise :class:`InputError` if the arguments do not fit together."""
    fit = out.dim() == 4 and values.dim() == 3 and lse.shape == out.shape[:3]
    if not fit or (values.shape[0], values.shape[2]) != (out.shape[0], out.shape[3]):
        given = ", ".join(f"{n} {list(x.shape)}" for n, x in (("out", out), ("lse", lse), ("values", values)))
        raise InputError(f"{ALIKE}: got {given}; expected out [B,S,H,Lv], lse [B,S,H], values [B,T,Lv]")
    if (mask is None) is not (indices is None):
        raise InputError(f"{ALIKE}: got {'no mask' if mask is None else 'no indices'}; expected both or neither")
    if mask is None or indices is None:
        return
    wanted = (*(out.shape[k] for k in (0, 2, 1)), values.shape[1])
    of = mask.dim() == 4 and all(n in (1, size) for n, size in zip(mask.shape[:3], wanted[:3], strict=True))
    if not (of and mask.shape[3] == wanted[3] and mask.dtype.is_floating_point):
        raise InputError(
            f"{ALIKE}: mask is {mask.dtype} {list(mask.shape)}, expected floats {list(wanted)}, B, H or S may be 1"
        )
    if indices.dim() != 3 or tuple(indices.shape[:2]) != tuple(out.shape[:2]):
        raise InputError(f"{ALIKE}: indices is {list(indices.shape)}, expected [B,S,k] of out {list(out.shape)}")


def _means(values: Tensor, wanted: Tensor) -> Tensor:
    """Return :func:`mean_of` for the ``wanted`` batch entries. The others are 0, and their rows are not read."""
    from mla_compile.kernels.triton.mean_triton import BLOCK_T, BLOCK_V, means

    B, T, width = values.shape
    mean = values.new_zeros(B, width, dtype=torch.float32)
    if mean.numel() and T:
        grid = (B, -(-width // BLOCK_V))
        means[grid](values, wanted.to(torch.int32), mean, T, width, *values.stride(), BLOCK_T=BLOCK_T, BLOCK_V=BLOCK_V)
    return mean
