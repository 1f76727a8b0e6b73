"""Factors of rows of scores, as fractions of sums of exponentials.

A softmax may be written in parts: a shift in the exponent, a division by a sum, a factor ``sigmoid(lse - sink)`` or
``exp(lse - logsumexp([lse, sink]))`` afterwards. Each part is one number per row: a fraction in Z, the sum of
``exp(x)`` over the row, and in exponentials of other numbers. So the product of the parts is one fraction too. Its
reciprocal is the sum by which ``exp(x)`` is divided, however the parts were written.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from mla_compile.passes.ir.graph import args_of, argument, axis, is_tensor, packet, shape, val
from mla_compile.passes.ir.moves import Copy, Join, Regroup
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import same, same_sizes

aten = torch.ops.aten

_ARITHMETIC: dict[object, Callable[[sympy.Expr, sympy.Expr], sympy.Expr]] = {
    aten.add: operator.add,
    aten.sub: operator.sub,
    aten.rsub: lambda a, b: b - a,
    aten.mul: operator.mul,
    aten.div: operator.truediv,
}


@dataclass(frozen=True)
class RowNumber:
    """A number for each row: a tensor that broadcasts against x, without the row's axis if not ``kept``."""

    node: fx.Node
    kept: bool


@dataclass(frozen=True)
class DivisorTerm:
    """``factor`` times the exponentials of some numbers, each to a power."""

    factor: float
    powers: tuple[tuple[RowNumber, int], ...]


class RowFactors:
    """Reads factors of the rows of ``x`` along ``dim``; ``exponent`` is ``x`` minus numbers of each row.

    Attributes:
        x: the scores.
        shift: the exponential of what is subtracted from them.
    """

    def __init__(self, exponent: fx.Node, dim: int) -> None:
        self._from_right = len(shape(exponent)) - dim
        self._total = sympy.Symbol("Z", positive=True)
        self._numbers: dict[RowNumber, sympy.Symbol] = {}
        self.x, shifts = self._unshifted(exponent)
        self.shift = self._power_of_all(shifts)

    def softmax(self) -> sympy.Expr:
        """By what a softmax multiplies ``exp(x)``."""
        return 1 / self._total

    def value(self, given: object, *, kept: bool = True) -> sympy.Expr | None:
        """Return a number of each row as a fraction; None if it is not known to be one.

        ``kept``: the tensor has the row's axis, with size 1.
        """
        if isinstance(given, (int, float)) and abs(given) < float("inf"):
            return sympy.Rational(given)
        if not is_tensor(given) or not val(given).dtype.is_floating_point:
            return None
        x, kept = self._moved(given, kept=kept)
        kind, operands = packet(x), args_of(x)
        if kind is aten.exp:
            return self._power(operands[0], kept=kept)
        if kind is aten.sigmoid:
            power = self._power(operands[0], kept=kept)
            return None if power is None else power / (1 + power)
        if kind is aten.sum:
            e = self._reduced(x, kept=kept)
            return self._sum(args_of(e)[0]) if packet(e) is aten.exp else None
        if kind is aten.reciprocal:
            one = self.value(operands[0], kept=kept)
            return None if one is None else 1 / one
        rule = _ARITHMETIC.get(kind)
        if rule is None or x.kwargs or len(operands) != 2:
            return None
        a, b = (self.value(one, kept=kept) for one in operands)
        return None if a is None or b is None or (kind is aten.div and b == 0) else rule(a, b)

    def divisor(self, factor: sympy.Expr) -> tuple[DivisorTerm, ...] | None:
        """Return the terms beside Z in the sum ``1 / factor``; None if it is no sum of Z and positive terms."""
        terms = sympy.Add.make_args(sympy.expand(sympy.cancel(1 / factor)))
        if self._total not in terms:
            return None
        found = [self._term(term) for term in terms if term != self._total]
        return None if None in found else tuple(term for term in found if term is not None)

    def _term(self, term: sympy.Expr) -> DivisorTerm | None:
        factor, rest = term.as_coeff_Mul()
        powers = {} if rest == 1 else rest.as_powers_dict()
        named = {symbol: number for number, symbol in self._numbers.items()}
        if not factor > 0 or any(s not in named or not n.is_Integer for s, n in powers.items()):
            return None
        return DivisorTerm(float(factor), tuple((named[s], int(n)) for s, n in powers.items()))

    def _power(self, given: object, *, kept: bool) -> sympy.Expr | None:
        """Return the exponential of a number of each row; None if it varies along the row."""
        if not is_tensor(given):
            return None
        x, moved = self._moved(given, kept=kept)
        found = self._power_of_parts(x, kept=moved)
        if found is not None:
            return found
        x, kept = self._moved(given, kept=kept, rounded=False)  # a sink that the model rounds stays rounded
        place = self._place(x)
        if kept and place >= 0 and not same(shape(x)[place], 1):
            return None
        return self._numbers.setdefault(RowNumber(x, kept), sympy.Symbol(f"e{len(self._numbers)}", positive=True))

    def _power_of_parts(self, x: fx.Node, *, kept: bool) -> sympy.Expr | None:
        kind, operands = packet(x), args_of(x)
        if kind is aten.logsumexp:
            y = self._reduced(x, kept=kept)
            return None if y is None else self._sum(y)
        if kind is aten.log:
            return self.value(operands[0], kept=kept)
        if kind not in (aten.logaddexp, aten.add, aten.sub, aten.neg) or x.kwargs or len(operands) > 2:
            return None
        powers = [power for one in operands if (power := self._power(one, kept=kept)) is not None]
        if len(powers) < len(operands):
            return None
        a, b = powers if len(powers) == 2 else (sympy.Integer(1), *powers)
        return {aten.logaddexp: a + b, aten.add: a * b}.get(kind, a / b)

    def _sum(self, y: fx.Node) -> sympy.Expr | None:
        """Return the sum of ``exp(y)`` along the row, of ``x`` or of ``x`` and numbers that are joined to it."""
        y, shifts = self._unshifted(y)
        if y is self.x:
            found = self._total
        elif isinstance(how := decode(y), Join) and how.dim == self._place(y):
            sums = [self._sum(part) for part in how.parts]
            found = None if None in sums else sympy.Add(*sums)
        else:
            found = self._power(y, kept=True)
        return None if found is None else found / self._power_of_all(shifts)

    def _unshifted(self, x: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
        """Return ``x`` before it was widened and before numbers of each row were subtracted, and these numbers."""
        shifts: list[fx.Node] = []
        while (source := _narrower(x)) or (packet(x) is aten.sub and not x.kwargs and len(args_of(x)) == 2):
            if source is not None:
                x = source
                continue
            source, shift = args_of(x)
            if not is_tensor(source) or not is_tensor(shift) or not same_sizes(shape(source), shape(x)):
                break
            # Broadcasting aligns from the right. A shift lacks the row's axis, or has it with size 1.
            place = self._place(shift)
            if place >= 0 and not same(shape(shift)[place], 1):
                break
            shifts.append(shift)
            x = source
        return x, shifts

    def _power_of_all(self, shifts: list[fx.Node]) -> sympy.Expr:
        powers = [self._power(shift, kept=True) for shift in shifts]
        return sympy.Mul(*powers)

    def _place(self, x: fx.Node) -> int:
        """Where the row's axis is among those of ``x``; negative if ``x`` lacks it."""
        return len(shape(x)) - self._from_right

    def _reduced(self, x: fx.Node, *, kept: bool) -> Any:
        """Return what a reduction along the row alone is of; None if ``x`` is another reduction."""
        y, dims = args_of(x)[0], argument(x, 1, "dim")
        if not isinstance(dims, (list, tuple)) or len(dims) != 1 or x.kwargs.get("dtype") is not None:
            return None
        along = axis(dims[0], len(shape(y))) == self._place(y)
        return y if along and bool(argument(x, 2, "keepdim", False)) is kept else None

    def _moved(self, x: fx.Node, *, kept: bool, rounded: bool = True) -> tuple[fx.Node, bool]:
        """Return ``x`` before it was converted to another float and before the row's axis was added or removed.

        ``rounded``: also to one that has not all of its numbers.
        """
        while isinstance(how := decode(x), (Copy, Regroup)):
            if isinstance(how, Copy):
                floats = val(how.x).dtype.is_floating_point and same_sizes(shape(how.x), shape(x))
                if not floats or (not rounded and _narrower(x) is None):
                    break
            else:
                # Values keep their order, so a shape without the axis, which has size 1, is enough.
                longer, shorter = (x, how.x) if kept else (how.x, x)
                place = self._place(longer)
                if place < 0 or not same(shape(longer)[place], 1):
                    break
                sizes = shape(longer)
                if not same_sizes([*sizes[:place], *sizes[place + 1 :]], shape(shorter)):
                    break
                kept = not kept
            x = how.x
        return x, kept


def _narrower(x: fx.Node) -> fx.Node | None:
    """Return ``x`` before it was copied to a dtype that has all of its numbers; None if it is no such copy."""
    how = decode(x)
    if not isinstance(how, Copy) or not same_sizes(shape(how.x), shape(x)):
        return None
    old, new = val(how.x).dtype, val(x).dtype
    return how.x if old.is_floating_point and torch.promote_types(old, new) == new else None
