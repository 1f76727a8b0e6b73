"""The schedule: a tensor of prepared data that the attention calls of all layers can share in a decode step.

It holds a mask's lists of tiles (kernels/triton/tiles_triton.py) or the partitions of a ragged batch
(kernels/triton/schedule.py). Both depend only on the mask, lengths, sizes, dtypes and numbers, which all layers of a
model share. The operator ``mla_compile::decode_schedule`` writes the schedule once. A call that receives a schedule
skips its own preparation.

The amount of data depends on the device. But the size of the tensor must be known without a device, because fake
functions cannot query one. :func:`elements` is therefore an upper bound over all plans and devices.
"""

from __future__ import annotations

import math

import torch

from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.tiles import LEAST

ALIGNMENT = 16  # bytes: the alignment that the kernels assume of their buffers
PLANES = 6  # planes of a mask's lists, see kernels/triton/tiles_triton.py
MAX_SMS = 144  # SMs of a full GH100 die; a batch has at most this many partitions

Buffers = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype by name


def elements(call: DecodeCall) -> int:
    """Return the number of int64 elements in a call's schedule; 0 if the call never prepares data.

    Sizes may be symbolic. This function adds no guards.
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
    """Return the offset of each buffer in a schedule, in bytes."""
    found, at = {}, 0
    for name, (shape, dtype) in buffers.items():
        found[name] = at
        at += _padded(math.prod(shape) * dtype.itemsize)
    return found


def _padded(size: int) -> int:
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
