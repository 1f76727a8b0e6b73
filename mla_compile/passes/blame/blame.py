"""Find the operator to blame: it lies between an up-projection and the node where the walk from K or V ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch import fx

from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.ir.graph import (
    HANDED_OVER,
    args_of,
    bytes_hint,
    is_tensor,
    is_tuple,
    operator_name,
    packet,
    shape,
    val,
)
from mla_compile.passes.ir.moves import Copy, Join, Reorder, Select, Slice, Stack, Write, WriteOne, WriteRows
from mla_compile.passes.ir.operators import behind, decode, is_contraction
from mla_compile.passes.ir.stand_in import BARRED
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.ir.walk import REACH, ancestors, nearest, reachable
from mla_compile.passes.linear.records import Maps, Piece, quantizes
from mla_compile.passes.linear.stops import barred, computed_weight, selected_weight, unexplained
from mla_compile.passes.proof.proved import LeadAxis, Proofs
from mla_compile.passes.quantized.foreign import foreign_name, foreign_rows
from mla_compile.passes.sources.records import pieces_of
from mla_compile.passes.sources.residual import shortcut
from mla_compile.passes.sources.sources import choose_sources
from mla_compile.passes.sources.writes import write_of

aten = torch.ops.aten

_WRITES = (aten.where, aten.index_put, aten.scatter, aten.index_add)
"""Operators that write tokens into a buffer, in addition to the writes that :func:`decode` recognises."""

_CACHED = "the cache holds K and V per head, not the latent"

_PICKS = (aten.gather, aten.index, aten.index_select)
"""Operators that read rows of a buffer at given positions."""

SYMPTOMS = ("not_mla", "per_head_rope", "head_dependent_latent", "too_many_sources")
"""Codes that describe the rows but name no cause. The cause may be an operator further upstream."""


@dataclass(frozen=True)
class Search:
    """Defines which projections are up-projections in a search upstream of a source.

    Usually, these are the projections that make rows wider. ``own``: the nodes from which the queries are computed. A
    projection from such a node starts at the hidden state, not at a latent. ``rows``: the site's known latent rows. Any
    projection from these rows is an up-projection, even if the result is no wider. ``proofs``: what can be proved about
    operators.
    """

    maps: Maps
    own: Container[fx.Node]
    rows: Collection[fx.Node]
    proofs: Proofs


def explained(source: fx.Node, search: Search) -> Stop | None:
    """Return the operator to blame for a walk that ended at ``source``; None if there is no up-projection upstream."""
    if BARRED in source.meta:
        return barred(None, source)
    return _behind(source, search) or _by_an_input(source, search) or _blocked_projection(source, search)


def explain_source(source: fx.Node, site: AttentionSite, maps: Maps, rows: Collection[fx.Node]) -> Stop | None:
    """Apply :func:`explained` to a source of ``site``. ``rows``: the site's known latent rows (see :class:`Search`)."""
    return explained(source, Search(maps, of_queries(site, maps), rows, Proofs(site, maps)))


def _blocked_projection(source: fx.Node, search: Search) -> Stop | None:
    """Explain why ``source``, a product of rows with a weight, has no linear map; None if it is not such a product."""
    maps = search.maps
    stop = maps.reasons.get(source)
    if stop is None or BARRED in source.meta:
        return stop
    if not is_contraction(source):
        foreign = foreign_rows(source, maps.weights)
        return None if foreign is None or foreign in search.own else _foreign_product(source, foreign)
    rows = [n for n in source.all_input_nodes if not (maps.is_weight(n) or computed_weight(maps, n))]
    # A product of two activations, such as the scores of another attention, is not a projection.
    if len(rows) == len(source.all_input_nodes) and not _widens(source):
        return None
    # A projection from nodes that also make the queries starts at the hidden state, as in plain attention.
    if all(n in search.own for n in rows):
        return None
    if stop.code not in ("head_dependent_latent", "position_dependent", "unsupported_weight"):
        return None
    return search.proofs.shown(stop)


def _foreign_product(node: fx.Node, rows: fx.Node) -> Stop:
    if quantizes(val(rows).dtype):
        return Stop(node, "nonlinear", "rows are rounded before this product by a scale that is not known to fit them")
    name = foreign_name(node) or foreign_name(args_of(node)[0])
    how = f"{name} multiplies rows by a weight in its own format; register_quantized_linear tells how to read it"
    return Stop(node, "unknown_product", how)


def _widens(node: fx.Node) -> bool:
    """Whether ``node`` is a linear layer that makes rows wider. Its weight may be computed from inputs."""
    rows = args_of(node)[0]
    # Only `linear` tells which operand is the weight.
    return packet(node) is aten.linear and bytes_hint(node) > bytes_hint(rows)


def _by_an_input(source: fx.Node, search: Search) -> Stop | None:
    """Explain that ``source`` has no linear map because an input of the graph is used as an up-projection's weight."""
    operands = [n for n in source.all_input_nodes if is_tensor(n)]
    if not is_contraction(source) or len(operands) != 2:
        return None
    for rows, other in (operands, operands[::-1]):
        given, wider = _moved(other), bytes_hint(rows) < bytes_hint(source)
        if search.maps.is_weight(given):
            return None
        if selected_weight(search.maps, other):
            return unexplained(search.maps, source)
        if _is_input(given) and not _is_input(_moved(rows)) and wider and rows not in search.own:
            how = f"rows are multiplied by {given}, an input of the graph that is not a weight of the model"
            return Stop(source, "unsupported_weight", how)
    return None


def _moved(node: fx.Node) -> fx.Node:
    """Return the tensor of which ``node`` is a permutation, reshape, cast or slice."""
    return behind(node, (Copy, Reorder, Slice))[-1]


def of_queries(site: AttentionSite, maps: Maps) -> Container[fx.Node]:
    """Return the nodes upstream of the queries. Rows among these nodes are the model's hidden state, not a latent."""
    return maps.behind(p.q.node for p in site.products)


def _behind(source: fx.Node, search: Search) -> Stop | None:
    """Return the obstacle between ``source`` and the nearest up-projection upstream.

    If a product without a linear map is nearer, return why this product has none.
    """
    reader: dict[fx.Node, fx.Node] = {}  # node -> the reader from which the search reached the node

    def inputs(node: fx.Node) -> Iterable[fx.Node]:
        if not is_tensor(node) and not is_tuple(node):
            return
        for n in _inputs(node, search.rows):
            if not search.maps.is_weight(n):
                reader.setdefault(n, node)
                yield n

    # The first node is the source itself, which is known not to be an up-projection.
    for node in islice(reachable([source], inputs, REACH), 1, None):
        if not is_tensor(node):
            continue
        if node in search.rows or _is_expansion(node, search):
            return _blame(node, reader, source, search)
        blocked = _blocked_projection(node, search)
        if blocked is not None:
            return blocked
    return None


def made_behind(source: fx.Node, maps: Maps) -> tuple[list[Piece], list[fx.Node]]:
    """Return the maps of the nearest projected tensors upstream of ``source``, and products that have no such map."""
    maps, found, products = maps.unbound, list[Piece](), list[fx.Node]()

    def inputs(node: fx.Node) -> Iterable[fx.Node]:
        if not is_tensor(node) and not is_tuple(node):
            return ()
        projected = [p for p in maps.map(node).pieces if p.projected] if is_tensor(node) else []
        found.extend(projected)
        products.extend([node] if is_contraction(node) and not projected else [])
        return () if projected or is_contraction(node) else (n for n in _inputs(node, ()) if not maps.is_weight(n))

    deque(reachable([source], inputs, REACH), maxlen=0)
    return found, products


def _inputs(node: fx.Node, rows: Collection[fx.Node]) -> list[fx.Node]:
    """Return the inputs of ``node``. For a residual connection ``x + f(x)``, return only ``x``.

    ``f`` is a feed-forward network or another attention. Its projections may widen rows, but these rows are not
    latents. If an input is in ``rows``, all inputs are returned.
    """
    inputs = list(node.all_input_nodes)
    through = None if any(n in rows for n in inputs) else shortcut(node)
    return inputs if through is None else [through]


def _is_expansion(node: fx.Node, search: Search) -> bool:
    """Whether ``node`` is projected from known latent rows, or from narrower rows that do not also make the queries."""
    for piece in search.maps.map(node).pieces:
        if not piece.path or not piece.path[-1].contractions:
            continue
        total = piece.path[-1].contractions
        wide = min(bytes_hint(v.node) for v in piece.path if v.contractions == total)
        for n in (v.node for v in piece.path if v.contractions < total):
            if n in search.rows or (bytes_hint(n) < wide and n not in search.own):
                return True
    return False


def _blame(expansion: fx.Node, reader: dict[fx.Node, fx.Node], source: fx.Node, search: Search) -> Stop:
    """Return the first reason downstream of the up-projection, preferably a reason other than "unsupported_op"."""
    maps, said = search.maps, list[Stop]()
    path = [expansion]
    while path[-1] is not source:
        path.append(reader[path[-1]])
    writes = _arithmetic_writes(path, maps)
    for node in path[1:]:
        if (stop := maps.reasons.get(node)) is not None:
            # If the cause is not on the path, but in the other term of a sum, `node` is no cache of these rows.
            of_a_cache = _of_a_cache(node, expansion, search) if stop.node is node else None
            said.append(writes.get(node) or of_a_cache or search.proofs.shown(stop))
    found = next((s for s in said if s.code != "unsupported_op"), said[0] if said else None)
    found = found or search.proofs.shown(unexplained(maps, source))
    return _joined(found.node, search) or found


def _arithmetic_writes(path: Sequence[fx.Node], maps: Maps) -> dict[fx.Node, Stop]:
    """Map each operator of ``path`` in a write such as ``input * (1 - m) + new * m`` to the reason."""

    def is_kept(node: fx.Node) -> bool:
        held = _is_input(node) and is_tensor(node) and not maps.is_weight(node)
        return held and val(node).is_floating_point()

    found: dict[fx.Node, Stop] = {}
    for k, node in enumerate(path):
        write = write_of(node, is_kept)
        if write is not None and not write.stacked and write.parts[0] in path[:k]:
            stop = Stop(node, "expanded_cache", _CACHED)
            found |= dict.fromkeys(path[path.index(write.parts[0]) + 1 : k + 1], stop)
    return found


def _of_a_cache(node: fx.Node, expansion: fx.Node, search: Search) -> Stop | None:
    """Return the reason if ``node`` joins expanded rows to an input or writes them into an input; None otherwise."""
    how = decode(node)
    if isinstance(how, (Join, Write, WriteRows)) and how.dim not in search.proofs.tokens.get(node, ()):
        return None
    if not isinstance(how, (Join, Write, WriteOne, WriteRows)) and packet(node) not in _WRITES:
        return None
    for n in node.all_input_nodes:
        buffer, selected = _whole(n, selected=isinstance(how, WriteOne))
        kept = _is_input(buffer) and n is not expansion and not search.maps.is_weight(n)
        if kept and is_tensor(buffer) and val(buffer).is_floating_point():
            several = ", and is selected from a buffer of several (kv[0], k[layer])" if selected else ""
            return Stop(node, "expanded_cache", f"{_CACHED}{several}")
    return None


def _is_input(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _of_inputs(node: fx.Node) -> bool:
    """Whether ``node`` is computed from any floating-point input, rather than only from positions."""
    inputs = (a for a in chain([node], ancestors(node)) if _is_input(a) and is_tensor(a))
    return any(val(a).is_floating_point() for a in inputs)


def _whole(node: fx.Node, *, selected: bool = False) -> tuple[fx.Node, bool]:
    """Return the buffer of which ``node`` is a part, and whether the part was selected. Writes are looked through."""
    how = decode(node)
    if isinstance(how, (Slice, Select)):
        return _whole(how.x, selected=selected or isinstance(how, Select))
    if isinstance(how, (Write, WriteOne, WriteRows)):
        return _whole(how.base, selected=selected or isinstance(how, WriteOne))
    if packet(node) in _PICKS:
        return _whole(args_of(node)[0], selected=selected)
    return node, selected


_JOINED: dict[LeadAxis, tuple[str, str]] = {
    "heads": ("head_dependent_latent", "heads made of different rows are joined and read together"),
    "batch": ("too_many_sources", "entries of the batch are made of different tensors, joined behind a weight"),
    "batch or heads": ("too_many_sources", "batch or heads are made of different tensors, joined behind weights"),
}


def _joined(node: fx.Node, search: Search) -> Stop | None:
    """Explain that ``node`` joins projections of different rows along the batch or the heads; None if it does not."""
    how = decode(node)
    if not isinstance(how, (Join, Stack)) or (isinstance(how, Join) and how.dim == len(shape(node)) - 1):
        return None
    maps = search.maps.unbound  # without chosen sources, because the parts of this join may have been chosen
    made = any(p.weight is not None for n in how.parts if not maps.is_weight(n) for p in maps.map(n).pieces)
    role = search.proofs.role(node, how.dim) if made else None
    if role is None:
        return None
    products, _ = nearest(node, lambda n: n.all_input_nodes, is_contraction, maps.is_weight)
    if role != "heads" and len(products) == 1:  # the parts are parts of one tensor, in any order
        return Stop(node, "unsupported_op", f"no rule for {operator_name(node)} along the {role}, behind a weight")
    return Stop(node, *_JOINED[role])


def plain_side(site: AttentionSite, side: str, nodes: Sequence[fx.Node], maps: Maps) -> Stop | None:
    """Explain why ``nodes``, the keys or values of ``site``, stay; None if a latent makes these nodes."""
    pieces = pieces_of([maps.map(node) for node in nodes])
    at_rows = maps.with_sources(choose_sources(pieces, of_queries(site, maps))[0])
    if any(p.projected for p in pieces_of([at_rows.map(node) for node in nodes])):
        return None
    if made_outside(nodes, maps):
        return from_outside(nodes[0], f"the {side}", nodes, Proofs(site, maps))
    if pieces and all(p.projected and p.source in of_queries(site, maps) for p in pieces):
        return Stop(nodes[0], "not_mla", f"the {side} are projected from hidden states, as the queries are")
    return Stop(nodes[0], "not_mla", f"the {side} are not a linear image of narrower rows that all heads share")


def made_outside(nodes: Sequence[fx.Node], maps: Maps) -> bool:
    """Whether ``nodes`` are computed without any weight of this graph.

    If all nodes come from before a graph break, only weights in products are considered. A rotation table, for example,
    is a weight but makes no keys.
    """
    reached = [list(chain([node], ancestors(node))) for node in nodes]
    if all(any(HANDED_OVER in a.meta for a in one) for one in reached):
        return not any(is_contraction(a) and any(map(maps.is_weight, a.all_input_nodes)) for a in chain(*reached))
    return not any(maps.is_weight(a) for a in chain(*reached) if a.op != "get_attr")


def from_outside(node: fx.Node, what: str, made: Sequence[fx.Node], proofs: Proofs) -> Stop:
    """Explain K and V that are made only from inputs, perhaps from inputs that come from before a graph break."""
    reached = dict.fromkeys(a for one in made for a in chain([one], ancestors(one)))
    if any(HANDED_OVER in a.meta for a in reached):
        return Stop(node, "graph_break", f"{what} enter this graph from before a graph break: what makes them is there")
    product = next((a for a in reached if is_contraction(a) and all(map(_of_inputs, a.all_input_nodes))), None)
    if product is not None:
        weights = [n for n in product.all_input_nodes if not proofs.tokens.get(n)]
        if len(weights) == 1:
            how = f"rows are multiplied by {_moved(weights[0])}, which inputs make, and no weight of the model"
            return Stop(product, "unsupported_weight", how)
        return Stop(product, "unsupported_op", f"{operator_name(product)} multiplies what inputs make")
    return Stop(node, "expanded_inputs", f"{what} enter this graph as inputs: nothing in it makes them from a latent")
