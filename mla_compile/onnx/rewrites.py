"""Rewrite caches for the profiles inplace and genai, which :mod:`mla_compile.onnx.profile` describes."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from mla_compile.errors import ExportError
from mla_compile.onnx.interface import GrowingCache, Site
from mla_compile.onnx.ir_tools import Editor, consumers, remove_unread, replace_input, shape_range
from mla_compile.onnx.op import ALIKE, LISTED, NAME


def in_place(
    graph: ir.Graph, appends: Sequence[GrowingCache], total: tuple[ir.Value, int], query: tuple[ir.Value, int] | int
) -> None:
    """Turn caches into buffers. Each call writes its new rows into the buffers, from row ``total - query`` on.

    ``total``: the (input, axis) whose size is the number of all tokens. ``query``: the (input, axis) whose size is the
    number of new tokens, or this number itself. Attention nodes with a mask read only the rows that the mask covers.
    WeighAlike receives the number of used rows. Every other reader receives only the used rows.
    """
    edit = Editor(graph, graph[0], "cache_rows")
    zero = edit.ints(0)
    used = edit.op("Shape", total[0], start=total[1], end=total[1] + 1)
    if isinstance(query, int):
        new = edit.ints(query)
    else:
        new = edit.op("Shape", query[0], start=query[1], end=query[1] + 1)
    rows = edit.op("Sub", used, new)
    for append in appends:
        concat = append.present.producer()
        assert concat is not None
        edit = Editor(graph, concat, f"{append.past.name}/write")
        batch = edit.op("Shape", append.past, start=0, end=1)
        scatter = edit.op("TensorScatter", append.past, append.new, edit.op("Expand", rows, batch), axis=1)
        old, past_readers = append.present, consumers(append.past)
        _publish(graph, old, scatter)
        others = [(n, i) for n, i in consumers(old) if not _reads_buffer(n)]
        buffers = [(n, i) for n, i in consumers(old) if _reads_buffer(n)]
        replace_input(old, scatter, buffers)
        for node in [n for n, i in others if n.op_type == ALIKE and i == 2]:
            node.resize_inputs(6)
            node.replace_input_with(2, scatter)
            node.replace_input_with(5, used)
        others = consumers(old)
        if others:
            replace_input(old, edit.slice(scatter, zero, used, 1), others)
        _replace_lengths(graph, append.past, past_readers, rows)
        remaining = [(n, i) for n, i in consumers(append.past) if n.op_type not in ("TensorScatter", "Shape", "Concat")]
        if remaining:
            replace_input(append.past, edit.slice(scatter, zero, rows, 1), remaining)
    remove_unread(graph)
    graph.sort()


def _reads_buffer(node: ir.Node) -> bool:
    return node.op_type in (NAME, LISTED) and len(node.inputs) > 3 and node.inputs[3] is not None


def _publish(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Make ``new`` a graph output instead of ``old``."""
    for index, value in enumerate(graph.outputs):
        if value is old:
            new.shape, new.type = old.shape, old.type
            graph.outputs[index] = new


def _replace_lengths(graph: ir.Graph, past: ir.Value, readers: Sequence[tuple[ir.Node, int]], rows: ir.Value) -> None:
    """Let Shape nodes return ``rows``, the number of rows used before the call, as the length of ``past``."""
    for node, _ in readers:
        if node.op_type != "Shape":
            continue
        start, end = shape_range(node, 3)
        if not start <= 1 < end:
            continue
        # The replaced node's name makes the new names unique, because several nodes may read the length of a cache.
        edit = Editor(graph, node, f"{node.outputs[0].name}/in_use")
        parts = [edit.op("Shape", past, start=start, end=1)] if start < 1 else []
        parts.append(rows)
        if end > 2:
            parts.append(edit.op("Shape", past, start=2, end=end))
        replace_input(node.outputs[0], edit.joined(parts), consumers(node.outputs[0]))


def halves(graph: ir.Graph, appends: Sequence[GrowingCache], found: Sequence[Site]) -> list[tuple[ir.Value, ir.Value]]:
    """Turn each layer's latent and rotary caches into two caches of equal shape: [B,1,T,(L+R)/2].

    The two caches hold the two halves of [latent, k_rope]. Returns the input and output of each, two pairs per layer,
    and removes the old outputs from the graph. Raises :class:`ExportError` if the caches are not pairs of latent and
    rotary key, or if a row has odd width.
    """
    pairs = [(s.latent, s.rope) for s in found]
    grouped = {index for pair in pairs for index in pair if index is not None}
    if len(set(pairs)) * 2 != len(grouped) or len(grouped) != len(appends) or any(r is None for _, r in pairs):
        raise ExportError(
            f"profile 'genai' keeps one row of latent and rotary key per layer; this model has {len(appends)} caches, "
            f"of which its {len(found)} attentions read {len(grouped)} that way; use the portable profile"
        )
    made: list[tuple[ir.Value, ir.Value]] = []
    for layer, (latent, rope) in enumerate(dict.fromkeys(pairs)):
        assert latent is not None
        assert rope is not None
        made += _halve(graph, layer, appends[latent], appends[rope], [s.node for s in found if s.latent == latent])
    remove_unread(graph)
    graph.sort()
    return made


def _halve(
    graph: ir.Graph, layer: int, latent: GrowingCache, rope: GrowingCache, nodes: Sequence[ir.Node]
) -> list[tuple[ir.Value, ir.Value]]:
    L, R = (int(a.past.shape[2]) for a in (latent, rope))
    if (L + R) % 2:
        raise ExportError(f"profile 'genai' halves the row of {L} + {R} values, which is odd; use the portable profile")
    half = (L + R) // 2
    anchor = latent.present.producer()
    assert anchor is not None
    edit = Editor(graph, anchor, f"layer.{layer}/halves")
    row = edit.op("Concat", latent.new, rope.new, axis=2)
    new = edit.op("Unsqueeze", row, edit.ints(1))
    result, joined, flat = [], [], []
    for start, name in ((0, "key"), (half, "value")):
        past = ir.Value(name=f"past_key_values.{layer}.{name}", type=latent.past.type)
        past.shape = ir.Shape([latent.past.shape[0], 1, latent.past.shape[1], half])
        part = edit.slice(new, edit.ints(start), edit.ints(start + half), 3)
        present = edit.op("Concat", past, part, axis=2)
        present.name = f"present.{layer}.{name}"
        present.type = latent.past.type
        present.shape = ir.Shape([latent.present.shape[0], 1, latent.present.shape[1], half])
        result.append((past, present))
        joined.append(present)
        rows = edit.op("Squeeze", present, edit.ints(1))
        rows.type = latent.past.type
        rows.shape = ir.Shape([latent.past.shape[0], latent.present.shape[1], half])
        flat.append(rows)
    for node in nodes:
        node.replace_input_with(1, flat[0])
        node.replace_input_with(2, flat[1])
        node.attributes["value_width"] = ir.AttrInt64("value_width", L)
    for append, start, stop in ((latent, 0, L), (rope, L, L + R)):
        old = append.present
        for index in reversed([i for i, v in enumerate(graph.outputs) if v is old]):
            del graph.outputs[index]
        if consumers(old):  # nodes other than the attention read the cache
            whole = edit.op("Concat", *flat, axis=2)
            replace_input(old, edit.slice(whole, edit.ints(start), edit.ints(stop), 2), consumers(old))
        for node, _ in consumers(append.past):
            if node.op_type == "Shape":
                _shape_of_key(graph, node, result[0][0])
            elif node is not old.producer():
                raise ExportError(f"profile 'genai' cannot be made: {node.op_type} reads {append.past.name!r} directly")
    return result


def _shape_of_key(graph: ir.Graph, node: ir.Node, key: ir.Value) -> None:
    start, end = shape_range(node, 3)
    if end > 2:
        raise ExportError("profile 'genai' cannot be made: the graph asks for the width of a cache")
    edit = Editor(graph, node, f"{node.outputs[0].name}/of_key")  # unique, because other nodes may read this length
    axes = {0: (0, 1), 1: (2, 3)}
    parts = [edit.op("Shape", key, start=axes[a][0], end=axes[a][1]) for a in range(start, end)]
    replace_input(node.outputs[0], edit.joined(parts), consumers(node.outputs[0]))
