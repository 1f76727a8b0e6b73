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
    """A new object of the class of ``module`` with the same attributes, as ``copy.copy`` makes it.

    ``copy.copy`` calls ``__new__``. FSDP2 gives a module a class whose ``__new__`` returns modules of the original
    class; such an object is made with ``object.__new__`` instead.
    """
    if type(module).__new__ is object.__new__:
        return copy.copy(module)
    made: Module = object.__new__(type(module))
    vars(made).update(vars(module))
    return made


class Added:
    """The class of attributes that only an optimized module has, not its original. They lead to no other module.

    ``replaced``: the function that the attribute replaces, if that was set on the module object, not on its class.
    """

    replaced: Callable[..., Any] | None = None


_HOOKED = "_output_capturing_hooks_installed"
_originals: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def remember_original(made: nn.Module, original: nn.Module) -> None:
    """Record ``original`` as the module whose layers the copy ``made`` shares."""
    _originals[made] = weakref.ref(original)


def is_copy_of(made: nn.Module, module: nn.Module) -> bool:
    """Whether :func:`remember_original` has recorded ``made`` as a copy of ``module``."""
    known = _originals.get(made)
    return known is not None and known() is module


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

    A hook may remove itself from the original.
    """

    hooks: dict[int, Callable[..., object]]
    key: int

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """The result of the hook; None, which changes nothing, once the original hook is gone."""
        hook = self.hooks.get(self.key)
        return None if hook is None else hook(*args, **kwargs)
