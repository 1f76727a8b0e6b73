"""Multiply an activation by a weight as precisely as the form that the absorbed form replaces.

In half-precision models, the tensors between W_kc and the scores, and between the values' rows and W_v, are kept in
float32. One more rounding on either side would make the absorbed form up to 1.4 times less accurate than the original,
and float16 overflows in q W where q . (W c) does not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.arrange import aligned, einsum
from mla_compile.passes.ir.axes import Atom
from mla_compile.passes.ir.graph import OURS, Builder, args_of, packet, val
from mla_compile.passes.ir.sizes import hint, size
from mla_compile.passes.ir.walk import remove_dead_code
from mla_compile.passes.quantized.stored import dequantized_by_library, stored_leaves

aten = torch.ops.aten

FEW_ROWS = 4
"""The most rows for which a product with a weight of two bytes per value is computed as a multiply and a sum.

A product that first converts such a weight moves ten bytes per value in every call: two are read, four are written, and
these four are read again. A fused multiply and sum reads two bytes per value and row, which is less for up to four
rows.
"""


def project(
    builder: Builder, x: fx.Node, x_atoms: Sequence[Atom], weight: fx.Node, w_atoms: Sequence[Atom], out: Sequence[Atom]
) -> fx.Node:
    """Multiply ``x`` by ``weight`` in the dtype of ``x``, summing over atoms not in ``out``; one dimension per atom."""
    return einsum(builder, x, x_atoms, builder.cast(weight, val(x).dtype), w_atoms, out)


def lower_projections(graph: fx.Graph, fake_mode: FakeTensorMode | None, weights: Collection[fx.Node]) -> int:
    """Turn products of few rows with a converted weight into a multiply and a sum; return how many.

    Before: ``einsum("bshn,hnl->bshl", x, _to_copy(w, float32))``, which copies the weight in every call. After:
    ``sum(x[..., None] * _to_copy(w, float32), -2)``, which a compiler fuses, so that the weight is read once,
    unconverted.
    """
    done = 0
    for node in list(graph.nodes):
        if packet(node) is not aten.einsum or OURS not in node.meta:
            continue
        equation, (x, weight) = args_of(node)
        (lx, lw), lo = equation.split("->")[0].split(","), equation.split("->")[1]
        if weight in weights and _is_converted(weight) and rows_sharing_weight(node) <= FEW_ROWS:
            node.replace_all_uses_with(_multiply_and_sum(Builder(node, fake_mode), x, lx, weight, lw, lo))
            graph.erase_node(node)
            done += 1
    if done:
        remove_dead_code(graph)
    return done


def _is_converted(weight: fx.Node) -> bool:
    """Whether each call computes ``weight`` from fewer bytes, by operators that a compiler fuses."""
    if packet(weight) is aten._to_copy and val(args_of(weight)[0]).dtype.itemsize == 2:
        return True
    return bool(stored_leaves(weight)) and not dequantized_by_library(weight)


def rows_sharing_weight(node: fx.Node) -> int:
    """Return how many rows share the weight of an einsum that a rewrite added, at the sizes seen in the trace."""
    equation, (x, _) = args_of(node)
    lx, lw = equation.split("->")[0].split(",")
    return math.prod(hint(size(d), d) for letter, d in zip(lx, val(x).shape, strict=True) if letter not in lw)


def _multiply_and_sum(builder: Builder, x: fx.Node, lx: str, weight: fx.Node, lw: str, out: str) -> fx.Node:
    order = out + "".join(c for c in lx if c not in out)
    product = builder.call(aten.mul.Tensor, aligned(builder, x, lx, order), aligned(builder, weight, lw, order))
    summed = list(range(len(out), len(order)))
    return builder.call(aten.sum.dim_IntList, product, summed) if summed else product
