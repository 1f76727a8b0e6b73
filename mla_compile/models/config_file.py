"""Finds and reads an untrusted Hugging Face config, and checks its sizes before anything is built."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mla_compile.errors import InputError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LARGEST_SIZE = 2**24
LARGEST_COUNT = 2**13
LARGEST_DEPTH = 2**10

_SIZE = re.compile(r"(_size|_dim|_rank|_inner|n_embd|d_model|_embeddings|n_positions)$")
_COUNT = re.compile(r"(_layers|_layer|_heads|_head|_experts|_per_tok|_topk|_group)$")
# Widths and counts that may be 0: no rotary part, no experts, no dense layers.
_MAY_BE_ZERO = re.compile(r"rope|rotary|expert|shared|mtp|nextn|dense|topk|group|per_tok|window")


def read(source: str) -> tuple[PreTrainedConfig, tuple[str, ...]]:
    """Return the transformers config in a file or a model's directory, and notes on assumptions.

    Nothing is downloaded, and no code from the model's directory runs. Raises :class:`InputError`.
    """
    raw, path = read_raw(source)
    return parse(raw, path)


def read_raw(source: str) -> tuple[dict[str, object], Path]:
    """Return the fields of the config in a file or in a model's directory, and the path of the config file.

    Sizes are checked. Raises :class:`InputError`.
    """
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise InputError(
            f"{source!r} is neither a config.json nor a directory with one nor python:MODULE:FUNCTION"
            + ("" if path.exists() else f"; there is no file {path}")
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{path} is JSON, but not an object with the fields of a config")
    check_sizes(raw, str(path))
    return raw, path


def check_sizes(raw: Mapping[str, object], where: str) -> None:
    """Refuse sizes that no model has, because building would never end, or fail far from the cause."""
    for name, value in raw.items():
        if name.startswith("rope_"):  # rope_* fields are factors, not sizes
            continue
        if name == "quantization_config":  # another reader checks the contents, where sizes may be -1
            if not isinstance(value, Mapping | None):
                raise InputError(f"{where}: quantization_config is {value!r}, expected an object with a quant_method")
            continue
        if isinstance(value, Mapping):
            check_sizes(value, f"{where}, {name}")
            continue
        size, count = _SIZE.search(name), _COUNT.search(name)
        if (size is None and count is None) or value is None or isinstance(value, (bool, str, list)):
            continue
        least = 0 if _MAY_BE_ZERO.search(name) else 1
        most = LARGEST_SIZE if size else LARGEST_DEPTH if "layer" in name else LARGEST_COUNT
        if not isinstance(value, int) or not least <= value <= most:
            raise InputError(f"{where}: {name} is {value!r}, expected a whole number from {least:,} to {most:,}")


def transformers(what: str = "a config") -> ModuleType:
    """Return the module transformers, with its logging silenced.

    If transformers is missing, an :class:`InputError` names the extra that installs it.
    """
    try:
        library = import_module("transformers")
    except ImportError as error:
        why = "" if error.name == "transformers" else f", which cannot be imported ({error})"
        raise InputError(f'reading {what} needs transformers{why}: pip install "mla-compile[demo]"') from None
    library.logging.set_verbosity_error()
    return library


def in_one_line(error: BaseException) -> str:
    """Return the type and message of an error on one line, shortened if it is long."""
    return textwrap.shorten(f"{type(error).__name__}: {error or 'no message'}", 300, placeholder=" ...")


def parse(raw: dict[str, Any], path: Path) -> tuple[PreTrainedConfig, tuple[str, ...]]:
    """Return the transformers config that ``raw`` describes, and notes on assumptions. ``path`` is for messages."""
    library = transformers()
    known = library.CONFIG_MAPPING
    kind = raw.get("model_type")
    notes: tuple[str, ...] = ()
    if not isinstance(kind, str):
        has = "no model_type" if kind is None else f"{kind!r} as its model_type"
        raise InputError(f"{path} has {has}, so it is not the config of a transformers model")
    if kind in known:
        config_class = known[kind]
    else:
        config_class = _of_architecture(library, raw)
        if config_class is None:
            raise InputError(
                f"{path}: transformers {library.__version__} has no model type {kind!r}"
                f"{nearest(kind, known.keys())}; a model with code of its own is given as python:MODULE:FUNCTION"
            )
        name = config_class.model_type
        notes = (f"model type {kind!r} is read as {name!r}, the type of its architecture {raw['architectures'][0]}",)
        raw = {**raw, "model_type": name}
    try:
        return config_class.from_dict(raw), notes
    except Exception as error:
        raise InputError(f"transformers does not read {path}: {in_one_line(error)}") from error


def _of_architecture(library: object, raw: Mapping[str, object]) -> type[PreTrainedConfig] | None:
    """Return the config class of the first architecture, or ``None`` if transformers does not have this class."""
    names = raw.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return getattr(getattr(library, str(first), None), "config_class", None)
