"""Modules within a model that its methods may call on their own, and copies of them.

These are models, which have layers, and whatever a method names as an attribute: modules with submodules, and those in
a ``ModuleList``, ``Sequential`` or ``ModuleDict``, or in a plain list, tuple or dict. What the method of one module
names may also be an attribute of a module below it, as in ``for layer in self.layers: layer.attention(x)``.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from mla_compile.core.modules import shallow

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
PLAIN = (list, tuple, dict)
NOT_COPIED = (fx.GraphModule, torch.jit.ScriptModule, OptimizedModule, *CONTAINERS)

Names = frozenset[str]
Replace = Callable[[nn.Module, str, Names], nn.Module]
"""Return what takes the place of a module that is called, given its path and the names that methods above it name."""


def methods_of(kind: type[nn.Module]) -> dict[str, FunctionType]:
    """The methods of a module's class, inherited ones included, except ``forward`` and those of ``nn.Module``."""
    found: dict[str, FunctionType] = {}
    for one in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name, value in vars(one).items():
            special = name.startswith("__") and name != "__call__"
            if isinstance(value, FunctionType) and name != "forward" and not special:
                found.setdefault(name, value)
    return found


def names_in(method: FunctionType, kind: type[nn.Module]) -> Names:
    """What the code of a method names: attributes and globals, and those of the properties of ``kind`` among them.

    Functions within the method count as its code.
    """
    names, left = set[str](), [method]
    while left:
        new = {name for code in _codes(inspect.unwrap(left.pop()).__code__) for name in code.co_names} - names
        names |= new
        left += [getter for name in new if (getter := _getter(kind, name)) is not None]
    return frozenset(names)


def _getter(kind: type[nn.Module], name: str) -> FunctionType | None:
    """The function of a property."""
    found = inspect.getattr_static(kind, name, None)
    function = found.fget if isinstance(found, property) else getattr(found, "func", None)
    return function if isinstance(function, FunctionType) else None


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes(value)


def _named(kind: type[nn.Module]) -> Names:
    """What the public methods of a class name, and the private ones that they name."""
    methods = methods_of(kind)
    names, left = set[str](), [name for name in methods if name == "__call__" or not name.startswith("_")]
    while left:
        new = names_in(methods.pop(left.pop()), kind) - names
        names |= new
        left += [name for name in new if name.startswith("_") and name in methods]
    return frozenset(names)


def copy_called(
    root: nn.Module, original: nn.Module, model: Callable[[nn.Module], nn.Module], other: Callable[[Any], Any]
) -> None:
    """Replace each module within ``root``, a copy of ``original``, that methods may call on their own by a copy.

    ``model`` copies a module with layers, ``other`` any other. ``root``, the copies and the containers on the way get
    dicts of submodules of their own and share everything else. Methods of copied modules that were set as attributes
    become those of the copies.
    """
    copies: dict[nn.Module, nn.Module] = {}

    def replaced(module: nn.Module, path: str, names: Names) -> nn.Module:
        if module not in copies:
            copies[module] = model(module) if _has_layers(module) else other(module)
            visit(copies[module], path, names)
        return copies[module]

    def visit(owner: nn.Module, path: str, names: Names) -> None:
        modules, attributes = _with_called(owner, path, names, replaced)
        if modules:
            vars(owner)["_modules"] = copy.copy(owner._modules)
            owner._modules.update(modules)
        vars(owner).update(attributes)

    visit(root, "", frozenset())
    copies[original] = root
    for owner in copies.values():
        for name, value in list(vars(owner).items()):
            # The forward of a copy is another's affair, and so is what wrappers keep of it.
            if "forward" not in name:
                vars(owner)[name] = _rebound(value, copies)


def _rebound(value: Any, copies: Mapping[nn.Module, nn.Module]) -> Any:
    """A method of a module that was copied, also within a ``partial``, as a method of the copy."""
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module) and value.__self__ in copies:
        return MethodType(value.__func__, copies[value.__self__])
    if type(value) is partial:
        args = [copies.get(one, one) if isinstance(one, nn.Module) else one for one in value.args]
        return partial(_rebound(value.func, copies), *args, **value.keywords)
    return value


def called_within(root: nn.Module) -> dict[nn.Module, str]:
    """The modules that :func:`copy_called` copies, outer ones first, and their paths from ``root``."""
    found: dict[nn.Module, str] = {}

    def seen(module: nn.Module, path: str, names: Names) -> nn.Module:
        if module not in found:
            found[module] = path
            _with_called(module, path, names, seen)
        return module

    _with_called(root, "", frozenset(), seen)
    return found


def models_within(root: nn.Module) -> list[nn.Module]:
    """Those of :func:`called_within` that have layers."""
    return [module for module in called_within(root) if _has_layers(module)]


def _with_called(owner: nn.Module, path: str, names: Names, replace: Replace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The submodules and the plain attributes of ``owner`` that are, or hold, modules that are called; replaced."""
    names = names | _named(type(owner))
    found: list[dict[str, Any]] = []
    for held in (owner._modules, {k: v for k, v in vars(owner).items() if k in names and type(v) in PLAIN}):
        new = _each(held, path, names, replace, lambda key: key in names)
        found.append({key: value for key, value in new.items() if value is not held[key]})
    modules, attributes = found
    return modules, attributes


def _each(
    held: Mapping[Any, Any], path: str, names: Names, replace: Replace, named: Callable[[Any], bool]
) -> dict[Any, Any]:
    return {
        key: _replaced(value, f"{path}.{key}" if path else str(key), names, replace, named=named(key))
        for key, value in held.items()
    }


def _replaced(value: Any, path: str, names: Names, replace: Replace, *, named: bool) -> Any:
    """``value`` with each module in it that is called replaced; the same object if there is none.

    ``named``: methods name it. Dicts of models are looked through in any case.
    """
    if isinstance(value, nn.Module):
        if _has_layers(value) or (named and _is_called(value)):
            return replace(value, path, names)
        if not isinstance(value, CONTAINERS) or not (named or isinstance(value, nn.ModuleDict)):
            return value
        items: Any = value._modules
    elif type(value) in PLAIN:
        items = value if isinstance(value, dict) else dict(enumerate(value))
    else:
        return value
    made = _each(items, path, names, replace, lambda _: named)
    if all(made[key] is one for key, one in items.items()):
        return value
    if isinstance(value, nn.Module):
        container = shallow(value)
        vars(container)["_modules"] = made
        return container
    return made if isinstance(value, dict) else type(value)(made.values())


def _is_called(module: nn.Module) -> bool:
    """Whether a module, which has no layers, may have an attention: it has submodules, and is no product of rows.

    A product's state, such as the adapter that is active, stays that of the original.
    """
    product = isinstance(getattr(module, "in_features", None), int)
    return _can_be_copied(module) and any(module.children()) and not product


def _can_be_copied(module: nn.Module) -> bool:
    # FSDP2 puts a class of its own over a module's class, and identifies the module by its identity.
    return not (isinstance(module, NOT_COPIED) or type(module).__new__ is not object.__new__ or is_parametrized(module))


def _has_layers(module: nn.Module) -> bool:
    """Whether a module is a model: a container in it has modules that have submodules."""
    if not _can_be_copied(module):
        return False
    # An adapter's factors and a parametrized module's parametrizations are in containers, too, but are no layers.
    containers = (one for one in module.modules() if isinstance(one, CONTAINERS))
    layers = (one for container in containers for one in container.children())
    return any(any(one.children()) and not isinstance(one, ParametrizationList) for one in layers)
