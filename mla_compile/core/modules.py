"""Copies of module objects."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch

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
