"""``save`` and ``load``: what was compiled for an optimized module, in a folder, for other processes."""

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
    """Compiles an optimized module for the calls of ``run`` and writes the code to a new folder, for :func:`load`.

    The calls run twice: while they are compiled, and once more with what was written, of which only what is called then
    is kept. Sizes that differ between calls are open in what is written.

    Args:
        model: what ``optimize`` returned. It stays as it is, and may have been called or not.
        folder: a path at which there is nothing yet, or an empty folder.
        run: calls the model that it is given as other processes will call theirs. By default two prompts with a
            growing cache, of one sequence and of two, are continued by ``generate()``: then any number of sequences,
            prompt and context fits.

    Raises:
        InputError: ``model`` is not what ``optimize`` returned for a module.
        ExportError: torch is older than 2.13, or what was compiled cannot be saved.
        TargetError: there is something in ``folder``, or it cannot be written.
    """
    _check_torch(ExportError)
    from mla_compile.saved import writing  # on use: torch's means are no older than that release

    writing.write(model, Path(folder).absolute(), run)


def load(folder: str | os.PathLike[str], model: Module, **options: Any) -> Module:
    """What ``optimize`` would return for ``model``, with the code of a folder in the place of a compiler.

    Nothing is traced and nothing is compiled: a call like none that was saved is a :class:`ModelFileError`, which says
    what is different. The folder fits a model of the same class, names, shapes and dtypes, whatever its weights are,
    on the kind of machine, with the versions and the source code for which it was written. It holds native code:
    load only what you would run. Files that another user could have written are refused before they are read.

    Args:
        folder: what :func:`save` wrote.
        model: a module as it would be given to ``optimize``. It stays as it is.
        **options: those of ``optimize`` that must have been given when the folder was written; all of them are used.

    Raises:
        InputError: ``model`` is not a module.
        ModelFileError: the folder is damaged, somebody else's, or was not written for this model and machine.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"load() takes a folder and an nn.Module, got {type(model).__name__}")
    _check_torch(ModelFileError)
    from mla_compile.saved import reading  # on use, as above

    return reading.read(Path(folder).absolute(), model, options)


def _check_torch(kind: type[Exception]) -> None:
    if TorchVersion(torch.__version__) < _OLDEST:
        raise kind(f"saved code takes torch {_OLDEST} or newer, this is {torch.__version__}; use optimize()")
    if torch._dynamo.config.caching_precompile:
        raise kind(
            "torch's own TORCH_CACHING_PRECOMPILE is on, which drops guards that saved code needs: switch it off"
        )
