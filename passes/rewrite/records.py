"""What a rewrite did, as data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from mla_compile.passes.decide.records import AbsorbPlan


@dataclass(frozen=True)
class Absorbed:
    """A rewritten site: the node that is now its output, the queries after W_kc, and the attended latent before W_v.

    ``latent`` is None where the values stay expanded. ``views`` are rows of virtual sources, added to the graph.
    ``weights`` are the nodes of W_kc and W_v. ``given`` are the rows to check it with, where the plan's are parts of
    the same ones, and ``columns`` which of them are the values.
    """

    plan: AbsorbPlan
    out: fx.Node
    queries: tuple[fx.Node, ...]
    latent: fx.Node | None
    views: tuple[fx.Node, ...] = ()
    weights: tuple[fx.Node, ...] = ()
    given: tuple[fx.Node, ...] = ()
    columns: tuple[int, int] | None = None


@dataclass(frozen=True)
class Folded:
    """One folded product: which side, and its relative rounding error where the weights' values are known."""

    side: str
    error: float | None
