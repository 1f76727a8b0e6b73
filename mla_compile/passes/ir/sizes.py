"""Sizes of axes: numbers, or expressions over a graph's shape symbols. A comparison must hold for all symbol values.

Torch replaces a symbol only if a guard states its value. A guard such as ``s10 + s22 == s22 + s31`` (two caches of
equal length, each extended by the same tokens) is not used, so equal axes keep different names. This module solves each
linear guard once for a symbol. If no symbol can be isolated, the guard is solved for a length rounded up to whole
blocks, as in ``2*Max(1, -(-s0//2)) == s0``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import sympy
import torch
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy


class _Solved:
    """The guards that were read from a shape environment, solved for symbols and for sizes rounded to blocks."""

    def __init__(self, shape_env: ShapeEnv) -> None:
        # Under Dynamo, guards enforce the ranges that torch assumes for its symbols. An exported program has no such
        # guards: torch assumes lengths of at least two, but the program also runs with length one. In this case, a
        # symbol is only assumed to be positive or nonnegative.
        context = TracingContext.try_get()
        mode = context.fake_mode if context is not None else None
        guarded = mode is not None and mode.shape_env is shape_env
        # Torch updates this dict in place. A reference to the whole environment would keep the environment alive
        # forever.
        self._ranges = shape_env.var_to_range if guarded else None
        self._read = 0
        self._values: dict[sympy.Symbol, sympy.Expr] = {}
        self._multiples: dict[sympy.Expr, tuple[sympy.Integer, sympy.Expr]] = {}
        self._canonical: dict[sympy.Expr, sympy.Expr] = {}  # a cache, cleared when new guards are read

    def read(self, guards: Sequence[Any]) -> None:
        # Guards are only ever appended, so reading continues after the last guard that was read.
        new = guards[self._read :]
        self._read = len(guards)
        if new:
            self._canonical.clear()
        for guard in new:
            if isinstance(guard.expr, sympy.Eq):
                self._add(guard.expr)

    def canonical(self, expr: sympy.Expr) -> sympy.Expr:
        if (found := self._canonical.get(expr)) is None:
            found = self._canonical[expr] = self._reduced(expr)
        return found

    def _reduced(self, expr: sympy.Expr) -> sympy.Expr:
        expr = self._plain(expr.xreplace(self._values))
        for term, (times, value) in self._multiples.items():
            if expr.has(term):
                expr = _with_multiples(expr, term, times, value)
        return expr

    def _plain(self, expr: sympy.Expr) -> sympy.Expr:
        """Replace remainders, exact divisions, and maxima with a known largest argument by simpler expressions."""
        new: dict[sympy.Expr, sympy.Expr] = {one: self._largest(one) for one in expr.atoms(Max)}
        # If B and S are one symbol, a view of [B * S] as [B, -1] has the size `s**2 // s`, which torch does not
        # simplify.
        new |= {one: n for one in expr.atoms(FloorDiv) if (n := quotient(*one.args)) is not None}
        new |= {one: one.args[0] - one.args[1] * FloorDiv(*one.args) for one in expr.atoms(PythonMod)}
        return expr.xreplace(new) if new else expr

    def _largest(self, maximum: sympy.Expr) -> sympy.Expr:
        ranges = self._ranges
        if ranges is None:
            sizes = (one for one in maximum.free_symbols if one.is_nonnegative)
            ranges = {one: ValueRanges(int(bool(one.is_positive)), int_oo) for one in sizes}
        for one in maximum.args:
            if all(one is other or bound_sympy(one - other, ranges).lower >= 0 for other in maximum.args):
                return one
        return maximum

    def _add(self, equation: sympy.Eq) -> None:
        # The common factor is divided out first. Otherwise `2*s0 == 2*s1` would have no coefficient of 1.
        _, zero = sympy.expand(self._reduced(equation.lhs - equation.rhs)).as_content_primitive()
        zero = sympy.expand(zero)
        for symbol in sorted(zero.free_symbols, key=_age, reverse=True):
            factor = zero.coeff(symbol, 1)
            rest = sympy.expand(zero - factor * symbol)
            # The solution is an integer for all values of the other symbols only if the coefficient is 1 or -1.
            if abs(factor) == 1 and symbol not in rest.free_symbols:
                self._replace(symbol, -rest * factor)
                return
        for term in sorted(zero.atoms(FloorDiv, Max), key=str):
            factor = zero.coeff(term, 1)
            rest = sympy.expand(zero - factor * term)
            if factor.is_Integer and factor != 0 and not rest.has(term):
                self._multiples[term] = (abs(factor), -rest * sympy.sign(factor))
                return

    def _replace(self, symbol: sympy.Symbol, value: sympy.Expr) -> None:
        # Values must not contain replaced symbols. One `xreplace` is then enough.
        new = {symbol: value}
        self._values = {known: old.xreplace(new) for known, old in self._values.items()} | new
        multiples = {term.xreplace(new): (n, old.xreplace(new)) for term, (n, old) in self._multiples.items()}
        self._multiples = {term: multiple for term, multiple in multiples.items() if isinstance(term, (FloorDiv, Max))}


def _with_multiples(expr: sympy.Expr, term: sympy.Expr, times: sympy.Integer, value: sympy.Expr) -> sympy.Expr:
    """Replace ``times * term`` by ``value`` in ``expr``. The value of ``term`` itself is not known."""
    expanded = sympy.expand(expr)
    factor = expanded.coeff(term, 1)
    each = sympy.expand(factor / times)
    whole = all(number.is_Integer for number in each.as_coefficients_dict().values())
    return sympy.expand(expanded - factor * term + each * value) if factor != 0 and whole else expr


_solved: WeakKeyDictionary[ShapeEnv, _Solved] = WeakKeyDictionary()


def canonical(expr: sympy.Expr, shape_env: ShapeEnv | None) -> sympy.Expr:
    """Replace later symbols and rounded lengths in ``expr`` by equal expressions, as far as guards allow.

    Guards hold whenever the graph runs, so the value of ``expr`` does not change.
    """
    if shape_env is None or expr.is_Integer:
        return expr
    if (solved := _solved.get(shape_env)) is None:
        solved = _solved[shape_env] = _Solved(shape_env)
    solved.read(shape_env.guards)
    return solved.canonical(expr)


def _age(symbol: sympy.Symbol) -> tuple[int, str]:
    """Return a sort key that puts later symbols after earlier ones, independent of the order of the guards."""
    # The length of the name comes first, because as text s10 would sort before s9.
    return len(symbol.name), symbol.name


Size: TypeAlias = "int | sympy.Expr"
"""One dimension of a shape: a number, or an expression over the graph's shape symbols."""

UNSEEN = 4096
"""The size that cost estimates assume for an unknown dimension, such as the length of the result of ``nonzero``."""


def size(dim: int | torch.SymInt) -> Size:
    """Return a dimension as an int if it is a number, and as its sympy expression otherwise."""
    if isinstance(dim, int):
        return dim
    expr = canonical(sympy.sympify(dim.node.expr), dim.node.shape_env)
    return int(expr) if expr.is_Integer else expr


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for every value of the symbols, and not only in the traced call."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    # `==` compares structure, which is cheap and usually enough. `s*(t+1)` and `s*t + s` need the expansion.
    return bool(a == b) or sympy.expand(sympy.sympify(a) - sympy.sympify(b)) == 0


def same_sizes(a: Sequence[Size], b: Sequence[Size]) -> bool:
    return len(a) == len(b) and all(map(same, a, b))


def quotient(a: Size, b: Size) -> Size | None:
    """Return ``a / b`` if it is an integer for every value of the symbols, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b > 0 and a % b == 0 else None
    ratio = sympy.cancel(sympy.sympify(a) / sympy.sympify(b))
    # `s / 2` is refused even if it is an integer for the traced length.
    if sympy.fraction(ratio)[1] != 1 or not ratio.is_integer:
        return None
    return int(ratio) if ratio.is_Integer else ratio


def hint(dim: Size, value: int | torch.SymInt) -> int:
    """Return a representative size: the number itself, the size seen at tracing, or :data:`UNSEEN`."""
    if isinstance(dim, int):
        return dim
    known = getattr(getattr(value, "node", None), "hint", None)
    return int(known) if known is not None else UNSEEN


def at_least(a: Size, b: Size) -> bool:
    """Whether ``a >= b`` is proved for every value of the symbols. Sizes are never negative."""
    return bool(sympy.expand(sympy.sympify(a) - sympy.sympify(b)).is_nonnegative)


MINIMA = (sympy.Min, Min)
"""Minimum operators: sympy's own, and torch's, which simplifies less."""


def least_of(a: Size) -> tuple[Size, ...]:
    """Return the arguments of ``a`` if it is a minimum; otherwise return only ``a``."""
    return a.args if isinstance(a, MINIMA) else (a,)


def holds(condition: sympy.Basic) -> bool:
    """Whether a comparison of sizes, or an And or Or of comparisons, is proved for every value of the symbols."""
    if isinstance(condition, (sympy.And, sympy.Or)):
        return (all if isinstance(condition, sympy.And) else any)(map(holds, condition.args))
    if isinstance(condition, (sympy.Ge, sympy.Gt)):
        return _covers(condition.lhs, condition.rhs + int(isinstance(condition, sympy.Gt)))
    if isinstance(condition, (sympy.Le, sympy.Lt)):
        return _covers(condition.rhs, condition.lhs + int(isinstance(condition, sympy.Lt)))
    if isinstance(condition, sympy.Ne):
        a, b = condition.args
        return _covers(a, b + 1) or _covers(b, a + 1)
    return condition is sympy.true or (isinstance(condition, sympy.Eq) and _equal(*condition.args))


def _equal(a: sympy.Expr, b: sympy.Expr) -> bool:
    if same(a, b):
        return True
    if isinstance(a, (Mod, PythonMod)) and b == 0:
        return quotient(*a.args) is not None
    if isinstance(a, FloorDiv):  # b * by <= over < (b + 1) * by
        over, by = a.args
        return _covers(by, sympy.S.One) and _covers(over, b * by) and _covers((b + 1) * by, over + 1)
    return False


def _covers(most: sympy.Expr, least: sympy.Expr) -> bool:
    """Whether ``most >= least`` is proved.

    If ``least`` grows with a minimum, a proof for any one argument of the minimum is enough.
    """
    if at_least(most, least):
        return True
    least = sympy.expand(least)
    for one in sorted(least.atoms(*MINIMA), key=str):
        factor = least.coeff(one)
        rest = sympy.expand(least - factor * one)
        if factor.is_positive and not rest.has(one) and any(_covers(most, rest + factor * n) for n in one.args):
            return True
    return False
