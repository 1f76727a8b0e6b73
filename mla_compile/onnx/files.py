"""Check that the files of a model directory are unchanged and refer to nothing outside of the directory.

ONNX Runtime reads any path that a graph names as external data. Therefore every graph is searched for such paths before
a session is created, and links are resolved before a file is trusted.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from mla_compile.errors import ModelFileError
from mla_compile.onnx.manifest import WEIGHTS, FileEntry, Manifest

if TYPE_CHECKING:
    from google.protobuf.message import Message

_CHUNK = 1 << 22  # bytes per read: fast, but little memory


def check_files(directory: str | Path, manifest: Manifest, *, quick: bool = False) -> None:
    """Raise :class:`ModelFileError` unless all files of the manifest exist, are unchanged, and refer to no other files.

    ``quick`` skips the hashes, which need every byte of the files. Sizes and external data are always checked.
    """
    root = Path(directory)
    for name, entry in manifest.files.items():
        _check_file(root, name, entry, quick=quick)
    for name in sorted(set(manifest.graphs.values())):
        _check_external_data(root / name, manifest)


def _check_file(root: Path, name: str, entry: FileEntry, *, quick: bool) -> None:
    path = root / name
    if not path.is_file():
        raise ModelFileError(f"{path} is missing, expected a file of {entry.bytes} bytes; copy or export it again")
    if path.resolve().parent != root.resolve():
        raise ModelFileError(f"{path} is a link to {path.resolve()}, expected a file in the directory itself")
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            raise ModelFileError(
                f"{path} has {size} bytes, expected {entry.bytes} as the manifest says; copy or export it again"
            )
        if not quick and (got := sha256(path)) != entry.sha256:
            raise ModelFileError(
                f"{path} was changed after the export: its SHA-256 is {got}, "
                f"expected {entry.sha256}; copy or export it again"
            )
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error}") from error


def sha256(path: Path) -> str:
    """Return the hash of a file in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _check_external_data(path: Path, manifest: Manifest) -> None:
    """Check that every external tensor of a graph is in ``weights.bin`` and within that file's bounds."""
    onnx = _onnx()
    from google.protobuf.message import DecodeError  # comes with onnx

    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError) as error:
        raise ModelFileError(f"{path} is not an ONNX model: {error}; export it again") from None
    held = manifest.files.get(WEIGHTS)
    for tensor in _messages(model, onnx.TensorProto):
        entries = [(entry.key, entry.value) for entry in tensor.external_data]
        if not entries and tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        said = dict(entries)
        what = f"{path}: tensor {tensor.name!r}"
        if len(said) != len(entries):  # another reader might use the other entry of a key
            raise ModelFileError(f"{what} describes its external data twice: {entries}; export the model again")
        location = said.get("location", "")
        if location != WEIGHTS or held is None:
            raise ModelFileError(f"{what} keeps its data in {location!r}, expected {WEIGHTS} as the manifest lists it")
        offset, length = (_position(said.get(key, default), what, key) for key, default in _PLACE.items())
        needed = -(-math.prod(tensor.dims) * _bits(onnx, tensor.data_type, what) // 8)
        if length < needed or offset + length > held.bytes:
            raise ModelFileError(
                f"{what} takes {length} bytes at {offset} of {WEIGHTS}, expected at least {needed} bytes within the "
                f"{held.bytes} of the file; export the model again"
            )


_PLACE = {"offset": "0", "length": ""}


def _position(text: str, what: str, key: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ModelFileError(f"{what} has the external {key} {text!r}, expected a number; export the model again")
    return int(text)


def _bits(onnx: ModuleType, data_type: int, what: str) -> int:
    """Return the number of bits of one element. Packed types have fewer than eight."""
    names = onnx.TensorProto.DataType
    if data_type not in names.values() or names.Name(data_type) in ("UNDEFINED", "STRING"):
        raise ModelFileError(f"{what} has element type {data_type}, expected numbers; export the model again")
    name = names.Name(data_type)
    if name in ("INT4", "UINT4", "FLOAT4E2M1", "INT2", "UINT2"):
        return 2 if name.endswith("INT2") else 4
    return int(onnx.helper.tensor_dtype_to_np_dtype(data_type).itemsize) * 8


def _messages(message: Message, kind: type[Message]) -> Iterator[Message]:
    """Yield every message of ``kind`` in a protobuf, also inside initializers, attributes, subgraphs and functions."""
    if isinstance(message, kind):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for entry in (value,) if hasattr(value, "ListFields") else value:
            yield from _messages(entry, kind)


def _onnx() -> ModuleType:
    try:
        return import_module("onnx")
    except ImportError:
        raise ModelFileError(
            'checking an exported model needs onnx, which is not installed: pip install "mla-compile[onnx]"'
        ) from None
