"""Tells when a method of an optimized module runs an attention outside of everything that is compiled.

What a method calls is compiled where its code names the way to it (:mod:`mla_compile.core.inner`). A module in an
object of another class, or an attention in the method's own code, runs as it came.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves

from mla_compile.core.inner import methods_of, names_in
from mla_compile.core.modules import Added
from mla_compile.core.objects import reached
from mla_compile.core.tracing import is_traced
from mla_compile.dynamo.candidates import PRODUCTS
from mla_compile.dynamo.recompiles import running
from mla_compile.report.report import LEFT_OUT

_CALLS = 8
"""How often a method is watched. One that runs no attention by then is taken for one that never does."""

_WAYS = frozenset({"children", "named_children", "modules", "named_modules", "get_submodule", "_modules"})
"""Names by which a method reaches submodules without naming them."""


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
        self.left = _CALLS
        functools.update_wrapper(self, function)
        self.__signature__ = inspect.signature(MethodType(function, module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method; its result."""
        method = getattr(type(self.module), self.name)
        if is_traced() or _thread.within or running() is not None:
            return method(self.module, *args, **kwargs)
        _thread.within = True
        try:
            return self._watched(*args, **kwargs) if self.left else method(self.module, *args, **kwargs)
        finally:
            _thread.within = False

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        _thread.current = watch = _Watch()
        try:
            with watch:
                return getattr(type(self.module), self.name)(self.module, *args, **kwargs)
        finally:
            _thread.current = None
            if watch.compiled or watch.ran is not None:
                self.left = 0
            if watch.ran is not None and not watch.compiled and not self._is_within_forward():
                vars(self.module)["forward"].tell_left_out(_message(self, watch.ran))

    def _is_within_forward(self) -> bool:
        """Whether the forward of the class calls the method: whoever called that wanted what is not compiled."""
        forward, frame = inspect.unwrap(type(self.module).forward), sys._getframe()
        while frame.f_back is not None and frame.f_code is not getattr(forward, "__code__", None):
            frame = frame.f_back
        return frame.f_back is not None

    def __reduce__(self) -> tuple[object, ...]:
        return OwnMethod, (self.module, self.name)


def watch_methods(module: nn.Module) -> None:
    """Watch the methods of an optimized module whose code names what holds modules."""
    holding = {*_WAYS, *module._modules, *(name for name, value in vars(module).items() if _holds_a_module(value))}
    for name, method in methods_of(type(module)).items():
        later = inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method)
        if name != "__call__" and name not in vars(module) and not later and names_in(method, type(module)) & holding:
            vars(module)[name] = OwnMethod(module, name)


def unwatch(module: nn.Module) -> None:
    """Undo :func:`watch_methods`."""
    for name in [name for name, value in vars(module).items() if isinstance(value, OwnMethod)]:
        del vars(module)[name]


@contextmanager
def compiled() -> Iterator[None]:
    """Surrounds a call of something that is compiled: its method, if there is one, has nothing to tell."""
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
        compiled: whether something compiled was called.
        ran: the modules, outer ones first, in whose forwards an attention ran; None if none did.
    """

    def __init__(self) -> None:
        super().__init__()
        self.compiled = False
        self.ran: list[nn.Module] | None = None
        self._weights: set[torch.Size] = set()

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Call the function, and look at what it is."""
        result = func(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling() and self.ran is None and self._is_attention(func, args, result):
            self.ran = _modules_called()
        return result

    def _is_attention(self, func: Any, args: Sequence[Any], result: Any) -> bool:
        """Whether a function is an attention, or a product with what a softmax made of scores."""
        name = str(getattr(func, "__name__", "")).lower()
        if "softmax" in name and isinstance(result, Tensor) and result.dim() > 2:
            self._weights.add(result.shape)
        product = bool(self._weights) and name in PRODUCTS
        tensors = (one for one in tree_leaves(args) if isinstance(one, Tensor)) if product else ()
        return "attention" in name or "attn" in name or any(one.shape in self._weights for one in tensors)


def _modules_called() -> list[nn.Module]:
    """The modules that are being called below the watched method, outer ones first."""
    found: list[nn.Module] = []
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not OwnMethod.__call__.__code__:
        if frame.f_code is nn.Module._call_impl.__code__:
            found.insert(0, frame.f_locals["self"])
        frame = frame.f_back
    return found


def _message(method: OwnMethod, ran: Sequence[nn.Module]) -> str:
    called = f"{type(method.module).__name__}.{method.name}()"
    if not ran:
        return (
            f"{LEFT_OUT} in {called} itself; compile that method: "
            f'model.{method.name} = torch.compile(model.{method.name}, backend="mla")'
        )
    kind = type(ran[0]).__name__
    return (
        f"{LEFT_OUT} in {called}, in the forward of a {kind}; pass that {kind} to optimize(), and put the result in "
        "its place"
    )


def _holds_a_module(value: object) -> bool:
    """Whether a value is or holds a module: in a collection, an object, a bound method or a variable of a function."""
    return any(isinstance(one, nn.Module) for one in reached([value]))
