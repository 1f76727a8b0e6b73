"""Reuses an operator's result on fake tensors for the same operator in the next layer, within one trace.

Dynamo runs each operator on fake tensors to learn the sizes of its result. That takes a millisecond per operator, and a
quarter of Dynamo's time. The layers of a model repeat the same operators on the same sizes.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch._dynamo import utils as dynamo_utils
from torch._subclasses.fake_tensor import FakeTensor, disable_fake_tensor_cache, in_kernel_invocation_manager
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from mla_compile.core.alike import PLAIN, each, known_of, number_of

_Made = Callable[[list[FakeTensor]], object]
"""Makes an operator's result from the tensors among its arguments."""


def remember_results(output: Any) -> None:
    """Run equal operators on equal tensors only once, in the trace that writes into Dynamo's ``output``."""
    known: dict[Hashable, _Made | None] = {}
    run = dynamo_utils.run_node

    def run_node(tracer: Any, node: torch.fx.Node, args: object, kwargs: Any, nnmodule: object) -> object:
        if tracer is output and getattr(node.target, "__name__", "") == "shallow_copy_data_":
            # This is ``a.data = b`` in torch 2.14 and later. A result from torch's cache would not change the shape of
            # ``a``.
            with disable_fake_tensor_cache(output.fake_mode):
                return run(tracer, node, args, kwargs, nnmodule)
        key, given = _key(node, args, kwargs) if tracer is output else (None, [])
        if key is None:
            return run(tracer, node, args, kwargs, nnmodule)
        if (make := known.get(key)) is not None:
            return make(given)
        result = run(tracer, node, args, kwargs, nnmodule)
        if key not in known:
            known[key] = _maker(result, given)
        return result

    def restore() -> None:
        dynamo_utils.run_node = run

    dynamo_utils.run_node = run_node
    output.add_cleanup_hook(restore)


def _key(node: torch.fx.Node, args: object, kwargs: object) -> tuple[Hashable | None, list[FakeTensor]]:
    """Return a key of everything that determines the result's metadata, and the tensors among the arguments.

    The key is None if the metadata might depend on something else.
    """
    if not _is_of_torch(node) or torch._C._is_any_autocast_enabled() or torch._C._len_torch_function_stack():
        return None, []
    values: list[object] = []
    read = (each(args, partial(_read, values)), each(kwargs, partial(_read, values)))
    tensors = [value for value in values if isinstance(value, FakeTensor)]
    if not tensors or not all(map(_is_plain, values)):
        return None, []
    state = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), _kernels()
    return (node.op, node.target, state, read), tensors


def _is_of_torch(node: torch.fx.Node) -> bool:
    """Whether a node calls a function of torch or a tensor's method, and the call writes to none of its arguments."""
    target: Any = node.target
    if node.op == "call_method":
        return not target.endswith("_")
    if node.op != "call_function" or not isinstance(target, (types.BuiltinFunctionType, types.FunctionType)):
        return False
    of_torch = (target.__module__ or "").partition(".")[0] in ("torch", "_operator")
    return of_torch and not target.__name__.startswith("_") and not target.__name__.endswith("_")


def _is_plain(value: object) -> bool:
    """Whether a key can describe a value fully: a number, a constant, or a plain fake tensor without known values."""
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided and not value.is_quantized
        return type(value) is FakeTensor and value.constant is None and strided
    return isinstance(value, (float, complex, torch.SymInt, torch.SymFloat, torch.SymBool, *PLAIN))


def _kernels() -> Hashable:
    """Return which attention kernels torch may choose. The strides of an attention's result depend on that choice."""
    kinds = torch.backends.cuda
    return kinds.flash_sdp_enabled(), kinds.mem_efficient_sdp_enabled(), kinds.math_sdp_enabled()


def _read(values: list[object], value: object) -> Hashable:
    values.append(value)
    return (value.is_inference(), known_of(value)) if isinstance(value, torch.Tensor) else number_of(value)


def _maker(result: object, given: list[FakeTensor]) -> _Made | None:
    """Return a function that makes the same result from other tensors; None if metadata do not determine the result."""
    leaves, tree = pytree.tree_flatten(result)
    if not leaves or not all(isinstance(one, torch.Tensor) and _is_plain(one) for one in leaves):
        return None
    memories = [_memory(tensor) for tensor in given]
    parts: list[_Made] = []
    fresh: set[int] = set()
    for one in leaves:
        memory, shared = _memory(one), memories.count(_memory(one))
        offset = one.storage_offset()  # comparing a symbolic offset with 0 would add a guard, and so more graphs
        whole = isinstance(offset, int) and offset == 0 and memory not in fresh
        if any(one is tensor for tensor in given) or shared > 1 or (not shared and not whole):
            return None
        if one.requires_grad or one.is_conj() or one.is_neg() or free_unbacked_symbols(one):
            return None
        if one.is_inference() != torch.is_inference_mode_enabled():
            return None
        fresh.add(memory)
        parts.append(_like(one, memories.index(memory) if shared else None))
    return lambda tensors: pytree.tree_unflatten([part(tensors) for part in parts], tree)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _like(one: FakeTensor, place: int | None) -> _Made:
    """Return a function that makes a tensor like ``one``, in new memory or in the memory of argument ``place``.

    The metadata is read now, because a later in-place method may change the shape of ``one``.
    """
    mode, env, dtype, device = one.fake_mode, one.fake_mode.shape_env, one.dtype, one.device
    shape, stride, offset = tuple(one.shape), one.stride(), one.storage_offset()

    def make(tensors: list[FakeTensor]) -> FakeTensor:
        with in_kernel_invocation_manager(mode), env.suppress_guards() if env is not None else nullcontext():
            made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if place is not None:
                made.set_(tensors[place].untyped_storage(), offset, shape, stride)
        return FakeTensor(mode, made, device)

    return make
