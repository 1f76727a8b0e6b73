"""Follow rows that are divided by their own scale, rounded, multiplied and scaled back, until the scale has cancelled.

    s = amax(|x|) / 127;  q = round(x / s);  y = (q W_q) * s * w        is x (w W_q), up to the rounding of the rows

Every node along the way is described as plain rows times powers of scales (:class:`Scaled`). If all scales of a node
have cancelled, the node is an ordinary tensor up to rounding, and a stand-in represents it
(:mod:`mla_compile.passes.ir.stand_in`).

Dropping the rounding is legal because each scale is computed from the largest number of a block of these rows
(:mod:`mla_compile.passes.quantized.scales`). Therefore no number is clipped, and every rounding error is a fraction of
the scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.expr import wide
from mla_compile.passes.ir.graph import Builder, args_of, argument, axis, is_tensor, packet, shape, val
from mla_compile.passes.ir.sizes import quotient, same
from mla_compile.passes.quantized.scales import (
    COPIES,
    REGROUPS,
    Scale,
    block,
    copied,
    covers,
    largest_over,
    power_of,
    regrouped,
)  # fmt: skip

aten = torch.ops.aten

FINE = 7
"""Rounding is treated as quantization if at least this many steps lie between zero and a block's largest number.

Four bits have seven steps. A function with fewer steps, such as a sign or a ternary gate, is part of the model.
"""


_SLACK = 2**-7
"""The fraction by which the largest number may be clipped: one step of 7 bits, or the rounding of a scale."""


@dataclass(frozen=True)
class Scaled:
    """Describes a node as ``plain`` (of the same shape) times ``scales``, plus ``zero``, up to rounding.

    Attributes:
        zero: the offset: a number, or the zero points that were chosen with a scale.
        summed: the weight that multiplied rows plus ``zero``, and the summed axis of this weight.
        low, high: the bounds of the node's numbers.
        whole: whether the numbers are whole.
        projected: whether the rows were multiplied by a weight after they were rounded.
        dropped: the format to which rows were rounded, in words; empty if they were not rounded.
    """

    plain: fx.Node
    scales: tuple[Scale, ...]
    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    projected: bool = False
    dropped: str = ""
    zero: fx.Node | float | None = None
    summed: tuple[fx.Node, int] | None = None

    @property
    def top(self) -> float:
        """The largest magnitude that the node's numbers can have."""
        return max(-self.low, self.high)

    def unbounded(self) -> Scaled:
        return replace(self, low=-math.inf, high=math.inf, whole=False)

    @property
    def settled(self) -> bool:
        """Whether the node differs from ``plain`` only by rounding."""
        return not self.scales and self.zero is None and bool(self.dropped)

    def times(self, scale: Scale) -> Scaled | None:
        """Multiply by another scale; None if the same root already scales blocks of another length."""
        for own in self.scales:
            if own.root is scale.root:
                if not same(own.block, scale.block):
                    return None
                exponent = own.exponent + scale.exponent
                others = tuple(s for s in self.scales if s is not own)
                kept = () if exponent == 0 else (replace(own, exponent=exponent),)
                return replace(self.unbounded(), scales=others + kept)
        return replace(self.unbounded(), scales=(*self.scales, scale))


class RowTracker:
    """The descriptions of one graph's nodes, which are added in graph order."""

    def __init__(self, weights: Collection[fx.Node], fake_mode: FakeTensorMode | None) -> None:
        self.weights = weights
        self.fake_mode = fake_mode
        self.known: dict[fx.Node, Scaled] = {}

    def of(self, node: object) -> Scaled | None:
        return self.known.get(node) if isinstance(node, fx.Node) else None

    def read(self, node: fx.Node) -> Scaled | None:
        """Describe ``node`` from the descriptions of its operands; None if no rule fits."""
        op = packet(node)
        rule = _RULES.get(op)
        return None if rule is None else rule(self, node)

    def is_weight(self, node: object) -> bool:
        return isinstance(node, fx.Node) and node in self.weights

    def scale_of(self, node: fx.Node, rows: fx.Node) -> tuple[Scale, float] | None:
        """Return ``node`` as a scale of ``rows`` and a factor; None if it is no scale of these rows."""
        if not is_tensor(node) or self.is_weight(node) or not covers(shape(node), shape(rows)):
            return None
        root, exponent, factor = power_of(node)
        length = block(node, rows)
        if length is None or self.is_weight(root) or not val(root).dtype.is_floating_point:
            return None
        return Scale(root, length, exponent), factor

    def build(self, node: fx.Node) -> Builder:
        return Builder(node, self.fake_mode)

    def product(self, node: fx.Node, rows: Scaled, weight: fx.Node, *, transposed: bool) -> Scaled | None:
        """Multiply ``rows`` by a weight [in, out], or [out, in] if ``transposed``, in float32 or wider."""
        shifted = isinstance(rows.zero, fx.Node) or rows.summed is not None
        if shifted or not all(isinstance(d, int) for d in shape(weight)):
            return None
        builder = self.build(node)
        dtype = wide(val(rows.plain).dtype)
        op = aten.linear.default if transposed else aten.matmul.default
        new = builder.call(op, builder.cast(rows.plain, dtype), builder.cast(weight, dtype))
        # Each scale must cover whole rows, because a sum over a row would mix numbers of different scales.
        scales: list[Scale] = []
        for scale in rows.scales:
            many = quotient(scale.block, shape(rows.plain)[-1])
            if many is None:
                return None
            scales.append(replace(scale, block=many * shape(new)[-1]))
        summed = (weight, 1 if transposed else 0) if rows.zero is not None else None
        return replace(rows.unbounded(), plain=new, scales=tuple(scales), projected=True, summed=summed)

    def multiplied(self, node: fx.Node, x: Scaled, by: Any, op: object) -> Scaled | None:
        """Multiply or divide ``x`` by a number, a weight or a scale. ``op`` is the operator."""
        if x.zero is not None:
            return None
        builder = self.build(node)
        sign = -1 if op is aten.div else 1
        if isinstance(by, (int, float)):
            factor = float(by) ** sign
            return replace(x.unbounded(), plain=self._times(builder, x.plain, factor))
        if self.is_weight(by):
            # The weight may vary within a block of the scale, so it becomes a factor of the plain rows.
            other = builder.cast(by, torch.promote_types(val(by).dtype, val(x.plain).dtype))
            new = builder.call(aten.div.Tensor if sign < 0 else aten.mul.Tensor, x.plain, other)
            return replace(x.unbounded(), plain=new) if _as_large(new, x.plain) else None
        if _outer(by, self.weights):  # the scales of rows times the scales of weights
            first = self.multiplied(node, x, args_of(by)[0], op)
            return first and self.multiplied(node, first, args_of(by)[1], op)
        found = self.scale_of(by, x.plain)
        if found is None:
            return None
        scale, factor = found
        scaled = x.times(replace(scale, exponent=sign * scale.exponent))
        return scaled and replace(scaled, plain=self._times(builder, x.plain, factor**sign))

    def started(self, node: fx.Node, rows: fx.Node, by: fx.Node, op: object) -> Scaled | None:
        """Describe ``rows`` divided by a scale that is computed from the largest numbers of ``rows``."""
        found = self.scale_of(by, rows) if val(rows).dtype.is_floating_point else None
        if found is None:
            return None
        scale, factor = found
        sign = -1 if op is aten.div else 1
        scale, factor = replace(scale, exponent=sign * scale.exponent), factor**sign
        fits = largest_over(scale, rows) if scale.exponent == -1 else None
        if fits is None:
            return None
        plain = self._times(self.build(node), rows, factor)
        reach = fits * abs(factor)
        return Scaled(plain, (scale,), -reach, reach)

    @staticmethod
    def _times(builder: Builder, node: fx.Node, factor: float) -> fx.Node:
        return node if factor == 1.0 else builder.call(aten.mul.Tensor, node, factor)


def _outer(node: fx.Node, weights: Collection[fx.Node]) -> bool:
    """Whether ``node`` is the product of a weight and another tensor."""
    operands = args_of(node)[:2] if packet(node) is aten.mul else ()
    return len([a for a in operands if is_tensor(a)]) == 2 and any(a in weights for a in operands)


def _as_large(a: fx.Node, b: fx.Node) -> bool:
    return len(shape(a)) == len(shape(b)) and all(same(x, y) for x, y in zip(shape(a), shape(b), strict=True))


def _view(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    of = regrouped(node)
    x = tracker.of(of)
    if x is None:
        return None
    op: Any = aten.reshape.default if packet(node) in (aten.view, aten._unsafe_view) else node.target
    new = tracker.build(node).call(op, x.plain, *args_of(node)[1:], **node.kwargs)
    return replace(x, plain=new)


def _copy(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    x, dtype = tracker.of(copied(node)), val(node).dtype
    if x is None or dtype.is_complex or dtype == torch.bool:
        return None
    if dtype.is_floating_point and dtype.itemsize > 1:
        return x if x.zero is None or _holds(dtype, x) else None
    if dtype.is_floating_point:
        fits = x.zero is None and FINE <= x.top <= torch.finfo(dtype).max * (1 + _SLACK)
        return replace(x, dropped=short(dtype)) if fits else None
    # A cast to an integer truncates, so numbers that are not whole would all move towards zero.
    return x if x.whole and _holds(dtype, x) else None


def _holds(dtype: torch.dtype, x: Scaled) -> bool:
    """Whether ``dtype`` represents all whole numbers of ``x``. Sums of products have no bound and need 32 bits."""
    if x.top == math.inf:
        return dtype.itemsize >= 4
    if dtype.is_floating_point:
        return x.top <= 2 / torch.finfo(dtype).eps
    info = torch.iinfo(dtype)
    return info.min <= round(x.low) and round(x.high) <= info.max


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def _round(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    x = tracker.of(args_of(node)[0])
    if x is None or x.zero is not None or node.target is not aten.round.default or not FINE <= x.top < math.inf:
        return None
    return replace(x, whole=True, dropped=f"{2 * round(x.top) + 1} steps")


def _clamp(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    x, low, high = tracker.of(args_of(node)[0]), argument(node, 1, "min"), argument(node, 2, "max")
    if x is None or not isinstance(low, (int, float)) or not isinstance(high, (int, float)):
        return None
    # The largest number is rounded like all others, and may lie slightly beyond the last step.
    slack = (x.high - x.low) / 2 * _SLACK
    fits = low <= x.low + slack and high >= x.high - slack
    return replace(x, low=max(low, x.low), high=min(high, x.high)) if fits else None


def _shift(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    """Describe whole numbers plus an offset (for kernels of unsigned bytes), or a product minus the offset's effect."""
    a, by = args_of(node)[:2]
    x = tracker.of(a)
    if x is None or node.kwargs or isinstance(x.zero, fx.Node):
        return None
    if x.summed is not None:
        return replace(x, zero=None, summed=None) if packet(node) is aten.sub and _is_sum(by, x) else None
    if not isinstance(by, int) or not x.whole or x.projected:
        return None
    by = by if packet(node) is aten.add else -by
    moved = replace(x, zero=(x.zero or 0) + by or None, low=x.low + by, high=x.high + by)
    # If the offset is larger than the range of the rows, rounding the sum could lose the rows.
    near = abs((x.zero or 0) + by) <= x.high - x.low + 1
    return moved if near and _holds(val(node).dtype, moved) else None


def _is_sum(node: Any, x: Scaled) -> bool:
    """Whether ``node`` is ``x.zero`` times the sums of the weight, one sum per feature of the product."""
    assert x.summed is not None
    weight, dim = x.summed
    node = _uncast(node) if is_tensor(node) else node
    args = args_of(node) if packet(node) is aten.mul else ()
    if len(args) != 2 or args[1] != x.zero or packet(args[0]) is not aten.sum:
        return False
    dims = argument(args[0], 1, "dim")
    over = dims is not None and {axis(d, 2) for d in dims} == {dim} and shape(node)[-1] == shape(x.plain)[-1]
    exact = not val(args[0]).dtype.is_floating_point or val(args[0]).dtype.itemsize >= 4
    return over and exact and _uncast(args_of(args[0])[0]) is _uncast(weight)


def _uncast(node: fx.Node) -> fx.Node:
    while (x := copied(node)) is not None and val(x).dtype.itemsize <= val(node).dtype.itemsize:
        node = x
    return node


def _multiply(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    op, (a, b) = packet(node), args_of(node)[:2]
    if node.kwargs.get("rounding_mode"):
        return None
    if tracker.of(a) is None and op is aten.mul:
        a, b = (b, a) if tracker.of(b) is not None else (a, b)
    x = tracker.of(a)
    if x is not None:
        return None if tracker.of(b) is not None or not is_tensor(node) else tracker.multiplied(node, x, b, op)
    for rows, by in ((a, b), (b, a)) if op is aten.mul else ((a, b),):
        if is_tensor(rows) and is_tensor(by) and not tracker.is_weight(rows) and _as_large(node, rows):
            found = tracker.started(node, rows, by, op)
            if found is not None:
                return found
    return None


def _matmul(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    a, b = args_of(node)[:2]
    x = tracker.of(a)
    bias = argument(node, 2, "bias") if packet(node) is aten.linear else None
    if x is None or not tracker.is_weight(b) or len(shape(b)) != 2 or bias is not None:
        return None
    found = tracker.product(node, x, b, transposed=packet(node) is aten.linear)
    if found is not None and found.zero is not None and not _holds(val(node).dtype, found):
        return None  # subtracting the offset again would leave the rounding error of the larger sums
    # An integer result is a product of whole numbers.
    return found and replace(found, whole=not val(node).dtype.is_floating_point)


_RULES: dict[object, Callable[[RowTracker, fx.Node], Scaled | None]] = {
    **dict.fromkeys(REGROUPS, _view),
    **dict.fromkeys(COPIES, _copy),
    aten.round: _round,
    **dict.fromkeys((aten.add, aten.sub), _shift),
    **dict.fromkeys((aten.clamp, aten.clip), _clamp),
    **dict.fromkeys((aten.mul, aten.div), _multiply),
    **dict.fromkeys((aten._int_mm, aten.mm, aten.matmul, aten.linear), _matmul),
}
