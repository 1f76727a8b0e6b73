"""Families of operators."""

from __future__ import annotations

import torch

aten = torch.ops.aten

CONTRACTIONS = {
    aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.einsum, aten.tensordot, aten.batch_norm,
    aten.conv1d, aten.conv2d,
}  # fmt: skip
"""Operators that may apply a weight to the features of a row."""

FILLS = {
    aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided, aten.zeros,
    aten.zeros_like, aten.new_zeros, aten.full, aten.full_like, aten.new_full,
}  # fmt: skip
"""Operators whose result depends on no number of the graph."""
