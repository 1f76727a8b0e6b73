"""Finds attentions that methods of an optimized module run uncompiled.

An inner module that a method calls is compiled if the method's code names the attributes that lead to the inner module
(:mod:`mla_compile.core.inner`). If the optimized module's own methods run an attention in their code, the method that
computes one step is compiled from the next call on. Any other attention runs uncompiled, and a warning says so.
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
"""How many calls of a method are watched. If none of them runs an attention, later calls are not expected to either."""

_NEAR = 1000
"""How many objects that a value leads to are searched for a module."""

_left: weakref.WeakKeyDictionary[nn.Module, dict[str, int]] = weakref.WeakKeyDictionary()
"""Module -> method -> how many more calls of the method are watched."""


class _ThreadWatch(threading.local):
    current: _Watch | None = None
    within = False


_thread = _ThreadWatch()


class OwnMethod(Added):
    """Replaces a method on an optimized module. It calls the method of the module's class, and watches the call."""

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
    """Watch a call of a method, or a piece of a call, unless it runs inside a call that is watched or compiled."""
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
    """Compile the method ``step``, or warn about what ran in ``name``. Return whether to watch the next call.

    The step is compiled from the next call of ``name`` on, not already from the next step. Uncompiled steps made the
    cache of the present call, and compiled steps expect a cache of another form.
    """
    forward: Any = vars(module)["forward"]
    can = step is not None and isinstance(vars(module).get(step), (OwnMethod, NoneType))
    if can:
        forward.compile_method(step)
    else:
        forward.tell_left_out(_message(module, name, ran))
    return can


def _is_within_forward(module: nn.Module) -> bool:
    """Whether the forward of the class calls the method. The caller then chose to run the forward uncompiled."""
    forward, frame = inspect.unwrap(type(module).forward), sys._getframe()
    while frame.f_back is not None and frame.f_code is not getattr(forward, "__code__", None):
        frame = frame.f_back
    return frame.f_back is not None


def watch_methods(module: nn.Module) -> None:
    """Watch the methods of an optimized module whose code names a holder of modules, or another watched method.

    A holder may be an attribute of the object or of its class, a global, or a variable of another function. If the
    class has operators, such as ``self[i]``, all methods are watched, because code can use an operator without naming
    it.
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
    """Undo :func:`watch_methods`, and remove the methods that were compiled since then."""
    for name, value in list(vars(module).items()):
        later = is_a(value, MethodType) and hasattr(value.__func__, _IN_PIECES)
        if name != "forward" and (later or is_a(value, (OwnMethod, OwnForward))):
            del vars(module)[name]


@contextmanager
def compiled() -> Iterator[None]:
    """Surround a call of compiled code, so that the watched method that makes the call, if any, is not reported."""
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
    """Watches the functions of torch that a method calls.

    Attributes:
        wanted: whether the module's forward calls the method.
        compiled: whether the method called anything compiled.
        ran: the modules whose forwards ran the first attention, outer modules first. Empty if no forward ran it, and
            None before the first attention.
        step: the method of ``module`` to compile if the attention ran in no forward; None if there is no such method.
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
        """Call the function. If it is the first attention, record where it ran."""
        result = func(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling() and self.ran is None and self._is_attention(func, args, result):
            frames = frames_below((OwnMethod.__call__.__code__, driven.__code__))
            self.ran = modules_called(frames)
            self.step = None if self.ran else step_among(frames, self.module)
        return result

    def _is_attention(self, func: Any, args: Sequence[Any], result: Any) -> bool:
        """Whether a function is an attention, or a product with a tensor of the shape of an earlier softmax."""
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
    """Whether a value is a module or holds one in a collection, object, bound method or variable of a function."""
    return any(is_a(one, nn.Module) for one in reached([value]))


def _is_near_a_module(value: object) -> bool:
    """Like :func:`_holds_a_module`, but search only the first objects, because a logger may hold most of a program."""
    return any(is_a(one, nn.Module) for one in islice(reached([value]), _NEAR))
