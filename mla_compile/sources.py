"""Where a model on the command line comes from: a directory of transformers, a config, or a Python function."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from mla_compile.errors import InputError


def load(source: str, *, random_weights: int | None = None) -> torch.nn.Module:
    """The model that ``source`` names, in evaluation mode; nothing is ever downloaded.

    ``DIRECTORY``: of a transformers model with its weights. ``CONFIG.json``: with ``random_weights`` as the seed, since
    it has none. ``python:MODULE:FUNCTION``: what the function returns; modules are also looked for in the current
    directory. Raises :class:`InputError` for a source that is none of these or cannot be loaded.
    """
    if source.startswith("python:"):
        return _made_by(source)
    path = Path(source)
    if path.is_dir():
        return _pretrained(path) if random_weights is None else _from_config(path / "config.json", random_weights)
    if path.is_file() and path.suffix == ".json":
        if random_weights is None:
            raise InputError(
                f"{source} is a config without weights; name the model's directory, or pass --random-weights"
            )
        return _from_config(path, random_weights)
    raise InputError(
        f"{source!r} is no directory of a model, no config.json and no python:MODULE:FUNCTION"
        + ("" if path.exists() else "; there is no such file")
    )


def call(source: str) -> Any:
    """What the function that ``python:MODULE:FUNCTION`` names returns; :class:`InputError` where there is none."""
    _, _, rest = source.partition(":")
    module, _, function = rest.partition(":")
    if not module or not function:
        raise InputError(f"{source!r}: expected python:MODULE:FUNCTION")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise InputError(f"{source!r} cannot be found: {error}") from error
    finally:
        sys.path.remove(os.getcwd())


def _made_by(source: str) -> torch.nn.Module:
    made = call(source)
    if not isinstance(made, torch.nn.Module):
        raise InputError(f"{source!r} returned {type(made).__name__}, expected an nn.Module")
    return made.eval()


def _pretrained(directory: Path) -> torch.nn.Module:
    transformers = _transformers()
    try:
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            str(directory), local_files_only=True, dtype="auto"
        )
    except Exception as error:  # somebody else's files, and the code of the model they name, which raises what it likes
        raise InputError(f"transformers does not load {directory}: {_first_line(error)}") from error
    return model.eval()


def _from_config(path: Path, seed: int) -> torch.nn.Module:
    transformers = _transformers()
    try:
        json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from error
    torch.manual_seed(seed)
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # as above: sizes that do not fit each other fail anywhere in the model's code
        raise InputError(f"transformers does not build a model from {path}: {_first_line(error)}") from error
    return model.eval()


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise InputError('reading a model needs transformers: pip install "mla-compile[demo]"') from None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no message')}"
