"""Copies of module objects."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

Module = TypeVar("Module", bound=torch.nn.Module)


def shallow(module: Module) -> Module:
    """Another object of the class of ``module`` with the same attributes: ``copy.copy``.

    That calls ``__new__``, which a class that was put over the module's own may have taken for itself: FSDP2 makes
    modules of the class below there. Such a class is asked for an object as ``object`` makes it.
    """
    if type(module).__new__ is object.__new__:
        return copy.copy(module)
    made: Module = object.__new__(type(module))
    vars(made).update(vars(module))
    return made


_HOOKED = "_output_capturing_hooks_installed"
_originals: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def remember_original(made: nn.Module, original: nn.Module) -> None:
    """Notes which module a copy shares its layers with."""
    _originals[made] = weakref.ref(original)


def share_marks(copies: Iterable[nn.Module]) -> None:
    """Tells each copy and its original that the layers they share have the hooks of transformers already.

    These record attentions and hidden states. A model puts them on its layers once and marks itself; a copy and an
    original that know nothing of each other would both do so, and everything would be recorded twice.
    """
    for one in copies:
        known = _originals.get(one)
        original = None if known is None else known()
        if original is not None and (_HOOKED in vars(one)) != (_HOOKED in vars(original)):
            vars(one)[_HOOKED] = vars(original)[_HOOKED] = True


@dataclass
class HookOf:
    """A hook in a copy of a module: that of the module, as long as it has it. Hooks may remove themselves."""

    hooks: dict[int, Callable[..., Any]]
    key: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the hook returns; None, by which nothing is changed, where it is gone."""
        hook = self.hooks.get(self.key)
        return None if hook is None else hook(*args, **kwargs)


CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
NOT_COPIED = (fx.GraphModule, torch.jit.ScriptModule, OptimizedModule, *CONTAINERS)


def copy_models(root: nn.Module, copied: Callable[[nn.Module], nn.Module]) -> None:
    """Puts ``copied(model)`` in the place of each model within ``root`` that its methods may call by themselves.

    ``root`` and the copies get dicts of submodules of their own; all else is shared. A model is what has layers: a
    ``ModuleList``, ``ModuleDict`` or ``Sequential`` of modules that have submodules.
    """
    copies: dict[nn.Module, nn.Module] = {}

    def visit(owner: nn.Module) -> None:
        found = {name: child for name, child in owner.named_children() if _has_layers(child)}
        if not found:
            return
        vars(owner)["_modules"] = copy.copy(owner._modules)
        for name, child in found.items():
            if child not in copies:
                copies[child] = copied(child)
                visit(copies[child])
            owner._modules[name] = copies[child]

    visit(root)


def models_within(root: nn.Module) -> list[nn.Module]:
    """The models that :func:`copy_models` copies, outer ones first."""
    found: dict[nn.Module, None] = {}

    def visit(owner: nn.Module) -> None:
        for child in owner.children():
            if child not in found and _has_layers(child):
                found[child] = None
                visit(child)

    visit(root)
    return list(found)


def _has_layers(module: nn.Module) -> bool:
    # FSDP2 puts a class of its own over a module's, and knows the module by its identity.
    if isinstance(module, NOT_COPIED) or type(module).__new__ is not object.__new__ or is_parametrized(module):
        return False
    # An adapter holds its factors in containers, too, and a parametrized module its parametrizations: no layers.
    containers = (one for one in module.modules() if isinstance(one, CONTAINERS))
    layers = (one for container in containers for one in container.children())
    return any(any(one.children()) and not isinstance(one, ParametrizationList) for one in layers)
