"""The operator to blame: what lies between an up-projection and the source at which the walk from K or V ended."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.decide.residual import shortcut
from mla_compile.passes.ir.graph import args_of, bytes_hint, is_tensor, packet
from mla_compile.passes.ir.operators import Join, Stack, decode, is_contraction
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.ir.walk import REACH, ancestors
from mla_compile.passes.linear.records import Maps
from mla_compile.passes.linear.stops import unexplained

aten = torch.ops.aten

# Codes behind which there may be a cause that says more.
SYMPTOMS = ("not_mla", "per_head_rope", "head_dependent_latent", "too_many_sources")


@dataclass(frozen=True)
class Search:
    """What up-projections are looked for behind a source.

    ``own``: what the queries are made of, which is no latent. ``rows``: what the site, or the rest of it, is projected
    from: what is projected from those, too, was meant to be absorbed, though it is no wider.
    """

    maps: Maps
    own: Collection[fx.Node]
    rows: Collection[fx.Node]


def explained(source: fx.Node, search: Search) -> Stop | None:
    return _behind(source, search) or _blocked_projection(source, search)


def explain_source(source: fx.Node, site: AttentionSite, maps: Maps, rows: Collection[fx.Node]) -> Stop | None:
    """What lies between ``source`` and an up-projection behind it; None where there is none.

    ``rows``: what the rest of the site is projected from.
    """
    return explained(source, Search(maps, of_queries(site), rows))


def _blocked_projection(source: fx.Node, search: Search) -> Stop | None:
    """Why ``source``, a product of rows and a weight, is none that a map can be drawn through."""
    maps = search.maps
    stop = maps.reasons.get(source)
    if stop is None or not is_contraction(source):
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


def _behind(source: fx.Node, search: Search) -> Stop | None:
    """An up-projection among the nearest ancestors of ``source`` that something follows, or that is none itself."""
    parent: dict[fx.Node, fx.Node] = {}
    queue = [source]
    while queue and len(parent) < REACH:
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


def _is_expansion(node: fx.Node, search: Search) -> bool:
    for piece in search.maps.map(node).pieces:
        if not piece.path or not piece.path[-1].contractions:
            continue
        total = piece.path[-1].contractions
        wide = min(bytes_hint(v.node) for v in piece.path if v.contractions == total)
        for n in (v.node for v in piece.path if v.contractions < total):
            if n in search.rows or (bytes_hint(n) < wide and n not in search.own):
                return True
    return False


def _blame(child: fx.Node, parent: dict[fx.Node, fx.Node], source: fx.Node, maps: Maps) -> Stop:
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


def _joins_heads(node: fx.Node, maps: Maps) -> bool:
    """Whether tensors are joined along an axis that the weights of one of them make."""
    how = decode(node)
    if not isinstance(how, (Join, Stack)):
        return False
    parts = [n for n in how.parts if not maps.is_weight(n)]
    maps = maps.with_stops(())  # the walk may have ended at a part because of this very node
    pieces = [p for n in parts for p in maps.map(n).pieces if p.weight is not None]
    if isinstance(how, Stack):  # along an axis that no row has
        return bool(pieces)
    return any(a in p.weight.atoms for p in pieces if p.weight is not None for a in p.axes[how.dim])
