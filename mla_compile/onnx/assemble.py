"""Turn a converted graph into a finished ONNX model: names, profile, functions and metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from mla_compile.errors import ExportError
from mla_compile.onnx.attach import attach_functions
from mla_compile.onnx.convert import Converted
from mla_compile.onnx.interface import (
    GrowingCache,
    Site,
    attention_nodes,
    cache_names,
    find_append,
    rename,
    sites,
    widen_masks,
)
from mla_compile.onnx.manifest import TOKENS
from mla_compile.onnx.op import VERSION
from mla_compile.onnx.paged import DOMAIN as DOMAIN_PAGED
from mla_compile.onnx.paged import in_pages
from mla_compile.onnx.profile import Profile
from mla_compile.onnx.rewrites import halves, in_place
from mla_compile.version import __version__


@dataclass(frozen=True)
class CacheIO:
    """The input and output of one cache in the finished graph.

    In ``shape``, the batch axis and the axis that grows are None.
    """

    past: str
    present: str
    grows: bool
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class Wires:
    """The caches of a converted graph.

    The first three inputs describe tokens, and the first output is the logits. All further inputs and outputs are
    caches, in the same order. ``grows``: whether each cache grows. ``fallback``: names for caches that no attention
    reads.
    """

    fallback: tuple[str, ...]
    grows: tuple[bool, ...]


def assemble(converted: Converted, wires: Wires, profile: Profile, names: Sequence[str] | None = None) -> list[CacheIO]:
    """Finish the graph in place, and return its caches.

    ``names``: the names of the decode graph's caches, which a prefill graph has to use, too.
    """
    model, graph = converted.model, converted.model.graph
    dims = _dims(graph, wires)
    inputs, outputs = list(graph.inputs), len(graph.outputs)
    old = [str(v.name) for v in inputs[3:]]
    widen_masks(graph)
    appends = [find_append(graph, inputs[3 + i], 1 + i) if grows else None for i, grows in enumerate(wires.grows)]
    presents = [a.present if a else graph.outputs[1 + i] for i, a in enumerate(appends)]
    found = sites(graph, presents)
    if names is None:
        names = cache_names(found, len(presents), wires.fallback)
    assert outputs == 1 + len(names)
    growing = [a for a in appends if a is not None]
    if profile.layout == "in place":
        lost = [n for n, a, grows in zip(names, appends, wires.grows, strict=True) if grows and a is None]
        if lost:
            raise ExportError(
                f"profile 'inplace' cannot be made: the caches {', '.join(lost)} are not [batch, tokens, width] with "
                "rows appended; use the portable profile"
            )
        in_place(graph, growing, (inputs[1], 1), (inputs[0], 1))
        dims |= {symbol: "capacity" for symbol, name in dims.items() if name == "past"}
    caches: list[CacheIO]
    rename(graph.inputs[:3], TOKENS, _tokens_dims(dims))
    rename(graph.outputs[:1], ["logits"], _tokens_dims(dims))
    if profile.layout == "halves":
        caches = _as_halves(graph, growing, found, dims)
    elif profile.layout == "pages":
        caches = [
            CacheIO(str(p.name), str(q.name), grows=True, shape=_shape(p, 1))
            for p, q in in_pages(graph, growing, found)
        ]
        model.opset_imports[DOMAIN_PAGED] = 1
        for value in (*graph.inputs[:2], graph.outputs[0]):
            assert value.shape is not None
            value.shape = ir.Shape([1, "tokens", *value.shape[2:]])
    else:
        rename(graph.inputs[3:], [f"past_{n}" for n in names], dims)
        rename(graph.outputs[1:], [f"present_{n}" for n in names], dims | _capacity(dims, profile))
        caches = [
            CacheIO(f"past_{n}", f"present_{n}", g, _shape(graph.inputs[3 + i], 1 if g else None))
            for i, (n, g) in enumerate(zip(names, wires.grows, strict=True))
        ]
    _rename_nodes(graph, {f"{before}/": f"past_{name}/" for before, name in zip(old, names, strict=True)})
    finish(converted, profile, strip="model.")
    return caches


def _rename_nodes(graph: ir.Graph, prefixes: Mapping[str, str]) -> None:
    """Rename nodes that were added for a cache, and their outputs. ``prefixes``: old prefix -> new prefix."""
    for node in graph:
        prefix = next((p for p in prefixes if str(node.name).startswith(p)), None)
        if prefix is not None:
            node.name = prefixes[prefix] + str(node.name).removeprefix(prefix)
            for value in node.outputs:
                if str(value.name).startswith(prefix):
                    value.name = prefixes[prefix] + str(value.name).removeprefix(prefix)


def _as_halves(
    graph: ir.Graph, appends: Sequence[GrowingCache], found: Sequence[Site], dims: Mapping[str, str]
) -> list[CacheIO]:
    pairs = halves(graph, appends, found)
    del graph.inputs[3:]
    for past, present in pairs:
        rename([past], [str(past.name)], dims)
        rename([present], [str(present.name)], dims)
        graph.inputs.append(past)
        graph.outputs.append(present)
    graph.sort()
    return [CacheIO(str(p.name), str(q.name), grows=True, shape=_shape(p, 2)) for p, q in pairs]


def _dims(graph: ir.Graph, wires: Wires) -> dict[str, str]:
    """Map torch's symbols to readable names."""
    ids, mask = graph.inputs[0], graph.inputs[1]
    assert ids.shape is not None
    assert mask.shape is not None
    named = [(ids.shape[0], "batch"), (ids.shape[1], "query"), (mask.shape[1], "total")]
    for value, grows in zip(graph.inputs[3:], wires.grows, strict=True):
        if grows and value.shape is not None:
            named.append((value.shape[1], "past"))
    found = {d.value: n for d, n in named if isinstance(d, ir.SymbolicDim) and d.value is not None}
    past, query = (next((k for k, n in found.items() if n == name), None) for name in ("past", "query"))
    if past is not None:
        new = query if query is not None else "1"
        found |= {f"{past} + {new}": "total", f"{new} + {past}": "total"}
    return found


def _tokens_dims(dims: Mapping[str, str]) -> dict[str, str]:
    return {k: "past" if n == "capacity" else n for k, n in dims.items()}


def _capacity(dims: Mapping[str, str], profile: Profile) -> dict[str, str]:
    """Map the length of output caches to "capacity" if new rows are written into the input buffers."""
    return {k: "capacity" for k, n in dims.items() if n == "total"} if profile.layout == "in place" else {}


def _shape(value: ir.Value, axis: int | None) -> tuple[int | None, ...]:
    assert value.shape is not None
    return tuple(None if i in (0, axis) or not isinstance(d, int) else d for i, d in enumerate(value.shape))


def finish(converted: Converted, profile: Profile, *, strip: str) -> None:
    """Give a graph its functions, readable weight names and metadata, and remove all traces of this machine.

    ``strip``: a prefix that the export added to the model's own weight names.
    """
    model, report = converted.model, converted.report
    graph = model.graph
    for node in attention_nodes(graph):
        if len(node.outputs) > 1 and not node.outputs[1].uses():
            node.resize_outputs(1)
        for name in [n for n in ("causal", "softcap", "window") if n in node.attributes]:
            if not node.attributes[name].value:
                del node.attributes[name]
    _name_weights(graph, converted.weights, converted.state, strip)
    attach_functions(model)
    _clean(model)
    model.producer_name, model.producer_version = "mla_compile", __version__
    model.graph.name = "mla_compile"
    model.metadata_props["mla_compile.profile"] = profile.name
    model.metadata_props["mla_compile.op_version"] = str(VERSION)
    model.metadata_props["mla_compile.attention"] = json.dumps(
        [
            {"H": s.dims.H, "L": s.dims.L, "R": s.dims.R, "N": s.dims.N, "V": s.dims.V, "form": s.form}
            for s in report.sites
            if s.dims is not None
        ]
    )


def _name_weights(graph: ir.Graph, baked: Mapping[str, str], state: Mapping[str, torch.Tensor], strip: str) -> None:
    """Give weights the model's names, without the prefix ``strip``. Transposed weights get the suffix ".transposed"."""
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in state.items():
        if tensor.dim() == 2 and not tensor.is_meta:
            by_shape.setdefault(tuple(tensor.shape), []).append(name)
    taken: set[str] = set()
    for value in list(graph.initializers.values()):
        old = str(value.name)
        name = baked.get(old, old)
        if name not in state and value.const_value is not None and len(value.const_value.shape) == 2:
            array = value.const_value.numpy()
            same = [n for n in by_shape.get(array.shape[::-1], []) if _is_transposed(array, state[n])]
            name = f"{same[0]}.transposed" if same and name == old else name
        name = name.removeprefix(strip)
        while name in taken:
            name += "_"
        taken.add(name)
        if name != old:
            value.name = name


def _is_transposed(array: npt.NDArray[np.generic], weight: torch.Tensor) -> bool:
    if weight.dtype == torch.bfloat16 or array.shape[0] == 0:
        return bool(weight.numel()) and array.tobytes() == weight.t().contiguous().view(torch.int16).numpy().tobytes()
    other = weight.detach().cpu().numpy().T
    return bool(array.dtype == other.dtype and np.array_equal(array[0], other[0]) and np.array_equal(array, other))


def _clean(model: ir.Model) -> None:
    """Remove source lines, paths of this machine, and the shapes of inner values, which the runtime infers itself."""
    graph = model.graph
    kept = {*graph.inputs, *graph.outputs, *(v for n in attention_nodes(graph) for v in (*n.inputs, *n.outputs))}
    for node in graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            if value not in kept:
                value.shape = None
    for value in (*graph.inputs, *graph.outputs, *graph.initializers.values()):
        value.metadata_props.clear()
        value.doc_string = None
    model.metadata_props.clear()
    graph.metadata_props.clear()
