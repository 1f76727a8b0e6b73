"""``save`` and ``load``: write the code of an optimized module to a folder, and use it in other processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

from mla_compile.core.modules import Module
from mla_compile.errors import ExportError, InputError, ModelFileError

_OLDEST = "2.13"


def save(model: torch.nn.Module, folder: str | os.PathLike[str], run: Callable[[Any], object] | None = None) -> None:
    """Compile an optimized module for the calls of ``run``, and write the code to a new folder for :func:`load`.

    The calls run twice: once to compile them, and once with the compiled code. Only the code that the second run uses
    is saved. Sizes that differ between the calls are dynamic in the saved code.

    Args:
        model: the result of ``optimize``. The model does not change, and need not have been called before.
        folder: a path at which nothing exists yet, or an empty folder.
        run: a function that calls a given model in the way in which other processes will call it. By default,
            ``generate()`` runs with a growing cache, for one sequence and for a batch of two. The code then fits any
            number of sequences and any length of prompt and context.

    Raises:
        InputError: ``model`` is not the result of ``optimize`` for a module.
        ExportError: torch is older than 2.13, or the compiled code cannot be saved.
        TargetError: ``folder`` is not empty, or cannot be written.
    """
    _check_torch(ExportError)
    from mla_compile.saved import writing  # imported on use, because it needs a recent torch

    writing.write(model, Path(folder).absolute(), run)


def load(folder: str | os.PathLike[str], model: Module, **options: object) -> Module:
    """Return what ``optimize`` would return for ``model``, but with saved code from a folder.

    Nothing is traced or compiled. A call that no saved code fits raises :class:`ModelFileError`, which names the
    difference. The classes, names, shapes and dtypes of the model must be as they were for :func:`save`, but weights
    may have other values. The kind of machine, the versions and the source code must also be as before.

    A folder holds native code, so load only folders that you trust. Files that another user could have written are
    refused before they are read.

    Args:
        folder: a folder that :func:`save` wrote.
        model: a module, as for ``optimize``. The module does not change.
        **options: the options of ``optimize``, which must be as they were for :func:`save`.

    Raises:
        InputError: ``model`` is not a module.
        ModelFileError: the folder is damaged, belongs to another user, or was not written for this model and machine.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"load() takes a folder and an nn.Module, got {type(model).__name__}")
    _check_torch(ModelFileError)
    from mla_compile.saved import reading  # imported on use, as above

    return reading.read(Path(folder).absolute(), model, options)


def _check_torch(kind: type[Exception]) -> None:
    if TorchVersion(torch.__version__) < _OLDEST:
        raise kind(f"saved code takes torch {_OLDEST} or newer, this is {torch.__version__}; use optimize()")
    if torch._dynamo.config.caching_precompile:
        raise kind(
            "torch's own TORCH_CACHING_PRECOMPILE is on, which drops guards that saved code needs: switch it off"
        )
