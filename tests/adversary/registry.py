"""What a mutation is, and the register of all of them: each breaks one proof obligation, or looks as if it did.

Axes are drawn at random, so that the same step is sometimes legal (a factor along the features) and sometimes not (one
along the tokens). Whether a mutant is legal is for :mod:`tests.adversary.oracle` to say; ``legal`` marks those that
are so wherever they are put, and must be absorbed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mla_compile.codes import Code
from mla_compile.passes.ir.graph import val
from tests.adversary.bases import Base
from tests.adversary.places import Edge, Edit, choose

ROWS = ("keys", "values", "both")
Make = Callable[[random.Random, Tensor], Callable[..., Tensor]]


@dataclass(frozen=True)
class Mutation:
    """``make`` draws an edit for one edge of ``places``; ``legal``: absorbed as the base is.

    ``codes`` are true of it on the way of keys and values, besides those of the obligation that a mutant breaks;
    ``outside`` are those that may be said of it elsewhere, any where there are none.
    """

    name: str
    places: tuple[str, ...]
    make: Callable[[random.Random, Base, Edge], Edit]
    legal: bool = False
    codes: tuple[Code, ...] = ()
    outside: tuple[Code, ...] = ()


MUTATIONS: dict[str, Mutation] = {}


def mutation(*places: str, **more: Any) -> Callable[[Make], Make]:
    """Registers a step ``make(rng, x) -> fn(x)`` under its own name."""

    def register(make: Make) -> Make:
        def edit(rng: random.Random, base: Base, edge: Edge) -> Edit:
            return Edit(make(rng, val(edge.node)))

        MUTATIONS[make.__name__] = Mutation(make.__name__, places, edit, **more)
        return make

    return register


def wiring(*places: str, **more: Any) -> Callable[[Callable[[random.Random, Base, Edge], Edit]], None]:
    """Registers a step that needs more of the graph than the tensor on the edge."""

    def register(make: Callable[[random.Random, Base, Edge], Edit]) -> None:
        MUTATIONS[make.__name__] = Mutation(make.__name__, places, make, **more)

    return register


def axis(rng: random.Random, x: Tensor, fixed: bool = False) -> int:
    """An axis of more than one entry; ``fixed``: of known size."""
    sizes = [(d, s) for d, s in enumerate(x.shape) if not isinstance(s, int) or s > 1]
    return int(choose(rng, [d for d, s in sizes if isinstance(s, int) or not fixed]))


def two_axes(rng: random.Random, x: Tensor) -> tuple[int, int]:
    """Two axes of one size."""
    pairs = [(a, b) for a in range(x.dim()) for b in range(a) if x.shape[a] == x.shape[b] and x.shape[a] != 1]
    one: tuple[int, int] = choose(rng, pairs)
    return one


def along(x: Tensor, d: int, numbers: Tensor) -> Tensor:
    """A vector as a factor along axis ``d`` of ``x``."""
    return numbers.to(x.dtype).reshape([-1 if k == d else 1 for k in range(x.dim())])
