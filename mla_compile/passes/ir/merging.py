"""The weights with which attention over disjoint keys is merged (:mod:`mla_compile.kernels.merge`), as operators."""

from __future__ import annotations

import torch
from torch import fx

from mla_compile.passes.ir.graph import Builder

aten = torch.ops.aten


def weights_of(builder: Builder, sums: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the weight of each part, and where a part sees no key; its weight is 0 there.

    ``sums`` [P,B,S,H] are the log-sum-exps of the parts, minus infinity where a part sees no key.
    """
    empty = builder.call(aten.eq.Scalar, sums, float("-inf"))
    # softmax, not exp(sums - lse): if scores are large, the rounding of lse itself would scale the result.
    return builder.call(aten.masked_fill.Scalar, builder.call(aten.softmax.int, sums, 0), empty, 0.0), empty
