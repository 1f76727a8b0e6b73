"""Capture: turns a Dynamo graph, an ExportedProgram or a GraphModule into a :class:`Program`.

The graph is made functional (by :mod:`mla_compile.capture.functional`, or by ``torch.export`` itself). In-place writes
are removed and listed as mutations. Composite operations (linear, scaled_dot_product_attention) stay one node each.
The inverse is :mod:`mla_compile.capture.emit`.
"""

from __future__ import annotations

import copy
import functools
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import torch
from torch import fx
from torch._dynamo.source import UnspecializedParamBufferSource
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from mla_compile.capture.autocast import acting, has_regions, is_active, without_autocast, write_casts
from mla_compile.capture.dtensors import localize, put_back
from mla_compile.capture.exported import functional_program
from mla_compile.capture.functional import functionalized
from mla_compile.capture.held_weights import held_weights, is_held
from mla_compile.capture.inline import calls_written_out, levels_restored, written_out
from mla_compile.capture.repeated import traced_by_kind
from mla_compile.capture.subclasses import close_subclasses, open_subclasses
from mla_compile.core.program import Capture, Program, copy_graph, graph_module, results_of, view_source
from mla_compile.core.shared_state import drop_idle_sets, state_beside_parameters
from mla_compile.errors import CaptureError, InputError, brief
from mla_compile.passes.ir.graph import shape
from mla_compile.passes.ir.sizes import same_sizes

_Given = ParamSpec("_Given")

aten = torch.ops.aten
_WRITES = {op.default for op in (aten.slice_scatter, aten.select_scatter, aten.index_copy, aten.index_put, aten.roll)}
"""Operators that return a copy of their first argument with other values in some positions."""


def _timed(capture: Callable[_Given, Program]) -> Callable[_Given, Program]:
    """Wrap ``capture`` to record the capture's duration in the program."""

    @functools.wraps(capture)
    def timed(*args: _Given.args, **kwargs: _Given.kwargs) -> Program:
        start = time.perf_counter()
        program = capture(*args, **kwargs)
        program.know(seconds=time.perf_counter() - start)
        return program

    return timed


@_timed
def from_dynamo(gm: fx.GraphModule, example_inputs: Sequence[object]) -> Program:
    """Capture a graph that Dynamo passes to a backend. This has to be called inside the backend.

    Inputs that Dynamo reached as parameters or buffers of a module are weights. Caches may also be buffers, so there
    are two exceptions: buffers of symbolic size, and inputs that the graph writes to or :func:`replaces <replaced>`.
    Tensors that a module holds in other ways are weights if the graph uses them as weights
    (:mod:`mla_compile.capture.held_weights`). Raises :class:`CaptureError` if the graph cannot be captured.
    """
    program = _functionalize(gm, list(example_inputs))
    inputs = gm.graph.find_nodes(op="placeholder")
    beside = state_beside_parameters(inputs, example_inputs)
    changed = {*program.mutations, *replaced(program)}
    held: dict[str, torch.Tensor] = {}
    for node, origin, value in zip(program.placeholders, inputs, example_inputs, strict=True):
        if not isinstance(value, torch.Tensor) or node.name in changed:
            continue
        state = origin.name in beside or _is_module_state(getattr(origin, "_dynamo_source", None))
        constant = state and not _is_resized(node)
        if isinstance(value, torch.nn.Parameter) or constant:
            program.weights[node.name] = _with_values(value)
            for part, tensor in program.capture.parts.get(node.name, {}).items():
                program.weights[part] = _with_values(tensor)
        elif not _is_resized(node) and is_held(getattr(origin, "_dynamo_source", None)):
            held[node.name] = value
    for name in held_weights(program.gm.graph, program.weights, held):
        program.weights[name] = _with_values(held[name])
    return program


@_timed
def from_graph_module(gm: fx.GraphModule, example_inputs: Sequence[object] | None = None) -> Program:
    """Capture any traced module.

    If the placeholders have ``meta["val"]``, the program keeps their (possibly symbolic) shapes. Otherwise the module
    is captured for the shapes of ``example_inputs``, one value per placeholder. Parameters, buffers and constants stay
    attributes.
    """
    if not gm.graph.find_nodes(op="output"):
        raise InputError("the graph returns nothing: it has no output node")
    placeholders = gm.graph.find_nodes(op="placeholder")
    recorded = [node.meta.get("val") for node in placeholders]
    if all(value is not None for value in recorded):
        values = recorded
    elif example_inputs is None:
        missing = next(node.name for node, value in zip(placeholders, recorded, strict=True) if value is None)
        raise InputError(
            f'input {missing!r} of the graph has no meta["val"]: pass example_inputs, one per placeholder '
            f"({', '.join(node.name for node in placeholders)})"
        )
    else:
        values = list(example_inputs)
        if len(values) != len(placeholders):
            raise InputError(
                f"the graph has {len(placeholders)} inputs ({', '.join(node.name for node in placeholders)}), "
                f"got {len(values)} example inputs"
            )
    return _functionalize(gm, values)


@_timed
def from_exported(exported: torch.export.ExportedProgram) -> Program:
    """Capture an ExportedProgram. Its functional form becomes ``original`` in the program's ``capture``."""
    try:
        gm = copy.deepcopy(exported.graph_module)
        if gm.graph.find_nodes(op="get_attr"):
            gm = calls_written_out(gm)
        # Casts are written before torch makes the program functional, because torch would lose some casts.
        autocast = has_regions(gm) or is_active()
        if autocast:
            write_casts(gm, renew=True)
        with without_autocast():
            functional = functional_program(exported, gm)
    except CaptureError:
        raise
    except Exception as error:  # whatever an operator or its fake kernel raises
        raise _failure("the exported program cannot be made functional", error) from error
    signature = functional.graph_signature
    graph = copy_graph(functional.graph)
    _drop_grad_mode(graph)
    by_target = {spec.target: spec.arg.name for spec in signature.input_specs if spec.target is not None}
    mutated: list[str] = []
    for spec in signature.output_specs:
        if spec.kind is OutputKind.BUFFER_MUTATION:
            mutated.append(by_target[spec.target])
        elif spec.kind is OutputKind.USER_INPUT_MUTATION:
            mutated.append(str(spec.target))
        elif spec.kind is not OutputKind.USER_OUTPUT:
            raise CaptureError(
                f"the exported program returns a {spec.kind.name}; only inference programs are supported"
            )
    tensors = {**functional.constants, **functional.state_dict}
    weights = {
        name: _with_values(tensors[target])
        for target, name in by_target.items()
        if isinstance(tensors.get(target), torch.Tensor) and name not in mutated
    }
    traced = graph_module(functional.graph_module, graph)
    return _finish(Program(traced, tuple(mutated), weights, capture=Capture(functional, autocast=autocast)))


def _functionalize(gm: fx.GraphModule, values: list[object]) -> Program:
    """Make the graph functional, then restore parameters and buffers as get_attr nodes under their old names."""
    try:
        with levels_restored():
            flat = _flat(written_out(gm))
            drop_idle_sets(flat, values)
            local = localize(flat, values)
            values, opened = open_subclasses(flat, local.values)
            opened += local.opened
    except CaptureError:
        raise
    except Exception as error:  # whatever an operator, a fake kernel or a guard raises
        raise _failure("a nested graph cannot be inlined", error) from error
    autocast = has_regions(flat) or is_active()
    state = [*flat.named_parameters(remove_duplicate=False), *flat.named_buffers(remove_duplicate=False)]
    try:
        with torch.no_grad(), levels_restored(), acting(flat):
            traced = traced_by_kind(flat, values) or functionalized(flat, values)
        if autocast:
            write_casts(traced.gm)
    except CaptureError:
        raise
    except Exception as error:  # whatever an operator, a fake kernel or a guard raises
        raise _failure("the graph cannot be made functional", error) from error
    graph = traced.gm.graph
    effects = not _drop_idle_tokens(graph, traced.tokens)
    parameters = sum(1 for _ in flat.named_parameters(remove_duplicate=False))
    if effects or any(place < parameters for place in traced.written):
        what = "an operator with side effects" if effects else "a write to a parameter"
        raise CaptureError(f"the graph contains {what}")

    _drop_grad_mode(graph)
    inputs = graph.find_nodes(op="placeholder")
    if len(inputs) != len(state) + len(values):
        raise CaptureError("an input or a weight is a tensor subclass that takes several tensors in the graph")
    outputs = results_of(graph)
    if len(set(outputs[: len(traced.written)])) != len(traced.written):
        raise CaptureError(f"the same value is written to several of {len(traced.written)} inputs of the graph")

    targets = [str(node.target) for node in _get_attrs(graph)]
    attributes: dict[str, Any] = {target: operator.attrgetter(target)(traced.gm) for target in targets}
    weights: dict[str, torch.Tensor | None] = {
        node.name: _with_values(attributes[str(node.target)])
        for node in _get_attrs(graph)
        if isinstance(attributes[str(node.target)], torch.Tensor)
    }
    holders = list(inputs)
    for place, (name, tensor) in enumerate(state):
        target = name if name not in attributes else f"{name}_state"
        attributes[target] = tensor
        with graph.inserting_before(inputs[0]):
            attribute = graph.create_node("get_attr", target)
        attribute.meta = dict(inputs[place].meta)
        inputs[place].replace_all_uses_with(attribute)
        holders[place] = attribute
        if place not in traced.written:
            weights[attribute.name] = _with_values(tensor)
    for node in inputs[: len(state)]:
        graph.erase_node(node)
    for node, origin in zip(inputs[len(state) :], flat.graph.find_nodes(op="placeholder"), strict=True):
        node._rename(origin.name)
        node.target = node.name

    mutations = tuple(holders[place].name for place in traced.written)
    parts = close_subclasses(graph, opened, mutations)
    put_back(graph, local.left_out, gm)
    used = {str(node.target) for node in _get_attrs(graph) if node.users or node.name in mutations}
    for node in _get_attrs(graph):
        if node.target not in used:
            weights.pop(node.name, None)
            graph.erase_node(node)
    traced_gm = graph_module({target: attributes[target] for target in used}, graph)
    return _finish(Program(traced_gm, mutations, weights, capture=Capture(gm, parts, autocast=autocast)))


def _finish(program: Program) -> Program:
    """Derive the fake mode and the aliases from the graph, and lint the graph."""
    for node in program.gm.graph.nodes:
        if isinstance(node.meta.get("val"), FakeTensor):
            program.fake_mode = node.meta["val"].fake_mode
            break
    written = program.outputs[: len(program.mutations)]
    owner = {new: name for new, name in zip(written, program.mutations, strict=True) if isinstance(new, fx.Node)}
    for index, value in enumerate(program.outputs[len(written) :]):
        root = value
        while root is not None and root not in owner:
            root = view_source(root)
        if root is not None:
            program.aliases[index] = owner[root]
    program.gm.graph.lint()
    return program


def _flat(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of ``gm`` that takes and returns flat tuples, and whose constants are its own buffers."""
    graph = copy_graph(gm.graph)
    output = graph.output_node()
    output.args = (tuple(pytree.tree_leaves(output.args[0])),)
    return graph_module(gm, graph)


def _drop_idle_tokens(graph: fx.Graph, count: int) -> bool:
    """Remove the tokens that order side effects: the first ``count`` inputs and results.

    Return False if an operator uses a token. A composite operator that checks its input (linalg_solve) adds an unused
    token. The operator stays in the graph and still checks.
    """
    tokens = graph.find_nodes(op="placeholder")[:count]
    output = graph.output_node()
    returned = results_of(graph)
    if list(returned[:count]) != tokens or any(len(token.users) != 1 for token in tokens):
        return False
    output.args = (returned[count:],)
    for token in tokens:
        graph.erase_node(token)
    return True


def _drop_grad_mode(graph: fx.Graph) -> None:
    """Remove switches of grad mode. An inference graph needs no switch, and the effect would outlast the run."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch._C._set_grad_enabled:
            graph.erase_node(node)


def _get_attrs(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="get_attr"))


def _is_module_state(source: object) -> bool:
    """Whether Dynamo reached an input through the parameters or buffers of a module."""
    while source is not None:
        if isinstance(source, UnspecializedParamBufferSource):
            return True
        source = getattr(source, "base", None)
    return False


def replaced(program: Program) -> set[str]:
    """Return the names of the inputs that the program returns with new values in some positions.

    An example is ``k``, if the program returns ``k.index_copy(...)`` or ``cat([k[:, 1:], new], 1)``.
    """
    found: set[str] = set()
    for value in program.outputs[len(program.mutations) :]:
        pending, seen = [(value, False)], set[tuple[object, bool]]()
        while pending:
            node, written = one = pending.pop()
            if not isinstance(node, fx.Node) or one in seen:
                continue
            seen.add(one)
            if node.op == "placeholder":
                found |= {node.name} if written and same_sizes(shape(node), shape(value)) else set()
            elif node.target is aten.cat.default:
                pending += [(part, True) for part in node.all_input_nodes]
            elif node.target in _WRITES or view_source(node) is not None:
                pending.append((node.args[0], written or node.target in _WRITES))
    return found


def _is_resized(node: fx.Node) -> bool:
    """Whether a tensor has symbolic sizes, because Dynamo has seen several sizes of the tensor."""
    return any(isinstance(size, torch.SymInt) for size in node.meta["val"].shape)


def _with_values(tensor: torch.Tensor) -> torch.Tensor | None:
    return None if isinstance(tensor, FakeTensor) or tensor.is_meta else tensor


def _failure(what: str, error: Exception) -> CaptureError:
    return CaptureError(f"{what}: {brief(error)}")
