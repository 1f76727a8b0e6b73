"""Products of two tensors, whatever operator makes them, as einsum labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mla_compile.passes.ir.graph import args_of, argument, axis, is_tensor, packet, shape, val
from mla_compile.passes.ir.sizes import same

aten = torch.ops.aten


def parse_einsum(node: fx.Node) -> tuple[list[str], str] | None:
    """The subscripts of an einsum node, ellipses written out; None where a label is repeated in one operand."""
    equation, operands = args_of(node)[0], args_of(node)[1]
    assert isinstance(equation, str)
    assert isinstance(operands, Sequence)
    text = equation.replace(" ", "")
    left, arrow, out = text.partition("->")
    inputs = left.split(",")
    free = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in text]
    widths = [len(shape(o)) - len(i.replace("...", "")) for i, o in zip(inputs, operands, strict=True)]
    dots = "".join(free[: max([w for i, w in zip(inputs, widths, strict=True) if "..." in i], default=0)])
    inputs = [i.replace("...", dots[len(dots) - w :] if w else "") for i, w in zip(inputs, widths, strict=True)]
    if not arrow:
        joined = "".join(inputs)
        out = dots + "".join(sorted(c for c in set(joined) if joined.count(c) == 1 and c not in dots))
    out = out.replace("...", dots)
    return (inputs, out) if all(len(set(i)) == len(i) for i in inputs) else None


def product_labels(node: fx.Node) -> tuple[tuple[fx.Node, str], tuple[fx.Node, str], str] | None:
    """A product (einsum, sum, matmul, bmm, mm) as einsum labels: (left, labels), (right, labels), result labels."""
    op = packet(node)
    if op is aten.einsum:
        parsed = parse_einsum(node)
        operands: Any = args_of(node)[1]
        if parsed is None or len(operands) != 2:
            return None
        (a, b), out = parsed
        return (operands[0], a), (operands[1], b), out
    if op is aten.sum:
        return _multiplied_and_summed(node)
    left, right = args_of(node)[0], args_of(node)[1]
    ra, rb = len(shape(left)), len(shape(right))
    if ra < 2 or rb < 2:
        return None
    batch = "abcdefghijklmnopqrstuvw"[: max(ra, rb) - 2]
    la = batch[len(batch) - (ra - 2) :] + "xy"
    lb = batch[len(batch) - (rb - 2) :] + "yz"
    return (left, la), (right, lb), batch + "xz"


def _multiplied_and_summed(node: fx.Node) -> tuple[tuple[fx.Node, str], tuple[fx.Node, str], str] | None:
    """``(a * b).sum(dim)``, where one operand is broadcast along some axis and so the sum is no product of equals."""
    times, dims, kept = args_of(node)[0], argument(node, 1, "dim"), argument(node, 2, "keepdim", False)
    if packet(times) is not aten.mul or not isinstance(dims, (list, tuple)) or len(dims) != 1:
        return None
    left, right = args_of(times)[:2]
    rank = len(shape(times))
    if not is_tensor(left) or not is_tensor(right) or not len(shape(left)) == len(shape(right)) == rank:
        return None
    dim = axis(dims[0], rank)
    ones = [(same(a, 1), same(b, 1)) for a, b in zip(shape(left), shape(right), strict=True)]
    if any(ones[dim]) or not any(a != b for a, b in ones) or val(node).dtype != val(times).dtype:
        return None
    labels = "abcdefghijklmnopqrstuvw"[:rank]
    return (left, labels), (right, labels), labels.replace(labels[dim], "z" if kept else "")
