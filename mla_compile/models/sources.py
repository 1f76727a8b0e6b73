"""Loads the model that a command line names: a transformers directory, a config, or a Python function."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from mla_compile.core.measuring import available_bytes
from mla_compile.core.quantities import gib
from mla_compile.errors import InputError, brief
from mla_compile.models import config_file, skeleton


def load(source: str, *, random_weights: int | None = None) -> torch.nn.Module:
    """Return the model that ``source`` names, in evaluation mode. Nothing is ever downloaded.

    ``DIRECTORY``: a transformers model with weights. ``CONFIG.json``: a config without weights.
    ``python:MODULE:FUNCTION``: the result of the function, whose module may be in the current directory.
    ``random_weights``: a seed for random weights. A config requires a seed, and a directory may be loaded with a seed.
    Raises :class:`InputError` for any other source, or if loading fails.
    """
    if random_weights is not None and not 0 <= random_weights < 2**63:
        raise InputError(f"the seed of random weights is {random_weights}, expected a whole number from 0 to 2^63 - 1")
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
        f"{source!r} is neither a directory of a model nor a config.json nor python:MODULE:FUNCTION"
        + ("" if path.exists() else "; there is no such file")
    )


def call(source: str) -> Any:
    """Call the function ``python:MODULE:FUNCTION``. Raises :class:`InputError` if it is missing or fails."""
    _, _, rest = source.partition(":")
    module, _, function = rest.partition(":")
    if not module or not function:
        raise InputError(f"{source!r}: expected python:MODULE:FUNCTION")
    sys.path.insert(0, os.getcwd())
    try:
        with redirect_stdout(sys.stderr):  # keep the prints of the user's code out of our output
            make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{source!r} cannot be found: {error}") from error
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise InputError(f"{source!r} cannot be imported: {config_file.in_one_line(error)}") from error
    finally:
        sys.path.remove(os.getcwd())
    try:
        with redirect_stdout(sys.stderr):
            return make()
    except (Exception, SystemExit) as error:  # the user's function
        raise InputError(f"{source!r} raised {config_file.in_one_line(error)}") from error


def _made_by(source: str) -> torch.nn.Module:
    made = call(source)
    if not isinstance(made, torch.nn.Module):
        raise InputError(
            f"{source!r} returned {type(made).__name__}, expected a causal language model of transformers; other "
            "modules are exported from Python, with export_onnx(model, path, example_inputs=...)"
        )
    return made.eval()


def _pretrained(directory: Path) -> torch.nn.Module:
    transformers = config_file.transformers("a model")
    try:
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            str(directory), local_files_only=True, dtype="auto"
        )
    except Exception as error:  # third-party files and the code that they refer to may raise anything
        raise InputError(f"transformers does not load {directory}: {brief(error)}") from error
    return model.eval()


def _from_config(path: Path, seed: int) -> torch.nn.Module:
    config, _ = config_file.read(str(path))
    dtype = config.get_text_config().dtype
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32
    size = sum(p.numel() * p.element_size() for p in skeleton.build(config, dtype).parameters())
    if size > 0.8 * (free := available_bytes()):
        raise InputError(f"the weights of {path} take {gib(size)}, and {gib(free)} of memory are free")
    torch.manual_seed(seed)
    return skeleton.build(config, dtype, "cpu")
