"""Write a model directory. The write is atomic, equal models give equal bytes, and shared weights are stored once."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx_ir as ir

from mla_compile.core.files import new_folder, unwritable
from mla_compile.errors import TargetError
from mla_compile.onnx.files import sha256
from mla_compile.onnx.manifest import WEIGHTS, FileEntry

REPORT = "report.json"
_INLINE = 1024  # bytes; smaller tensors stay in the graph's file, so that tools show their values
_ALIGNMENT = 4096  # a page, so that a runtime can map a tensor directly from the file


@contextlib.contextmanager
def staged(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Create a directory next to ``target``, and move it to ``target`` when the context ends without an error.

    If anything fails, ``target`` keeps its previous contents. Raises :class:`TargetError` if ``target`` exists or
    cannot be written. ``overwrite`` allows replacing an empty directory or an earlier export, but no other directory.
    """
    if target.exists() and not overwrite:
        raise TargetError(f"{target} exists; pass overwrite=True to replace it, or choose another path")
    if target.exists() and not target.is_dir():
        raise TargetError(f"{target} is a file, and a model is a directory; choose another path")
    try:
        if target.exists() and not _replaceable(target):
            raise TargetError(f"{target} holds files that no export wrote, and is not replaced; choose another path")
    except OSError as error:
        raise unwritable(target, error) from error
    with new_folder(target) as stage:
        yield stage


def _replaceable(target: Path) -> bool:
    return not any(target.iterdir()) or all((target / name).is_file() for name in (WEIGHTS, REPORT))


def write_graphs(graphs: Mapping[str, ir.Model], directory: Path) -> dict[str, FileEntry]:
    """Save graphs under their file names. All large weights are in one file, and equal weights are stored once.

    Returns file name -> entry in the manifest.
    """
    with _Weights(directory / WEIGHTS) as weights:
        for model in graphs.values():
            for name in sorted(model.graph.initializers):
                value = model.graph.initializers[name]
                if value.const_value is not None and value.const_value.nbytes >= _INLINE:
                    value.const_value = weights.add(value.const_value, name)
    digest = sha256(directory / WEIGHTS)
    for file, model in graphs.items():
        model.metadata_props["mla_compile.weights_sha256"] = digest
        ir.save(model, directory / file)
    paths = {name: directory / name for name in sorted((*graphs, WEIGHTS))}
    return {name: FileEntry(path.stat().st_size, sha256(path)) for name, path in paths.items()}


class _Weights:
    """A file of tensors, each aligned to a page. Equal tensors are written once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._known: dict[tuple[object, ...], int] = {}

    def __enter__(self) -> _Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, tensor: ir.TensorProtocol, name: str) -> ir.ExternalTensor:
        data = tensor.tobytes()
        key = (hashlib.sha256(data).digest(), len(data))
        if key not in self._known:
            self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
            self._known[key] = self._file.tell()
            self._file.write(data)
        return ir.ExternalTensor(
            WEIGHTS, self._known[key], len(data), tensor.dtype, shape=ir.Shape(tensor.shape), name=name,
            base_dir=self._path.parent,
        )  # fmt: skip
