"""Collects the names that the methods of a class use, to find the modules that a method may call directly.

Only names are read, not the code around them. A method that uses a name is assumed to reach every attribute and global
of that name. Through the names in :data:`WAYS`, and through operators, a method may reach submodules without naming
them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType

from torch import nn

from mla_compile.core.holders import is_torchs, variables
from mla_compile.core.reached import is_a

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

WAYS = frozenset({"children", "named_children", "modules", "named_modules", "get_submodule", "_modules", "getattr"})
"""Names by which a method reaches submodules without naming them."""

Names = frozenset[str]


def methods_of(kind: type) -> dict[str, FunctionType]:
    """Return the methods of a class by name, including inherited methods, but not the methods of ``nn.Module``.

    For a class of modules, these are left out: ``forward``, and overrides of special methods of ``nn.Module`` other
    than ``__call__``. For any other class, ``__init__`` and ``__post_init__`` are left out.
    """
    is_module = issubclass(kind, nn.Module)
    last = kind.__mro__.index(nn.Module if is_module else object)
    unnamed = {"forward"} if is_module else {"__init__", "__post_init__"}
    found: dict[str, FunctionType] = {}
    for one in kind.__mro__[:last]:
        for name, value in vars(one).items():
            of_torch = is_module and is_special(name) and hasattr(nn.Module, name) and name != "__call__"
            if isinstance(value, FunctionType) and name not in unnamed and not of_torch:
                found.setdefault(name, value)
    return found


def is_special(name: str) -> bool:
    """Whether ``name`` is the name of a special method such as ``__getitem__``, which Python calls for operators."""
    return name.startswith("__") and name.endswith("__")


def is_container(kind: type) -> bool:
    """Whether methods of a class of modules may reach all submodules through operators, as in ``self[i]``.

    For a subclass of torch's containers, this is True only if the subclass defines a method. Torch's own methods,
    except ``forward``, call no module.
    """
    methods = methods_of(kind)
    if issubclass(kind, CONTAINERS):
        return any(not is_torchs(method) for method in methods.values())
    return any(is_special(name) and names_in(method, kind) & WAYS for name, method in methods.items())


def names_in(method: FunctionType, kind: type) -> Names:
    """Return the names of attributes and globals in the code of all functions from :func:`functions_of`."""
    return frozenset(name for one in functions_of(method, kind) for name in _names(one))


def outside(function: FunctionType) -> Iterator[object]:
    """Yield the values of all globals and closure variables that a function uses."""
    yield from variables(function).values()
    yield from (function.__globals__[name] for name in _names(function) if name in function.__globals__)


def functions_of(method: FunctionType, kind: type) -> list[FunctionType]:
    """Return a method of ``kind``, and the functions whose code is treated as part of the method.

    If a decorator wraps the method, the wrapped function is returned instead. The other functions are in the same file,
    and the method names them or has them in its closure. They include properties, static methods and class methods of
    ``kind``. Functions of other files are left out, because their code rarely names parts of the model, and torch's
    functions name all modules.
    """
    found, left = list[FunctionType](), [method]
    while left:
        one = left.pop()
        inner = inspect.unwrap(one)
        inner = inner.__func__ if is_a(inner, MethodType) else inner
        one = inner if is_a(inner, FunctionType) else one
        if one in found or is_torchs(one):
            continue
        found.append(one)
        more: list[object] = [*variables(one).values()]
        for name in _names(one):
            more += [_getter(kind, name), one.__globals__.get(name)]
        left += [other for other in more if is_a(other, FunctionType) and other.__globals__ is one.__globals__]
    return found


def _names(function: FunctionType) -> set[str]:
    return {name for code in _codes(function.__code__) for name in code.co_names}


def _getter(kind: type, name: str) -> object:
    """Return the function of the property, static method or class method ``name``, or None."""
    found = next((vars(one)[name] for one in kind.__mro__ if name in vars(one)), None)
    return found.fget if isinstance(found, property) else getattr(found, "func", getattr(found, "__func__", None))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes(value)


def named_by(kind: type, names: Names) -> Names:
    """Return ``names``, and all names that the methods of a class use.

    A private method is read only if the method's own name is among the returned names.
    """
    methods = methods_of(kind)
    found = set(names)
    left = [name for name in methods if is_special(name) or not name.startswith("_") or name in names]
    while left:
        if (method := methods.pop(left.pop(), None)) is not None:
            new = names_in(method, kind) - found
            found |= new
            left += [name for name in new if name.startswith("_")]
    return frozenset(found)
