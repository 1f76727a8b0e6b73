"""Shallow copies of modules."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=torch.nn.Module)


def shallow(module: Module) -> Module:
    """Return a shallow copy of ``module``.

    ``copy.copy`` calls ``__new__``. FSDP2 gives a module a class whose ``__new__`` returns modules of the original
    class. Such a module is copied with ``object.__new__`` instead.
    """
    if type(module).__new__ is object.__new__:
        return copy.copy(module)
    made: Module = object.__new__(type(module))
    vars(made).update(vars(module))
    return made


class Added:
    """Base class of attributes that only an optimized module has, not its original.

    Such an attribute leads to no other module.

    ``replaced`` is the function that the attribute replaces, or None if that function belongs to the module's class.
    """

    replaced: Callable[..., Any] | None = None


_HOOKED = "_output_capturing_hooks_installed"
_originals: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def remember_original(made: nn.Module, original: nn.Module) -> None:
    """Record that ``made`` is a copy of ``original`` and shares its layers."""
    _originals[made] = weakref.ref(original)


def is_copy_of(made: nn.Module, module: nn.Module) -> bool:
    """Whether :func:`remember_original` has recorded ``made`` as a copy of ``module``."""
    known = _originals.get(made)
    return known is not None and known() is module


def share_marks(copies: Iterable[nn.Module]) -> None:
    """Mark each copy and its original as hooked by transformers if either is marked.

    A model installs hooks on its layers once, and then marks itself as hooked. The hooks record attentions and hidden
    states. A copy shares the layers. Without a shared mark, the copy and the original would both install hooks, and all
    values would be recorded twice.
    """
    for one in copies:
        known = _originals.get(one)
        original = None if known is None else known()
        if original is not None and (_HOOKED in vars(one)) != (_HOOKED in vars(original)):
            vars(one)[_HOOKED] = vars(original)[_HOOKED] = True


@dataclass
class HookOf:
    """A hook on a copy of a module. It runs the original module's hook until that hook is removed."""

    hooks: dict[int, Callable[..., object]]
    key: int

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Return the result of the original hook. Once that hook is gone, return None, which changes nothing."""
        hook = self.hooks.get(self.key)
        return None if hook is None else hook(*args, **kwargs)
