"""Multiply an activation by a weight, so that the absorbed form is as precise as the original.

In half-precision models, the tensors between W_kc and the scores, and between the attended rows and W_v, are kept in
float32. One additional rounding on either side would make the absorbed form up to 1.4 times less accurate than the
original. In float16, q W may also overflow when q . (W c) does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.arrange import aligned, einsum
from mla_compile.passes.ir.axes import Atom
from mla_compile.passes.ir.graph import OURS, Builder, args_of, elements_hint, packet, replace_each, val
from mla_compile.passes.ir.sizes import hint, size
from mla_compile.passes.ir.walk import remove_dead_code
from mla_compile.passes.quantized.stored import dequantized_by_library, stored_leaves
from mla_compile.passes.rewrite.as_stored import as_stored, replayed

aten = torch.ops.aten

FEW_ROWS = 4
"""The largest number of rows for which a product with a two-byte weight is computed as a multiply and a sum.

A product that first converts the weight to float32 moves ten bytes per value: it reads two, writes four, and reads
these four again. A fused multiply and sum reads two bytes per value and row, which is less for up to four rows.
"""


def project(
    builder: Builder, x: fx.Node, x_atoms: Sequence[Atom], weight: fx.Node, w_atoms: Sequence[Atom], out: Sequence[Atom]
) -> fx.Node:
    """Multiply ``x`` by ``weight`` in the dtype of ``x``, and sum over the atoms that are not in ``out``.

    Each tensor has one dimension per atom.
    """
    return einsum(builder, x, x_atoms, builder.cast(weight, val(x).dtype), w_atoms, out)


@dataclass(frozen=True)
class Heads:
    """The conditions for using the operator ``few_rows_of_heads``, which multiplies a few rows by a per-head weight.

    Attributes:
        reads: tells whether the operator supports a device, a dtype of the rows and a dtype of the weight.
        least_bytes: the size of the smallest weight for which the operator is used.
        most: the largest number of rows for which the operator is used.
    """

    reads: Callable[[torch.device, torch.dtype, torch.dtype], bool]
    least_bytes: int
    most: int


def lower_projections(
    graph: fx.Graph, fake_mode: FakeTensorMode | None, weights: Collection[fx.Node], heads: Heads | None = None
) -> int:
    """Rewrite products of a few rows and a weight so that they do not copy the weight; return how many.

    Before: ``einsum("bshn,hnl->bshl", x, _to_copy(w, float32))`` copies the weight in every call.

    After: ``mla_compile::few_rows_of_heads(x, w)``, with x as [h,b,s,n] and w as [h,l,n], if ``heads`` takes the
    product. Otherwise: ``sum(x[..., None] * _to_copy(w, float32), -2)``, which a compiler fuses.
    """

    def lowered(node: fx.Node) -> fx.Node | None:
        if packet(node) is not aten.einsum or OURS not in node.meta or args_of(node)[1][1] not in weights:
            return None
        new = _of_heads(node, heads, fake_mode) if heads else None
        if new is None and _is_converted(args_of(node)[1][1]) and rows_sharing_weight(node) <= FEW_ROWS:
            new = _multiply_and_sum(node, fake_mode)
        return new

    if done := replace_each(graph.nodes, lowered):
        remove_dead_code(graph)
    return done


def reads_stored(node: fx.Node, heads: Heads) -> bool:
    """Whether the operator of ``heads`` takes the product ``node`` and can read the stored weight."""
    stored = as_stored(args_of(node)[1][1])
    return stored is not None and takes(node, heads, val(stored[0]).dtype)


def takes(node: fx.Node, heads: Heads, stored: torch.dtype) -> bool:
    """Whether the operator of ``heads`` takes the product ``node`` if the weight has the dtype ``stored``."""
    equation, (x, weight) = args_of(node)
    if _head_letters(equation) is None or rows_sharing_weight(node) > heads.most:
        return False
    enough = elements_hint(weight) * stored.itemsize >= heads.least_bytes
    return enough and heads.reads(val(x).device, val(x).dtype, stored)


def _of_heads(node: fx.Node, heads: Heads, fake_mode: FakeTensorMode | None) -> fx.Node | None:
    """Return the result of the operator for the product ``node``; None if the operator does not take ``node``."""
    if not reads_stored(node, heads):
        return None
    equation, (x, weight) = args_of(node)
    stored, letters = as_stored(weight), _head_letters(equation)
    assert stored is not None
    assert letters is not None
    (lx, lw), lo = _operand_letters(equation)
    (head, out, summed), rows = letters, [c for c in lx if c not in lw]
    builder = Builder(node, fake_mode)
    x = aligned(builder, x, lx, [head, *rows, summed])
    weight = aligned(builder, replayed(builder, *stored), lw, [head, out, summed])
    new = builder.call(torch.ops.mla_compile.few_rows_of_heads.default, x, weight)
    if head is None:
        new = builder.call(aten.squeeze.dim, new, 0)
    return aligned(builder, new, [c for c in (head, *rows, out) if c], lo)


def _operand_letters(equation: str) -> tuple[list[str], str]:
    operands, out = equation.split("->")
    return operands.split(","), out


def _head_letters(equation: str) -> tuple[str | None, str, str] | None:
    """Return the einsum letters of a weight's axes: heads (or None), columns of the result, and the summed axis.

    Return None if the weight has other axes, or if the einsum also sums over an axis of the rows alone.
    """
    (lx, lw), lo = _operand_letters(equation)
    roles = [(c in lx, c in lo) for c in lw]
    heads, out, summed = (roles.count(role) for role in ((True, True), (False, True), (True, False)))
    if heads > 1 or (out, summed) != (1, 1) or heads + 2 != len(lw) or not set(lx) - {*lw} <= {*lo}:
        return None
    head = lw[roles.index((True, True))] if heads else None
    return head, lw[roles.index((False, True))], lw[roles.index((True, False))]


def _is_converted(weight: fx.Node) -> bool:
    """Whether each call computes ``weight`` from fewer bytes, with operators that a compiler can fuse."""
    if packet(weight) is aten._to_copy and val(args_of(weight)[0]).dtype.itemsize == 2:
        return True
    return bool(stored_leaves(weight)) and not dequantized_by_library(weight)


def rows_sharing_weight(node: fx.Node) -> int:
    """Return how many rows share the weight of an einsum that a rewrite added, at the sizes seen in the trace."""
    equation, (x, _) = args_of(node)
    (lx, lw), _ = _operand_letters(equation)
    return math.prod(hint(size(d), d) for letter, d in zip(lx, val(x).shape, strict=True) if letter not in lw)


def _multiply_and_sum(node: fx.Node, fake_mode: FakeTensorMode | None) -> fx.Node:
    builder, (equation, (x, weight)) = Builder(node, fake_mode), args_of(node)
    (lx, lw), out = _operand_letters(equation)
    order = out + "".join(c for c in lx if c not in out)
    product = builder.call(aten.mul.Tensor, aligned(builder, x, lx, order), aligned(builder, weight, lw, order))
    summed = list(range(len(out), len(order)))
    return builder.call(aten.sum.dim_IntList, product, summed) if summed else product
