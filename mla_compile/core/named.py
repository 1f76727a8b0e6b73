"""The names that the methods of a class use, to find the modules that a method may call directly.

Only names are read: a method is assumed to reach what an attribute or a global of that name holds, and all submodules
if it uses certain names (:data:`WAYS`) or operators.
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
    """The methods of a class, inherited ones included, except those of ``nn.Module``.

    Also left out are a module's ``forward`` and its overrides of special methods of ``nn.Module`` (but ``__call__``),
    and ``__init__`` and ``__post_init__`` of any other class.
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
    """Whether a name is that of a special method, such as ``__getitem__``, which Python calls for an operator."""
    return name.startswith("__") and name.endswith("__")


def is_container(kind: type) -> bool:
    """Whether the methods of a class of modules may reach all submodules by operators, as in ``self[i]``.

    A subclass of torch's containers needs a method of its own: torch's, except ``forward``, call no module.
    """
    methods = methods_of(kind)
    if issubclass(kind, CONTAINERS):
        return any(not is_torchs(method) for method in methods.values())
    return any(is_special(name) and names_in(method, kind) & WAYS for name, method in methods.items())


def names_in(method: FunctionType, kind: type) -> Names:
    """What the code of a method names: attributes and globals; see :func:`functions_of`."""
    return frozenset(name for one in functions_of(method, kind) for name in _names(one))


def outside(function: FunctionType) -> Iterator[object]:
    """The values of the globals, and of the variables of enclosing functions, that a function names."""
    yield from variables(function).values()
    yield from (function.__globals__[name] for name in _names(function) if name in function.__globals__)


def functions_of(method: FunctionType, kind: type) -> list[FunctionType]:
    """A method of ``kind`` and the functions whose code counts as its own.

    If the method is a decorator's wrapper, the function inside stands for it. Also returned are functions of the
    same file that it names or has in its closure, and properties, static and class methods of ``kind`` that it names.
    Functions of other files are left out: what they name is rarely the model's, and those of torch name all modules.
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
    """The function of the property, or static or class method, with that name; None if there is none."""
    found = next((vars(one)[name] for one in kind.__mro__ if name in vars(one)), None)
    return found.fget if isinstance(found, property) else getattr(found, "func", getattr(found, "__func__", None))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes(value)


def named_by(kind: type, names: Names) -> Names:
    """``names``, and the names in a class's public and special methods, and in private methods that are named."""
    methods = methods_of(kind)
    found = set(names)
    left = [name for name in methods if is_special(name) or not name.startswith("_") or name in names]
    while left:
        if (method := methods.pop(left.pop(), None)) is not None:
            new = names_in(method, kind) - found
            found |= new
            left += [name for name in new if name.startswith("_")]
    return frozenset(found)
