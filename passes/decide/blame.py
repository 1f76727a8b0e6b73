"""The operator to blame: what stands between an up-projection and the node where the walk from K or V ended."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import fx

from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.decide.residual import shortcut
from mla_compile.passes.ir.graph import args_of, bytes_hint, is_tensor, is_tuple, packet, val
from mla_compile.passes.ir.operators import (
    Copy,
    Join,
    Permute,
    Regroup,
    Select,
    Slice,
    Stack,
    Write,
    WriteOne,
    WriteRows,
    decode,
    is_contraction,
)
from mla_compile.passes.ir.stand_in import BARRED
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.ir.walk import REACH, reachable
from mla_compile.passes.linear.records import Maps, quantizes
from mla_compile.passes.linear.stops import barred, unexplained
from mla_compile.passes.quantized.foreign import foreign_name, foreign_rows

aten = torch.ops.aten

_PICKS = (aten.gather, aten.index, aten.index_select)
"""Operators that read rows of a buffer at positions."""

SYMPTOMS = ("not_mla", "per_head_rope", "head_dependent_latent", "too_many_sources")
"""Codes that say what the rows look like, not why: an operator further back may be the cause, and says more."""


@dataclass(frozen=True)
class Search:
    """Which projections count as up-projections in a search behind a source.

    Usually a projection that makes rows wider. ``own`` are the nodes that the queries are computed from: a projection
    from one of those starts at the hidden state, not at a latent. ``rows`` are the latent rows already known for this
    site: any projection from them counts, even one that makes nothing wider.
    """

    maps: Maps
    own: Container[fx.Node]
    rows: Collection[fx.Node]


def explained(source: fx.Node, search: Search) -> Stop | None:
    """The operator to blame for a walk that ended at ``source``; None where no up-projection lies behind it."""
    if BARRED in source.meta:
        return barred(None, source)
    return _behind(source, search) or _by_an_input(source, search) or _blocked_projection(source, search)


def explain_source(source: fx.Node, site: AttentionSite, maps: Maps, rows: Collection[fx.Node]) -> Stop | None:
    """:func:`explained` for ``site``, the rest of which is projected from ``rows``."""
    return explained(source, Search(maps, of_queries(site, maps), rows))


def _blocked_projection(source: fx.Node, search: Search) -> Stop | None:
    """Why ``source``, a product of rows with a weight, has no linear map; None where it is no such product."""
    maps = search.maps
    stop = maps.reasons.get(source)
    if stop is None or BARRED in source.meta:
        return stop
    if not is_contraction(source):
        rows = foreign_rows(source, maps.weights)
        return None if rows is None or rows in search.own else _foreign_product(source, rows)
    # A product of two activations, such as the scores of another attention, is no projection.
    if not any(maps.is_weight(n) for n in source.all_input_nodes) and not _widens(source):
        return None
    # Projected from what the queries are made of: that is the hidden state, as in plain attention.
    if all(n in search.own for n in source.all_input_nodes if not maps.is_weight(n)):
        return None
    return stop if stop.code in ("head_dependent_latent", "position_dependent", "unsupported_weight") else None


def _foreign_product(node: fx.Node, rows: fx.Node) -> Stop:
    if quantizes(val(rows).dtype):
        return Stop(node, "nonlinear", "rows are rounded before this product by a scale that is not known to fit them")
    name = foreign_name(node) or foreign_name(args_of(node)[0])
    how = f"{name} multiplies rows by a weight in a format of its own; register_quantized_linear says how to read it"
    return Stop(node, "unknown_product", how)


def _widens(node: fx.Node) -> bool:
    """Whether a linear layer, its weight perhaps computed from inputs, makes rows wider than those it reads."""
    rows = args_of(node)[0]
    # Only `linear` says which operand is the weight; of the other products either could be.
    return packet(node) is aten.linear and bytes_hint(node) > bytes_hint(rows)


def _by_an_input(source: fx.Node, search: Search) -> Stop | None:
    """Why ``source`` has no linear map where an input makes it of a latent, as the weight of an up-projection would."""
    operands = [n for n in source.all_input_nodes if is_tensor(n)]
    if not is_contraction(source) or len(operands) != 2:
        return None
    for rows, other in (operands, operands[::-1]):
        given, wider = _moved(other), bytes_hint(rows) < bytes_hint(source)
        if _is_input(given) and not _is_input(_moved(rows)) and wider and rows not in search.own:
            how = f"rows are multiplied by {given}, an input of the graph that is no weight of the model"
            return Stop(source, "unsupported_weight", how)
    return None


def _moved(node: fx.Node) -> fx.Node:
    """What ``node`` shows in another order, shape or dtype, or a part of."""
    how = decode(node)
    return _moved(how.x) if isinstance(how, (Copy, Regroup, Permute, Slice)) else node


def of_queries(site: AttentionSite, maps: Maps) -> Container[fx.Node]:
    """What the queries are computed from. Rows among those nodes are the model's hidden state, not a latent."""
    return maps.behind(p.q.node for p in site.products)


def _behind(source: fx.Node, search: Search) -> Stop | None:
    """What follows the nearest up-projection behind ``source``, or why the nearest projection is not a usable one."""
    reader: dict[fx.Node, fx.Node] = {}  # of the nodes seen, the one by which each was reached: the way back to source

    def inputs(node: fx.Node) -> Iterable[fx.Node]:
        if not is_tensor(node) and not is_tuple(node):
            return
        for n in _inputs(node, search.rows):
            if not search.maps.is_weight(n):
                reader.setdefault(n, node)
                yield n

    # The first is the source itself, which is known to be no up-projection.
    for node in islice(reachable([source], inputs, REACH), 1, None):
        if not is_tensor(node):
            continue
        if node in search.rows or _is_expansion(node, search):
            return _blame(node, reader, source, search.maps)
        blocked = _blocked_projection(node, search)
        if blocked is not None:
            return blocked
    return None


def _inputs(node: fx.Node, rows: Collection[fx.Node]) -> list[fx.Node]:
    """What ``node`` is computed from; for a residual connection ``x + f(x)`` only ``x``, unless ``f(x)`` are the rows.

    Inside ``f``, a feed-forward network or another attention, projections widen rows too, but those are no latents.
    """
    inputs = list(node.all_input_nodes)
    through = None if any(n in rows for n in inputs) else shortcut(node)
    return inputs if through is None else [through]


def _is_expansion(node: fx.Node, search: Search) -> bool:
    """Whether ``node`` is an up-projection: wider than some row tensor before its last projection."""
    for piece in search.maps.map(node).pieces:
        if not piece.path or not piece.path[-1].contractions:
            continue
        total = piece.path[-1].contractions
        wide = min(bytes_hint(v.node) for v in piece.path if v.contractions == total)
        for n in (v.node for v in piece.path if v.contractions < total):
            if n in search.rows or (bytes_hint(n) < wide and n not in search.own):
                return True
    return False


def _blame(expansion: fx.Node, reader: dict[fx.Node, fx.Node], source: fx.Node, maps: Maps) -> Stop:
    """The first node after the up-projection that has no linear map, preferably one whose code says why."""
    stops: list[Stop] = []
    node = expansion
    walked: set[fx.Node] = set()
    while node is not source:
        node = reader[node]
        walked.add(node)
        if node in maps.reasons:
            stops.append(maps.reasons[node])
    stop = next((s for s in stops if s.code != "unsupported_op"), stops[0] if stops else unexplained(maps, source))
    node = stop.node
    if _joins_heads(node, maps):
        return Stop(node, "head_dependent_latent", "heads made of different rows are joined and read together")
    # A node beside the way, such as the other term of a sum, holds no cache of these rows.
    if node in walked and (stop.code == "token_mixing" or packet(node) is aten.where):
        for n in node.all_input_nodes:
            buffer, selected = _whole(n)
            if _is_input(buffer) and n is not expansion and not maps.is_weight(n) and val(buffer).is_floating_point():
                how = ", and is selected from a buffer of several (kv[0], k[layer])" if selected else ""
                return Stop(node, "expanded_cache", f"the cache holds K and V per head, not the latent{how}")
    return stop


def _is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _whole(node: fx.Node, selected: bool = False) -> tuple[fx.Node, bool]:
    """The buffer of which ``node`` is a part, new rows in it or not; whether the part is one that was selected."""
    how = decode(node)
    if isinstance(how, (Slice, Select)):
        return _whole(how.x, selected or isinstance(how, Select))
    if isinstance(how, (Write, WriteOne, WriteRows)):
        return _whole(how.base, selected or isinstance(how, WriteOne))
    if packet(node) in _PICKS:
        return _whole(args_of(node)[0], selected)
    return node, selected


def _joins_heads(node: fx.Node, maps: Maps) -> bool:
    """Whether ``node`` joins tensors along an axis, such as the heads, that a weight of one of them makes."""
    how = decode(node)
    if not isinstance(how, (Join, Stack)):
        return False
    parts = [n for n in how.parts if not maps.is_weight(n)]
    maps = maps.unbound  # the walk may have ended at a part because of this very node
    pieces = [p for n in parts for p in maps.map(n).pieces if p.weight is not None]
    if isinstance(how, Stack):  # along an axis that no row has
        return bool(pieces)
    return any(a in p.weight.atoms for p in pieces if p.weight is not None for a in p.axes[how.dim])
