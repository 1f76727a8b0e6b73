"""Shallow copies of modules."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

Module = TypeVar("Module", bound=torch.nn.Module)


def shallow(module: Module) -> Module:
    """A new object of the class of ``module`` with the same attributes, as ``copy.copy`` makes it.

    ``copy.copy`` calls ``__new__``. FSDP2 puts a class over the module's own whose ``__new__`` returns modules of the
    class below; in that case the object is made with ``object.__new__``.
    """
    if type(module).__new__ is object.__new__:
        return copy.copy(module)
    made: Module = object.__new__(type(module))
    vars(made).update(vars(module))
    return made


_HOOKED = "_output_capturing_hooks_installed"
_originals: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def remember_original(made: nn.Module, original: nn.Module) -> None:
    """Record the module whose layers a copy shares."""
    _originals[made] = weakref.ref(original)


def share_marks(copies: Iterable[nn.Module]) -> None:
    """Mark each copy and its original as hooked by transformers if either of them is.

    These hooks record attentions and hidden states. A model installs them on its layers once and marks itself. A copy
    shares the layers but not the mark, so both would install hooks, and everything would be recorded twice.
    """
    for one in copies:
        known = _originals.get(one)
        original = None if known is None else known()
        if original is not None and (_HOOKED in vars(one)) != (_HOOKED in vars(original)):
            vars(one)[_HOOKED] = vars(original)[_HOOKED] = True


@dataclass
class HookOf:
    """A hook in a copy of a module: it runs the original's hook as long as that exists.

    Hooks may remove themselves.
    """

    hooks: dict[int, Callable[..., object]]
    key: int

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """The result of the hook; None, which changes nothing, once the original hook is gone."""
        hook = self.hooks.get(self.key)
        return None if hook is None else hook(*args, **kwargs)


CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
NOT_COPIED = (fx.GraphModule, torch.jit.ScriptModule, OptimizedModule, *CONTAINERS)


def copy_models(root: nn.Module, copied: Callable[[nn.Module], nn.Module]) -> None:
    """Replace each model within ``root`` that its methods may call on their own by ``copied(model)``.

    ``root`` and the copies get dicts of submodules of their own and share everything else; a ``ModuleDict`` that holds
    models is copied, too. A model is a module with layers: a ``ModuleList``, ``ModuleDict`` or ``Sequential`` of
    modules that have submodules. Methods of models that were set as attributes become those of the copies.
    """
    copies: dict[nn.Module, nn.Module] = {}

    def visit(owner: nn.Module) -> None:
        found = {name: child for name, child in owner.named_children() if _has_layers(child) or _holds_models(child)}
        if not found:
            return
        vars(owner)["_modules"] = copy.copy(owner._modules)
        for name, child in found.items():
            if child not in copies:
                copies[child] = copied(child) if _has_layers(child) else shallow(child)
                visit(copies[child])
            owner._modules[name] = copies[child]

    visit(root)
    for owner in (root, *copies.values()):
        for name, value in list(vars(owner).items()):
            # The forward of a copy is another's affair, and so is what wrappers keep of it.
            if isinstance(value, MethodType) and value.__self__ in copies and "forward" not in name:
                vars(owner)[name] = MethodType(value.__func__, copies[value.__self__])


def models_within(root: nn.Module) -> list[nn.Module]:
    """The models that :func:`copy_models` copies, outer ones first."""
    found: dict[nn.Module, None] = {}

    def visit(owner: nn.Module) -> None:
        for child in owner.children():
            if child not in found and _has_layers(child):
                found[child] = None
                visit(child)
            elif _holds_models(child):
                visit(child)

    visit(root)
    return list(found)


def _holds_models(module: nn.Module) -> bool:
    """Whether ``module`` is a dict of models. The modules of a list or a sequence are layers."""
    return isinstance(module, nn.ModuleDict) and any(_has_layers(m) or _holds_models(m) for m in module.children())


def _has_layers(module: nn.Module) -> bool:
    # FSDP2 puts a class of its own over a module's class, and identifies the module by its identity.
    if isinstance(module, NOT_COPIED) or type(module).__new__ is not object.__new__ or is_parametrized(module):
        return False
    # An adapter's factors and a parametrized module's parametrizations are in containers, too, but are no layers.
    containers = (one for one in module.modules() if isinstance(one, CONTAINERS))
    layers = (one for container in containers for one in container.children())
    return any(any(one.children()) and not isinstance(one, ParametrizationList) for one in layers)
