"""Operators for the weights that merge attentions over disjoint keys (:mod:`mla_compile.kernels.merge`)."""

from __future__ import annotations

import torch
from torch import fx

from mla_compile.passes.ir.graph import Builder

aten = torch.ops.aten


def weights_of(builder: Builder, sums: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return each part's weight and a mask. If a part sees no key, the mask is True and the weight is 0.

    ``sums`` [P,B,S,H]: the log-sum-exp of each part, or minus infinity if the part sees no key.
    """
    empty = builder.call(aten.eq.Scalar, sums, float("-inf"))
    # Softmax is used, not exp(sums - lse): with large scores, the rounding error of lse would scale the result.
    return builder.call(aten.masked_fill.Scalar, builder.call(aten.softmax.int, sums, 0), empty, 0.0), empty
