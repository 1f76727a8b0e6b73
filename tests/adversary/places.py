"""Where a mutation can go: the edges of a captured attention, by what flows over them; and how one is put there."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.capture import capture
from mla_compile.core.program import Program
from mla_compile.errors import CaptureError
from mla_compile.passes.ir.graph import evaluate_fake, is_tensor, packet, val
from mla_compile.passes.ir.operators import Fill, decode
from mla_compile.passes.ir.walk import weight_nodes
from tests.adversary.bases import Base, behind

aten = torch.ops.aten
PLACES = ("keys", "values", "both", "queries", "scores", "probs", "mask", "weights")


@dataclass(frozen=True)
class Edge:
    """The uses of ``node`` by ``users``, all of one kind."""

    node: fx.Node
    users: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Edit:
    """What is put on an edge: ``fn(x, *others, *constants)`` in place of x.

    ``others`` are nodes of the graph that it reads too, ``constants`` become weights of the program.
    """

    fn: Callable[..., Tensor]
    others: tuple[fx.Node, ...] = ()
    constants: tuple[Tensor, ...] = ()


class Refused(Exception):  # noqa: N818  not an error: the mutation makes no valid graph
    """The mutation does not fit this edge."""


def edges(base: Base, place: str) -> list[Edge]:
    """The edges of ``place`` in the base's own graph."""
    site = base.plan.site
    k, v = {p.k.node for p in site.products}, site.v.node
    core = {site.node, *(p.node for p in site.products if p.node is not None)}
    to_k = _way({t.piece.source for t in base.plan.keys if t.piece.source}, k)
    to_v = _way({t.piece.source for t in base.plan.vals if t.piece.source}, {v})
    if place in ("keys", "values", "both"):

        def kind(node: fx.Node, user: fx.Node) -> tuple[bool, bool]:
            ends = user in core
            return (node in k if ends else user in to_k) and node in to_k, (
                node is v if ends else user in to_v
            ) and node in to_v

        wanted = {"keys": (True, False), "values": (False, True), "both": (True, True)}[place]
        return _edges(to_k | to_v, lambda node, user: kind(node, user) == wanted)
    if place == "queries":
        return [Edge(p.q.node, (p.node or site.node,)) for p in site.products]
    if place in ("scores", "probs"):
        if site.probs is None:
            return []
        way = _way({p.node for p in site.products if p.node}, {site.probs.node})
        softmax = {n for n in way if packet(n) in (aten.softmax, aten._softmax)}
        after = {n for n in way if behind(n) & softmax}
        if place == "probs":
            return _edges(after, lambda node, user: user in after or user is site.node)
        return _edges(way - after, lambda node, user: user in way)
    if place == "mask":
        return _edges({m.operand.node for m in site.masks}, lambda node, user: user.op != "output")
    weights = weight_nodes(base.program.gm.graph, base.program.weights)
    return _edges(weights, lambda node, user: user not in weights and user in to_k | to_v)


def _way(sources: set[Any], ends: set[fx.Node]) -> set[fx.Node]:
    """Every node on a way from a source to an end, both included."""
    before = set().union(*(behind(e) for e in ends))
    return {n for n in before if behind(n) & sources}


def _edges(nodes: set[fx.Node], wanted: Callable[[fx.Node, fx.Node], bool]) -> list[Edge]:
    found = []
    for node in sorted(nodes):
        users = tuple(u for u in node.users if wanted(node, u))
        if users and is_tensor(node):
            found.append(Edge(node, users))
    return found


def apply(base: Base, edge: Edge, edit: Edit) -> Program:
    """A copy of the base's program with ``edit`` on ``edge``; raises :class:`Refused` where that is no valid graph."""
    program = base.program.copy()
    graph = program.gm.graph
    named = {n.name: n for n in graph.nodes}
    inputs = [named[n.name] for n in (edge.node, *edit.others)]
    users = [named[u.name] for u in edge.users]
    first = min(users)
    if any(n >= first for n in inputs):
        raise Refused("an operand is not there yet")
    for tensor in edit.constants:
        name = f"constant_{len(program.weights)}"
        program.gm.register_buffer(name, tensor)
        with graph.inserting_before(next(iter(graph.nodes))):
            node = graph.get_attr(name)
        node.meta["val"] = program.fake_mode.from_tensor(tensor, static_shapes=True)
        program.weights[node.name] = tensor
        inputs.append(node)
    try:
        new = _inline(graph, first, edit.fn, inputs, program.fake_mode)
        for user in users:
            user.replace_input_with(inputs[0], new)
        _values_again(program, new, inputs[0])
    except (
        RuntimeError,
        ValueError,
        IndexError,
        TypeError,
        CaptureError,
    ) as error:  # what operators raise on shapes they cannot take
        raise Refused(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    graph.lint()
    program.gm.recompile()
    return program


def _inline(
    graph: fx.Graph, before: fx.Node, fn: Callable[..., Tensor], inputs: list[fx.Node], fake_mode: Any
) -> fx.Node:
    """The graph of ``fn`` as the doors capture it, put before a node."""
    with torch.no_grad():
        traced = make_fx(fn, pre_dispatch=True)(*(n.meta["val"] for n in inputs))
        program = capture.from_graph_module(traced)
    env = dict(zip(program.placeholders, inputs, strict=True))
    with graph.inserting_before(before):
        for node in program.gm.graph.nodes:
            if node.op == "call_function":
                env[node] = graph.node_copy(node, lambda n: env[n])
                # Not the traced value: its sizes are symbols of that trace.
                env[node].meta["val"] = evaluate_fake(fake_mode, env[node].target, env[node].args, env[node].kwargs)
            elif node.op not in ("placeholder", "output"):
                raise Refused(f"{node.op} in an edit")
    return env[program.outputs[0]]


def _values_again(program: Program, new: fx.Node, old: fx.Node) -> None:
    """The metadata of every node that ``new`` changes the shape or strides of, where it stands for ``old``.

    A view that the new strides forbid becomes a reshape.
    """
    changed = set() if _alike(val(new), val(old)) else {new}
    for node in program.gm.graph.nodes:
        if node.op != "call_function" or changed.isdisjoint(node.all_input_nodes):
            continue
        if packet(node) is aten.view:
            node.target = aten.reshape.default
        before = node.meta["val"]
        node.meta["val"] = evaluate_fake(program.fake_mode, node.target, node.args, node.kwargs)
        if not isinstance(before, Tensor) or not _alike(val(node), before):
            changed.add(node)


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())


def choose(rng: random.Random, items: list[Any]) -> Any:
    """One of ``items``; raises :class:`Refused` where there is none."""
    if not items:
        raise Refused("nothing to choose from")
    return rng.choice(items)


def same_shape(base: Base, edge: Edge) -> list[fx.Node]:
    """Other tensors of the edge's shape and dtype that are there when it is read, but no memory that nobody wrote."""
    first = min(edge.users)
    value = val(edge.node)
    return [
        n
        for n in base.program.gm.graph.nodes
        if n is not edge.node
        and is_tensor(n)
        and not (isinstance(how := decode(n), Fill) and how.value is None)
        and n < first
        and val(n).dtype == value.dtype
        and list(val(n).shape) == list(value.shape)
    ]
