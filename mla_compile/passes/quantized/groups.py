"""Weights that a library's operator dequantizes from int8 codes, with a scale for each group of columns of a row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from mla_compile.passes.ir.graph import is_tensor, shape, val
from mla_compile.passes.ir.schema import named_arguments, schema_name


class Groups(NamedTuple):
    """A weight ``(codes - zeros) * scales``, where each scale and zero point belongs to ``width`` columns of a row.

    ``codes`` is int8 [O,K], ``scales`` [O,K/width], and ``zeros`` is int8 [O,K/width] or None.
    ``four_bits`` says that the codes are declared to be -8 to 7.
    """

    codes: fx.Node
    scales: fx.Node
    zeros: fx.Node | None
    width: int
    four_bits: bool


def groups_of(node: fx.Node) -> Groups | None:
    """Return the parts of a weight that ``torchao::dequantize_affine`` computes, or None for any other weight.

    The operator takes ``block_size``, the rows and columns that share a scale. A block of several rows is not read.
    """
    if schema_name(node) != "torchao::dequantize_affine":
        return None
    told = named_arguments(node)
    codes, scales, zeros = told["input"], told["scale"], told["zero_point"]
    rows, *columns = told["block_size"]
    if val(codes).dtype != torch.int8 or len(shape(codes)) != 2 or rows != 1:
        return None
    O, K = shape(codes)  # noqa: E741  the letter of the output's columns
    (width,) = columns
    expected = (O, K // width) if isinstance(K, int) and K % width == 0 else None
    fits = shape(scales) == expected and val(scales).dtype in (torch.float32, val(node).dtype)
    if is_tensor(zeros):
        fits = fits and shape(zeros) == expected and val(zeros).dtype == torch.int8
    bounds = [told["quant_min"], told["quant_max"]]
    four_bits = all(isinstance(bound, (int, float)) and -8 <= bound <= 7 for bound in bounds)
    return Groups(codes, scales, zeros, width, four_bits) if fits else None
