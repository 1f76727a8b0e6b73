"""Trace a step of a model whose weights are spread over ranks.

Dynamo is used, because ``torch.export`` takes no DTensor.

The result is a graph of this rank's share of the step, with its collectives. For other models,
:func:`mla_compile.capture.capture.from_exported` returns a graph of the same structure. The inputs are tokens,
positions, caches and this rank's shards of the weights. Sizes are not separate inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy
import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx.experimental import _config as sizes_config

from mla_compile.capture.capture import from_dynamo
from mla_compile.capture.causal_lm import BATCH, PAST, QUERY, CausalLM, evaluating
from mla_compile.capture.causal_step import INPUTS, step_to_trace
from mla_compile.capture.unroll import UnrolledExperts
from mla_compile.core.program import Program
from mla_compile.dynamo.entry import compiled_entry
from mla_compile.errors import CaptureError, brief
from mla_compile.passes.ir.sizes import holds
from mla_compile.passes.ir.walk import remove_dead_code

_ANY = {
    size: least + sympy.Symbol(name, integer=True, nonnegative=True)
    for size, name, least in ((BATCH, "batch", 2), (QUERY, "query", 2), (PAST, "past", 0))
}
"""Size in the trace -> an expression for all values that the size may have."""


class _CapturedError(Exception):
    """Ends the traced call before any of its code runs."""


def trace_step(lm: CausalLM, *, one_token: bool) -> Program:
    """Trace this rank's share of a step, like :func:`mla_compile.capture.causal_step.export_step`.

    The trace needs no other ranks. Raises :class:`CaptureError` if the model cannot be traced for all sizes.
    """
    step, inputs, opened = step_to_trace(lm, one_token=one_token)
    tensors = [*inputs[:2], *inputs[2]]
    for tensor, axes in zip(tensors, opened, strict=True):
        for axis in range(tensor.dim()):
            (torch._dynamo.mark_dynamic if axis in axes else torch._dynamo.mark_static)(tensor, axis)
    named = {id(tensor): name for name, tensor in zip(_names(len(lm.caches)), tensors, strict=True)}
    made: list[Program] = []

    def capture(gm: fx.GraphModule, example_inputs: Sequence[object]) -> object:
        made.append(_like_exported(from_dynamo(gm, example_inputs), example_inputs, named))
        _check_sizes(made[-1], dict(zip(named.values(), opened, strict=True)))
        return _end

    name = type(lm.model).__name__
    # Some conditions on sizes only select an implementation (can the requests be divided evenly among the ranks?).
    # These conditions have to be decided for all sizes, not for the sizes of the trace.
    sizes = sizes_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    try:
        with torch.no_grad(), evaluating(lm.model), UnrolledExperts(), sizes:
            compiled_entry(capture, fullgraph=True)(step, inputs, {})
    except _CapturedError:
        return made[-1]
    except Exception as error:  # tracing runs the user's model, which may raise anything
        cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
        told = str(cause) if isinstance(cause, CaptureError) else brief(cause)
        raise CaptureError(f"{name}, whose weights several ranks hold, cannot be traced: {told}") from error
    raise CaptureError(f"{name}, whose weights several ranks hold, computes nothing that Dynamo sees")


def _end(*_: object) -> object:
    raise _CapturedError


def _names(caches: int) -> list[str]:
    return [*INPUTS, *(f"caches_{index}" for index in range(caches))]


def _like_exported(program: Program, values: Sequence[object], named: Mapping[int, str]) -> Program:
    """Give ``program`` the inputs of an exported program: weights as plain tensors, then the inputs in ``named``."""
    if program.mutations:
        raise CaptureError(f"a step writes to {', '.join(program.mutations)}")
    if len(program.outputs) != 1 + len(named) - len(INPUTS):
        raise CaptureError(
            f"a step returns {len(program.outputs)} tensors, expected logits and as many caches as given"
        )
    graph = program.gm.graph
    given = {named.get(id(v)): node for node, v in zip(program.placeholders, values, strict=True)}
    for node, value in zip(program.placeholders, values, strict=True):
        if id(value) not in named and node.name not in program.capture.parts and isinstance(value, torch.Tensor):
            program.weights[node.name] = value  # includes tensors that are neither parameters nor buffers
    for whole, parts in program.capture.parts.items():
        for name in parts:
            with graph.inserting_before(program.node(whole)):
                own = _take(graph, name, program.node(name))
            program.weights[own.name] = program.weights.pop(name)
        program.weights.pop(whole)
    program.know(parts={})
    last = program.placeholders[-1]
    for name in named.values():
        if name not in given:
            raise CaptureError(f"a step does not read {name}")
        with graph.inserting_after(last):
            last = _take(graph, name, given[name])
    for node in program.placeholders:
        if isinstance(node.meta.get("val"), torch.SymInt) and node.users:
            _read_size(graph, node, program.placeholders, last)
    remove_dead_code(graph)
    for node in program.placeholders:
        if node.name in program.weights or node.name in named.values():
            continue
        if node.users:
            raise CaptureError(f"a step takes {node.name}, which is no tensor")
        graph.erase_node(node)
    graph.lint()
    program.gm.recompile()
    return program


def _take(graph: fx.Graph, name: str, old: fx.Node) -> fx.Node:
    """Replace ``old`` by a new input, and return the new input. It is called ``name``, unless this name is taken."""
    new = graph.placeholder(name)
    new.target = new.name
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    graph.erase_node(old)
    return new


def _read_size(graph: fx.Graph, size: fx.Node, inputs: Sequence[fx.Node], last: fx.Node) -> None:
    """Replace the input ``size``, a number, by an operator that reads the equal size of an input tensor."""
    expr = size.meta["val"].node.expr
    for node in inputs:
        value = node.meta.get("val")
        for axis, n in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(n, torch.SymInt) and n.node.expr == expr:
                with graph.inserting_after(last):
                    read = graph.call_function(torch.ops.aten.sym_size.int, (node, axis))
                read.meta = {**size.meta, "val": n}
                size.replace_all_uses_with(read)
                return
    raise CaptureError(f"a step takes the number {size.name}, which is the size of no input")


def _check_sizes(program: Program, opened: Mapping[str, Mapping[int, int]]) -> None:
    """Raise an error if the trace assumed more about sizes than that some of them are equal."""
    assert program.fake_mode is not None
    env = program.fake_mode.shape_env
    assert env is not None
    known: dict[sympy.Basic, sympy.Expr] = {}
    for name, axes in opened.items():
        for axis, size in axes.items():
            n: object = program.node(name).meta["val"].shape[axis]
            expr = n.node.expr if isinstance(n, torch.SymInt) else sympy.Integer(n)
            if not expr.is_Symbol:
                raise CaptureError(f"the model can only be traced for sizes with {_ANY[size]} = {expr}")
            known[expr] = _ANY[size]
    for guard in env.guards:
        if not holds(env.replace(guard.expr).xreplace(known)):
            raise CaptureError(f"the model can only be traced for sizes with {guard.expr}")
