"""Name an exported graph's inputs, outputs and dimensions, and give its caches one common form.

Before: ``Concat(Unsqueeze(past), new) -> Squeeze -> output``, with the number of axes that the model's cache has.

After: ``present = Concat(past, new)`` on [B,T,width]. The profiles rewrite this node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from mla_compile.onnx.ir_tools import Editor, axes_of, consumers, remove_unread, replace_input
from mla_compile.onnx.op import LISTED, NAME


@dataclass(frozen=True)
class GrowingCache:
    """A cache that grows: ``present = Concat(past, new)`` along axis 1 of [B,T,width]."""

    past: ir.Value
    new: ir.Value
    present: ir.Value


@dataclass(frozen=True)
class Site:
    """An attention node, and the indices of the caches that it reads (``None`` if the input is not a cache)."""

    node: ir.Node
    latent: int | None
    rope: int | None


def attention_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return the DecodeAttention and ListedAttention nodes in graph order."""
    return [node for node in graph if node.op_type in (NAME, LISTED)]


def widen_masks(graph: ir.Graph) -> None:
    """Expand masks of one column, which hide whole queries, to one column per key.

    The operator takes the number of keys from its mask.
    """
    for node in attention_nodes(graph):
        mask = node.inputs[3] if len(node.inputs) > 3 else None
        latent = node.inputs[1]
        if mask is None or latent is None or mask.shape is None or mask.shape[3] != 1:
            continue
        edit = Editor(graph, node, f"{node.name}/mask")
        keys = edit.op("Shape", latent, start=1, end=2)
        wide = edit.op("Expand", mask, edit.op("Concat", edit.ints(1, 1, 1), keys, axis=0))
        wide.type = mask.type
        wide.shape = ir.Shape([*mask.shape[:3], None if latent.shape is None else latent.shape[1]])
        node.replace_input_with(3, wide)


def find_append(graph: ir.Graph, past: ir.Value, output: int) -> GrowingCache | None:
    """Return how output number ``output`` appends to ``past``; ``None`` if it does not.

    If needed, rewrite the append to three axes.
    """
    present = graph.outputs[output]
    squeeze = present.producer()
    if squeeze is None:
        return None
    if squeeze.op_type == "Concat":
        new = _appended(squeeze, past, 1)
        return None if new is None else GrowingCache(past, new, present)
    if squeeze.op_type != "Squeeze" or axes_of(squeeze) != (1,):
        return None
    joined = squeeze.inputs[0]
    concat = joined.producer() if joined is not None else None
    if joined is None or concat is None or concat.op_type != "Concat":
        return None
    lifted = next((n.outputs[0] for n, _ in consumers(past) if n.op_type == "Unsqueeze" and axes_of(n) == (1,)), None)
    new4 = _appended(concat, lifted, 2) if lifted is not None else None
    if new4 is None:
        return None
    edit = Editor(graph, concat, f"{past.name}/append")
    one = edit.ints(1)
    new = edit.op("Squeeze", new4, one)
    present3 = edit.op("Concat", past, new, axis=1)
    for node, _ in list(consumers(joined)):
        if node.op_type == "Squeeze" and axes_of(node) == (1,):
            _replace(graph, node.outputs[0], present3)
    if consumers(joined):
        replace_input(joined, edit.op("Unsqueeze", present3, one), consumers(joined))
    present3.shape, present3.type = present.shape, present.type
    remove_unread(graph)
    return GrowingCache(past, new, present3)


def _appended(concat: ir.Node, past: ir.Value, axis: int) -> ir.Value | None:
    """Return what ``concat`` appends to ``past`` along ``axis``; None if it does not append."""
    if len(concat.inputs) != 2 or concat.inputs[0] is not past:
        return None
    rank = axis + 2
    return concat.inputs[1] if concat.attributes["axis"].as_int() in (axis, axis - rank) else None


def _replace(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    replace_input(old, new, consumers(old))
    for index, value in enumerate(graph.outputs):
        if value is old:
            graph.outputs[index] = new


def sites(graph: ir.Graph, presents: Sequence[ir.Value]) -> list[Site]:
    """Return each attention node with the caches that it reads as latent and rotary key."""
    position = {value: index for index, value in enumerate(presents)}

    def cache(value: ir.Value | None) -> int | None:
        return position.get(value) if value is not None else None

    return [
        Site(n, cache(n.inputs[1]), cache(n.inputs[2]) if len(n.inputs) > 2 else None) for n in attention_nodes(graph)
    ]


def cache_names(found: Iterable[Site], count: int, fallback: Sequence[str]) -> list[str]:
    """Return cache names, such as ``latent.0``. A cache that no attention reads gets its ``fallback`` name."""
    names: dict[int, str] = {}
    number = 0
    for site in found:
        fresh = [i for i in (site.latent, site.rope) if i is not None and i not in names]
        for index, role in ((site.latent, "latent"), (site.rope, "k_rope")):
            if index is not None and index not in names:
                names[index] = f"{role}.{number}"
        number += bool(fresh)
    return [names.get(i, fallback[i]) for i in range(count)]


def rename(values: Sequence[ir.Value], names: Sequence[str], dims: Mapping[str, str]) -> None:
    """Rename inputs or outputs of a graph. ``dims`` maps torch's symbols in shapes to readable names."""
    for value, name in zip(values, names, strict=True):
        value.name = name
        if value.shape is not None:
            value.shape = ir.Shape([renamed(d, dims) for d in value.shape])


def renamed(dim: int | ir.SymbolicDim, dims: Mapping[str, str]) -> int | str | None:
    """Rename the symbols in a dimension. A sum that is a key of ``dims`` is renamed as a whole."""
    if isinstance(dim, int):
        return dim
    if dim.value is None:
        return None
    text = dim.value
    return dims.get(text) or re.sub(r"[A-Za-z_]\w*", lambda m: dims.get(m.group(), m.group()), text)
