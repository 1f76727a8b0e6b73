"""Emission: turns a :class:`Program` back into the kind of object that was captured."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._export.verifier import SpecViolationError
from torch.export.graph_signature import InputKind, InputSpec, OutputSpec, TensorArgument
from torch.fx.graph_module import _assign_attr
from torch.utils import _pytree as pytree

from mla_compile.capture import autocast
from mla_compile.capture.cache_change import CacheChange
from mla_compile.capture.emit_cache import new_calls, new_examples, new_guards, new_signature, rows_in_graph_module
from mla_compile.core.program import Program, results_of, view_source
from mla_compile.errors import CaptureError
from mla_compile.passes.ir.graph import Builder, new_input

aten = torch.ops.aten


def to_graph_module(program: Program) -> fx.GraphModule:
    """Return a graph that Dynamo and Inductor accept in place of the captured graph.

    Placeholders keep Dynamo's annotations (source, static address, example value), so that static inputs, CUDA graphs
    and freezing work as before. The placeholder of a fold has no source and is marked as a static address. Constants of
    the graph become buffers, and each buffer gets a source, because AOTAutograd requires this.
    """
    gm, original = _with_writes(program), program.capture.original
    assert isinstance(original, fx.GraphModule)
    origins = {node.name: node for node in original.graph.find_nodes(op="placeholder")}
    folded = {fold.placeholder for fold in program.folds}
    # A cache may have been a user's buffer at a static address, but rows with spare capacity may move.
    moving = {one.input for one in program.appends}
    for node in gm.graph.find_nodes(op="placeholder"):
        origin = origins.get(node.name)
        if origin is None or node.name in moving:
            node._dynamo_source = None
            if node.name in folded:
                node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
            continue
        node.meta = {**origin.meta, "val": node.meta["val"]}
        node.type = origin.type
        if hasattr(origin, "_dynamo_source"):
            node._dynamo_source = origin._dynamo_source  # Dynamo sets this attribute, too
    gm.meta = dict(original.meta)
    for name, value in vars(original).items():
        if name not in vars(gm):
            setattr(gm, name, value)
    state = [name for name, _ in (*gm.named_parameters(), *gm.named_buffers())]
    known = getattr(original, "_param_name_to_source", {})
    vars(gm)["_param_name_to_source"] = {name: known.get(name, ConstantSource(name)) for name in state}
    gm.recompile()
    return gm


def constants_as_inputs(gm: fx.GraphModule) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Turn the constants of a graph for Dynamo into further inputs. Return the fake and the real tensor of each."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for node in list(gm.graph.find_nodes(op="get_attr")):
        value = fx.graph_module._get_attr(gm, str(node.target))
        if not isinstance(value, torch.Tensor):
            continue
        own = new_input(gm.graph, f"constant_{len(found)}", node.meta["val"])
        own._dynamo_source = None
        own.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
        node.replace_all_uses_with(own)
        gm.graph.erase_node(node)
        found.append((node.meta["val"], value.detach()))
    # One tensor may have several names. All go, because AOTAutograd would count each as an input.
    for name, _ in (*gm.named_parameters(remove_duplicate=False), *gm.named_buffers(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        delattr(gm.get_submodule(owner), leaf)
    gm.recompile()
    return found


def to_plain_graph_module(
    program: Program, folded: Mapping[str, torch.Tensor] | None = None, change: CacheChange | None = None
) -> fx.GraphModule:
    """Return a GraphModule with the original's calling convention and parameter names.

    ``folded`` has the values of the program's folds, which become buffers. With ``change``, row tensors replace each
    cache input (one new input for each held row tensor), and a tuple of row tensors replaces each cache output.
    """
    written, original = _with_writes(program), program.capture.original
    assert isinstance(original, fx.GraphModule)
    gm = fx.GraphModule(written, written.graph)  # not a lazy module: the caller may pickle, script or copy it
    for fold in program.folds:
        value = (folded or {})[fold.placeholder]
        node = next(n for n in gm.graph.find_nodes(op="placeholder") if n.name == fold.placeholder)
        gm.register_buffer(fold.placeholder, value)
        with gm.graph.inserting_before(node):
            attribute = gm.graph.create_node("get_attr", fold.placeholder)
        attribute.meta = node.meta
        node.replace_all_uses_with(attribute)
        gm.graph.erase_node(node)
    flat = results_of(gm.graph)
    if change is not None:
        flat = rows_in_graph_module(gm, program, change, original)
    origins = {node.name: node for node in original.graph.find_nodes(op="placeholder")}
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name in origins:
            origin = origins[node.name]
            node.target, node.args, node.type = origin.target, origin.args, origin.type
    output = gm.graph.output_node()
    leaves, spec = pytree.tree_flatten(original.graph.output_node().args[0])
    if len(leaves) != len(flat):
        raise CaptureError(f"the graph returned {len(leaves)} values, its rewritten form {len(flat)}")
    output.args = (pytree.tree_unflatten(flat, spec),)
    if program.capture.autocast:
        _switch_autocast_off(gm.graph)
    _check_inputs(gm, original)  # the checks run before autocast is disabled, in case a check raises
    gm.graph.set_codegen(original.graph._codegen)
    _keep_state(gm, original)
    gm.meta = dict(original.meta)
    gm.train(original.training)
    gm.recompile()
    return gm


def _keep_state(gm: fx.GraphModule, original: fx.GraphModule) -> None:
    """Give ``gm`` the original's state dict. Unused weights stay in the state dict, and no buffer is added."""
    present = {name for name, _ in (*gm.named_parameters(), *gm.named_buffers())}
    for name, tensor in (
        *original.named_parameters(remove_duplicate=False),
        *original.named_buffers(remove_duplicate=False),
    ):
        if name not in present:
            _assign_attr(tensor, gm, name)
    known = {*original.state_dict()}
    for path, module in gm.named_modules():
        prefix = f"{path}." if path else ""
        module._non_persistent_buffers_set.update(leaf for leaf in module._buffers if prefix + leaf not in known)


def _switch_autocast_off(graph: fx.Graph) -> None:
    """Disable autocast in the graph. All casts are explicit, and some products are in float32 on purpose."""
    values = [node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    devices = dict.fromkeys(v.device.type for v in values if torch.amp.is_autocast_available(v.device.type))
    for device in devices:
        first = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(first):
            entered = graph.call_function(autocast.ENTER, (device, None, False, None))
        with graph.inserting_before(graph.output_node()):
            graph.call_function(autocast.LEAVE, (entered,))


def _check_inputs(gm: fx.GraphModule, original: fx.GraphModule) -> None:
    """Keep the original's input checks. If the capture used example inputs, also reject other shapes and dtypes."""
    by_name = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
    known = [node for node in original.graph.find_nodes(op="placeholder") if node.name in by_name]
    inputs = {node: by_name[node.name] for node in known}
    last = next(iter(reversed(inputs.values())), None)
    if last is None:
        return
    with gm.graph.inserting_after(last):
        for node in original.graph.nodes:
            if node.op == "call_module" and not node.users and set(node.all_input_nodes) <= set(inputs):
                gm.add_submodule(str(node.target), original.get_submodule(str(node.target)))
                gm.graph.node_copy(node, lambda origin: inputs[origin])
        for origin, node in inputs.items():
            value = node.meta["val"]
            if "val" not in origin.meta and isinstance(value, torch.Tensor):
                gm.graph.call_function(
                    aten._assert_tensor_metadata.default, (node, list(value.shape), None, value.dtype)
                )


def to_exported(
    program: Program, folded: Mapping[str, torch.Tensor] | None = None, change: CacheChange | None = None
) -> torch.export.ExportedProgram:
    """Return an ExportedProgram with the inputs, outputs, state and constraints of the captured program.

    ``change`` says which inputs and outputs are rows instead of K and V. Weights that are no longer read stay in the
    signature. ``folded`` has the values of the program's folds, which become buffers outside the state dict.
    """
    original, program = program.capture.original, program.copy()
    assert isinstance(original, torch.export.ExportedProgram)
    graph = program.gm.graph
    signature = copy.deepcopy(original.graph_signature)
    constants = dict(original.constants)
    inputs = graph.find_nodes(op="placeholder")
    first_user = next((i for i, s in enumerate(signature.input_specs) if s.kind is InputKind.USER_INPUT), len(inputs))
    for position, fold in enumerate(program.folds, start=first_user):
        node = program.node(fold.placeholder)
        if first_user < len(inputs):
            inputs[first_user].prepend(node)
        constants[node.name] = (folded or {})[fold.placeholder]
        spec = InputSpec(InputKind.BUFFER, TensorArgument(name=node.name), node.name, persistent=False)
        signature.input_specs.insert(position, spec)
    calls, examples = list(original.module_call_graph), original.example_inputs
    names = [spec.arg.name for spec in original.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    if change is not None:
        rows, outputs = new_signature(program, change, signature)
        calls = new_calls(calls, names, rows, outputs[len(program.mutations) :])
        examples = new_examples(examples, original.call_spec.in_spec, names, change)
    _keep_old_values(program)
    signature.output_specs = [
        OutputSpec(spec.kind, dataclasses.replace(spec.arg, name=value.name), spec.target)
        if isinstance(value, fx.Node)
        else spec
        for spec, value in zip(signature.output_specs, program.outputs, strict=True)
    ]
    graph.lint()
    program.gm.recompile()
    try:
        result = torch.export.ExportedProgram(
            root=program.gm,
            graph=graph,
            graph_signature=signature,
            state_dict=dict(original.state_dict),
            range_constraints=copy.deepcopy(original.range_constraints),
            module_call_graph=calls,
            example_inputs=examples,
            constants=constants,
            verifiers=original.verifiers,
        )
    except SpecViolationError as error:
        raise CaptureError(f"the rewritten graph is no valid exported program: {error}") from error
    if change is not None:
        top = original.module_call_graph[0].signature
        result._guards_code = new_guards(original._guards_code, top, names, change)
    return result


def _with_writes(program: Program) -> fx.GraphModule:
    """Return a copied graph that writes mutated inputs just before the output, and returns only the caller's values.

    Before: ``return (index_copy, y)``. After: ``copy_ = aten.copy_(cache, index_copy); return (y,)``. Inductor turns
    ``index_copy`` and ``copy_`` into one in-place write. If the graph returned the new value instead, every call would
    copy the whole cache.
    """
    program = program.copy()
    _keep_old_values(program)
    _return_shares(program)
    _write_at_once(program)
    graph = program.gm.graph
    output = graph.output_node()
    new_values = program.outputs[: len(program.mutations)]
    returned = list(program.outputs[len(program.mutations) :])
    written: dict[str, tuple[object, fx.Node]] = {}
    named = program.named()
    with graph.inserting_before(output):
        for name, new in zip(program.mutations, new_values, strict=True):
            target = named[name]
            if new is target:
                written[name] = (new, target)
                continue
            node = graph.call_function(aten.copy_.default, (target, new))
            node.meta["val"] = target.meta["val"]
            written[name] = (new, node)
        for index, name in program.aliases.items():
            returned[index] = _view_again(graph, returned[index], *written[name])
        output.args = (tuple(returned),)
    graph.lint()
    return program.gm


def _write_at_once(program: Program) -> None:
    """Write appended rows into the buffer as soon as they are computed. No earlier node reads these positions."""
    graph, named = program.gm.graph, program.named()
    for one in program.appends:
        if one.input is None or not one.grows:
            continue
        rows = named[one.input]
        joined = program.outputs[program.mutations.index(one.input)]
        _, new, *where = joined.args
        with graph.inserting_before(joined):
            room = graph.call_function(aten.slice.Tensor, (rows, *where))
            write = graph.call_function(aten.copy_.default, (room, new))
        room.meta["val"] = write.meta["val"] = new.meta["val"]
        joined.replace_all_uses_with(rows)
        graph.erase_node(joined)


def _return_shares(program: Program) -> None:
    """For caches that begin in this call, return copies of this rank's rows instead of whole buffers."""
    graph, outputs = program.gm.graph, list(program.outputs)
    gone = [one.output for one in program.appends if one.input is not None and one.output is not None]
    for one in program.appends:
        if one.output is None or not one.total:
            continue
        sharing = program.capture.sharing
        assert sharing is not None
        at = len(program.mutations) + one.output - sum(place < one.output for place in gone)
        buffer: fx.Node = outputs[at]
        # The slice directly follows the buffer, so that the whole buffer can be freed after its last other reader.
        call = Builder(buffer.next, program.fake_mode).call
        own = call(aten.slice.Tensor, buffer, one.axis, sharing.rank, one.total, sharing.size)
        outputs[at] = call(aten.clone.default, own, memory_format=torch.contiguous_format)
    graph.output_node().args = (tuple(outputs),)


def _view_again(graph: fx.Graph, value: fx.Node, new: object, written: fx.Node) -> fx.Node:
    """Repeat the chain of views from ``new`` to ``value`` on ``written``."""
    chain = []
    node: fx.Node | None = value
    while node is not None and node is not new:
        chain.append(node)
        node = view_source(node)
    if node is None:
        raise CaptureError(f"the returned value {value.name} is no longer a view of the input that was written")
    result = written
    for step in reversed(chain):
        result = graph.call_function(step.target, (result, *step.args[1:]), step.kwargs)  # type: ignore[arg-type]
        result.meta = dict(step.meta)
    return result


def _keep_old_values(program: Program) -> None:
    """Clone every output that is a view of an overwritten input, because the caller expects the old value."""
    graph = program.gm.graph
    output = graph.output_node()
    named = program.named()
    mutated = {named[name] for name in program.mutations}
    values = list(program.outputs)
    own = dict(zip(program.mutations, values, strict=False))
    for index, value in enumerate(values):
        if not isinstance(value, fx.Node):
            continue
        root: fx.Node = value
        while (source := view_source(root)) is not None:
            root = source
        if root not in mutated or (value is root and own[root.name] is root):
            continue
        with graph.inserting_before(output):
            clone = graph.call_function(aten.clone.default, (value,))
        clone.meta = dict(value.meta)
        values[index] = clone
    output.args = (tuple(values),)
