"""Finds and copies the modules within a model that the model's methods may call directly.

There are two kinds of such modules. The first kind is a model, which has layers. The second kind has submodules, and is
found in an attribute that a method names. The module may be inside a ``ModuleList``, ``Sequential`` or ``ModuleDict``,
a collection or closure (:mod:`mla_compile.core.holders`), or another object (:mod:`mla_compile.core.objects`). The
attribute may belong to an inner module or object, as in ``for layer in self.layers: layer.attention(x)``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from mla_compile.core.holders import (
    BOUND,
    COLLECTIONS,
    is_closure,
    is_collection,
    items_of,
    variables,
    with_items,
)
from mla_compile.core.modules import shallow
from mla_compile.core.named import CONTAINERS, Names, is_container, named_by, names_in
from mla_compile.core.objects import attributes, can_be_copied, set_attributes, shallow_object
from mla_compile.core.reached import is_a, reached

NOT_COPIED = (fx.GraphModule, torch.jit.ScriptModule, OptimizedModule, *CONTAINERS)


def copy_called(
    root: nn.Module, original: nn.Module, model: Callable[[nn.Module], nn.Module], other: Callable[[Any], Any]
) -> None:
    """Copy each module within ``root`` that methods may call directly. ``root`` is a copy of ``original``.

    ``model`` copies a module with layers, and ``other`` copies any other module. Containers and objects that lead to
    copied modules are also copied. Everything else is shared. Bound methods of copied objects are bound to the copies.
    """
    copies: dict[int, Any] = {id(original): root, id(root): root}
    found = _Finding.of(root, original)
    _Copying(found, copies, model, other).visit(root, "", found.names[id(root)])
    for owner in copies.values():
        own = vars(owner) if isinstance(owner, nn.Module) else attributes(owner)
        # Other code sets the attributes that hold forwards.
        rebound = {name: _rebound(value, copies) for name, value in own.items() if "forward" not in name}
        changed = {name: value for name, value in rebound.items() if value is not own[name]}
        set_attributes(owner, changed)


def _rebound(value: Any, copies: Mapping[int, Any]) -> Any:
    """Return ``value`` with each method of a copied object, also inside a ``partial``, bound to the copy."""
    if is_a(value, MethodType) and id(value.__self__) in copies:
        return MethodType(value.__func__, copies[id(value.__self__)])
    if type(value) is partial:
        args = [copies.get(id(one), one) for one in value.args]
        return partial(_rebound(value.func, copies), *args, **value.keywords)
    return value


def called_within(root: nn.Module) -> dict[nn.Module, str]:
    """Return the modules that :func:`copy_called` copies, with their paths from ``root``. Outer modules come first."""
    return _Finding.of(root, root).modules


def models_within(root: nn.Module) -> list[nn.Module]:
    """Return the modules of :func:`called_within` that have layers."""
    return [module for module in called_within(root) if _has_layers(module)]


class _Visit:
    """Follows the names in a module's methods to the modules that these methods may call directly."""

    def __init__(self, roots: tuple[nn.Module, nn.Module]) -> None:
        self.roots = roots
        self.within_functions: list[FunctionType] = []

    def module(self, module: nn.Module, path: str, names: Names) -> Any:
        """Return the replacement of a called module. ``names``: the names that methods of outer modules use."""
        raise NotImplementedError

    def other(self, value: Any, path: str, names: Names) -> Any:
        """Return the replacement of an object that is not a module."""
        raise NotImplementedError

    def holder(self, value: Any, items: dict[Any, Any]) -> Any:
        """Return the replacement of a container or holder. ``items`` are the new contents."""
        raise NotImplementedError

    def below(self, owner: nn.Module, path: str, names: Names) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the replacements of submodules, and of other attributes, that lead to called modules."""
        names = named_by(type(owner), names)
        names |= {name for name, value in vars(owner).items() if is_closure(value) and not name.startswith("_")}
        own = {name: value for name, value in vars(owner).items() if name != "_modules"}
        own = {name: value for name, value in own.items() if _may_lead(name, value, named=name in names)}
        whole = is_container(type(owner)) or "_modules" in names
        modules = {key: (value, whole or key in names) for key, value in owner._modules.items()}
        others = {key: (value, key in names) for key, value in own.items()}
        return self.each(modules, path, names), self.each(others, path, names)

    def within(self, value: Any, path: str, names: Names) -> dict[Any, Any]:
        """Return the replacements of an object's attributes that lead to called modules."""
        names = named_by(type(value), names)
        return self.each({key: (one, key in names) for key, one in attributes(value).items()}, path, names)

    def each(self, held: Mapping[Any, tuple[Any, bool]], path: str, names: Names) -> dict[Any, Any]:
        """Return a dict: key -> replacement of the value. Values without a replacement are left out.

        ``held`` maps each key to a value, and to whether a method names the key.
        """
        made = {
            key: self.replaced(value, f"{path}.{key}" if path else str(key), names, named=named)
            for key, (value, named) in held.items()
        }
        return {key: value for key, value in made.items() if value is not held[key][0]}

    def replaced(self, value: Any, path: str, names: Names, *, named: bool) -> Any:
        """Replace each called module in ``value``. Return ``value`` itself if there is no called module.

        A ``ModuleDict`` is searched for models even if no method names the dict.
        """
        items: Mapping[Any, Any] | None
        if is_a(value, nn.Module):
            if value in self.roots or _has_layers(value) or (named and _is_called(value)):
                return self.module(value, path, names)
            if not isinstance(value, CONTAINERS) or not (named or isinstance(value, nn.ModuleDict)):
                return value
            items = value._modules
        elif (items := items_of(value)) is None:
            return self.other(value, path, names) if named and can_be_copied(value) else value
        named = named or type(value) in BOUND
        function = value.__func__ if is_a(value, MethodType) else value
        if is_a(function, FunctionType):
            if not named or function in self.within_functions:  # the second condition: the function calls itself
                return value
            names |= names_in(function, object)
            self.within_functions.append(function)
        made = self.each({key: (one, named) for key, one in items.items()}, path, names)
        if is_a(function, FunctionType):
            self.within_functions.pop()
        return self.holder(value, {**items, **made}) if made else value


def _may_lead(name: str, value: Any, *, named: bool) -> bool:
    """Whether an attribute that is not a module may lead to modules.

    Two kinds of functions do not: functions that wrappers keep (in attributes with ``forward`` in the name), and
    closures that replace a method of ``nn.Module``.
    """
    if type(value) in BOUND or is_closure(value):
        return "forward" not in name and (type(value) in BOUND or (named and not hasattr(nn.Module, name)))
    return named and (is_collection(value) or can_be_copied(value))


class _Finding(_Visit):
    """Finds the called modules, and changes nothing.

    Attributes:
        modules: the called modules, with their paths.
        staying: the ids of objects that must not be copied, because an uncopied object also holds them.
        objects: id -> object, for the objects that lead to called modules and are not in ``staying``.
        functions: id -> closure, for the closures that lead to called modules.
        names: id of a module or object -> all names that methods on the paths to it use.
    """

    def __init__(self, root: nn.Module, original: nn.Module, staying: Collection[int]) -> None:
        super().__init__((root, original))
        self.staying = staying
        self.modules: dict[nn.Module, str] = {}
        self.objects: dict[int, Any] = {}
        self.functions: dict[int, Any] = {}
        self.names: dict[int, Names] = {}

    @classmethod
    def of(cls, root: nn.Module, original: nn.Module) -> _Finding:
        """Search from ``root`` until ``staying`` has every object that an uncopied object also holds."""
        staying: set[int] = set()
        while True:
            search = cls(root, original, staying)
            search._all()
            more = search._held_elsewhere() if search.objects else set()
            if not more:
                return search
            staying |= more

    def _all(self) -> None:
        """Search until nothing new is found, because one search may miss objects that hold each other."""
        before = -1
        while len(self.objects) > before:
            before = len(self.objects)
            self.names.clear()
            self.functions.clear()
            self.module(self.roots[0], "", frozenset())

    def module(self, module: nn.Module, path: str, names: Names) -> Any:
        """Record a module, and search below it."""
        if module in self.roots:
            module, path = self.roots[0], ""
        elif module not in self.modules:
            self.modules[module] = path
        if self._is_news(module, names):
            self.below(module, path, self.names[id(module)])
        return _FOUND

    def other(self, value: Any, path: str, names: Names) -> Any:
        """Record an object if it leads to modules."""
        news = id(value) not in self.staying and self._is_news(value, names)
        if news and self.within(value, path, self.names[id(value)]):
            self.objects[id(value)] = value
        return _FOUND if id(value) in self.objects else value

    def _is_news(self, value: object, names: Names) -> bool:
        """Record ``names`` for a value. Return whether the value, or any of the names, is new."""
        known = self.names.get(id(value))
        self.names[id(value)] = names | (known or frozenset())
        return known is None or not names <= known

    def holder(self, value: Any, items: dict[Any, Any]) -> Any:
        """Report that the holder leads to a called module, and record the holder if it is a closure."""
        if is_a(value, FunctionType):
            self.functions[id(value)] = value
        return _FOUND

    def _held_elsewhere(self) -> set[int]:
        """Return the ids of found objects that an uncopied object also holds. Copies would split the shared state."""
        copied = {*self.roots, *self.modules}
        own = [value for module in copied for value in vars(module).values()]
        own += [value for one in self.objects.values() for value in attributes(one).values()]
        own += [value for one in self.functions.values() for value in variables(one).values()]
        replaced = {**self.objects, **self.functions}
        keeping = [
            one
            for one in reached(own, but=replaced)
            if id(one) not in replaced and not is_a(one, (*COLLECTIONS, *BOUND, nn.Module))
        ]
        for module in self.roots[0].modules():
            keeping += [] if module in copied else vars(module).values()
        return {id(one) for one in reached(keeping)} & set(self.objects)


_FOUND = object()


class _Copying(_Visit):
    """Copies the called modules, and the objects that lead to them."""

    def __init__(
        self,
        found: _Finding,
        copies: dict[int, Any],
        model: Callable[[nn.Module], nn.Module],
        other: Callable[[Any], Any],
    ) -> None:
        super().__init__(found.roots)
        self.found, self.copies = found, copies
        self.copy_of_model, self.copy_of_other = model, other

    def visit(self, owner: nn.Module, path: str, names: Names) -> None:
        """Replace the called modules below ``owner``, which is itself a copy."""
        modules, others = self.below(owner, path, names)
        if modules:
            vars(owner)["_modules"] = copy.copy(owner._modules)
            owner._modules.update(modules)
        vars(owner).update(others)

    def module(self, module: nn.Module, path: str, names: Names) -> Any:
        """Return the copy of a module."""
        if id(module) not in self.copies:
            self.copies[id(module)] = made = (self.copy_of_model if _has_layers(module) else self.copy_of_other)(module)
            self.visit(made, path, self.found.names[id(module)])
        return self.copies[id(module)]

    def other(self, value: Any, path: str, names: Names) -> Any:
        """Return the copy of an object that leads to modules. Return any other object itself."""
        if id(value) not in self.found.objects:
            return value
        if id(value) not in self.copies:
            self.copies[id(value)] = made = shallow_object(value)
            set_attributes(made, self.within(value, path, self.found.names[id(value)]))
        return self.copies[id(value)]

    def holder(self, value: Any, items: dict[Any, Any]) -> Any:
        """Return a copy of a container or holder with ``items`` as its contents."""
        if isinstance(value, nn.Module):
            container = shallow(value)
            vars(container)["_modules"] = items
            return container
        return with_items(value, items)


def _is_called(module: nn.Module) -> bool:
    """Whether a module without layers may contain an attention: it has submodules, and is not a linear layer.

    A linear layer is never copied, so that changes of its state, such as the active adapter, take effect everywhere.
    """
    product = isinstance(getattr(module, "in_features", None), int)
    return _can_be_copied(module) and any(module.children()) and not product


def _can_be_copied(module: nn.Module) -> bool:
    # FSDP2 gives a module a class with its own __new__, and looks the module up by identity. A copy would not work.
    return not (isinstance(module, NOT_COPIED) or type(module).__new__ is not object.__new__ or is_parametrized(module))


def _has_layers(module: nn.Module) -> bool:
    """Whether a module is a model: a container in it holds modules that have submodules."""
    if not _can_be_copied(module):
        return False
    # Containers may also hold adapters' factors or parametrizations, which are not layers.
    containers = (one for one in module.modules() if isinstance(one, CONTAINERS))
    layers = (one for container in containers for one in container.children())
    return any(any(one.children()) and not isinstance(one, ParametrizationList) for one in layers)
