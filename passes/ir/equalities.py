"""One spelling for sizes that a graph's guards make equal.

Torch replaces a symbol where a guard says outright what it is. A guard such as ``s10 + s22 == s22 + s31`` (two caches
of one length, each grown by the same tokens) stays a guard, and two equal axes keep two names. Here the linear ones
are solved, once for every new guard of a shape environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv


@dataclass
class _Solved:
    """The guards read so far, and what they say of each symbol they determine."""

    read: int = 0
    values: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)


_solved: WeakKeyDictionary[ShapeEnv, _Solved] = WeakKeyDictionary()


def canonical(expr: sympy.Expr, shape_env: ShapeEnv | None) -> sympy.Expr:
    """``expr`` with every symbol replaced that the guards express by earlier ones.

    A guard holds whenever the graph runs, so this changes no value.
    """
    if shape_env is None or expr.is_Integer:
        return expr
    solved = _solved.setdefault(shape_env, _Solved())
    guards = shape_env.guards[solved.read :]
    solved.read += len(guards)
    for guard in guards:
        if isinstance(guard.expr, sympy.Eq):
            _add(guard.expr, solved.values)
    return expr.xreplace(solved.values) if solved.values else expr


def _add(equation: sympy.Eq, values: dict[sympy.Symbol, sympy.Expr]) -> None:
    _, zero = sympy.expand((equation.lhs - equation.rhs).xreplace(values)).as_content_primitive()
    zero = sympy.expand(zero)
    for symbol in sorted(zero.free_symbols, key=_age, reverse=True):
        factor = zero.coeff(symbol, 1)
        rest = sympy.expand(zero - factor * symbol)
        if abs(factor) == 1 and symbol not in rest.free_symbols:
            value = -rest * factor
            for known, old in values.items():
                values[known] = old.xreplace({symbol: value})
            values[symbol] = value
            return


def _age(symbol: sympy.Symbol) -> tuple[int, str]:
    """Later symbols are replaced by earlier ones, whatever the order of the guards."""
    return len(symbol.name), symbol.name
