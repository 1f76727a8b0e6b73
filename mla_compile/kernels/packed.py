"""Codes of four bits, packed for the kernel that multiplies a few rows by them (``cpu/csrc/packed.h``).

Libraries store codes of four bits as int8, so that a step reads twice the bytes it needs. The packed copy holds a tile
of :data:`TILE` outputs after the other. A tile has, for each group of g columns, int32 words [g/8,TILE], and then the
scales and the zero points [TILE]. A word holds the codes of eight neighbouring columns, plus 8. Code 2j is in bits 4j
to 4j+3, and code 2j+1 is 16 bits further, so that a mask yields 16-bit integers of neighbouring columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.errors import InputError

PACK = "mla_compile::pack_codes"
TILE, CODES = 16, 8


def pack(codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Return int32 words [tiles,groups,words] of ``codes`` [O,K] (int8, -8 to 7), in tiles of outputs.

    ``scales`` [O,K/g] are float32 or bfloat16, and ``zeros`` [O,K/g] are int8; None means 0. g is a multiple of 8.
    Raises :class:`InputError` if the arguments do not fit together, or if a code needs more than four bits.
    """
    tiles, groups, _ = _shape(codes, scales, zeros)
    if codes.numel():
        least, largest = (int(n) for n in codes.aminmax())
        if least < -8 or largest > 7:
            raise InputError(
                f'{PACK}: codes are {least} to {largest}, expected -8 to 7; use dequantize="step" to read them as int8'
            )
    raised = (_tiled(codes, tiles) + 8).unflatten(-1, (groups, -1, CODES)).permute(0, 2, 3, 1, 4)
    packed = torch.zeros(raised.shape[:-1], dtype=torch.int32, device=codes.device)
    for j in range(CODES):
        packed |= raised[..., j].to(torch.int32) << 4 * (j // 2) + 16 * (j % 2)
    points = torch.zeros_like(scales, dtype=torch.int8) if zeros is None else zeros
    of_outputs = (_tiled(t, tiles).transpose(1, 2).flatten().view(torch.int32) for t in (scales, points))
    return torch.cat([t.view(tiles, groups, -1) for t in (packed, *of_outputs)], 2)


def fake(codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Return an empty tensor like the result."""
    return codes.new_empty(_shape(codes, scales, zeros), dtype=torch.int32)


def shape_of(codes: Tensor, scales: Tensor) -> tuple[int, int, int]:
    """Return the shape of the words for ``codes`` [O,K] with ``scales`` [O,K/g]."""
    (outputs, columns), groups = codes.shape, scales.shape[1]
    return -(-outputs // TILE), groups, (columns // groups // CODES * 4 + scales.element_size() + 1) * TILE // 4


def _shape(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[int, int, int]:
    O, groups = scales.shape if scales.dim() == 2 else (0, 0)  # noqa: E741  the letter of the output's columns
    fits = codes.dim() == 2 and groups > 0 and codes.shape[0] == O and codes.shape[1] % (CODES * groups) == 0
    kinds = codes.dtype == torch.int8 and scales.dtype in (torch.float32, torch.bfloat16)
    if zeros is not None:
        fits, kinds = fits and zeros.shape == scales.shape, kinds and zeros.dtype == torch.int8
    if not fits or not kinds:
        said = ", ".join("none" if t is None else f"{t.dtype} {list(t.shape)}" for t in (codes, scales, zeros))
        raise InputError(
            f"{PACK}: codes, scales and zeros are {said}; expected torch.int8 [O,K], torch.float32 or torch.bfloat16 "
            "[O,K/g], and torch.int8 [O,K/g], with g a multiple of 8"
        )
    return shape_of(codes, scales)


def _tiled(rows: Tensor, tiles: int) -> Tensor:
    """Return ``rows`` [O,...] as [tiles,TILE,...], padded with zeros."""
    return F.pad(rows, (0, 0, 0, tiles * TILE - len(rows))).view(tiles, TILE, -1)
