"""What the methods of a class name: by this, modules are found that a method may call on its own.

Only names are read. A method reaches what an attribute or a global of such a name holds, and by some names
(:data:`WAYS`) or operators all submodules.
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
    """The methods of a class, inherited ones included.

    Without ``forward`` and the methods of ``nn.Module`` if it is a module, and without the special ones that no call
    and no operator runs, such as ``self[i]``.
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
    """Whether a method runs by an operator, and not by its name."""
    return name.startswith("__") and name.endswith("__")


def is_container(kind: type) -> bool:
    """Whether the methods of a class of modules reach all submodules by operators, as in ``self[i]``.

    torch's own containers have no methods that call what they hold.
    """
    methods = methods_of(kind)
    if issubclass(kind, CONTAINERS):
        return any(not is_torchs(method) for method in methods.values())
    return any(is_special(name) and names_in(method, kind) & WAYS for name, method in methods.items())


def names_in(method: FunctionType, kind: type) -> Names:
    """What the code of a method names: attributes and globals; see :func:`functions_of`."""
    return frozenset(name for one in functions_of(method, kind) for name in _names(one))


def outside(function: FunctionType) -> Iterator[object]:
    """The values of the globals and of the variables of other functions that a function names."""
    yield from variables(function).values()
    yield from (function.__globals__[name] for name in _names(function) if name in function.__globals__)


def functions_of(method: FunctionType, kind: type) -> list[FunctionType]:
    """A method of ``kind`` and the functions that are its code as well.

    These are the properties and static methods of ``kind`` that it names, functions that it names of the same file, and
    what it decorates. Functions of other files are not asked: what they name is rarely the model's. Those of torch name
    all modules.
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
    """The function of a property, or of a static or class method."""
    found = next((vars(one)[name] for one in kind.__mro__ if name in vars(one)), None)
    return found.fget if isinstance(found, property) else getattr(found, "func", getattr(found, "__func__", None))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes(value)


def named_by(kind: type, names: Names) -> Names:
    """``names``, what the public methods of a class name, and the private ones that they or ``names`` name."""
    methods = methods_of(kind)
    found = set(names)
    left = [name for name in methods if is_special(name) or not name.startswith("_") or name in names]
    while left:
        if (method := methods.pop(left.pop(), None)) is not None:
            new = names_in(method, kind) - found
            found |= new
            left += [name for name in new if name.startswith("_")]
    return frozenset(found)
