"""Finds the attentions that a method of an optimized module runs outside of everything that is compiled.

A module that a method calls is compiled if the method's code names attributes that lead to it
(:mod:`mla_compile.core.inner`). If the code of the module's own methods runs an attention, the method that makes one
step is compiled from the next call on. Any other attention runs uncompiled, and a warning says so.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from types import FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves

from mla_compile.core.modules import Added, is_copy_of
from mla_compile.core.named import WAYS, functions_of, is_container, is_special, methods_of, names_in, outside
from mla_compile.core.reached import is_a, reached
from mla_compile.core.tracing import is_traced
from mla_compile.core.wrapped import OwnForward
from mla_compile.dynamo.candidates import PRODUCTS
from mla_compile.dynamo.pieces import driven, in_pieces, runs_in_pieces
from mla_compile.dynamo.recompiles import running
from mla_compile.dynamo.stack import frames_below, modules_called, step_among
from mla_compile.report.report import LEFT_OUT

_CALLS = 8
"""How many calls of a method are watched. If none of them runs an attention, later ones are not expected to."""

_NEAR = 1000
"""How many of the objects that a value holds are searched for a module."""

_left: weakref.WeakKeyDictionary[nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()
"""Module -> method -> how many more of its calls are watched."""


class _ThreadWatch(threading.local):
    current: _Watch | None = None
    within = False


_thread = _ThreadWatch()


class OwnMethod(Added):
    """A method of an optimized module, set on the object; it calls the method of the module's class."""

    def __init__(self, module: nn.Module, name: str) -> None:
        function = getattr(type(module), name)
        self.module = module
        self.name = name
        functools.update_wrapper(self, function)
        self.__signature__ = inspect.signature(MethodType(function, module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method and return its result."""
        method = getattr(type(self.module), self.name)
        if is_traced():
            return method(self.module, *args, **kwargs)
        with _watching(self.module, self.name):
            return method(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        return OwnMethod, (self.module, self.name)


def _watching(module: nn.Module, name: str) -> AbstractContextManager[None]:
    """Watch a call of a method, or a piece of one, unless it is part of a call that is watched or compiled already."""
    is_within = is_traced() or _thread.within or running() is not None
    return nullcontext() if is_within else _watched(module, name)


@contextmanager
def _watched(module: nn.Module, name: str) -> Iterator[None]:
    left = _left.setdefault(module, {})
    _thread.within = True
    try:
        if left.setdefault(name, _CALLS) == 0:
            yield
            return
        left[name] -= 1
        _thread.current = watch = _Watch(module, wanted=_is_within_forward(module))
        try:
            with watch:
                yield
        finally:
            _thread.current = None
            if watch.compiled or watch.ran is not None:
                left[name] = 0
            if watch.ran is not None and not (watch.compiled or watch.wanted):
                left[name] = int(_compile_or_tell(module, name, watch.ran, watch.step))
    finally:
        _thread.within = False


def _compile_or_tell(module: nn.Module, name: str, ran: Sequence[nn.Module], step: str | None) -> bool:
    """Compile the method that is a step, or say what ran in ``name``; return whether to watch the next call.

    The step is compiled from the next call of ``name`` on, not from the next step on: the cache of the present call
    does not have the form that compiled steps give a cache.
    """
    forward: Any = vars(module)["forward"]
    can = step is not None and isinstance(vars(module).get(step), (OwnMethod, NoneType))
    if can:
        forward.compile_method(step)
    else:
        forward.tell_left_out(_message(module, name, ran))
    return can


def _is_within_forward(module: nn.Module) -> bool:
    """Whether the forward of the class calls the method: the caller then chose to run this forward uncompiled."""
    forward, frame = inspect.unwrap(type(module).forward), sys._getframe()
    while frame.f_back is not None and frame.f_code is not getattr(forward, "__code__", None):
        frame = frame.f_back
    return frame.f_back is not None


def watch_methods(module: nn.Module) -> None:
    """Watch the methods of an optimized module whose code names something that holds modules, or another such method.

    The holder may be an attribute of the object or of its class, a global, or a variable of another function. If the
    class has operators, such as ``self[i]``, all methods are watched, because code runs an operator without its name.
    """
    of_class = ChainMap(*(dict(vars(kind)) for kind in type(module).__mro__))
    holding = {"forward", *module._modules, *(name for name, value in vars(module).items() if _holds_a_module(value))}
    holding |= {name for name, value in of_class.items() if not is_a(value, FunctionType) and _is_near_a_module(value)}
    methods = methods_of(type(module))
    names = {name: names_in(method, type(module)) for name, method in methods.items()}
    found = set[str]()
    while new := {name for name in names if name not in found and names[name] & (holding | found)}:
        found |= new
    found |= {name for name, method in methods.items() if names[name] & {*WAYS, "forward"}}
    code = {name: functions_of(methods[name], type(module)) for name in methods.keys() - found}
    seen = {id(one): one for functions in code.values() for function in functions for one in outside(function)}
    near = {key for key, one in seen.items() if _is_near_a_module(one)}
    found |= {name for name, functions in code.items() if any(id(one) in near for f in functions for one in outside(f))}
    if is_container(type(module)) or any(map(is_special, methods)):
        found = set(methods)
    for name in found - {*dir(nn.Module), *vars(module), *filter(is_special, found)}:
        method = methods[name]
        later = runs_in_pieces(method)
        vars(module)[name] = MethodType(_piecewise(method), module) if later else OwnMethod(module, name)


def _piecewise(method: FunctionType) -> Callable[..., Any]:
    made = in_pieces(method, lambda module: _watching(module, method.__name__))
    vars(made)[_IN_PIECES] = True
    return made


_IN_PIECES = "_mla_in_pieces"


def unwatch(module: nn.Module) -> None:
    """Undo :func:`watch_methods`, and remove the methods that were compiled since."""
    for name, value in list(vars(module).items()):
        later = is_a(value, MethodType) and hasattr(value.__func__, _IN_PIECES)
        if name != "forward" and (later or is_a(value, (OwnMethod, OwnForward))):
            del vars(module)[name]


@contextmanager
def compiled() -> Iterator[None]:
    """Surrounds a call of something compiled, so that the watched method that calls it, if any, is not reported."""
    watch, within = _thread.current, _thread.within
    _thread.current, _thread.within = None, True
    try:
        if watch is not None:
            watch.compiled = True
        with _pop_mode_temporarily() if watch is not None and _get_current_function_mode() is watch else nullcontext():
            yield
    finally:
        _thread.current, _thread.within = watch, within


class _Watch(TorchFunctionMode):
    """Sees the functions of torch that a method calls.

    Attributes:
        wanted: whether the forward calls the method.
        compiled: whether something compiled was called.
        ran: the modules, outer ones first, in whose forwards an attention ran (empty: in none); None before the first
            attention.
        step: the method of ``module`` to compile if the attention ran in no forward; None if there is none.
    """

    def __init__(self, module: nn.Module, *, wanted: bool) -> None:
        super().__init__()
        self.module = module
        self.wanted = wanted
        self.compiled = False
        self.ran: list[nn.Module] | None = None
        self.step: str | None = None
        self._weights: set[torch.Size] = set()

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Call the function, and note whether it is an attention."""
        result = func(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling() and self.ran is None and self._is_attention(func, args, result):
            frames = frames_below((OwnMethod.__call__.__code__, driven.__code__))
            self.ran = modules_called(frames)
            self.step = None if self.ran else step_among(frames, self.module)
        return result

    def _is_attention(self, func: Any, args: Sequence[Any], result: Any) -> bool:
        """Whether a function is an attention, or a product with a tensor that has the shape of a softmax's result."""
        name = str(getattr(func, "__name__", "")).lower()
        if "softmax" in name and isinstance(result, Tensor) and result.dim() > 2:
            self._weights.add(result.shape)
        product = bool(self._weights) and name in PRODUCTS
        tensors = (one for one in tree_leaves(args) if isinstance(one, Tensor)) if product else ()
        return "attention" in name or "attn" in name or any(one.shape in self._weights for one in tensors)


def _message(module: nn.Module, name: str, ran: Sequence[nn.Module]) -> str:
    called = f"{type(module).__name__}.{name}()"
    if not ran:
        return (
            f"{LEFT_OUT} in {called} itself; move one step of it, from the latent to the attention, into a method of "
            "its own, which is then compiled"
        )
    kind = type(ran[0]).__name__
    if is_copy_of(module, ran[0]):
        return (
            f"{LEFT_OUT} in {called}: an object that the optimized {kind} shares with the original leads to the "
            f"original; let that object hold the optimized {kind}"
        )
    path = next((path for path, one in module.named_modules() if one is ran[0]), None)
    where = f"a {kind}" if path is None else f"{path}, a {kind}"
    return (
        f"{LEFT_OUT} in {called}, in the forward of {where}; pass that {kind} to optimize(), and put the result in its "
        "place"
    )


def _holds_a_module(value: object) -> bool:
    """Whether a value is or holds a module: in a collection, an object, a bound method or a variable of a function."""
    return any(is_a(one, nn.Module) for one in reached([value]))


def _is_near_a_module(value: object) -> bool:
    """Like :func:`_holds_a_module`, but for the first objects only: loggers and the like hold much of a program."""
    return any(is_a(one, nn.Module) for one in islice(reached([value]), _NEAR))
