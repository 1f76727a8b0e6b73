"""Pure functions that describe the additional launch arguments of index lists (kernels/triton/lists_triton.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.shared import Buffers
from mla_compile.kernels.triton.step import Arguments

LOOKED_UP = 1024  # places that a block looks up at a time: 4 or 8 per thread. Not tuned on a GPU yet
_I32 = 1 << 31


def suits(call: DecodeCall) -> bool:
    """Whether the kernel can read the rows of a call's lists in place. Shapes may still be unchecked.

    This is False if the mask differs between heads, because a block looks up one mask row for all heads. It is also
    False if places exceed int32.
    """
    mask = call.mask
    by_head = mask is not None and mask.dim() == 4 and mask.shape[1] > 1 and mask.stride(1) != 0
    some = call.indices is not None and call.indices.numel() > 0
    return some and not by_head and call.latent.shape[:2].numel() < _I32


def scratch(call: DecodeCall) -> Buffers:
    """Return buffers: places if there is a block table or a mask, bias if the mask is additive."""
    if call.indices is None or (call.block_table is None and call.mask is None):
        return {}
    size = tuple(call.indices.shape)
    found: Buffers = {"places": (size, torch.int32)}
    if call.mask is not None and call.mask.dtype.is_floating_point:
        found["bias"] = (size, torch.float32)
    return found


def arguments(call: DecodeCall, into: Arguments) -> tuple[int, bool]:
    """Add the arguments of an index list. Return the page size for the loop, and whether offsets need 64 bits.

    If all rows are equally spaced, also across pages, the loop treats the pages as one contiguous cache (page size 0).
    The length of a list is set at each launch if it grows with the cache (kernels/kinds.py).
    """
    page, buffers = call.sizes.page, scratch(call)
    into.pointer("indices", call.indices)
    for name, kind in (("places", "*i32"), ("bias", "*fp32")):
        into.scratch(name, name, kind, used=name in buffers)
    into.constants |= {"LIST_PAGE": page, "LOOKED_UP": LOOKED_UP}
    if call.indices is None:
        into.strides({"indices_b": 0, "indices_s": 0})
        into.constants["entries"] = 0
        return page, False
    told(call.indices, into)
    if page == 0 or not in_one_piece(call):
        return page, False
    return 0, any(x.shape[0] * x.stride(0) >= _I32 for x in _pages(call))


def told(indices: Tensor, into: Arguments) -> None:
    """Add the strides and the length of an index list to the arguments of a launch."""
    outer, inner, entries = *indices.stride()[:2], indices.shape[2]
    into.scalars |= {"indices_b": outer, "indices_s": inner, "entries": entries}


def in_one_piece(call: DecodeCall) -> bool:
    """Whether the rows of all pages are equally spaced, also across pages."""
    return all(x.stride(0) == x.shape[1] * x.stride(1) for x in _pages(call))


def _pages(call: DecodeCall) -> list[Tensor]:
    return [x for x in (call.latent, call.rope, call.kv_scale) if x is not None and x.dim() > 1]
