"""Einsum labels for products of two tensors, whichever operator computes the product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from mla_compile.passes.ir.graph import args_of, argument, axis, is_tensor, packet, shape, val
from mla_compile.passes.ir.sizes import same

aten = torch.ops.aten

LABELLED = {aten.matmul, aten.bmm, aten.mm, aten.einsum, aten.sum}
"""Operators that :func:`product_labels` reads."""


def parse_einsum(node: fx.Node) -> tuple[list[str], str] | None:
    """Return the subscripts of an einsum node with ellipses expanded; None if an operand repeats a label."""
    equation, operands = args_of(node)[0], args_of(node)[1]
    assert isinstance(equation, str)
    assert isinstance(operands, Sequence)
    text = equation.replace(" ", "")
    left, arrow, out = text.partition("->")
    inputs = left.split(",")
    free = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in text]
    # "..." may cover fewer axes in one operand than in another. These axes align from the right, as in broadcasting.
    widths = [len(shape(o)) - len(i.replace("...", "")) for i, o in zip(inputs, operands, strict=True)]
    dots = "".join(free[: max([w for i, w in zip(inputs, widths, strict=True) if "..." in i], default=0)])
    inputs = [i.replace("...", dots[len(dots) - w :] if w else "") for i, w in zip(inputs, widths, strict=True)]
    # Without "->", einsum keeps every label that occurs once, in alphabetical order, after the "..." axes.
    if not arrow:
        joined = "".join(inputs)
        out = dots + "".join(sorted(c for c in set(joined) if joined.count(c) == 1 and c not in dots))
    out = out.replace("...", dots)
    # A repeated label takes a diagonal. Diagonals are refused because a linear map cannot describe them.
    return (inputs, out) if all(len(set(i)) == len(i) for i in inputs) else None


def product_labels(node: fx.Node) -> tuple[tuple[fx.Node, str], tuple[fx.Node, str], str] | None:
    """Return the two operands of a product (einsum, sum, matmul, bmm, mm), each with its einsum labels.

    The third item is the labels of the result. Return None if the product cannot be read in this way.
    """
    op = packet(node)
    if op is aten.einsum:
        parsed = parse_einsum(node)
        operands = args_of(node)[1]
        if parsed is None or len(operands) != 2:
            return None
        (a, b), out = parsed
        return (operands[0], a), (operands[1], b), out
    if op is aten.sum:
        return _multiplied_and_summed(node)
    left, right = args_of(node)[0], args_of(node)[1]
    ra, rb = len(shape(left)), len(shape(right))
    # A matmul with a vector drops an axis. No attention is written in this way.
    if ra < 2 or rb < 2:
        return None
    la, lb, out = matmul_labels(ra, rb)
    return (left, la), (right, lb), out


def matmul_labels(ra: int, rb: int) -> tuple[str, str, str]:
    """Return the labels of two matrices, batched or not, and of their product."""
    # Batch labels must differ from the matrix labels x, y and z.
    batch = "abcdefghijklmnopqrstuvw"[: max(ra, rb) - 2]
    return batch[len(batch) - (ra - 2) :] + "xy", batch[len(batch) - (rb - 2) :] + "yz", batch + "xz"


def _multiplied_and_summed(node: fx.Node) -> tuple[tuple[fx.Node, str], tuple[fx.Node, str], str] | None:
    """Read ``(a * b).sum(dim)``. This is a matrix product only if one operand is broadcast along some axis."""
    times, dims, kept = args_of(node)[0], argument(node, 1, "dim"), argument(node, 2, "keepdim", False)
    if packet(times) is not aten.mul or not isinstance(dims, (list, tuple)) or len(dims) != 1:
        return None
    left, right = args_of(times)[:2]
    rank = len(shape(times))
    if not is_tensor(left) or not is_tensor(right) or not len(shape(left)) == len(shape(right)) == rank:
        return None
    dim = axis(dims[0], rank)
    ones = [(same(a, 1), same(b, 1)) for a, b in zip(shape(left), shape(right), strict=True)]
    # If neither operand is broadcast, this is a row-wise dot product, as in a norm. If an operand is broadcast along
    # the summed axis, nothing is contracted. A matrix product does not sum in another dtype.
    if any(ones[dim]) or not any(a != b for a, b in ones) or val(node).dtype != val(times).dtype:
        return None
    labels = "abcdefghijklmnopqrstuvw"[:rank]
    return (left, labels), (right, labels), labels.replace(labels[dim], "z" if kept else "")
