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
    """Return a new object of the class of ``module`` with the same attributes, as ``copy.copy`` does.

    ``copy.copy`` itself calls ``__new__``. FSDP2 gives a module a class whose ``__new__`` returns modules of the
    original class, so ``object.__new__`` is used for such a module.
    """
    if type(module).__new__ is object.__new__:
        return copy.copy(module)
    made: Module = object.__new__(type(module))
    vars(made).update(vars(module))
    return made


class Added:
    """Base class of attributes that an optimized module has and its original does not. They lead to no other module.

    ``replaced`` is the function that the attribute replaces, if that function was set on the module object rather than
    on its class.
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
    """Mark each copy and its original as hooked by transformers if one of the two is.

    The hooks record attentions and hidden states. A model installs them on its layers once and marks itself. A copy
    shares the layers but not the mark, so both would install hooks, and everything would be recorded twice.
    """
    for one in copies:
        known = _originals.get(one)
        original = None if known is None else known()
        if original is not None and (_HOOKED in vars(one)) != (_HOOKED in vars(original)):
            vars(one)[_HOOKED] = vars(original)[_HOOKED] = True


@dataclass
class HookOf:
    """A hook on a copy of a module. It runs the original module's hook as long as that hook exists.

    The original module's hook may remove itself.
    """

    hooks: dict[int, Callable[..., object]]
    key: int

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Return the result of the original hook. Once that hook is gone, return None, which changes nothing."""
        hook = self.hooks.get(self.key)
        return None if hook is None else hook(*args, **kwargs)
