"""Finds what Python objects hold, directly or through other objects."""

from __future__ import annotations

import gc
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import TypeGuard, TypeVar

import torch
from torch import nn

from mla_compile.core.modules import Added

IsA = TypeVar("IsA")

_OPAQUE = (
    str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.CodeType, types.FrameType,
    types.BuiltinFunctionType, torch.dtype, torch.device,
)  # fmt: skip
_MANY = 1_000_000
"""After this many objects, :func:`reached` yields the objects already queued, and searches no further."""


def is_a(value: object, kinds: type[IsA] | tuple[type[IsA], ...]) -> TypeGuard[IsA]:
    """Whether the type of a value is one of ``kinds`` or a subclass.

    ``isinstance`` is not used, because it also reads the value's ``__class__``. A proxy's ``__class__`` is the class of
    the proxy's target, or raises if the target is gone.
    """
    return issubclass(type(value), kinds)


def reached(values: Iterable[object], *, but: Collection[int] = ()) -> Iterator[object]:
    """Yield ``values`` and all objects that they lead to. Modules and tensors are yielded, but not searched.

    The search is breadth first. It follows attributes, collections, closures, bound methods, hooks and weak references,
    but not proxies. An object whose ``id`` is in ``but`` is yielded, but not searched.
    """
    seen: dict[int, object] = {}
    left = deque(values)
    while left:
        one = left.popleft()
        if is_a(one, _OPAQUE) or id(one) in seen:
            continue
        seen[id(one)] = one
        yield one
        if id(one) not in but and len(seen) < _MANY:
            left += _held_by(one)


def _held_by(value: object) -> Iterable[object]:
    if is_a(value, (nn.Module, torch.Tensor)):
        return ()
    if is_a(value, Added):
        return (value.replaced,)
    if is_a(value, weakref.ReferenceType):
        return (value(),)
    if is_a(value, types.FunctionType):  # globals are left out, because they may hold anything
        return (value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__)
    return gc.get_referents(value)
