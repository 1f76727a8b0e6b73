"""Draw the nodes around an attention for a report.

A rewritten attention is drawn twice: one drawing shows the removed nodes and their inputs, the other shows the new
nodes and their inputs. An attention that stays is drawn back to the projections of queries, keys and values. A chain of
views becomes one box. A tensor that is computed only from weights becomes one box, named after the weights.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from mla_compile.codes import CODES
from mla_compile.core.drawing import Drawing, DrawnNode, Role, SiteDrawing
from mla_compile.passes.ir import moves
from mla_compile.passes.ir.graph import is_tensor, is_tuple, operator_name, packet, shape, val, whole_rows
from mla_compile.passes.ir.locate import locate
from mla_compile.passes.ir.operators import PRODUCTS, behind, decode
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.ir.walk import ancestors, reachable
from mla_compile.passes.rewrite.records import Absorbed
from mla_compile.passes.sources.records import Verdict

aten = torch.ops.aten
MOST = 60
"""A drawing expands at most this many nodes, so that it fits on one page.

Nodes farther from the attention are drawn as inputs.
"""

_VIEWS = (moves.Copy, moves.Rearrange, moves.Slice, moves.Select)
_JOINS = (moves.Join, moves.Assign, moves.Write, moves.WriteOne, moves.WriteRows)
_OTHER_JOINS = {aten.index_put, aten.scatter, aten.where}
_ATTENTIONS = {aten.scaled_dot_product_attention, aten.softmax, aten._softmax, torch.ops.mla_compile.decode_attention}
_LOCAL = re.compile(r"^l_(?:kwargs_|inputs_)?|_$")
_STATE = re.compile(r"_(?:modules|parameters|buffers)_+")


@dataclass
class Sketch:
    """Draws attentions of one graph. ``original`` is a copy of the graph from before any rewrite.

    ``weights`` are the names of the nodes computed from weights alone.
    """

    original: fx.Graph
    weights: Collection[str]
    _nodes: dict[str, fx.Node] = field(init=False)

    def __post_init__(self) -> None:
        self._nodes = {node.name: node for node in self.original.nodes}

    def left(self, verdict: Verdict) -> SiteDrawing:
        """Draw an attention that stays as it was."""
        return self.around(verdict.site.node, None if CODES[verdict.code].verdict == "not_mla" else verdict.blame)

    def unfollowed(self, node: fx.Node, stop: Stop) -> SiteDrawing:
        """Draw an attention of which only the softmax is known."""
        return self.around(node, stop.node)

    def around(self, node: fx.Node, blame: fx.Node | None) -> SiteDrawing:
        """Draw the graph upstream of ``node``, back to the nearest products with weights."""
        start = self._nodes[node.name]
        way = _between([self._nodes[blame.name]], start) if blame is not None and blame.name in self._nodes else set()
        draft = _Draft(self.weights, lambda _: True, self._is_projection, blamed=blame.name if blame else "")
        draft.always = way if len(way) < MOST else set()
        return SiteDrawing(draft.drawn(start))

    def rewritten(self, verdict: Verdict, absorbed: Absorbed) -> SiteDrawing:
        """Draw a rewritten attention: the old nodes, and the nodes that replaced the old nodes."""
        assert verdict.plan is not None
        site, out = verdict.site, absorbed.out
        rows = {n.name for r in verdict.plan.rows for n in (r.node, whole_rows(r.node))}
        rows |= {view.name for view in absorbed.views}
        nodes = set(out.graph.nodes)
        alive = {node.name for node in nodes}
        # If W_v was folded into the output projection, the attended latent is the attention's last node.
        out = out if out in nodes or absorbed.latent is None else absorbed.latent
        start = self._nodes[site.node.name]
        products = [self._nodes[p.node.name] for p in site.products if p.node is not None]
        core = _between(products, start)
        before = _Draft(self.weights, lambda n: n.name not in alive or n in core, latents=rows)
        kept = {n.name for n in core} & alive
        after = _Draft(self.weights, lambda n: n.name not in self._nodes or n.name in kept, latents=rows)
        return SiteDrawing(before.drawn(start), after.drawn(out) if out in nodes else None)

    def _is_projection(self, node: fx.Node) -> bool:
        return packet(node) in PRODUCTS and any(n.name in self.weights for n in node.all_input_nodes)


@dataclass
class _Draft:
    """A drawing under construction.

    Nodes that satisfy ``inside`` or show a cache are expanded, that is, their inputs are drawn. All other nodes end the
    drawing. If a node satisfies ``ends_at``, an input of the node is expanded only if it is a view or shows a cache.
    Nodes in ``always`` are expanded even if the drawing is full.
    """

    weights: Collection[str]
    inside: Callable[[fx.Node], bool]
    ends_at: Callable[[fx.Node], bool] = lambda _: False
    latents: Collection[str] = ()
    blamed: str = ""
    boxes: dict[fx.Node, DrawnNode] = field(default_factory=dict)
    reads: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    ends: set[fx.Node] = field(default_factory=set)
    always: set[fx.Node] = field(default_factory=set)
    constant: dict[fx.Node, bool] = field(default_factory=dict)

    def drawn(self, start: fx.Node) -> Drawing:
        queue = [start]
        while queue:
            node = queue.pop(0)
            if node in self.boxes:
                continue
            entered = node is start or ((len(self.boxes) < MOST or node in self.always) and self._entered(node))
            self.boxes[node] = self._box(node, entered=entered)
            self.reads[node] = self._inputs(node) if entered else []
            # The inputs of such a node are expanded only if they are views or show a cache.
            if node in self.ends or self.ends_at(node):
                self.ends.update(self.reads[node])
            queue += self.reads[node]
        # All boxes must be known before views are merged, because a view with several drawn readers is not merged.
        self._contract(start)
        order = [n for n in start.graph.nodes if n in self.boxes]
        place = {node: i for i, node in enumerate(order)}
        edges = tuple((place[source], place[n]) for n in order for source in self.reads[n])
        return Drawing(tuple(self.boxes[n] for n in order), edges)

    def _entered(self, node: fx.Node) -> bool:
        if node in self.ends and not (_is_view(node) or self._shows_cache(node)):
            return False
        if node.op in ("placeholder", "get_attr") or self._is_weight(node):
            return False
        return self.inside(node) or self._shows_cache(node)

    def _shows_cache(self, node: fx.Node) -> bool:
        """Whether ``node`` joins new rows to a cached input, or is a view of such a join."""
        node = _root(node)
        return _is_join(node) and any(self._is_cache(n) for n in self._inputs(node))

    def _is_cache(self, node: fx.Node) -> bool:
        node = _root(node)
        if node.op != "placeholder" or node.name in self.weights or not is_tensor(node):
            return False
        readers = list(node.users)
        for reader in readers:
            readers += reader.users if _is_view(reader) else []
        return any(_is_join(reader) for reader in readers)

    def _is_weight(self, node: fx.Node) -> bool:
        """Whether ``node`` is computed from weights alone. A rewrite may have added ``node``."""
        if node not in self.constant:
            sources = node.all_input_nodes
            self.constant[node] = node.name in self.weights or (
                node.op == "call_function" and bool(sources) and all(self._is_weight(n) for n in sources)
            )
        return self.constant[node]

    def _inputs(self, node: fx.Node) -> list[fx.Node]:
        """Return the tensors that ``node`` reads. If ``node`` is a getitem, return the inputs of its operator."""
        if node.target is operator.getitem:
            (parent,) = node.all_input_nodes[:1]
            if _is_view(node) or len(parent.users) == 1:
                node = parent
        return [n for n in node.all_input_nodes if is_tensor(n) or is_tuple(n)]

    def _box(self, node: fx.Node, *, entered: bool) -> DrawnNode:
        where = locate(node)
        role = self._role(node, entered=entered)
        label = _label(node)
        if role == "weight":
            label = _state_name(node)
        elif node.op == "placeholder":
            label = _short(node.name)
        sizes = tuple(str(s) for s in shape(node)) if is_tensor(node) else ()
        dtype = str(val(node).dtype).removeprefix("torch.") if is_tensor(node) else ""
        return DrawnNode(
            node.name, label, sizes, dtype, role, where.source if node.op == "call_function" else None,
            where.code if node.op == "call_function" else None, node.name == self.blamed,
        )  # fmt: skip

    def _role(self, node: fx.Node, *, entered: bool) -> Role:
        if self._is_weight(node):
            return "weight"
        if node.name in self.latents:
            return "latent"
        if self._is_cache(node) and not entered:
            return "cache"
        op = packet(node.all_input_nodes[0]) if node.target is operator.getitem else packet(node)
        if entered and op in _ATTENTIONS:
            return "attention"
        return "op" if entered else "input"

    def _contract(self, start: fx.Node) -> None:
        """Merge a view of a view into one box if nothing else reads the inner view."""
        users: dict[fx.Node, list[fx.Node]] = {}
        for node, sources in self.reads.items():
            for source in sources:
                users.setdefault(source, []).append(node)
        for node in list(start.graph.nodes):
            if node not in self.boxes or not self._is_plain_view(node):
                continue
            (source,) = self.reads[node]
            if self._is_plain_view(source) and users[source] == [node]:
                box, inner = self.boxes[node], self.boxes.pop(source)
                names = [*inner.label.split(", "), box.label]
                self.boxes[node] = replace(box, label=", ".join(dict.fromkeys(names)))
                self.reads[node] = self.reads.pop(source)

    def _is_plain_view(self, node: fx.Node) -> bool:
        box = self.boxes.get(node)
        return box is not None and box.role == "op" and not box.blamed and len(self.reads[node]) == 1 and _is_view(node)


def _between(sources: Iterable[fx.Node], end: fx.Node) -> set[fx.Node]:
    """Return the nodes on the paths from ``sources`` to ``end``, both included."""
    starts = list(sources)
    before = {end, *ancestors(end, starts)} if starts else set()
    return set(reachable((n for n in starts if n in before), lambda node: (u for u in node.users if u in before)))


def _is_view(node: fx.Node) -> bool:
    """Whether ``node`` is a view or a copy of one tensor, or of a part of the tensor."""
    return isinstance(decode(node), _VIEWS)


def _root(node: fx.Node) -> fx.Node:
    """Return the tensor of which ``node`` is a view, perhaps a nested view; ``node`` itself if it is no view."""
    return behind(node, _VIEWS)[-1]


def _is_join(node: fx.Node) -> bool:
    """Whether ``node`` combines elements of several tensors into one tensor."""
    return isinstance(decode(node), _JOINS) or packet(node) in _OTHER_JOINS


def _label(node: fx.Node) -> str:
    if node.target is operator.getitem:
        parent = node.all_input_nodes[0]
        return f"{_label(parent)} [{node.args[1]}]" if _is_view(node) else _label(parent)
    return operator_name(node) if node.op == "call_function" else _short(node.name)


def _short(name: str) -> str:
    """Shorten a mangled path to its end: ``kv_b_proj.weight`` for ``l_self_modules_kv_b_proj_parameters_weight_``."""
    parts = [part.strip("_") for part in _STATE.split(name) if part.strip("_")]
    return ".".join(parts[-2:]) if len(parts) > 1 else _LOCAL.sub("", name)


def _state_name(node: fx.Node) -> str:
    """Return the names of the weights that ``node`` is computed from."""
    roots = [n for n in (node, *ancestors(node)) if n.op in ("placeholder", "get_attr")]
    names = list(dict.fromkeys(_short(str(n.target) if n.op == "get_attr" else n.name) for n in roots))
    return ", ".join(names[:2]) + (", ..." if len(names) > 2 else "") if names else "constant"
