"""Writes the casts of ``torch.autocast`` into a graph.

Autocast works inside the dispatcher: ``linear`` is called with float32 tensors, casts them, and computes in bfloat16. A
graph traced above the dispatcher shows the call and the dtype of the result, but no cast.

Before: ``y = linear(x, w)`` with x and w float32, y bfloat16

After: ``y = linear(_to_copy(x, bfloat16), _to_copy(w, bfloat16))``, which gives the same y without autocast.

The casts come from a trace of the kernel that autocast itself would run, not from a table of operators.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._C import DispatchKey, DispatchKeySet
from torch._higher_order_ops.wrap import wrap_with_autocast
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from mla_compile.errors import CaptureError
from mla_compile.passes.ir.graph import args_of, evaluate_fake, splice

aten = torch.ops.aten

without_autocast = torch._C._DisableAutocast
"""A context manager that disables autocast on all devices."""

_KEYS = [key for name, key in DispatchKey.__members__.items() if name.startswith("Autocast") and name != "Autocast"]
ENTER, LEAVE = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
"""The functions by which a graph enters and leaves autocast."""


def is_active() -> bool:
    """Whether autocast is on for some device."""
    active: bool = torch._C._is_any_autocast_enabled()
    return active


def has_regions(gm: fx.GraphModule) -> bool:
    """Whether a graph switches autocast. Raises :class:`CaptureError` if a nested graph, as in ``cond``, does."""
    for node in (n for n in gm.graph.find_nodes(op="get_attr") if n.users):  # an inlined graph's node has no users
        nested = operator.attrgetter(str(node.target))(gm)
        if isinstance(nested, fx.GraphModule) and (has_regions(nested) or _wraps(nested)):
            raise CaptureError("autocast is switched in a nested graph")
    return any(node.target is ENTER for node in gm.graph.nodes)


def _wraps(gm: fx.GraphModule) -> bool:
    return any(node.target is wrap_with_autocast for node in gm.graph.nodes)


@contextmanager
def acting(gm: fx.GraphModule) -> Iterator[None]:
    """Let the nodes of ``gm`` that switch autocast take effect during a trace, instead of only being recorded.

    If the trace fails, the previous autocast state is restored.
    """
    entered: list[torch.autocast] = []

    def enter(*how: Any) -> torch.autocast:
        mode = torch.autocast(*how)
        mode.__enter__()
        entered.append(mode)
        return mode

    def leave(mode: torch.autocast) -> None:
        entered.remove(mode)
        mode.__exit__(None, None, None)

    for node in gm.graph.nodes:
        if node.target in (ENTER, LEAVE):
            node.target = enter if node.target is ENTER else leave
    gm.recompile()
    cached = torch.is_autocast_cache_enabled()
    try:
        yield
    finally:
        while entered:
            entered.pop().__exit__(None, None, None)
        # Tracing switches the cache of casts off. A mode that ends only after the trace would leave the cache off.
        torch.set_autocast_cache_enabled(cached)


def write_casts(gm: fx.GraphModule, *, renew: bool = False) -> None:
    """Write the casts of every operator into a traced graph, and remove the nodes that switch autocast.

    The graph is assumed to begin in the current autocast state. ``renew``: recompute the dtypes in the graph, because
    they belong to other autocast settings. Raises :class:`CaptureError` for an operator whose casts are not visible.
    """
    modes: dict[fx.Node, torch.autocast] = {}
    cached = torch.is_autocast_cache_enabled()
    # With the cache on, weights that the trace casts would be reused after the trace.
    torch.set_autocast_cache_enabled(False)
    try:
        for node in list(gm.graph.nodes):
            if node.target is ENTER:
                modes[node] = torch.autocast(*args_of(node))
                modes[node].__enter__()
            elif node.target is LEAVE:
                modes.pop(node.all_input_nodes[0]).__exit__(None, None, None)
            else:
                _write(gm, node, renew=renew)
    finally:
        for mode in reversed(modes.values()):
            mode.__exit__(None, None, None)
        torch.set_autocast_cache_enabled(cached)
    for node in reversed(list(gm.graph.nodes)):
        if node.target in (ENTER, LEAVE):
            gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()


def _write(gm: fx.GraphModule, node: fx.Node, *, renew: bool = False) -> bool:
    """Replace a node by operators with explicit casts; return False if autocast casts nothing in this node."""
    if node.op != "call_function":
        return False
    if renew and _is_floating(node):
        node.meta["val"] = _evaluated(node)
    keys = _active_keys(node)
    if not keys:
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        _check_nested(gm, node, keys)
        return False
    key = _kernel(node.target, keys)
    if key is not None:
        # Autocast's kernel casts, and then calls the operator with autocast off. A trace of the kernel has the casts.
        traced = _traced(node, lambda op, *args, **kwargs: op._op_dk(key, *args, **kwargs))
        if not _is_cast(traced, node):
            return False
    elif _is_composite(node.target):
        # Autocast has no kernel for a composite operator, but acts on the operators of the decomposition.
        traced = _traced(node, lambda op, *args, **kwargs: op.decompose(*args, **kwargs))
        written = [_write(traced, own) for own in list(traced.graph.nodes)]
        if not any(written):
            return False
        if any(_writes(own) for own in traced.graph.nodes):
            raise CaptureError(f"autocast is active, and {node.target} decomposes into operators that write in place")
    else:
        _check_unchanged(node)
        return False
    _replace(gm, node, traced)
    return True


def _active_keys(node: fx.Node) -> list[DispatchKey]:
    """Return the autocast dispatch keys that apply to this call of an operator."""
    tensors = [v for n in node.all_input_nodes for v in pytree.tree_leaves(n.meta.get("val"))]
    devices = [v for v in tensors if isinstance(v, torch.Tensor)]
    if not any(
        torch.amp.is_autocast_available(v.device.type) and torch.is_autocast_enabled(v.device.type) for v in devices
    ):
        return []
    excluded = torch._C._dispatch_tls_local_exclude_set()
    present = [torch._C._dispatch_keys(v) for v in devices]
    return [key for key in _KEYS if not excluded.has(key) and any(one.has(key) for one in present)]


def _kernel(op: torch._ops.OpOverload, keys: list[DispatchKey]) -> DispatchKey | None:
    """Return the key of the kernel that autocast runs in place of ``op``, or None."""
    own = DispatchKeySet(DispatchKey.Undefined)
    for key in keys:
        name = str(key).rpartition(".")[2]
        if torch._C._dispatch_has_kernel_for_dispatch_key(
            op.name(), name
        ) and not torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough(op.name(), name):
            own = own.add(key)
    return own.highestPriorityTypeId() if any(own.has(key) for key in keys) else None


def _is_composite(op: torch._ops.OpOverload) -> bool:
    """Whether an operator decomposes into others. This is False for views, which compute nothing."""
    views = any(returned.alias_info is not None for returned in op._schema.returns)
    return not views and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def _traced(node: fx.Node, call: Callable[..., object]) -> fx.GraphModule:
    """Trace ``call(operator, *arguments)`` for a node. The placeholders of the trace are the node's inputs."""
    inputs = node.all_input_nodes

    def function(*values: Any) -> object:
        env = dict(zip(inputs, values, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        # Without this, the pre-dispatch tracing mode would also record the operator itself.
        with torch._C.DisableTorchFunction():
            return call(node.target, *args, **kwargs)

    values = [n.meta["val"] for n in inputs]
    modes = (v.fake_mode for v in pytree.tree_leaves(values) if isinstance(v, FakeTensor))
    with next(modes, nullcontext()), torch.no_grad():
        traced = make_fx(function, pre_dispatch=True)(*values)
    for own in traced.graph.nodes:
        if own.target is aten.to.dtype:
            x, dtype, *_ = own.args
            own.target, own.args, own.kwargs = aten._to_copy.default, (x,), {"dtype": dtype}
    return traced


def _is_cast(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the kernel does anything besides calling the operator with the given arguments."""
    calls = [own for own in traced.graph.nodes if own.op == "call_function"]
    inputs = dict(zip(traced.graph.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    if len(calls) != 1 or calls[0].target is not node.target:
        return True
    given = fx.map_arg((calls[0].args, calls[0].kwargs), lambda n: inputs[n])
    return bool(given != (node.args, node.kwargs))


def _replace(gm: fx.GraphModule, node: fx.Node, traced: fx.GraphModule) -> None:
    several = isinstance(node.meta["val"], (tuple, list))
    results = splice(gm, node, traced, node.all_input_nodes)
    for new in results:
        for key in ("nn_module_stack", "source_fn_stack", "seq_nr"):
            if key in node.meta:
                new.meta.setdefault(key, node.meta[key])
    if several:
        for user in list(node.users):  # getitem: selects one of several results
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)
        return
    (result,) = results
    node.replace_all_uses_with(result)
    gm.graph.erase_node(node)
    if result.op == "call_function":
        result.name = node.name  # signatures refer to outputs by name


def _check_unchanged(node: fx.Node) -> None:
    """Raise if autocast changes the result dtype of an operator without visible casts."""
    if not _is_floating(node) or _writes(node):
        return
    with without_autocast():
        bare = _evaluated(node)
    pairs = zip(pytree.tree_leaves(bare), pytree.tree_leaves(node.meta["val"]), strict=True)
    if any(isinstance(a, torch.Tensor) and a.dtype != b.dtype for a, b in pairs):
        raise CaptureError(f"autocast is active, and the casts of {node.target} are not visible")


def _check_nested(gm: fx.GraphModule, node: fx.Node, keys: list[DispatchKey]) -> None:
    """Raise if autocast would cast in a nested graph (``cond``, a score function). Nested graphs are not rewritten."""
    for n in node.all_input_nodes:
        nested = gm.get_submodule(str(n.target)) if n.op == "get_attr" and "val" not in n.meta else None
        if not isinstance(nested, fx.GraphModule):
            continue
        for own in nested.graph.nodes:
            op = own.target
            if own.op != "call_function":
                continue
            if not isinstance(op, torch._ops.OpOverload):
                _check_nested(nested, own, keys)
            elif _kernel(op, keys) is not None or _is_composite(op):
                raise CaptureError(f"autocast is active, and casts {op} in a nested graph")


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_floating(node: fx.Node) -> bool:
    leaves = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    # Values with unbacked sizes are excluded, because each evaluation would give such a size a fresh symbol.
    return any(v.is_floating_point() for v in leaves) and not any(map(free_unbacked_symbols, leaves))


def _evaluated(node: fx.Node) -> object:
    values = (v for n in node.all_input_nodes for v in pytree.tree_leaves(n.meta.get("val")))
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)
    assert callable(node.target)
    return evaluate_fake(mode, node.target, node.args, dict(node.kwargs))
