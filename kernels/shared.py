"""What calls of one step can share: the buffers that their preparing launches write, laid out in one tensor.

A mask's lists of tiles (kernels/triton/tiles_triton.py) and the cut of a ragged batch (kernels/triton/schedule.py)
depend on the mask, the lengths, sizes, dtypes and numbers, and the layers of a model have those in common. The op
``mla_compile::decode_schedule`` writes them once, and calls that are given its result launch without preparing.

Which buffers there are, and of which tiles, depends on the device; the size of the tensor must not, because a fake
function has none to ask. So :func:`elements` is a bound that holds for every plan on every device.
"""

from __future__ import annotations

import math

import torch

from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.tiles import LEAST

ALIGNMENT = 16  # bytes: what the kernels are told of their buffers' addresses
PLANES = 6  # of a mask's lists
MAX_SMS = 144  # of a whole GH100 die; a batch is cut for no more of them

Buffers = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype by name


def elements(call: DecodeCall) -> int:
    """How many int64 the schedule of a call has; 0 where no device has anything to prepare.

    Sizes may be symbolic, and nothing is asked of them that would become a guard.
    """
    B = call.query.shape[0]
    if call.indices is not None:
        return 0
    if call.mask is not None:
        return PLANES * B * ((call.latent.shape[1] + LEAST - 1) // LEAST)
    if call.block_table is None or call.deterministic or call.num_splits:
        return 0
    return (_padded(8 * (MAX_SMS + 1)) + 3 * _padded(4 * B)) // 8


def offsets(buffers: Buffers) -> dict[str, int]:
    """Where each buffer begins inside a schedule, in bytes."""
    found, at = {}, 0
    for name, (shape, dtype) in buffers.items():
        found[name] = at
        at += _padded(math.prod(shape) * dtype.itemsize)
    return found


def _padded(size: int) -> int:
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
