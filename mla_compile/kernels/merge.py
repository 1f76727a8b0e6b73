"""Merges attention results over disjoint keys, for example of several caches, a shared prefix, or several ranks.

Part p is the result over some of the keys: ``out_p`` (the softmax average over these keys) and ``lse_p`` (the natural
logarithm of the sum of the exponentials of their scores, or minus infinity if the part saw no key). The merge computes

    w_p = exp(lse_p) / sum_q exp(lse_q)        0 if lse_p is minus infinity

    out = sum_p w_p out_p        lse = log sum_p exp(lse_p)

(Flash-Decoding; the incremental form is Milakov and Gimelshein's, arXiv 1805.02867.) If a part saw no key, its ``out``
is ignored and may be anything, NaN included. If no part saw a key, the merged ``out`` is 0 and ``lse`` minus infinity.
A sink multiplies the merged ``out`` by :func:`mla_compile.kernels.reference.sink_share`, so the parts are computed
without the sink.

The merge uses plain torch operators. They run on every device, and ``torch.compile`` can fuse them with neighbouring
operators, which saves a launch. The splits of one launch are merged in kernels/triton/combine_triton.py instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mla_compile.errors import InputError
from mla_compile.kernels.checks import FLOATS
from mla_compile.kernels.reference import sink_share


def merge(
    out: Tensor | Sequence[Tensor], lse: Tensor | Sequence[Tensor], *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge results over disjoint sets of keys into the result over all keys (see the module's equations).

    ``out`` is [P,B,S,H,V] or P tensors [B,S,H,V], ``lse`` [P,B,S,H] or P tensors [B,S,H], both as
    :func:`mla_compile.kernels.decode.decode_attention` returns them, in any order. ``lse`` is a natural logarithm
    (multiply a base-2 logarithm by ``math.log(2)``), in float32 or float64. Pass ``sinks`` [H] here and not to the
    parts, because a sink must be applied only once.

    Returns ``out`` [B,S,H,V] in the dtype of the parts, summed in float32 (in float64 if a part or ``lse`` is float64),
    and ``lse`` [B,S,H] without the sinks. Merged results can be merged again. There is no gradient.

    Raises :class:`InputError` if there is no part, if shapes, dtypes or devices do not fit, or if an input requires a
    gradient.
    """
    parts, sums = _stacked("out", out), _stacked("lse", lse)
    wrong = _wrong(parts, sums, sinks)
    if wrong is not None:
        raise InputError(f"merge: {wrong}")
    dtype = torch.promote_types(parts.dtype, sums.dtype)
    empty = sums == -torch.inf
    # softmax, not exp(lse_p - lse): for large scores, the rounding error of lse would scale the result.
    weight = torch.softmax(sums, dim=0).masked_fill(empty, 0.0)
    whole = torch.logsumexp(sums, dim=0)
    total = (weight[..., None] * parts.to(dtype).masked_fill(empty[..., None], 0.0)).sum(dim=0)
    if sinks is not None:
        total = total * sink_share(whole, sinks)[..., None]
    return total.to(parts.dtype), whole


def _stacked(name: str, given: Tensor | Sequence[Tensor]) -> Tensor:
    """Stack P tensors to [P,...]."""
    if isinstance(given, Tensor):
        return given
    if not given:
        raise InputError(f"merge: there is no part in {name}; give one at least")
    first = given[0]
    for p, part in enumerate(given):
        if (part.shape, part.dtype, part.device) != (first.shape, first.dtype, first.device):
            raise InputError(f"merge: {name}[{p}] is {_kind(part)}, expected {_kind(first)} as {name}[0]")
    return torch.stack(list(given))


def _wrong(parts: Tensor, sums: Tensor, sinks: Tensor | None) -> str | None:
    """Return a message about an argument that does not fit, or None if all fit."""
    if parts.dim() != 5:
        return f"out is {_kind(parts)}, expected [P,B,S,H,V], or P tensors [B,S,H,V]"
    P, _, _, H, _ = parts.shape
    if P == 0:
        return "there is no part in out; give one at least"
    if sums.shape != parts.shape[:-1]:
        return f"lse is {_kind(sums)}, expected {list(parts.shape[:-1])} beside out {_kind(parts)}"
    if parts.dtype not in FLOATS:
        return f"out is {parts.dtype}, expected one of {FLOATS}; cast it"
    if sums.dtype not in (torch.float32, torch.float64):
        return f"lse is {sums.dtype}, expected float32 or float64; compute it in one, a cast restores nothing"
    if sinks is not None and (sinks.shape != (H,) or sinks.dtype not in FLOATS):
        return f"sinks is {_kind(sinks)}, expected float32 [H] = [{H}]; cast or reshape it"
    for name, x in (("lse", sums), ("sinks", sinks)):
        if x is not None and x.device != parts.device:
            return f"{name} is on {x.device}, expected {parts.device} as out; move one of them"
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (parts, sums, sinks)):
        return "an input requires grad while gradients are enabled, and merge has none; call it under torch.no_grad()"
    return None


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}"
