"""Records of what a rewrite did."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from mla_compile.passes.sources.records import AbsorbPlan


@dataclass(frozen=True)
class Absorbed:
    """A rewritten site: the node that is now its output, the queries after W_kc, and the attended latent before W_v.

    ``latent`` is None if the rewrite applies no W_v. ``views`` are the nodes that the rewrite added for rows of
    virtual sources. ``weights`` are the nodes of W_kc and W_v. ``given`` holds the rows that get random numbers in
    a verification; it is empty if these are the plan's rows. ``columns`` are the columns of these rows that are the
    values.
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
    """A folded product: its side, and its relative rounding error (None if the weights have no known values)."""

    side: str
    error: float | None
