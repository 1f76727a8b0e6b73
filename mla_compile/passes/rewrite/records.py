"""Records of what a rewrite did."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from mla_compile.passes.sources.records import AbsorbPlan


@dataclass(frozen=True)
class Absorbed:
    """A rewritten site.

    ``out``: the new output. ``queries``: the queries after W_kc. ``latent``: the attended latent before W_v; None if
    the rewrite applies no W_v. ``views``: the nodes that the rewrite added for virtual sources. ``weights``: the nodes
    of W_kc and W_v. ``given``: the rows that get random numbers in a verification; empty if these are the plan's rows.
    ``columns``: the columns of the rows that hold the values.
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
    """A folded product: the side, and the relative rounding error (None if the weights have no known values)."""

    side: str
    error: float | None
