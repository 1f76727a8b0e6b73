"""Modules within a model that its methods may call directly, and copies of them.

These are models (modules with layers), and any other module that has submodules and is in an attribute that a method
names. Such a module may also be in a ``ModuleList``, ``Sequential`` or ``ModuleDict``, in a collection or a closure
(:mod:`mla_compile.core.holders`), or in an object of any other class (:mod:`mla_compile.core.objects`). An attribute
that a method names may also belong to a module or an object below the method's own, as in ``for layer in self.layers:
layer.attention(x)``.
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
    """Within ``root``, a copy of ``original``, replace each module that methods may call directly by a copy.

    ``model`` copies a module with layers, ``other`` any other module. The containers and objects that lead to copies
    are copied, too; everything else is shared. Attributes that are bound methods of copied modules or objects are bound
    to the copies instead.
    """
    copies: dict[int, Any] = {id(original): root, id(root): root}
    found = _Finding.of(root, original)
    _Copying(found, copies, model, other).visit(root, "", found.names[id(root)])
    for owner in copies.values():
        own = vars(owner) if isinstance(owner, nn.Module) else attributes(owner)
        # The forward of a copy, and the original forward that wrappers keep, are set by other code.
        rebound = {name: _rebound(value, copies) for name, value in own.items() if "forward" not in name}
        changed = {name: value for name, value in rebound.items() if value is not own[name]}
        set_attributes(owner, changed)


def _rebound(value: Any, copies: Mapping[int, Any]) -> Any:
    """Return a method of a copied object, also inside a ``partial``, bound to the copy instead."""
    if is_a(value, MethodType) and id(value.__self__) in copies:
        return MethodType(value.__func__, copies[id(value.__self__)])
    if type(value) is partial:
        args = [copies.get(id(one), one) for one in value.args]
        return partial(_rebound(value.func, copies), *args, **value.keywords)
    return value


def called_within(root: nn.Module) -> dict[nn.Module, str]:
    """The modules that :func:`copy_called` copies, outer ones first, and their paths from ``root``."""
    return _Finding.of(root, root).modules


def models_within(root: nn.Module) -> list[nn.Module]:
    """The modules of :func:`called_within` that have layers."""
    return [module for module in called_within(root) if _has_layers(module)]


class _Visit:
    """Follows what the methods of a module name to the modules that they may call directly."""

    def __init__(self, roots: tuple[nn.Module, nn.Module]) -> None:
        self.roots = roots
        self.within_functions: list[FunctionType] = []

    def module(self, module: nn.Module, path: str, names: Names) -> Any:
        """The replacement of a called module; ``names``: what the methods of its owners name."""
        raise NotImplementedError

    def other(self, value: Any, path: str, names: Names) -> Any:
        """The replacement of any other object."""
        raise NotImplementedError

    def holder(self, value: Any, items: dict[Any, Any]) -> Any:
        """The replacement of a container or a holder, with ``items``."""
        raise NotImplementedError

    def below(self, owner: nn.Module, path: str, names: Names) -> tuple[dict[str, Any], dict[str, Any]]:
        """The replacements of the submodules and of the attributes of ``owner`` that are or hold called modules."""
        names = named_by(type(owner), names)
        names |= {name for name, value in vars(owner).items() if is_closure(value) and not name.startswith("_")}
        own = {name: value for name, value in vars(owner).items() if name != "_modules"}
        own = {name: value for name, value in own.items() if _may_lead(name, value, named=name in names)}
        whole = is_container(type(owner)) or "_modules" in names
        modules = {key: (value, whole or key in names) for key, value in owner._modules.items()}
        others = {key: (value, key in names) for key, value in own.items()}
        return self.each(modules, path, names), self.each(others, path, names)

    def within(self, value: Any, path: str, names: Names) -> dict[Any, Any]:
        """The replacements of those attributes of an object that are or hold called modules."""
        names = named_by(type(value), names)
        return self.each({key: (one, key in names) for key, one in attributes(value).items()}, path, names)

    def each(self, held: Mapping[Any, tuple[Any, bool]], path: str, names: Names) -> dict[Any, Any]:
        """The replacements that differ from the values in ``held``: key -> value, whether a method names the key."""
        made = {
            key: self.replaced(value, f"{path}.{key}" if path else str(key), names, named=named)
            for key, (value, named) in held.items()
        }
        return {key: value for key, value in made.items() if value is not held[key][0]}

    def replaced(self, value: Any, path: str, names: Names, *, named: bool) -> Any:
        """``value`` with each called module in it replaced; the same object if there is none.

        A ``ModuleDict`` is searched for models even if no method names it.
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
            if not named or function in self.within_functions:  # the latter: a function that calls itself
                return value
            names |= names_in(function, object)
            self.within_functions.append(function)
        made = self.each({key: (one, named) for key, one in items.items()}, path, names)
        if is_a(function, FunctionType):
            self.within_functions.pop()
        return self.holder(value, {**items, **made}) if made else value


def _may_lead(name: str, value: Any, *, named: bool) -> bool:
    """Whether an attribute that is not a module may lead to modules.

    Functions that wrappers keep do not (their names contain ``forward``), nor does a closure in the place of a method
    of ``nn.Module``.
    """
    if type(value) in BOUND or is_closure(value):
        return "forward" not in name and (type(value) in BOUND or (named and not hasattr(nn.Module, name)))
    return named and (is_collection(value) or can_be_copied(value))


class _Finding(_Visit):
    """Finds the called modules, and changes nothing.

    Attributes:
        modules: the called modules, with their paths.
        staying: the identities of objects that are not copied, because something uncopied holds them, too.
        objects: the objects that lead to called modules, by identity, without those in ``staying``.
        functions: the closures that lead to called modules, by identity.
        names: for each module or object, by identity, all names that methods on the ways to it use.
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
        """The search from ``root``, without objects that are also held by something uncopied."""
        staying: set[int] = set()
        while True:
            search = cls(root, original, staying)
            search._all()
            more = search._held_elsewhere() if search.objects else set()
            if not more:
                return search
            staying |= more

    def _all(self) -> None:
        """Search until nothing new is found: if objects hold each other, one search may miss some of them."""
        before = -1
        while len(self.objects) > before:
            before = len(self.objects)
            self.names.clear()
            self.functions.clear()
            self.module(self.roots[0], "", frozenset())

    def module(self, module: nn.Module, path: str, names: Names) -> Any:
        """Note a module, and go on below it."""
        if module in self.roots:
            module, path = self.roots[0], ""
        elif module not in self.modules:
            self.modules[module] = path
        if self._is_news(module, names):
            self.below(module, path, self.names[id(module)])
        return _FOUND

    def other(self, value: Any, path: str, names: Names) -> Any:
        """Note an object if it leads to modules."""
        news = id(value) not in self.staying and self._is_news(value, names)
        if news and self.within(value, path, self.names[id(value)]):
            self.objects[id(value)] = value
        return _FOUND if id(value) in self.objects else value

    def _is_news(self, value: object, names: Names) -> bool:
        """Note ``names`` for a value. Return whether it was not visited yet with all of them."""
        known = self.names.get(id(value))
        self.names[id(value)] = names | (known or frozenset())
        return known is None or not names <= known

    def holder(self, value: Any, items: dict[Any, Any]) -> Any:
        """Count a holder of something found as found, too, and note it if it is a closure."""
        if is_a(value, FunctionType):
            self.functions[id(value)] = value
        return _FOUND

    def _held_elsewhere(self) -> set[int]:
        """The identities of found objects that are also held by something uncopied, which has to see their state."""
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
        """Replace the called modules that a copy leads to."""
        modules, others = self.below(owner, path, names)
        if modules:
            vars(owner)["_modules"] = copy.copy(owner._modules)
            owner._modules.update(modules)
        vars(owner).update(others)

    def module(self, module: nn.Module, path: str, names: Names) -> Any:
        """The copy of a module."""
        if id(module) not in self.copies:
            self.copies[id(module)] = made = (self.copy_of_model if _has_layers(module) else self.copy_of_other)(module)
            self.visit(made, path, self.found.names[id(module)])
        return self.copies[id(module)]

    def other(self, value: Any, path: str, names: Names) -> Any:
        """The copy of an object that leads to modules."""
        if id(value) not in self.found.objects:
            return value
        if id(value) not in self.copies:
            self.copies[id(value)] = made = shallow_object(value)
            set_attributes(made, self.within(value, path, self.found.names[id(value)]))
        return self.copies[id(value)]

    def holder(self, value: Any, items: dict[Any, Any]) -> Any:
        """A container or holder of the same kind with ``items``."""
        if isinstance(value, nn.Module):
            container = shallow(value)
            vars(container)["_modules"] = items
            return container
        return with_items(value, items)


def _is_called(module: nn.Module) -> bool:
    """Whether a module without layers may have an attention: it has submodules, and is not a linear layer.

    A linear layer is not copied, so that its state, such as its active adapter, is always that of the original.
    """
    product = isinstance(getattr(module, "in_features", None), int)
    return _can_be_copied(module) and any(module.children()) and not product


def _can_be_copied(module: nn.Module) -> bool:
    # FSDP2 gives a module a class with a __new__ of its own, and looks the module up by identity, so no copy would do.
    return not (isinstance(module, NOT_COPIED) or type(module).__new__ is not object.__new__ or is_parametrized(module))


def _has_layers(module: nn.Module) -> bool:
    """Whether a module is a model: a container in it has modules that have submodules."""
    if not _can_be_copied(module):
        return False
    # An adapter's factors and a parametrized module's parametrizations are in containers, too, but are no layers.
    containers = (one for one in module.modules() if isinstance(one, CONTAINERS))
    layers = (one for container in containers for one in container.children())
    return any(any(one.children()) and not isinstance(one, ParametrizationList) for one in layers)
