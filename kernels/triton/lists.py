"""What a launch with lists of keys has more than one without (kernels/triton/lists_triton.py), as data and pure."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.shared import Buffers
from mla_compile.kernels.triton.step import Arguments

LOOKED_UP = 1024  # places that a block looks up at a time: 4 or 8 for each of its threads. Not tuned on a GPU yet
_I32 = 1 << 31


def suits(call: DecodeCall) -> bool:
    """Whether the kernel reads the rows of a call's lists where they lie. Shapes may be wrong yet.

    A block looks up one mask for all of its heads, and places are int32.
    """
    mask = call.mask
    by_head = mask is not None and mask.dim() == 4 and mask.shape[1] > 1 and mask.stride(1) != 0
    some = call.indices is not None and call.indices.numel() > 0
    return some and not by_head and call.latent.shape[:2].numel() < _I32


def scratch(call: DecodeCall) -> Buffers:
    """Places, where they are looked up in a block table or a mask, and what a mask adds to the scores."""
    if call.indices is None or (call.block_table is None and call.mask is None):
        return {}
    size = tuple(call.indices.shape)
    found: Buffers = {"places": (size, torch.int32)}
    if call.mask is not None and call.mask.dtype.is_floating_point:
        found["bias"] = (size, torch.float32)
    return found


def arguments(call: DecodeCall, into: Arguments) -> tuple[int, bool]:
    """Adds the arguments of a list. Returns the rows of a page as the loop sees them, and whether that takes 64 bits.

    Pages whose rows are all at one distance, also from page to page, are one cache for it. A list's length is told in
    each launch where it grows with the cache (kernels/kinds.py).
    """
    page, buffers = call.sizes.page, scratch(call)
    into.pointer("indices", call.indices)
    for name, kind in (("places", "*i32"), ("bias", "*fp32")):
        if name in buffers:
            into.scratch(name, name, kind)
        else:
            into.pointer(name, None)
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
    """Adds the numbers of a list."""
    outer, inner, entries = *indices.stride()[:2], indices.shape[2]
    into.scalars |= {"indices_b": outer, "indices_s": inner, "entries": entries}


def in_one_piece(call: DecodeCall) -> bool:
    """Whether the rows of all pages are at one distance, also from page to page."""
    return all(x.stride(0) == x.shape[1] * x.stride(1) for x in _pages(call))


def _pages(call: DecodeCall) -> list[Tensor]:
    return [x for x in (call.latent, call.rope, call.kv_scale) if x is not None and x.dim() > 1]
