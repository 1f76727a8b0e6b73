"""Changes the signature of a program whose K and V became rows. A tuple of rows replaces each K or V."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from mla_compile.capture.cache_change import CacheChange
from mla_compile.core.program import Program, results_of
from mla_compile.errors import InputError


def rows_in_place(
    program: Program, change: CacheChange, gm: fx.GraphModule
) -> tuple[dict[str, list[fx.Node]], list[object]]:
    """Return the row placeholders of each old cache input, and the flat outputs, as nodes of ``gm``.

    ``gm`` is a module made from the program. In the outputs, a list of rows replaces each K or V.
    """
    cache = program.cache
    assert cache is not None
    nodes = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
    inputs = {t.name: [nodes[cache.rows[t.rows[i]]] for i in t.holds] for t in change.inputs}
    values = list(results_of(gm.graph))
    # ``gm`` may already write the new values of inputs instead of returning them.
    values = [*[None] * (len(program.outputs) - len(values)), *values]
    appended = {at for rows in cache.outputs.values() for at in rows}
    held = {index: t.holds for index, t in zip(sorted(cache.outputs), change.outputs, strict=True)}
    new: list[object] = []
    for index, value in enumerate(values):
        if index in held:
            new.append([values[cache.outputs[index][i]] for i in held[index]])
        elif index not in appended:
            new.append(value)
    return inputs, new


def order_placeholders(graph: fx.Graph, names: Sequence[str]) -> None:
    """Put the placeholders in the order of ``names``."""
    by_name = {node.name: node for node in graph.find_nodes(op="placeholder")}
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for name in names:
        first.prepend(by_name[name])


def new_signature(
    program: Program, change: CacheChange, signature: ExportGraphSignature
) -> tuple[dict[str, list[fx.Node]], list[object]]:
    """Put the row inputs and outputs into ``signature`` and the graph. Return the result of :func:`rows_in_place`."""
    inputs, outputs = rows_in_place(program, change, program.gm)
    specs: list[InputSpec] = []
    for spec in signature.input_specs:
        rows = inputs.get(spec.arg.name) if spec.kind is InputKind.USER_INPUT else None
        specs += [spec] if rows is None else [_input(row) for row in rows]
    signature.input_specs = specs
    order_placeholders(program.gm.graph, [spec.arg.name for spec in specs if hasattr(spec.arg, "name")])
    results: list[OutputSpec] = []
    flat: list[Any] = []
    for result, value in zip(_with_written_rows(program, signature), outputs, strict=True):
        if isinstance(value, list):
            results += [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=row.name), None) for row in value]
            flat += value
        else:
            results.append(result)
            flat.append(value)
    signature.output_specs = results
    program.gm.graph.output_node().args = (tuple(flat),)
    return inputs, outputs


def _with_written_rows(program: Program, signature: ExportGraphSignature) -> list[OutputSpec]:
    """Return the output specs of the program, with written rows in place of written buffers."""
    specs: list[OutputSpec] = []
    for spec in signature.output_specs:
        rows = program.cache.written.get(spec.target) if spec.kind is OutputKind.USER_INPUT_MUTATION else None
        if rows is None:
            specs.append(spec)
        else:
            specs += [OutputSpec(spec.kind, TensorArgument(name=row), row) for row in rows]
    return specs


def rows_in_graph_module(
    gm: fx.GraphModule, program: Program, change: CacheChange, original: fx.GraphModule
) -> tuple[object, ...]:
    """Order the inputs of ``gm``. Return one output for each output of the original, with rows in tuples."""
    if type(original.graph._codegen) is not fx.graph.CodeGen:
        raise InputError(
            'cache="latent" changes the inputs of a GraphModule, and this one takes nested ones; '
            "use torch.export.export and optimize the ExportedProgram"
        )
    inputs, outputs = rows_in_place(program, change, gm)
    names: list[str] = []
    for node in original.graph.find_nodes(op="placeholder"):
        names += [row.name for row in inputs[node.name]] if node.name in inputs else [node.name]
    order_placeholders(gm.graph, names)
    return tuple(tuple(v) if isinstance(v, list) else v for v in outputs[len(program.mutations) :])


def _input(row: fx.Node) -> InputSpec:
    return InputSpec(InputKind.USER_INPUT, TensorArgument(name=row.name), None)


def new_calls(
    entries: Sequence[ModuleCallEntry],
    user_inputs: Sequence[str],
    inputs: dict[str, list[fx.Node]],
    outputs: Sequence[object],
) -> list[ModuleCallEntry]:
    """Return the call entries, with new input and output trees in the whole program's entry."""
    top, *others = entries
    assert top.signature is not None
    in_spec = _with_tuples(top.signature.in_spec, [inputs.get(name) for name in user_inputs])
    rows = [value if isinstance(value, list) else None for value in outputs]
    out_spec = _with_tuples(top.signature.out_spec, rows)
    signature = dataclasses.replace(top.signature, inputs=[], outputs=[], in_spec=in_spec, out_spec=out_spec)
    return [dataclasses.replace(top, signature=signature), *others]


def new_examples(
    example_inputs: tuple[tuple[object, ...], dict[str, object]] | None,
    in_spec: pytree.TreeSpec,
    user_inputs: Sequence[str],
    change: CacheChange,
) -> tuple[tuple[Any, ...], dict[str, object]] | None:
    """Return example inputs of the new signature, with rows of zeros in place of K and V."""
    if example_inputs is None:
        return None
    known = {t.name: t for t in change.inputs}
    leaves = pytree.tree_leaves(example_inputs)

    def rows(name: str, value: object) -> object:
        tensor = known.get(name)
        if tensor is None or not isinstance(value, torch.Tensor):
            return value
        return tuple(
            torch.zeros(
                tensor.recipe.row_shape(value.shape, tensor.recipe.held_width(i)),
                dtype=change.dtypes[tensor.rows[i]],
                device=value.device,
            )
            for i in tensor.holds
        )

    args, kwargs = _rebuilt(in_spec, [rows(name, value) for name, value in zip(user_inputs, leaves, strict=True)])
    return args, kwargs


def new_guards(
    guards: Sequence[str], signature: ModuleCallSignature, user_inputs: Sequence[str], change: CacheChange
) -> list[str]:
    """Rewrite conditions on sizes of K and V as conditions on sizes of rows.

    A condition is Python code over ``L['argument']...``. A condition on an axis that rows do not have (the heads of K)
    is dropped, because the recipe fixes the size of this axis.
    """
    args, kwargs = pytree.tree_unflatten(list(user_inputs), signature.in_spec)
    arguments = {**dict(zip(signature.forward_arg_names or (), args, strict=False)), **kwargs}
    leaves, _ = pytree.tree_flatten_with_path(arguments)
    paths = {name: f"L{pytree.keystr(path)}" for path, name in leaves}
    held = {t.rows[i]: f"{paths[t.name]}[{at}]" for t in change.inputs for at, i in enumerate(t.holds)}
    new: list[str] = []
    for guard in guards:
        code: str | None = guard
        for tensor in change.inputs:
            for dim, kind in enumerate(tensor.recipe.kinds):
                old = f"{paths[tensor.name]}.size()[{dim}]"
                own = tensor.recipe.row_axis(dim)
                if code is not None and old in code:
                    code = code.replace(old, f"{held[tensor.rows[0]]}.size()[{own}]") if kind == "row" else None
        if code is not None:
            new.append(code)
    return new


def _with_tuples(spec: pytree.TreeSpec, rows: Sequence[Sequence[object] | None]) -> pytree.TreeSpec:
    """Return ``spec`` with a tuple of leaves in place of each leaf that became rows."""
    leaves = [object() if own is None else tuple(object() for _ in own) for own in rows]
    return pytree.tree_structure(_rebuilt(spec, leaves))


def _rebuilt(spec: pytree.TreeSpec, leaves: Sequence[object]) -> Any:
    try:
        return pytree.tree_unflatten(leaves, spec)
    except Exception as error:  # containers that other libraries registered may raise anything when they are rebuilt
        raise InputError(
            f"the cache is in a container that takes only tensors ({type(error).__name__}: {error}); pass it as "
            "tuples, lists or dicts when exporting"
        ) from error
