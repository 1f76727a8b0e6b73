"""Adds a second input, a twin, for each K or V buffer that must not change. Passes may turn the twin into rows.

Before::

    new = index_copy(buffer, dim, positions, k);  attention(q, new, ...);  buffer.copy_(new)

After, with a ``twin`` that holds the same values::

    new = index_copy(buffer, dim, positions, k);  buffer.copy_(new)
    own = index_copy(twin, dim, positions, k);    twin.copy_(own);  attention(q, own, ...)

The graph writes to the caller's buffer as before. Only the twin is read, so it may be kept as rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from mla_compile.core.program import Program, view_source
from mla_compile.passes.ir.graph import BESIDE
from mla_compile.passes.ir.walk import ancestors

aten = torch.ops.aten
_WRITES = {
    aten.slice_scatter.default, aten.select_scatter.default, aten.index_copy.default, aten.index_put.default,
    aten.index_add.default, aten.roll.default, aten.cat.default, aten.addcmul.default,
    aten.scatter.src, aten.copy.default, aten.clone.default, aten.zero.default, aten.fill.Scalar, aten.fill.Tensor,
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.lerp.Tensor, aten.where.self, aten.masked_fill.Scalar,
}  # fmt: skip


def with_twins(program: Program, buffers: Iterable[str]) -> tuple[Program, dict[str, str]]:
    """Return a copy of ``program`` with a twin of each written buffer if possible, and a dict: twin -> buffer."""
    program = program.copy()
    graph, named = program.gm.graph, program.named()
    new = dict(zip(program.mutations, program.outputs, strict=False))
    shown = set(program.aliases.values())
    last = program.placeholders[-1]
    twins: dict[str, str] = {}
    written: list[fx.Node] = []
    for name in buffers:
        chain = None if name in shown else _writes(named[name], new[name])
        if chain is None:
            continue
        with graph.inserting_after(last):
            last = graph.placeholder(f"{name}_twin")
        last.meta = {**named[name].meta, BESIDE: name}
        twins[last.name] = name
        written.append(_repeat(graph, named[name], last, chain))
    if twins:
        count, values = len(program.mutations), list(program.outputs)
        program.mutations = (*program.mutations, *twins)
        graph.output_node().args = ((*values[:count], *written, *values[count:]),)
        graph.lint()
    return program, twins


def _writes(buffer: fx.Node, new: object) -> list[fx.Node] | None:
    """Return the writes and views that lead from a buffer to its new value, or None if other operators are needed.

    The written rows may depend on the old value of the buffer: a layer's keys depend on what earlier layers read.
    """
    if not isinstance(new, fx.Node) or new is buffer or buffer.op != "placeholder":
        return None
    between = {new, *ancestors(new, [buffer])}
    chain: list[fx.Node] = []
    for node in buffer.graph.nodes:
        writes = node in between and (node.target in _WRITES or view_source(node) is not None)
        if writes and not {buffer, *chain}.isdisjoint(node.all_input_nodes):
            chain.append(node)
    return chain if new in chain else None


def _repeat(graph: fx.Graph, buffer: fx.Node, twin: fx.Node, chain: list[fx.Node]) -> fx.Node:
    """Repeat the writes to ``buffer`` on ``twin``, let all readers read the twin, and return the twin's new value."""
    copies = {buffer: twin}
    for node in chain:
        with graph.inserting_after(node):
            copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
    own = {*chain, *copies.values()}
    for node in chain:
        node.replace_all_uses_with(copies[node], lambda user: user.op != "output" and user not in own)
    return copies[chain[-1]]
