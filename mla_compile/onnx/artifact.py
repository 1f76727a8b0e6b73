"""Writing a model directory: all of it or nothing, the same bytes for the same model, weights once for both graphs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from mla_compile.errors import TargetError

WEIGHTS, REPORT = "weights.bin", "report.json"
_INLINE = 1024  # bytes: what is smaller stays in the graph's file, where tools show it
_ALIGNMENT = 4096  # a page, so that a runtime can map a tensor as it lies in the file


@contextlib.contextmanager
def staged(target: Path, overwrite: bool) -> Iterator[Path]:
    """A new directory beside ``target`` that takes its place when the block ends without an error.

    Whatever fails, what was at ``target`` before is still there. Raises :class:`TargetError` for a target that cannot
    be written or exists: with ``overwrite`` an empty directory and one that an export wrote may be replaced, and no
    other, such as that of the model itself.
    """
    if target.exists() and not overwrite:
        raise TargetError(f"{target} exists; pass overwrite=True to replace it, or choose another path")
    if target.exists() and not target.is_dir():
        raise TargetError(f"{target} is a file, and a model is a directory; choose another path")
    try:
        if target.exists() and not _replaceable(target):
            raise TargetError(f"{target} holds files that no export wrote, and is not replaced; choose another path")
        target.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    except OSError as error:
        raise TargetError(f"{target} cannot be written: {error.strerror or error}") from error
    try:
        yield stage
        stage.chmod(0o777 & ~_umask())
        _take_place(stage, target)
    except OSError as error:
        raise TargetError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _replaceable(target: Path) -> bool:
    return not any(target.iterdir()) or all((target / name).is_file() for name in (WEIGHTS, REPORT))


def _take_place(stage: Path, target: Path) -> None:
    old = None
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent)) / target.name
        target.rename(old)
    try:
        stage.rename(target)
    except OSError:
        if old is not None:
            old.rename(target)
        raise
    finally:
        if old is not None:
            shutil.rmtree(old.parent, ignore_errors=not target.exists())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@dataclass(frozen=True)
class Written:
    """The files of a directory: bytes and SHA-256 by name."""

    files: Mapping[str, tuple[int, str]]


def write_graphs(graphs: Mapping[str, ir.Model], directory: Path) -> Written:
    """Saves graphs by file name, with all large weights in one file, equal ones once."""
    weights = _Weights(directory / WEIGHTS)
    with weights:
        for model in graphs.values():
            for name in sorted(model.graph.initializers):
                value = model.graph.initializers[name]
                if value.const_value is not None and value.const_value.nbytes >= _INLINE:
                    value.const_value = weights.add(value.const_value, name)
    digest = fingerprint(directory / WEIGHTS)[1]
    for file, model in graphs.items():
        model.metadata_props["mla_compile.weights_sha256"] = digest
        ir.save(model, directory / file)
    return Written({name: fingerprint(directory / name) for name in sorted((*graphs, WEIGHTS))})


class _Weights:
    """A file of tensors, each on a page of its own; a tensor that is there already is not written again."""

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


def fingerprint(path: Path) -> tuple[int, str]:
    """Size and SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return path.stat().st_size, digest.hexdigest()
