"""Holders: objects of Python's own classes that hold values (collections, bound methods, partials, closures)."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from mla_compile.core.reached import is_a

COLLECTIONS = (list, tuple, dict, OrderedDict, defaultdict, deque)
BOUND = (MethodType, partial)


def is_collection(value: object) -> bool:
    """Whether a value is a named tuple, or of one of Python's own collection classes (not of a subclass)."""
    return type(value) in COLLECTIONS or (is_a(value, tuple) and hasattr(type(value), "_make"))


def is_closure(value: object) -> bool:
    """Whether a value is a function that uses variables of an enclosing function.

    This is False for torch's functions. They belong to compiled code, and hold objects that the code was compiled for.
    """
    return is_a(value, FunctionType) and value.__closure__ is not None and not is_torchs(value)


def is_torchs(function: FunctionType) -> bool:
    """Whether a function is defined in a module of torch."""
    return str(function.__globals__.get("__name__")).partition(".")[0] == "torch"


def variables(function: FunctionType) -> dict[str, Any]:
    """Return a function's closure variables by name. Variables that are not set yet are left out."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    return found


def items_of(value: object) -> dict[Any, Any] | None:
    """Return the values in a holder by key, or None if ``value`` is not a holder."""
    if is_collection(value):
        return dict(value if is_a(value, dict) else enumerate(value))  # type: ignore[arg-type]
    if is_a(value, MethodType):
        return {"__self__": value.__self__}
    if type(value) is partial:
        return {**dict(enumerate((value.func, *value.args))), **value.keywords}
    return variables(value) if is_a(value, FunctionType) and is_closure(value) else None


def with_items(value: Any, items: Mapping[Any, Any]) -> Any:
    """Return a copy of the holder ``value`` with new items. The keys are as in :func:`items_of`."""
    if is_a(value, MethodType):
        return MethodType(value.__func__, items["__self__"])
    if is_a(value, partial):
        function, *args = (items[at] for at in range(1 + len(value.args)))
        return partial(function, *args, **{name: items[name] for name in value.keywords})
    if is_a(value, FunctionType):
        return _with_variables(value, items)
    if is_a(value, tuple):
        make: Any = getattr(type(value), "_make", tuple)
        return make(items.values())
    made = copy.copy(value)
    for key, one in items.items():
        made[key] = one
    return made


def _with_variables(function: FunctionType, new: Mapping[str, Any]) -> FunctionType:
    """Return a copy of the function with ``new`` values for its closure variables.

    Variables that do not change stay shared. If a variable holds ``function`` itself, the copy's variable holds the
    copy.
    """
    now = variables(function)
    changed = {name: CellType(one) for name, one in new.items() if one is function or one is not now[name]}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = tuple(changed.get(name, cell) for name, cell in cells)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
    for name in ("__kwdefaults__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        setattr(made, name, getattr(function, name))
    vars(made).update(vars(function))
    for cell in changed.values():
        if cell.cell_contents is function:
            cell.cell_contents = made
    return made
