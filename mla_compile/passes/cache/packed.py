"""Rows of a cache in float8 (e4m3), each with its own scale: about half the bytes of bfloat16.

Packed rows are one tensor of bytes, so that code that joins, cuts or reorders rows does not depend on the packing::

    [ W values in float8_e4m3fn | any bytes up to a multiple of 4 | the scale, 4 bytes of float32, ... ]

The unpacked row is the values times the scale. The scale is the largest magnitude in the row divided by 448. Zero bytes
represent a row of zeros. The scale is repeated until the row is a multiple of 16 bytes long, because GPUs load 16 bytes
at a time from aligned addresses. So 512 values take 528 bytes, as in FlashMLA's rows, which have four scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import fx

aten = torch.ops.aten
X = TypeVar("X", bound="torch.Tensor | fx.Node")
TensorCall = Callable[..., X]

FLOAT8 = torch.float8_e4m3fn
_TOP, _LEAST = torch.finfo(FLOAT8).max, 2.0**-100
_SCALE = 4  # bytes
_ROW = 16


def packed_width(width: int) -> int:
    """Return the number of bytes in a packed row of ``width`` values."""
    return _up(_up(width, _SCALE) + _SCALE, _ROW)


def place_of_scale(width: int) -> slice:
    """Return the slice of bytes that holds the scale in a packed row of ``width`` values."""
    return slice(_up(width, _SCALE), _up(width, _SCALE) + _SCALE)


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def pack(rows: X, width: int, call: TensorCall[X]) -> X:
    """Pack rows [..., width] into bytes [..., packed_width(width)]; ``call`` runs or emits an operator."""
    x = call(aten._to_copy.default, rows, dtype=torch.float32)
    largest = call(aten.amax.default, call(aten.abs.default, x), [-1], keepdim=True)
    # The scale of a row of zeros must not be 0, or its values would be NaN.
    scale = call(aten.clamp_min.default, call(aten.mul.Tensor, largest, 1 / _TOP), _LEAST)
    values = call(aten._to_copy.default, call(aten.div.Tensor, x, scale), dtype=FLOAT8)
    start, end = place_of_scale(width).start, packed_width(width)
    # There are at least two copies, because Inductor of torch 2.11 does not read an axis of size 1 as bytes.
    several = call(aten.cat.default, [scale] * max(2, (end - start) // _SCALE), -1)
    copies = call(aten.view.dtype, several, torch.uint8)
    parts = [call(aten.view.dtype, values, torch.uint8)]
    if start != width:
        # Bytes of the scale fill the gap. A pad operator would bake in the traced values of symbolic sizes.
        parts.append(call(aten.slice.Tensor, copies, -1, 0, start - width))
    return call(aten.cat.default, [*parts, call(aten.slice.Tensor, copies, -1, 0, end - start)], -1)


def unpack(rows: X, width: int, dtype: torch.dtype, call: TensorCall[X]) -> X:
    """Unpack rows from their bytes, and return them as [..., width] in ``dtype``."""
    values = call(aten._to_copy.default, float8_values(rows, width, call), dtype=torch.float32)
    return call(aten._to_copy.default, call(aten.mul.Tensor, values, scales(rows, width, call)), dtype=dtype)


def float8_values(rows: X, width: int, call: TensorCall[X]) -> X:
    """Return a view of the values [..., width] of packed rows."""
    return call(aten.view.dtype, call(aten.slice.Tensor, rows, -1, 0, width), FLOAT8)


def scales(rows: X, width: int, call: TensorCall[X]) -> X:
    """Return the scales [..., 1] of packed rows, in float32."""
    at = place_of_scale(width)
    own = call(aten.slice.Tensor, rows, -1, at.start, at.stop)
    # The scales are copied first, because in sliced or transposed rows they may not be aligned to four bytes.
    return call(aten.view.dtype, call(aten.clone.default, own, memory_format=torch.contiguous_format), torch.float32)


def at_once(op: Callable[..., torch.Tensor], *args: object, **kwargs: object) -> torch.Tensor:
    """Apply an operator eagerly: a :data:`TensorCall` on tensors."""
    return op(*args, **kwargs)


def error_of(width: int) -> float:
    """Return the relative error (2-norm) of packing rows of ``width`` values, measured on about 4,096 random values."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(max(1, 4096 // width), width, generator=generator)
    again = unpack(pack(rows, width, at_once), width, torch.float32, at_once)
    return float((again - rows).norm() / rows.norm())
