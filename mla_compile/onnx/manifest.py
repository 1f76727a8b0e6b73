"""The manifest of a model directory: what was exported, which files belong to it, and how its caches are bound.

The JSON file is untrusted, so each field is checked when it is read. An error names the file, the field, what was found
and what was expected. Unknown fields are ignored. If the meaning of a field changes, ``format`` is increased.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla_compile.errors import ModelFileError
from mla_compile.onnx.profile import PROFILES
from mla_compile.onnx.record import Record

MANIFEST = "mla_compile.json"
WEIGHTS = "weights.bin"
FORMAT = 1
OP_VERSION = 1
DTYPES = ("float32", "float16", "bfloat16")
TOKENS = ("input_ids", "attention_mask", "position_ids")
"""The inputs of a graph that are not caches, in order: [B,S], [B,T], [B,S]."""

_LARGEST = 1 << 20  # bytes; a manifest of a thousand layers takes about a quarter of this
_VERSION = re.compile(r"\d+(\.\d+)*")


@dataclass(frozen=True)
class FileEntry:
    """One file of the directory: its size, and the SHA-256 of its content in hexadecimal digits."""

    bytes: int
    sha256: str

    @classmethod
    def parse(cls, record: Record) -> FileEntry:
        """Read an entry of the manifest."""
        return cls(record.number("bytes", lowest=0), record.hash("sha256"))


@dataclass(frozen=True)
class Cache:
    """One cache of the model: a graph input, the output that replaces it in the next call, and their shape.

    Attributes:
        past, present: the names of the input and of the output.
        axis: the axis with one entry per token; ``None`` for a state of fixed size.
        shape: ``"batch"``, then sizes, with ``None`` at ``axis``.
        dtype: the dtype of the elements.
        grows: whether the cache has one row per token. A cache that does not grow is a state that starts as zeros.
    """

    past: str
    present: str
    axis: int | None
    shape: tuple[str | int | None, ...]
    dtype: str
    grows: bool

    @classmethod
    def parse(cls, record: Record) -> Cache:
        """Read an entry of the manifest."""
        grows = record.flag("grows")
        axis = record.optional_number("axis", lowest=1)
        shape = tuple(record.items("shape"))
        sizes = [size for at, size in enumerate(shape) if at not in (0, axis)]
        if (
            len(shape) < 2
            or shape[0] != "batch"
            or (axis is None) == grows
            or (axis is not None and (axis >= len(shape) or shape[axis] is not None))
            or not all(type(size) is int and size > 0 for size in sizes)
        ):
            raise record.wrong(
                "shape",
                f"{list(shape)} with axis {axis} and grows {grows}",
                '"batch", then sizes, with null at the token axis of a cache that grows',
            )
        return cls(record.text("past"), record.text("present"), axis, shape, record.choice("dtype", DTYPES), grows)

    def sizes(self, batch: int, tokens: int) -> list[int]:
        """Return the shape with numbers filled in."""
        return [batch if size == "batch" else tokens if size is None else int(size) for size in self.shape]


@dataclass(frozen=True)
class AttentionNode:
    """The sizes and features of one DecodeAttention node, which a native library has to support.

    ``values``: whether the values are a separate input. ``value_width``: if not 0, the values are the first
    ``value_width`` columns of [latent, rope].
    """

    H: int
    La: int
    Lb: int
    Lv: int
    mask: str | None
    sinks: bool
    softcap: float
    window: int
    values: bool = False
    value_width: int = 0

    @classmethod
    def parse(cls, record: Record) -> AttentionNode:
        """Read an entry of the manifest."""
        return cls(
            record.number("H", lowest=1),
            record.number("La", lowest=1),
            record.number("Lb", lowest=0),
            record.number("Lv", lowest=1),
            record.optional_choice("mask", ("bool", "float")),
            record.flag("sinks"),
            record.real("softcap"),
            record.number("window", lowest=0),
            record.flag("values"),
            record.number("value_width", lowest=0),
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All fields of the manifest, named as in its JSON."""

    profile: str
    dtype: str
    opset: int
    minimum_onnxruntime: str
    created_by: str
    graphs: Mapping[str, str]
    files: Mapping[str, FileEntry]
    caches: tuple[Cache, ...]
    vocab_size: int
    max_position: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    attention: tuple[AttentionNode, ...]
    weights_sha256: str
    decode_query: int | None = None
    format: int = field(default=FORMAT)
    op_version: int = field(default=OP_VERSION)

    @classmethod
    def read(cls, directory: str | Path) -> Manifest:
        """Read ``mla_compile.json`` of a model directory. Raises :class:`ModelFileError` if it cannot be used."""
        path = Path(directory) / MANIFEST
        if not Path(directory).is_dir():
            raise ModelFileError(f"{directory} is not a directory; expected one that `mla-compile export` wrote")
        try:
            if path.stat().st_size > _LARGEST:
                raise ModelFileError(f"{path} has {path.stat().st_size} bytes, expected at most {_LARGEST}")
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise ModelFileError(f"{path} is missing; expected a directory that `mla-compile export` wrote") from None
        except OSError as error:
            raise ModelFileError(f"{path} cannot be read: {error}") from error
        except (ValueError, RecursionError) as error:
            raise ModelFileError(f"{path} is not JSON ({error}); export the model again") from None
        return cls.from_dict(content, str(path))

    @classmethod
    def from_dict(cls, content: object, source: str = MANIFEST) -> Manifest:
        """Check and read a record that :meth:`to_dict` returned. Errors name ``source``."""
        record = Record.of(content, source)
        newest = {"format": FORMAT, "op_version": OP_VERSION}
        for name, known in newest.items():
            if (got := record.number(name, lowest=1)) > known:
                raise record.wrong(name, got, f"at most {known}; a newer mla-compile wrote it: upgrade mla-compile")
        minimum = record.text("minimum_onnxruntime")
        if not _VERSION.fullmatch(minimum):
            raise record.wrong("minimum_onnxruntime", minimum, "a version such as 1.20.0")
        if record.optional_number("decode_query", lowest=1) not in (None, 1):
            raise record.wrong("decode_query", record.get("decode_query"), "1 or null")
        manifest = cls(
            format=record.number("format", lowest=1),
            op_version=record.number("op_version", lowest=1),
            profile=record.choice("profile", tuple(PROFILES)),
            dtype=record.choice("dtype", DTYPES),
            opset=record.number("opset", lowest=1),
            minimum_onnxruntime=minimum,
            created_by=record.text("created_by"),
            graphs={name: record.child("graphs").file_name(name) for name in record.child("graphs").names()},
            files={name: FileEntry.parse(record.child("files").child(name)) for name in record.child("files").names()},
            decode_query=record.optional_number("decode_query", lowest=1),
            caches=tuple(Cache.parse(entry) for entry in record.children("caches")),
            vocab_size=record.number("vocab_size", lowest=1),
            max_position=record.optional_number("max_position", lowest=1),
            eos_token_ids=tuple(record.numbers("eos_token_ids")),
            pad_token_id=record.number("pad_token_id", lowest=0),
            attention=tuple(AttentionNode.parse(entry) for entry in record.children("attention")),
            weights_sha256=record.hash("weights_sha256"),
        )
        manifest._check_together(record)
        return manifest

    def _check_together(self, record: Record) -> None:
        """Check conditions that involve several fields."""
        for name in self.files:
            record.child("files").plain_name(name)
        if "decode" not in self.graphs:
            raise record.wrong("graphs", sorted(self.graphs), "a graph named decode")
        for name in self.graphs.values():
            if name not in self.files:
                raise record.wrong("files", sorted(self.files), f"an entry for {name}, which graphs names")
        names = [name for cache in self.caches for name in (cache.past, cache.present)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise record.wrong("caches", f"{twice[0]} twice", "each name once")
        for name, ids in (("pad_token_id", (self.pad_token_id,)), ("eos_token_ids", self.eos_token_ids)):
            if any(not 0 <= token < self.vocab_size for token in ids):
                raise record.wrong(name, record.get(name), f"token ids from 0 to {self.vocab_size - 1}")

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able record with every field."""
        record = dataclasses.asdict(self)
        for entry in record["caches"]:
            entry["shape"] = list(entry["shape"])
        return {name: list(value) if isinstance(value, tuple) else value for name, value in record.items()}

    def to_json(self) -> str:
        """Return the text of ``mla_compile.json``. Equal manifests have equal texts."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True, allow_nan=False) + "\n"


def check_onnxruntime(manifest: Manifest, installed: str) -> None:
    """Raise :class:`ModelFileError` if the installed onnxruntime is older than the graphs need."""
    if _numbers(installed) < _numbers(manifest.minimum_onnxruntime):
        least = manifest.minimum_onnxruntime
        raise ModelFileError(
            f"onnxruntime {installed} is installed, this {manifest.profile} model needs {least} or newer: "
            f'pip install -U "onnxruntime>={least}" (onnxruntime-gpu for CUDA)'
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Parse a version such as ``1.31.1``, without suffixes of local and development builds.

    The result is padded with zeros, so that 1.20 equals 1.20.0.
    """
    found = _VERSION.match(version)
    numbers = tuple(int(part) for part in found[0].split(".")) if found else ()
    return numbers + (0,) * (4 - len(numbers))
