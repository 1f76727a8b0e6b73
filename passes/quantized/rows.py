"""Rows that are divided by a scale of their own, rounded, multiplied and scaled back, followed until the scale is gone.

    s = amax(|x|) / 127;  q = round(x / s);  y = (q W_q) * s * w        is x (w W_q), up to the rounding of the rows

Every node on that way is known as plain rows times powers of scales (:class:`Scaled`). Where the scales have cancelled,
what is left is an ordinary tensor of the model's graph, and a stand-in says so (:mod:`mla_compile.passes.ir.stand_in`).

What makes dropping the rounding legal is that the scale fits the rows: it is made of their own largest number, block by
block, so that nothing is cut off and an error is a fraction of that number. A scale is a tensor whose numbers belong to
equal blocks of the rows' memory order, one after another. Views keep that order, so that scales are known again by the
node they begin with and the length of a block.
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
from mla_compile.passes.ir.operators import Copy, Regroup, decode
from mla_compile.passes.ir.sizes import Size, quotient, same

aten = torch.ops.aten

FINE = 7
"""The least number of steps between zero and the largest number of a block for which rounding counts as quantization.

Four bits have seven. A function of fewer steps (a sign, a ternary gate) is meant as one."""


_SLACK = 2**-7
"""By how much of itself the largest number may be cut off: a step of 7 bits, or the rounding of a scale."""


TINY = 2.0**-6
"""The largest magnitude of a block that a guard against division by zero may take for larger than it is.

Below it rows get fewer steps than the format has; a guard that ordinary rows do not reach is a function of its own."""


@dataclass(frozen=True)
class Scale:
    """A power of the numbers of ``root``, one for each ``block`` numbers of the rows, in the order of their memory."""

    root: fx.Node
    block: Size
    exponent: int


@dataclass(frozen=True)
class Scaled:
    """What a node is: ``plain`` (of its shape) times ``scales``, plus ``zero``, up to rounding.

    Attributes:
        low, high: what its numbers lie between.
        whole: whether they are whole numbers.
        projected: whether they were multiplied by a weight since they were rounded.
        dropped: what they were rounded to on the way, for people; empty where nothing was.
    """

    plain: fx.Node
    scales: tuple[Scale, ...]
    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    projected: bool = False
    dropped: str = ""
    zero: fx.Node | None = None

    @property
    def top(self) -> float:
        """The largest magnitude that its numbers can have."""
        return max(-self.low, self.high)

    def unbounded(self) -> Scaled:
        return replace(self, low=-math.inf, high=math.inf, whole=False)

    @property
    def settled(self) -> bool:
        """Whether only the rounding tells the node from ``plain``."""
        return not self.scales and self.zero is None and bool(self.dropped)

    def times(self, scale: Scale) -> Scaled | None:
        """With another scale multiplied in; None where its blocks are others than those of the same root."""
        for own in self.scales:
            if own.root is scale.root:
                if not same(own.block, scale.block):
                    return None
                exponent = own.exponent + scale.exponent
                others = tuple(s for s in self.scales if s is not own)
                kept = () if exponent == 0 else (replace(own, exponent=exponent),)
                return replace(self.unbounded(), scales=others + kept)
        return replace(self.unbounded(), scales=(*self.scales, scale))


_REGROUPS = {
    aten.view, aten._unsafe_view, aten.reshape, aten.flatten, aten.unflatten, aten.squeeze, aten.unsqueeze,
}  # fmt: skip
_COPIES = {aten.to, aten._to_copy, aten.clone, aten.contiguous, aten.detach, aten.alias, aten.type_as}


def regrouped(node: fx.Node) -> fx.Node | None:
    """What ``node`` is a view of that keeps the order of the numbers, in any spelling."""
    if packet(node) not in _REGROUPS:
        return None
    x: fx.Node = argument(node, 0, "self")
    how = decode(node) if packet(node) in (aten.view, aten.reshape) else Regroup(x, None)
    return x if isinstance(how, Regroup) else None  # else the bytes are read as another dtype


def copied(node: fx.Node) -> fx.Node | None:
    """What ``node`` is a copy of, perhaps in another dtype."""
    if packet(node) not in _COPIES:
        return None
    how = decode(node)
    return how.x if isinstance(how, Copy) else None


class RowTracker:
    """What is known of the nodes of one graph, which :class:`~mla_compile.passes.quantized.reader.Reader` visits."""

    def __init__(self, weights: Collection[fx.Node], fake_mode: FakeTensorMode | None) -> None:
        self.weights = weights
        self.fake_mode = fake_mode
        self.known: dict[fx.Node, Scaled] = {}

    def of(self, node: object) -> Scaled | None:
        return self.known.get(node) if isinstance(node, fx.Node) else None

    def read(self, node: fx.Node) -> Scaled | None:
        """What ``node`` is by what its operands are, for operators of ATen."""
        op = packet(node)
        rule = _RULES.get(op)
        return None if rule is None else rule(self, node)

    def is_weight(self, node: object) -> bool:
        return isinstance(node, fx.Node) and node in self.weights

    # Scales

    def scale_of(self, node: fx.Node, rows: fx.Node) -> tuple[Scale, float] | None:
        """``node``, which multiplies ``rows``, as a scale and a number; None where it is no scale of theirs."""
        if not is_tensor(node) or self.is_weight(node) or not covers(shape(node), shape(rows)):
            return None
        root, exponent, factor = _power(node)
        length = block(node, rows)
        if length is None or self.is_weight(root) or not val(root).dtype.is_floating_point:
            return None
        return Scale(root, length, exponent), factor

    def fits(self, scale: Scale, rows: fx.Node) -> float | None:
        """The largest |rows| / root, where the root is made of the largest number of each block of the same rows."""
        factor, node, floor = 1.0, scale.root, 0.0
        while True:
            below = _at_least(node)
            if below is None:
                break
            floor = max(floor, _floor(node) / factor)
            node, by = below
            factor /= by
        found = _largest(node)
        if found is None or floor * factor > TINY:
            return None
        of, length = found
        return factor if _numbers(of) is _numbers(rows) and same(length, scale.block) else None

    # Plain operators

    def build(self, node: fx.Node) -> Builder:
        return Builder(node, self.fake_mode)

    def product(self, node: fx.Node, rows: Scaled, weight: fx.Node, transposed: bool) -> Scaled | None:
        """``rows`` times a weight [in, out], or [out, in] if ``transposed``, in float32 at least."""
        if rows.zero is not None or not all(isinstance(d, int) for d in shape(weight)):
            return None
        builder = self.build(node)
        dtype = wide(val(rows.plain).dtype)
        op = aten.linear.default if transposed else aten.matmul.default
        new = builder.call(op, builder.cast(rows.plain, dtype), builder.cast(weight, dtype))
        # Each scale has to be one for whole rows, or a sum over a row would mix what it tells apart.
        scales: list[Scale] = []
        for scale in rows.scales:
            many = quotient(scale.block, shape(rows.plain)[-1])
            if many is None:
                return None
            scales.append(replace(scale, block=many * shape(new)[-1]))
        return replace(rows.unbounded(), plain=new, scales=tuple(scales), projected=True)

    def multiplied(self, node: fx.Node, x: Scaled, by: Any, op: Any) -> Scaled | None:
        """``x`` times (or divided by, as ``op`` says) a number, a weight or a scale."""
        builder = self.build(node)
        sign = -1 if op is aten.div else 1
        if isinstance(by, (int, float)):
            factor = float(by) ** sign
            return replace(x.unbounded(), plain=self._times(builder, x.plain, factor))
        if self.is_weight(by):
            # One that differs along the scaled rows' blocks is still a factor of its own.
            other = builder.cast(by, torch.promote_types(val(by).dtype, val(x.plain).dtype))
            new = builder.call(aten.div.Tensor if sign < 0 else aten.mul.Tensor, x.plain, other)
            return replace(x.unbounded(), plain=new) if _as_large(new, x.plain) else None
        if _outer(by, self.weights):  # the scales of rows and weights, multiplied with each other first
            first = self.multiplied(node, x, args_of(by)[0], op)
            return first and self.multiplied(node, first, args_of(by)[1], op)
        found = self.scale_of(by, x.plain)
        if found is None:
            return None
        scale, factor = found
        scaled = x.times(replace(scale, exponent=sign * scale.exponent))
        return scaled and replace(scaled, plain=self._times(builder, x.plain, factor**sign))

    def started(self, node: fx.Node, rows: fx.Node, by: fx.Node, op: Any) -> Scaled | None:
        """``rows`` divided by a scale that is made of their own largest numbers."""
        found = self.scale_of(by, rows) if val(rows).dtype.is_floating_point else None
        if found is None:
            return None
        scale, factor = found
        sign = -1 if op is aten.div else 1
        scale, factor = replace(scale, exponent=sign * scale.exponent), factor**sign
        fits = self.fits(scale, rows) if scale.exponent == -1 else None
        if fits is None:
            return None
        plain = self._times(self.build(node), rows, factor)
        reach = fits * abs(factor)
        return Scaled(plain, (scale,), -reach, reach)

    @staticmethod
    def _times(builder: Builder, node: fx.Node, factor: float) -> fx.Node:
        return node if factor == 1.0 else builder.call(aten.mul.Tensor, node, factor)


def covers(scale: tuple[Size, ...], rows: tuple[Size, ...]) -> bool:
    """Whether a tensor of shape ``scale`` broadcasts to ``rows`` by repeating each number along the last axes only."""
    if len(scale) > len(rows):
        return False
    padded = (*([1] * (len(rows) - len(scale))), *scale)
    kept = max((k for k, s in enumerate(padded, 1) if not same(s, 1)), default=0)
    return all(same(a, b) for a, b in zip(padded[:kept], rows[:kept], strict=True))


def block(scale: fx.Node, rows: fx.Node) -> Size | None:
    """How many numbers of ``rows`` share one of ``scale``."""
    return quotient(math.prod(shape(rows)), math.prod(shape(scale)))


def _outer(node: fx.Node, weights: Collection[fx.Node]) -> bool:
    """Whether ``node`` is the product of a weight and another tensor."""
    operands = args_of(node)[:2] if packet(node) is aten.mul else ()
    return len([a for a in operands if is_tensor(a)]) == 2 and any(a in weights for a in operands)


def _as_large(a: fx.Node, b: fx.Node) -> bool:
    return len(shape(a)) == len(shape(b)) and all(same(x, y) for x, y in zip(shape(a), shape(b), strict=True))


def _power(node: fx.Node) -> tuple[fx.Node, int, float]:
    """``node = factor * root ** exponent``, number by number in the order of memory."""
    exponent, factor = 1, 1.0
    while True:
        op, args = packet(node), args_of(node)
        x = regrouped(node) or _float_copy(node)
        if x is not None:
            node = x
        elif op is aten.reciprocal:
            node, exponent = args[0], -exponent
        elif op in (aten.mul, aten.div) and isinstance(args[1], (int, float)) and args[1] != 0:
            factor *= float(args[1]) ** (exponent if op is aten.mul else -exponent)
            node = args[0]
        elif op is aten.div and isinstance(args[0], (int, float)) and isinstance(args[1], fx.Node) and args[0] != 0:
            factor *= float(args[0]) ** exponent
            node, exponent = args[1], -exponent
        else:
            return node, exponent, factor


def _float_copy(node: fx.Node) -> fx.Node | None:
    x = copied(node)
    floats = x is not None and all(val(n).dtype.is_floating_point and val(n).dtype.itemsize > 1 for n in (x, node))
    return x if floats else None


def _at_least(node: fx.Node) -> tuple[fx.Node, float] | None:
    """A node and a number with ``node >= that * number``, where the node is positive; one step back."""
    op, args = packet(node), args_of(node)
    x = regrouped(node) or _float_copy(node)
    if x is not None:
        return x, 1.0
    number = args[1] if len(args) > 1 else None
    if op in (aten.clamp, aten.clip):
        return (args[0], 1.0) if argument(node, 2, "max") is None else None
    if op is aten.clamp_min or (op is aten.add and isinstance(number, (int, float)) and number >= 0):
        return args[0], 1.0
    if op is aten.maximum:
        constants = [a for a in args if not _reads_rows(a)]
        return (next(a for a in args if a not in constants), 1.0) if len(constants) == 1 else None
    if op in (aten.mul, aten.div) and isinstance(number, (int, float)) and number > 0:
        return args[0], float(number) if op is aten.mul else 1.0 / number
    return None


def _floor(node: fx.Node) -> float:
    """The number that keeps a scale from being zero, where ``node`` clamps to it or adds it."""
    op = packet(node)
    if op in (aten.clamp, aten.clip, aten.clamp_min, aten.add):
        number = argument(node, 1, "other" if op is aten.add else "min")
        return float(number) if isinstance(number, (int, float)) else 0.0
    return 0.0


def _reads_rows(node: fx.Node) -> bool:
    return bool(node.all_input_nodes) and packet(node) not in (aten.full_like, aten.ones_like, aten.zeros_like)


def _largest(node: fx.Node) -> tuple[fx.Node, Size] | None:
    """The tensor whose largest magnitudes ``node`` holds, one for each block of so many numbers."""
    whole = node
    if getattr(node.target, "__name__", "") == "getitem" and args_of(node)[1] == 0:
        whole = args_of(node)[0]
    op, args = packet(whole), args_of(whole)
    dims: Any
    if op is aten.linalg_vector_norm and argument(whole, 1, "ord", 2) == math.inf:
        x, dims = args[0], argument(whole, 2, "dim")
    elif op in (aten.amax, aten.max) and packet(args[0]) is aten.abs:
        x, dims = args_of(args[0])[0], argument(whole, 1, "dim")
    else:
        return None
    if isinstance(dims, fx.Node):  # the larger of two tensors
        return None
    rank = len(shape(x))
    axes = set(range(rank)) if dims in (None, [], ()) else {axis(d, rank) for d in _several(dims)}
    if axes != set(range(rank - len(axes), rank)):
        return None
    return x, math.prod(shape(x)[rank - len(axes) :])


def _several(dims: Any) -> list[int]:
    return list(dims) if isinstance(dims, (list, tuple)) else [dims]


def _numbers(node: fx.Node) -> fx.Node:
    """The first node with the same numbers in the same order as ``node``."""
    while (x := regrouped(node) or _float_copy(node)) is not None:
        node = x
    return node


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
        return x
    if dtype.is_floating_point:
        fits = FINE <= x.top <= torch.finfo(dtype).max * (1 + _SLACK)
        return replace(x, dropped=short(dtype)) if fits else None
    # Cut to whole numbers instead of rounded, they would all become smaller; beyond the dtype they would wrap around.
    # A sum of products is made for 32 bits.
    info = torch.iinfo(dtype)
    fits = info.bits >= 32 if x.top == math.inf else info.min <= round(x.low) and round(x.high) <= info.max
    return x if x.whole and fits else None


def short(dtype: torch.dtype) -> str:
    """The name of a dtype, without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def _round(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    x = tracker.of(args_of(node)[0])
    fine = x is not None and node.target is aten.round.default and FINE <= x.top < math.inf
    return replace(x, whole=True, dropped=f"{2 * round(x.top) + 1} steps") if x is not None and fine else None


def _clamp(tracker: RowTracker, node: fx.Node) -> Scaled | None:
    x, low, high = tracker.of(args_of(node)[0]), argument(node, 1, "min"), argument(node, 2, "max")
    if x is None or not isinstance(low, (int, float)) or not isinstance(high, (int, float)):
        return None
    # The largest number is rounded like all others, and may lie a little beyond the last step.
    reach = x.top * (1 - _SLACK)
    return replace(x, low=max(low, x.low), high=min(high, x.high)) if low <= -reach and high >= reach else None


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
    found = tracker.product(node, x, b, packet(node) is aten.linear)
    # Whole numbers times whole numbers.
    return found and replace(found, whole=not val(node).dtype.is_floating_point)


_RULES: dict[object, Callable[[RowTracker, fx.Node], Scaled | None]] = {
    **dict.fromkeys(_REGROUPS, _view),
    **dict.fromkeys(_COPIES, _copy),
    aten.round: _round,
    **dict.fromkeys((aten.clamp, aten.clip), _clamp),
    **dict.fromkeys((aten.mul, aten.div), _multiply),
    **dict.fromkeys((aten._int_mm, aten.mm, aten.matmul, aten.linear), _matmul),
}
