"""Explain why an attention that looks like MLA cannot be absorbed, by finding the operator to blame.

The walk back from K or V ended at some node. If there is an up-projection upstream of that node, the attention is MLA,
and the node is the obstacle. Otherwise, the attention is plain MHA, GQA or MQA.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import chain
from typing import TypeGuard

from torch import fx

from mla_compile.core.alike import constant_of, each
from mla_compile.passes.attention.site import AttentionSite, Product
from mla_compile.passes.blame.blame import (
    SYMPTOMS,
    Search,
    explained,
    from_outside,
    made_behind,
    made_outside,
    of_queries,
    plain_side,
)
from mla_compile.passes.ir.labels import product_labels
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.linear.records import Maps
from mla_compile.passes.linear.stops import unexplained
from mla_compile.passes.proof.plan import make_part_plan, make_plan
from mla_compile.passes.proof.proved import Proofs
from mla_compile.passes.sources.records import AbsorbPlan, Side, ends_of, groups_of, pieces_of, repeats
from mla_compile.passes.sources.sources import choose_sources, cut

_HIDDEN = "hidden states, as the queries are"


def explain_refusal(site: AttentionSite, failed: Stop, maps: Maps, wide: fx.Node | None) -> Stop:
    """Return the best explanation for ``site``, whose plan failed with ``failed``.

    The main candidates, in order:

    1. Rows that are merely too wide (``wide``).
    2. Weights or views that mix tokens. No walk ends at these, so no operator is to blame.
    3. An operator upstream of K or V, on a side that cannot be absorbed alone.
    4. ``failed``.
    """
    if failed.code not in SYMPTOMS:
        return failed
    own = of_queries(site, maps)
    sides = ([p.k for p in site.products], [site.v])
    operands = [[o.node for o in side] for side in sides]
    pieces = pieces_of([maps.map(node) for nodes in operands for node in nodes])
    at_rows = maps.with_sources(choose_sources(pieces, any_width=True)[0])
    at_cuts = _plans(site, at_rows)
    # If all obligations hold for rows of any width, the width is the only reason.
    rows, too_wide = [], None
    if failed.code == "not_mla" and wide is not None and wide not in own:
        rows = [wide]
        too_wide = Stop(wide, "cost_latent_wide", "the rows that are expanded are no narrower than K and V")
        if not isinstance(at_cuts[0], Stop) and not _stays_by_head(at_cuts[0]):
            return too_wide
    unmade = failed
    if failed.code == "not_mla" and not rows:
        rows, unmade = _made_of(failed, [node for nodes in operands for node in nodes], own, Proofs(site, maps))
    # If no weight lies between rows and attention, no up-projection can mix tokens.
    for plan in _plans(site, maps) if failed.code != "not_mla" or rows else ():
        if _by_weights_alone(plan):
            return plan
    illegal = [k for k, plan in enumerate(at_cuts[1:]) if not _shared(plan)]
    # The first search may merge two projections into one map and so miss the rows between the projections. The second
    # search ends its walks at these rows.
    for one in (maps, at_rows):
        search = Search(one, own, rows, Proofs(site, one))
        for source in ends_of(chain(*(sides[k] for k in illegal or (0, 1))), site.lead, one):
            found = explained(source, search)
            # If all heads share K and V, as in MQA, nothing can depend on the head.
            if found is not None and (found.code != "head_dependent_latent" or not _shared_by_heads(site, maps)):
                # If the attention itself has a problem, this problem is the reason, however K and V are made.
                return site.problem or found
    if too_wide is not None:
        return too_wide
    of_heads = not _shared_by_heads(site, maps)
    if failed.code == "not_mla" and of_heads and made_outside([*operands[0], *operands[1]], maps):
        return from_outside(site.node, "K and V", [*operands[0], *operands[1]], Proofs(site, maps))
    if failed.code == "per_head_rope":
        plain = (plain_side(site, side, nodes, maps) for side, nodes in zip(("keys", "values"), operands, strict=True))
        return next((stop for stop in plain if stop is not None), failed)
    projected = [p for p in pieces if p.projected]
    if failed.code != "not_mla" and projected and all(p.source in own for p in projected):
        return Stop(site.node, "not_mla", "K and V are projected from hidden states, as the queries are")
    return site.problem if site.problem is not None and failed.code != "not_mla" else unmade


def _made_of(
    failed: Stop, ends: Sequence[fx.Node], own: Container[fx.Node], proofs: Proofs
) -> tuple[list[fx.Node], Stop]:
    """Return the narrower rows from which weights make ``ends`` or tensors upstream of ``ends``, or why there are none.

    The rows are compared with K and V together, because a latent may be wider than K alone. ``own``: the nodes from
    which the queries are made.
    """
    behind, products = zip(*(made_behind(end, proofs.maps) for end in ends), strict=True)
    product = next((node for found in products for node in found if node not in own), None)
    # If all heads share K and V, a product without a map does not expand rows for the heads.
    if product is not None and not _shared_by_heads(proofs.site, proofs.maps):
        stop = proofs.shown(unexplained(proofs.maps, product))
        mixed = [p.source in own for n in product.all_input_nodes for p in made_behind(n, proofs.maps)[0]]
        if stop.code != "token_mixing" or not mixed or not all(mixed):
            return [], stop
        return [], Stop(failed.node, "not_mla", f"K and V are projected from {_HIDDEN}")
    cuts = {p: c for made in behind for p in made if (c := cut(p, own, proper=True)) is not None}
    # Rows are identified by operator and arguments, because keys and values may each select the same rows.
    rows = {(c.node.target, each((c.node.args, c.node.kwargs), constant_of)): c.bytes for c in cuts.values()}
    expanded = {c.node: c.bytes for p in cuts if (c := cut(p, proper=False)) is not None}
    if sum(rows.values()) < sum(expanded.values()):
        return list(dict.fromkeys(c.node for c in cuts.values())), failed
    if not any(behind):
        return [], failed
    what = "K and V are" if all(behind) else "K or V is"
    return [], Stop(failed.node, "not_mla", f"{what} projected from {'rows that are no narrower' if cuts else _HIDDEN}")


def _plans(site: AttentionSite, maps: Maps) -> list[AbsorbPlan | Stop]:
    """Return the plans for the whole attention, for its keys alone, and for its values alone."""
    alone: tuple[Side, ...] = ("keys", "values")
    return [make_plan(site, maps), *(make_part_plan(site, maps, (side,)) for side in alone)]


def _stays_by_head(plan: AbsorbPlan) -> bool:
    """Whether groups of heads have their own weights and rows, but keys or values are these rows without a weight."""
    groups = groups_of(plan.terms, plan.batch)
    return any(
        not any(t.piece.projected for t in terms) and any(t.kind(a) == "token" for t in terms for a in groups)
        for _, terms in plan.sides
    )


def _shared(plan: AbsorbPlan | Stop) -> bool:
    """Whether ``plan`` is a plan (not a reason) in which all heads share all rows."""
    return not isinstance(plan, Stop) and not any(rows.heads for rows in plan.rows)


def _by_weights_alone(plan: AbsorbPlan | Stop) -> TypeGuard[Stop]:
    """Whether the plan failed because weights or views mix tokens or depend on positions. No walk ends there."""
    return isinstance(plan, Stop) and plan.code in ("token_mixing", "position_dependent")


def _shared_by_heads(site: AttentionSite, maps: Maps) -> bool:
    """Whether several query heads read the same keys and values, and no head has other keys or values, as in MQA."""
    operands = (*(p.k for p in site.products), site.v)
    own = [a for a in site.lead if not all(repeats(o, a, maps) for o in operands)]
    return len(own) < 2 and (len(own) < len(site.lead) or all(_more_axes(p) for p in site.products))


def _more_axes(product: Product) -> bool:
    """Whether the queries have an axis that the keys lack, in addition to the axis of query tokens."""
    read = {a for axis in product.k.axes for a in axis}
    own = [axis for axis in product.q.axes if not set(axis) & read]
    return any(own) and (len(own) - sum(not axis for axis in product.k.axes) > 1 or _stretched(product))


def _stretched(product: Product) -> bool:
    """Whether the keys are broadcast along an axis of the queries: size 1 in the keys, longer in the queries."""
    labelled = None if product.node is None else product_labels(product.node)
    if labelled is None:
        return False
    (left, of_left), (_, of_right), _ = labelled
    of_q, of_k = (of_left, of_right) if left is product.q.node else (of_right, of_left)
    met = {label for label, axis in zip(of_k, product.k.axes, strict=True) if not axis}
    return any(axis and label in met for label, axis in zip(of_q, product.q.axes, strict=True))
