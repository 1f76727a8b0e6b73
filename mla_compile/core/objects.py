"""Reads and copies plain Python objects that hold modules."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from threading import Thread
from types import MemberDescriptorType, SimpleNamespace
from typing import Any

from torch import nn

from mla_compile.core.modules import Added
from mla_compile.core.reached import is_a

_MEANT_OTHERWISE = (
    "__copy__",
    "__deepcopy__",
    "__reduce__",
    "__reduce_ex__",
    "__del__",
    "__setattr__",
    "__getattribute__",
)
"""Methods of objects that must not be copied: shared objects, proxies, and objects that are closed only once."""


def is_plain(value: object) -> bool:
    """Whether a value is not a module, and its class is written in Python and creates objects in the ordinary way."""
    kind = type(value)
    if kind is SimpleNamespace:
        return True
    return kind.__new__ is object.__new__ and kind is not object and not is_a(value, (nn.Module, Added))


def can_be_copied(value: object) -> bool:
    """Whether a value is a plain object whose shallow copy behaves like the object itself.

    This is False for:

    * objects of torch's own classes, which record the modules that they were made for,
    * threads,
    * objects whose metaclass has its own ``__call__``, because the class may be a singleton,
    * objects whose class has a method in :data:`_MEANT_OTHERWISE`.
    """
    kind = type(value)
    if kind is SimpleNamespace:
        return True
    if not is_plain(value) or is_a(value, Thread) or kind.__module__.partition(".")[0] == "torch":
        return False
    frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
    # The __setattr__ of a frozen dataclass only raises.
    names = (name for name in _MEANT_OTHERWISE if not (frozen and name == "__setattr__"))
    ordinary = all(getattr(kind, name, None) is getattr(object, name, None) for name in names)
    return ordinary and type(kind).__call__ is type.__call__


def attributes(value: object) -> dict[str, Any]:
    """Return the attributes of a plain object, including slots, without running code of its class."""
    found = {}
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            with suppress(AttributeError):  # a slot that was not set
                if isinstance(slot, MemberDescriptorType) and name != "__dict__":
                    found[name] = slot.__get__(value)
    with suppress(AttributeError):  # an object that has only slots
        found.update(object.__getattribute__(value, "__dict__"))
    return found


def shallow_object(value: Any) -> Any:
    """Return a new object of the class of ``value`` with the same attributes."""
    kind: Any = type(value)
    made = kind.__new__(kind)
    set_attributes(made, attributes(value))
    return made


def set_attributes(value: object, new: Mapping[str, Any]) -> None:
    """Set attributes of a plain object without calling its ``__setattr__``, which raises in a frozen dataclass."""
    for name, one in new.items():
        slot = inspect.getattr_static(type(value), name, None)
        if isinstance(slot, MemberDescriptorType):
            slot.__set__(value, one)
        else:
            vars(value)[name] = one
