"""Why an attention that looks like MLA cannot be absorbed: the operator to blame, not just a no.

The walk of the linear maps ended somewhere. If behind that node there is an up-projection from rows narrower than what
it makes, then this is MLA with something in the way, and the node where the walk ended is the explanation. If there is
none, the attention is plain MHA, GQA or MQA.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import fx

from mla_compile.passes.attention.site import AttentionSite, Operand, Product
from mla_compile.passes.decide.plan import AbsorbPlan, make_part_plan, make_plan, pieces_of
from mla_compile.passes.decide.residual import shortcut
from mla_compile.passes.decide.sources import choose_sources
from mla_compile.passes.ir.axes import Atom
from mla_compile.passes.ir.graph import ancestors, args_of, argument, axis, bytes_hint, is_tensor, packet, shape
from mla_compile.passes.ir.labels import product_labels
from mla_compile.passes.linear.analysis import LinearMaps
from mla_compile.passes.linear.contract import CONTRACTIONS
from mla_compile.passes.linear.stops import Stop, unexplained

aten = torch.ops.aten

# Codes behind which there may be a cause that says more.
SYMPTOMS = ("not_mla", "per_head_rope", "head_dependent_latent", "too_many_sources")
_REACH = 48  # operators between an up-projection and the scores: a rotation is a dozen


@dataclass(frozen=True)
class _Search:
    """What up-projections are looked for behind a source.

    ``own``: what the queries are made of, which is no latent. ``rows``: what the site, or the rest of it, is projected
    from: what is projected from those, too, was meant to be absorbed, though it is no wider.
    """

    maps: LinearMaps
    own: Collection[fx.Node]
    rows: Collection[fx.Node]


def explain_refusal(site: AttentionSite, failed: Stop, maps: LinearMaps, wide: fx.Node | None) -> Stop:
    """The best explanation for ``site``, whose plan failed with ``failed``.

    In this order: only too wide; broken by weights or views, where no walk ends; an operator behind the side that is
    illegal by itself; nothing that is known.
    """
    if failed.code not in SYMPTOMS:
        return failed
    own = of_queries(site)
    sides = [[maps.map(p.k.node) for p in site.products], [maps.map(site.v.node)]]
    pieces = pieces_of([*sides[0], *sides[1]])
    at_cuts = _plans(site, maps.with_stops(choose_sources(pieces, any_width=True)[0]))
    rows, too_wide = [], None
    if failed.code == "not_mla" and wide is not None and wide not in own:
        rows = [wide]
        too_wide = Stop(wide, "cost_latent_wide", "the rows that are expanded are no narrower than K and V")
        if not isinstance(at_cuts[0], Stop):
            return too_wide
    for plan in _plans(site, maps) if failed.code != "not_mla" or rows else ():
        if _by_weights_alone(plan):
            return plan
    illegal = [side for side, plan in zip(sides, at_cuts[1:], strict=True) if not _shared(plan)]
    for source in dict.fromkeys(p.source for side in illegal or sides for p in pieces_of(side)):
        found = None if source is None else _explained(source, _Search(maps, own, rows))
        if found is not None and (found.code != "head_dependent_latent" or not _shared_by_heads(site, maps)):
            return found
    if too_wide is not None:
        return too_wide
    if failed.code == "not_mla" and _made_outside(site, maps) and not _shared_by_heads(site, maps):
        return Stop(
            site.node, "graph_break", "K and V enter this graph as inputs: nothing in it makes them of a latent"
        )
    projected = [p for p in pieces if p.projected]
    if failed.code != "not_mla" and projected and all(p.source in own for p in projected):
        return Stop(site.node, "not_mla", "K and V are projected from hidden states, which the queries are made of")
    return site.problem if site.problem is not None and failed.code != "not_mla" else failed


def _plans(site: AttentionSite, maps: LinearMaps) -> list[AbsorbPlan | Stop]:
    """Of the whole, of the keys alone, and of the values alone."""
    keys, values = [maps.map(p.k.node) for p in site.products], maps.map(site.v.node)
    return [make_plan(site, keys, values), make_part_plan(site, keys, None), make_part_plan(site, None, values)]


def _shared(plan: AbsorbPlan | Stop) -> bool:
    """Whether a side can be absorbed, all of it from rows that the heads share."""
    return not isinstance(plan, Stop) and not any(rows.heads for rows in plan.rows)


def explain_source(source: fx.Node, site: AttentionSite, maps: LinearMaps, rows: Collection[fx.Node]) -> Stop | None:
    """What lies between ``source`` and an up-projection behind it; None where there is none.

    ``rows``: what the rest of the site is projected from.
    """
    return _explained(source, _Search(maps, of_queries(site), rows))


def _by_weights_alone(plan: AbsorbPlan | Stop) -> TypeGuard[Stop]:
    """Whether tokens are mixed or treated differently where no walk ends: by weights, or views."""
    return isinstance(plan, Stop) and plan.code in ("token_mixing", "position_dependent")


def _explained(source: fx.Node, search: _Search) -> Stop | None:
    return _behind(source, search) or _blocked_projection(source, search)


def _made_outside(site: AttentionSite, maps: LinearMaps) -> bool:
    """Whether no weight of this graph has a part in K and V."""
    operands = (*(p.k.node for p in site.products), site.v.node)
    return not any(maps.is_weight(a) for node in operands for a in (node, *ancestors(node)) if a.op != "get_attr")


def _shared_by_heads(site: AttentionSite, maps: LinearMaps) -> bool:
    """Whether several heads of the queries read the same rows as keys and as values: no head has rows of its own."""
    operands = (*(p.k for p in site.products), site.v)
    own = [a for a in site.lead if not all(_repeats(o, a, maps) for o in operands)]
    return len(own) < 2 and (len(own) < len(site.lead) or all(_more_axes(p) for p in site.products))


def _repeats(operand: Operand, atom: Atom, maps: LinearMaps) -> bool:
    """Whether the rows of ``operand`` are the same for every position of ``atom``."""
    at = next((k for k, axis in enumerate(operand.axes) if atom in axis), None)
    if at is None:
        return True
    pieces = maps.map(operand.node).pieces
    return all(p.weight is None and not set(p.axes[at]) & set(p.source_atoms) for p in pieces)


def _more_axes(product: Product) -> bool:
    """Whether the queries have an axis besides their tokens that the keys do not have."""
    read = {a for axis in product.k.axes for a in axis}
    own = [axis for axis in product.q.axes if not set(axis) & read]
    return any(own) and (len(own) - sum(not axis for axis in product.k.axes) > 1 or _stretched(product))


def _stretched(product: Product) -> bool:
    """Whether an axis of the keys, of size 1, is met by one of the queries that is longer."""
    labelled = None if product.node is None else product_labels(product.node)
    if labelled is None:
        return False
    (left, of_left), (_, of_right), _ = labelled
    of_q, of_k = (of_left, of_right) if left is product.q.node else (of_right, of_left)
    met = {label for label, axis in zip(of_k, product.k.axes, strict=True) if not axis}
    return any(axis and label in met for label, axis in zip(of_q, product.q.axes, strict=True))


def _blocked_projection(source: fx.Node, search: _Search) -> Stop | None:
    """Why ``source``, a product of rows and a weight, is none that a map can be drawn through."""
    maps = search.maps
    stop = maps.reasons.get(source)
    if stop is None or packet(source) not in CONTRACTIONS:
        return None
    if not any(maps.is_weight(n) for n in source.all_input_nodes) and not _widens(source):
        return None
    if all(n in search.own for n in source.all_input_nodes if not maps.is_weight(n)):
        return None
    return stop if stop.code in ("head_dependent_latent", "position_dependent", "unsupported_weight") else None


def _widens(node: fx.Node) -> bool:
    """Whether a projection by computed weights makes rows wider than those it reads."""
    rows = args_of(node)[0]
    return packet(node) is aten.linear and bytes_hint(node) > bytes_hint(rows)


def of_queries(site: AttentionSite) -> set[fx.Node]:
    """What the queries are computed from: rows that are among it are the model's hidden state, not a latent."""
    return {a for p in site.products for a in (p.q.node, *ancestors(p.q.node))}


def _behind(source: fx.Node, search: _Search) -> Stop | None:
    """An up-projection among the nearest ancestors of ``source`` that something follows, or that is none itself."""
    parent: dict[fx.Node, fx.Node] = {}
    queue = [source]
    while queue and len(parent) < _REACH:
        node = queue.pop(0)
        for child in _inputs(node, search.rows):
            if child in parent or child is source or search.maps.is_weight(child):
                continue
            parent[child] = node
            if is_tensor(child):
                if child in search.rows or _is_expansion(child, search):
                    return _blame(child, parent, source, search.maps)
                blocked = _blocked_projection(child, search)
                if blocked is not None:
                    return blocked
                queue.append(child)
            elif isinstance(child.meta.get("val"), (tuple, list)):
                queue.append(child)
    return None


def _inputs(node: fx.Node, rows: Collection[fx.Node]) -> list[fx.Node]:
    """What ``node`` is computed from; of a residual connection ``x + f(x)`` only ``x``, unless ``f(x)`` is the rows.

    Inside ``f``, a feed-forward network or an attention, rows are widened and something follows, but no latent.
    """
    inputs = list(node.all_input_nodes)
    through = None if any(n in rows for n in inputs) else shortcut(node)
    return inputs if through is None else [through]


def _is_expansion(node: fx.Node, search: _Search) -> bool:
    for piece in search.maps.map(node).pieces:
        if not piece.path or not piece.path[-1].contractions:
            continue
        total = piece.path[-1].contractions
        wide = min(bytes_hint(v.node) for v in piece.path if v.contractions == total)
        for n in (v.node for v in piece.path if v.contractions < total):
            if n in search.rows or (bytes_hint(n) < wide and n not in search.own):
                return True
    return False


def _blame(child: fx.Node, parent: dict[fx.Node, fx.Node], source: fx.Node, maps: LinearMaps) -> Stop:
    """The first node after the up-projection that has no linear map; an operator that says more goes before a view."""
    stops: list[Stop] = []
    node = child
    walked: set[fx.Node] = set()
    while node is not source:
        node = parent[node]
        walked.add(node)
        if node in maps.reasons:
            stops.append(maps.reasons[node])
    stop = next((s for s in stops if s.code != "unsupported_op"), stops[0] if stops else unexplained(source))
    node = stop.node
    if _joins_heads(node, maps):
        return Stop(node, "head_dependent_latent", "heads made of different rows are joined and read together")
    if (
        node in walked  # what goes into a sum beside the rows is no cache of them
        and stop.code == "token_mixing"
        and any(_is_input(n) and n is not child and not maps.is_weight(n) for n in node.all_input_nodes)
    ):
        return Stop(node, "expanded_cache", "the cache holds K and V per head, not the latent")
    return stop


def _is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _joins_heads(node: fx.Node, maps: LinearMaps) -> bool:
    """Whether tensors are joined along an axis that the weights of one of them make."""
    if packet(node) not in (aten.cat, aten.stack):
        return False
    parts = [n for n in args_of(node)[0] if not maps.is_weight(n)]
    maps = maps.with_stops(())  # the walk may have ended at a part because of this very node
    pieces = [p for n in parts for p in maps.map(n).pieces if p.weight is not None]
    if packet(node) is aten.stack:  # along an axis that no row has
        return bool(pieces)
    dim = axis(argument(node, 1, "dim", 0), len(shape(node)))
    return any(a in p.weight.atoms for p in pieces if p.weight is not None for a in p.axes[dim])
