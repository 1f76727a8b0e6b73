"""Express the factors that multiply rows of scores as fractions of sums of exponentials.

A softmax may be written in parts: a shift in the exponent, a division by a sum, or a later factor such as
``sigmoid(lse - sink)`` or ``exp(lse - logsumexp([lse, sink]))``. Each part is one number per row, and a fraction of
polynomials. The variables are the sum of ``exp(x)`` over the row (Z) and the exponentials of other numbers. The product
of all parts is also such a fraction. The reciprocal of this product is the sum by which ``exp(x)`` is divided.

Axes are followed as atoms, so the parts may be permuted and reshaped relative to each other.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from mla_compile.passes.ir.axes import Atom, Axes, flatten, fresh_axis
from mla_compile.passes.ir.graph import args_of, argument, axis, is_tensor, packet, shape, val
from mla_compile.passes.ir.moves import Copy, Join, Rearrange
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import Size, same, same_sizes

aten = torch.ops.aten

_ARITHMETIC: dict[object, Callable[[sympy.Expr, sympy.Expr], sympy.Expr]] = {
    aten.add: operator.add,
    aten.sub: operator.sub,
    aten.rsub: lambda a, b: b - a,
    aten.mul: operator.mul,
    aten.div: operator.truediv,
}


def row_axes(sizes: Sequence[Size], dim: int) -> Axes:
    """Return axes of a tensor whose rows lie along ``dim``; the axis ``dim`` has an atom even if its size is 1."""
    return tuple((Atom(n),) if d == dim else fresh_axis(n) for d, n in enumerate(sizes))


def broadcast_axes(given: object, axes: Axes) -> Axes:
    """Return the axes of ``given``, which broadcasts to a tensor with ``axes``; a number has no axes."""
    sizes = shape(given) if is_tensor(given) else []
    return tuple(() if same(n, 1) else a for n, a in zip(sizes, axes[len(axes) - len(sizes) :], strict=True))


@dataclass(frozen=True)
class RowNumber:
    """A number for each row: a tensor, and its axes in the atoms of the scores."""

    node: fx.Node
    axes: Axes


@dataclass(frozen=True)
class DivisorTerm:
    """A term of a divisor: ``factor``, times ``exp(number) ** power`` for each pair in ``powers``."""

    factor: float
    powers: tuple[tuple[RowNumber, int], ...]


class RowFactors:
    """Reads the numbers by which rows of scores are multiplied.

    Attributes:
        axes: the axes of the scores.
        row: the axis ``dim``, along which a row lies.
    """

    def __init__(self, axes: Axes, dim: int, *, log2_of_sum: fx.Node | None = None) -> None:
        """Read scores with ``axes`` and rows along ``dim``. ``log2_of_sum``: log2(Z) for each row, if known."""
        self.axes, self.row = axes, axes[dim]
        self._others = (*axes[:dim], *axes[dim + 1 :])
        self._log2_of_sum = log2_of_sum
        self._total = sympy.Symbol("Z", positive=True)
        self._numbers: dict[RowNumber, sympy.Symbol] = {}
        self._x: fx.Node | None = None

    def exponent(self, given: fx.Node) -> tuple[fx.Node, sympy.Expr]:
        """Split the exponent ``given`` into scores minus numbers per row; return the scores and ``exp(numbers)``."""
        self._x, shifts = self._unshifted(given, self.axes)
        power = self._power_of_all(shifts)
        assert power is not None, "what broadcasts to the scores has no axes but theirs"
        return self._x, power

    def softmax(self) -> sympy.Expr:
        """Return the factor by which a softmax multiplies ``exp(x)``."""
        return 1 / self._total

    def value(self, given: object, axes: Axes) -> sympy.Expr | None:
        """Return ``given`` as a fraction of sums of exponentials; None if it has another form.

        ``given`` is a number, or a tensor with one number per row. ``axes`` are the axes of the tensor.
        """
        if isinstance(given, (int, float)) and abs(given) < float("inf"):
            return sympy.Rational(given)
        if not is_tensor(given) or not val(given).dtype.is_floating_point:
            return None
        x, axes = _moved(given, axes)
        kind, operands = packet(x), args_of(x)
        if kind is aten.exp:
            return self._power(operands[0], axes)
        if kind is aten.sigmoid:
            power = self._power(operands[0], axes)
            return None if power is None else power / (1 + power)
        if kind is aten.sum:
            e, longer = self._reduced(x, axes) or (x, ())
            return self._sum(args_of(e)[0], longer) if packet(e) is aten.exp else None
        if kind is aten.reciprocal:
            one = self.value(operands[0], axes)
            return None if one is None else 1 / one
        rule = _ARITHMETIC.get(kind)
        if rule is None or x.kwargs or len(operands) != 2:
            return None
        a, b = (self.value(one, broadcast_axes(one, axes)) for one in operands)
        return None if a is None or b is None or (kind is aten.div and b == 0) else rule(a, b)

    def whole(self, start: sympy.Expr, factors: Iterable[tuple[object, bool, Axes]]) -> sympy.Expr | None:
        """Return ``start``, multiplied or divided by ``factors``; None unless each factor is one number per row."""
        for factor, divides, axes in factors:
            value = self.value(factor, axes)
            if value is None:
                return None
            start = start / value if divides else start * value
        return start

    def divisor(self, factor: sympy.Expr) -> tuple[DivisorTerm, ...] | None:
        """Return the terms other than Z in ``1 / factor``; None if ``1 / factor`` is not Z plus positive terms."""
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

    def _power(self, given: object, axes: Axes) -> sympy.Expr | None:
        """Return the exponential of ``given``, one number per row; None if ``given`` varies along the row."""
        if not is_tensor(given):
            return None
        found = self._power_of_parts(*_moved(given, axes))
        if found is not None:
            return found
        x, axes = _moved(given, axes, rounded=False)  # a sink that the model rounds stays rounded
        if not set(flatten(axes)) <= set(flatten(self._others)):
            return None
        return self._numbers.setdefault(RowNumber(x, axes), sympy.Symbol(f"e{len(self._numbers)}", positive=True))

    def _power_of_parts(self, x: fx.Node, axes: Axes) -> sympy.Expr | None:
        kind, operands = packet(x), args_of(x)
        if kind is aten.mul and operands[0] is self._log2_of_sum and operands[1] == math.log(2):
            return self._total if axes == self._others else None
        if kind is aten.logsumexp:
            summed = self._reduced(x, axes)
            return None if summed is None else self._sum(*summed)
        if kind is aten.log:
            return self.value(operands[0], axes)
        if kind not in (aten.logaddexp, aten.add, aten.sub, aten.neg) or x.kwargs or len(operands) > 2:
            return None
        found = (self._power(one, broadcast_axes(one, axes)) for one in operands)
        powers = [power for power in found if power is not None]
        if len(powers) < len(operands):
            return None
        a, b = powers if len(powers) == 2 else (sympy.Integer(1), *powers)
        return {aten.logaddexp: a + b, aten.add: a * b}.get(kind, a / b)

    def _sum(self, y: fx.Node, axes: Axes) -> sympy.Expr | None:
        """Return the sum of ``exp(y)`` along the row. ``y`` is the scores, perhaps joined with other numbers."""
        y, shifts = self._unshifted(y, axes)
        if y is self._x:
            found = self._total if axes == self.axes else None
        elif isinstance(how := decode(y), Join) and axes[how.dim] == self.row:
            sums = [self._sum(part, axes) for part in how.parts]
            found = None if None in sums else sympy.Add(*sums)
        else:
            found = self._power(y, broadcast_axes(y, axes))
        shift = self._power_of_all(shifts)
        return None if found is None or shift is None else found / shift

    def _unshifted(self, x: fx.Node, axes: Axes) -> tuple[fx.Node, list[RowNumber]]:
        """Undo widening casts and subtractions of one number per row; return the operand and the numbers."""
        shifts: list[RowNumber] = []
        while (source := _narrower(x)) or (packet(x) is aten.sub and not x.kwargs and len(args_of(x)) == 2):
            if source is not None:
                x = source
                continue
            source, shift = args_of(x)
            if not is_tensor(source) or not is_tensor(shift) or not same_sizes(shape(source), shape(x)):
                break
            number = RowNumber(shift, broadcast_axes(shift, axes))
            if self.row in number.axes:
                break
            shifts.append(number)
            x = source
        return x, shifts

    def _power_of_all(self, shifts: list[RowNumber]) -> sympy.Expr | None:
        powers = [self._power(shift.node, shift.axes) for shift in shifts]
        return None if None in powers else sympy.Mul(*powers)

    def _reduced(self, x: fx.Node, axes: Axes) -> tuple[Any, Axes] | None:
        """If ``x`` reduces along the row only, return its operand and the operand's axes; otherwise None."""
        y, dims = args_of(x)[0], argument(x, 1, "dim")
        if not isinstance(dims, (list, tuple)) or len(dims) != 1 or x.kwargs.get("dtype") is not None:
            return None
        dim = axis(dims[0], len(shape(y)))
        return y, (*axes[:dim], self.row, *axes[dim + bool(argument(x, 2, "keepdim", False)) :])


def _moved(x: fx.Node, axes: Axes, *, rounded: bool = True) -> tuple[fx.Node, Axes]:
    """Undo float conversions, permutations, reshapes and expansions of ``x``; return the operand and its axes.

    ``rounded``: whether conversions that may round are undone, too.
    """
    while isinstance(how := decode(x), (Copy, Rearrange)):
        if isinstance(how, Copy):
            floats = val(how.x).dtype.is_floating_point and same_sizes(shape(how.x), shape(x))
            if not floats or (not rounded and _narrower(x) is None):
                break
        else:
            before = None if how.map is None else how.map.backward(axes)
            if before is None:
                break
            axes = before
        x = how.x
    return x, axes


def _narrower(x: fx.Node) -> fx.Node | None:
    """If ``x`` is a copy that cannot round, return the copied tensor; otherwise None."""
    how = decode(x)
    if not isinstance(how, Copy) or not same_sizes(shape(how.x), shape(x)):
        return None
    old, new = val(how.x).dtype, val(x).dtype
    return how.x if old.is_floating_point and torch.promote_types(old, new) == new else None
