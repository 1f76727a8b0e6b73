"""Makes exported programs functional: in-place writes to inputs become results, which the signature describes.

A graph whose operators write nothing is already functional. If :func:`mla_compile.capture.functional.traced_once`
supports any other graph, the graph is traced once, and the program is rebuilt around the trace. The last resort is
torch's ``run_decompositions``, which runs the graph twice.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import torch
from torch import fx
from torch._higher_order_ops.effects import has_effects
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from mla_compile.capture.functional import traced_once
from mla_compile.capture.inline import levels_restored
from mla_compile.capture.repeated import traced_by_kind
from mla_compile.core.program import results_of


def functional_program(exported: torch.export.ExportedProgram, gm: fx.GraphModule) -> torch.export.ExportedProgram:
    """Return ``exported`` with the functional form of ``gm``, a graph with the inputs and results of ``exported``.

    Raises whatever an operator raises.
    """
    return _as_it_is(exported, gm) or _in_one_trace(exported, gm) or _decomposed(exported, gm)


_OF_SIZES = (torch.sym_float, torch.sym_int, torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_sum, torch.sym_ite)


def _as_it_is(exported: torch.export.ExportedProgram, gm: fx.GraphModule) -> torch.export.ExportedProgram | None:
    if not all(_writes_nothing(node) for node in gm.graph.nodes):
        return None
    gm.graph.eliminate_dead_code()
    gm.recompile()
    inputs = gm.graph.find_nodes(op="placeholder")
    results = results_of(gm.graph)
    return _around(exported, gm, _named_like(exported.graph_signature, inputs, results))


def _writes_nothing(node: fx.Node) -> bool:
    """Whether a node is an input or the output, a function of numbers, or an operator without side effects."""
    if node.op in ("placeholder", "output"):
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target._schema.is_mutable and not has_effects(node.target)
    # torch's verifier of exported programs accepts Python functions only from these modules.
    return getattr(node.target, "__module__", None) in ("_operator", "math") or node.target in _OF_SIZES


def _in_one_trace(exported: torch.export.ExportedProgram, gm: fx.GraphModule) -> torch.export.ExportedProgram | None:
    if gm.graph.find_nodes(op="get_attr") or any(_is_transform(node) for node in gm.graph.nodes):
        return None
    specs, given = exported.graph_signature.input_specs, gm.graph.find_nodes(op="placeholder")
    values = [
        node.meta["val"] if "val" in node.meta else exported.constants.get(spec.target or "")
        for node, spec in zip(given, specs, strict=True)
    ]
    with torch.no_grad(), levels_restored():
        traced = traced_by_kind(gm, values) or traced_once(gm, values)
    if traced is None or traced.gm.graph.find_nodes(op="get_attr"):
        return None
    inputs = traced.gm.graph.find_nodes(op="placeholder")
    results = results_of(traced.gm.graph)
    for node, origin in zip(inputs, given, strict=True):
        node._rename(origin.name)
        node.target = node.name
        node.meta = {**origin.meta, **node.meta}
    for node in traced.gm.graph.nodes:
        if node.op == "call_function":
            node.meta.setdefault("val", None)  # torch records None for asserts, which return nothing
    count = len(traced.written)
    found = [_write(specs[place], inputs[place], new) for place, new in zip(traced.written, results, strict=False)]
    writes = [spec for spec in found if spec is not None]
    if len(writes) < count or len(set(results[:count])) < count:
        return None
    signature = _named_like(exported.graph_signature, inputs, results[count:])
    signature.output_specs = [*writes, *signature.output_specs]
    return _around(exported, traced.gm, signature)


def _around(
    exported: torch.export.ExportedProgram, gm: fx.GraphModule, signature: ExportGraphSignature
) -> torch.export.ExportedProgram:
    """Return ``exported`` with the graph ``gm`` and the graph's signature."""
    return torch.export.ExportedProgram(
        root=gm,
        graph=gm.graph,
        graph_signature=signature,
        state_dict=exported.state_dict,
        range_constraints=exported.range_constraints,
        module_call_graph=exported.module_call_graph,
        example_inputs=exported.example_inputs,
        constants=exported.constants,
    )


def _is_transform(node: fx.Node) -> bool:
    """Whether a node enters or leaves a level of ``torch.func``, which functional tensors do not support."""
    return "_functorch" in str(getattr(node.target, "__module__", ""))


def _write(spec: InputSpec, node: fx.Node, new: fx.Node) -> OutputSpec | None:
    """Return the output spec that writes ``new`` to an input after the call, or None for a parameter or constant."""
    if spec.kind is InputKind.USER_INPUT:
        return OutputSpec(OutputKind.USER_INPUT_MUTATION, TensorArgument(new.name), node.name)
    if spec.kind is InputKind.BUFFER:
        return OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(new.name), spec.target)
    return None


def _decomposed(exported: torch.export.ExportedProgram, gm: fx.GraphModule) -> torch.export.ExportedProgram:
    """Return ``exported`` with the graph ``gm``, after torch has made the graph functional."""
    functional: torch.export.ExportedProgram = _called_flat(exported, gm).run_decompositions({})
    _call_like(exported, functional)
    return functional


def _called_flat(exported: torch.export.ExportedProgram, gm: fx.GraphModule) -> torch.export.ExportedProgram:
    """Return ``exported`` with the graph ``gm``, flat outputs and one flat keyword argument per input.

    With nested inputs, ``run_decompositions`` would build containers. Building a container may compute tensors (the
    DynamicCache of transformers appends to empty tensors), which would become constants without an owner.
    """
    first, *rest = exported.module_call_graph
    assert first.signature is not None  # the first entry describes the program
    results = results_of(gm.graph)
    graph_signature = _named_like(exported.graph_signature, gm.graph.find_nodes(op="placeholder"), results)
    names = [spec.arg.name for spec in graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    signature = dataclasses.replace(
        first.signature,
        in_spec=pytree.tree_structure(((), dict.fromkeys(names))),
        out_spec=pytree.tree_structure(tuple(range(first.signature.out_spec.num_leaves))),
        forward_arg_names=None,
    )
    return torch.export.ExportedProgram(
        root=gm,
        graph=gm.graph,
        graph_signature=graph_signature,
        state_dict=exported.state_dict,
        range_constraints=exported.range_constraints,
        module_call_graph=[dataclasses.replace(first, signature=signature), *rest],
        constants=exported.constants,
        verifiers=exported.verifiers,
    )


def _named_like(
    signature: ExportGraphSignature, inputs: Sequence[fx.Node], results: Sequence[object]
) -> ExportGraphSignature:
    """Return a copy of ``signature`` with the names of ``inputs`` and ``results``, which are nodes of a copied graph.

    A copied graph has new names for inlined nodes, and for inputs with the name of a builtin (``input``).
    """
    signature = copy.deepcopy(signature)
    renamed: dict[str, str] = {}
    for given, node in zip(signature.input_specs, inputs, strict=True):
        renamed[given.arg.name] = node.name
        given.arg = dataclasses.replace(given.arg, name=node.name)
    for result, value in zip(signature.output_specs, results, strict=True):
        if isinstance(value, fx.Node):
            result.arg = dataclasses.replace(result.arg, name=value.name)
        if result.kind is OutputKind.USER_INPUT_MUTATION:
            result.target = renamed[str(result.target)]
    return signature


def _call_like(exported: torch.export.ExportedProgram, flat: torch.export.ExportedProgram) -> None:
    """Restore the nested inputs and outputs of ``exported`` in ``flat``."""
    nested, signature = exported.module_call_graph[0].signature, flat.module_call_graph[0].signature
    assert nested is not None
    assert signature is not None
    signature.in_spec, signature.out_spec = nested.in_spec, nested.out_spec
    signature.forward_arg_names = nested.forward_arg_names
    flat._example_inputs = exported.example_inputs
