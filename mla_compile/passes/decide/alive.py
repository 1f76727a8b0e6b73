"""Find the nodes that are still computed after absorption, and the projections that make K and V."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from torch import fx

from mla_compile.passes.ir.walk import reachable
from mla_compile.passes.linear.records import Piece, Term
from mla_compile.passes.sources.readers import has_factors
from mla_compile.passes.sources.records import AbsorbPlan, Side, Verdict


class Alive:
    """The nodes that are still needed after the chosen sites are absorbed, and the inputs of these nodes."""

    def __init__(self, graph: fx.Graph, verdicts: Sequence[Verdict]) -> None:
        self._reads: dict[fx.Node, list[fx.Node]] = {}
        for verdict in verdicts:
            if verdict.absorb and verdict.plan is not None:
                self._reads.update(_reads(verdict.plan))
        self.nodes = frozenset(reachable([graph.output_node()], self.reads))

    def reads(self, node: fx.Node) -> Collection[fx.Node]:
        return self._reads.get(node, node.all_input_nodes)


def _reads(plan: AbsorbPlan) -> dict[fx.Node, list[fx.Node]]:
    """Map each node whose inputs the rewrite of a site changes to its new inputs."""
    site = plan.site
    keys = [p.k.node for p in site.products] if not plan.keys else _sources(plan.keys)
    values = [site.v.node] if not plan.vals else _sources(plan.vals)
    if (site.open_core is None and plan.fits_op) or site.probs is None:
        queries = [p.q.node for p in site.products]
        return {site.node: [*keys, *values, *queries, *(o.node for o in site.between)]}
    reads: dict[fx.Node, list[fx.Node]] = {}
    for index, product in enumerate(site.products if plan.keys else ()):
        assert product.node is not None
        reads[product.node] = [product.q.node, *_sources([t for t in plan.keys if t.product == index])]
    if plan.vals:
        reads[site.node] = [site.probs.node, *values]
    return reads


def _sources(terms: Sequence[Term]) -> list[fx.Node]:
    """Return the rows and weights of ``terms``."""
    factors = [f for t in terms for f in (t.piece.weight, t.piece.bias) if f is not None]
    return [*(t.piece.source for t in terms if t.piece.source), *(n for f in factors for n in f.expr.leaves())]


def expansions(verdict: Verdict) -> list[tuple[Side, fx.Node, fx.Node]]:
    """Return the side, the node and the source of each projection that makes K or V."""
    assert verdict.plan is not None
    found: list[tuple[Side, fx.Node, fx.Node]] = []
    for which, terms in verdict.plan.sides:
        for piece in (t.piece for t in terms if t.piece.source is not None):
            for path in (piece.path, piece.before):
                for before, visit in pairwise(path):
                    # Take only the last projection on the path. Other nodes may also read the results of an earlier
                    # projection.
                    last = visit.contractions == path[-1].contractions
                    if visit.contractions > before.contractions and last:
                        found.append((which, visit.node, path[0].node))
    return found


def added_to(verdict: Verdict, node: fx.Node, source: fx.Node) -> tuple[fx.Node, ...]:
    """Return ``source``, which ``node`` projects, and the rows of the other terms in the same sum."""
    assert verdict.plan is not None
    sums: dict[tuple[int | None, int], list[Piece]] = {}
    for t in verdict.plan.terms:  # the terms of a sum have the same columns
        sums.setdefault((t.product, t.start), []).append(t.piece)
    rows = [source]
    for pieces in sums.values():
        read = [p.path[0].node for p in pieces if p.path]
        for paths in ([p.path for p in pieces], [p.before for p in pieces]):
            if any(visit.node is node for path in paths for visit in path):
                rows += [path[0].node for path in paths if path]
                # If rows have factors, a reader of the sum needs the rows of all summands, with their factors.
                rows += read if any(map(has_factors, read)) else []
    return tuple(dict.fromkeys(rows))


def expansion_alive(verdict: Verdict, alive: Alive) -> tuple[Side, fx.Node] | None:
    """Return the side and the node of a projection for K or V that is still computed, or None."""
    return next(((which, node) for which, node, _ in expansions(verdict) if node in alive.nodes), None)
