"""Writes and reads the folder on disk. A manifest lists the other files. Each file is checked before use.

Unpickling a file or loading a library runs code. A file is therefore refused if another user could have written it, or
if its digest differs from the digest in the manifest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mla_compile.core.files import new_folder, umask
from mla_compile.core.trusted import refusal
from mla_compile.errors import ModelFileError, TargetError

MANIFEST = "mla_compile_saved.json"
FORMAT = 1
PARTS = ("versions", "machine", "options", "model", "code")
"""The parts of a manifest that say when the code is valid."""
_LARGEST = 1 << 26  # bytes of a manifest
_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")


def write(folder: Path, kind: Mapping[str, object], files: Mapping[str, bytes]) -> None:
    """Write a new folder, whole or not at all. Raises the errors of :func:`check_new`."""
    check_new(folder)
    digests = {name: digest(data) for name, data in files.items()}
    said = json.dumps({"format": FORMAT, "kind": kind, "files": digests}, indent=1)
    with new_folder(folder, 0o755) as draft:  # load() does not trust files that a group may write
        for name, data in {**files, MANIFEST: said.encode()}.items():
            (draft / name).write_bytes(data)
            (draft / name).chmod(0o644 & ~umask())
        check_new(folder)  # another process may have made the folder meanwhile


def check_new(folder: Path) -> None:
    """Raise :class:`TargetError` if something exists at the path, unless it is an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TargetError(f"{folder} exists already; give a new folder, or remove it")


def manifest(folder: Path, needed: Iterable[str]) -> dict[str, Any]:
    """Return the manifest of a folder. ``needed``: the files that every folder must have.

    Raises :class:`ModelFileError` if the folder was not written by ``save``, or belongs to another user.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ModelFileError(f"{folder} is no folder that mla_compile.save made: it has no {MANIFEST}")
    _refuse(path)
    try:
        with path.open("rb") as file:
            found: Any = json.loads(file.read(_LARGEST))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}") from error
    good = isinstance(found, dict) and all(isinstance(found.get(name), dict) for name in ("kind", "files"))
    if not good or found.get("format") != FORMAT:
        raise ModelFileError(f"{path} is not a manifest of format {FORMAT}; save the model again")
    for name in PARTS:
        if not isinstance(found["kind"].get(name), dict):
            raise ModelFileError(f"{path} does not say which {name} the code is for; save the model again")
    if missing := [name for name in needed if name not in found["files"]]:
        raise ModelFileError(f"{path} names no {', '.join(missing)}; save the model again")
    for name, given in found["files"].items():
        if not _NAME.fullmatch(name) or not isinstance(given, str):
            raise ModelFileError(f"{path} names a file {name!r}, which is not one that mla_compile.save writes")
    return dict(found)


def read(folder: Path, digests: Mapping[str, str]) -> dict[str, bytes]:
    """Return the contents of the files, after checking each file.

    Raises :class:`ModelFileError` for a file that is missing, belongs to another user, or was changed after saving.
    """
    found = {}
    for name, given in digests.items():
        path = folder / name
        if not path.is_file():
            raise ModelFileError(f"{path} is missing; save the model again")
        _refuse(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ModelFileError(f"{path} cannot be read: {error}") from error
        if digest(data) != given:
            raise ModelFileError(f"{path} is not what was saved: its digest differs; save the model again")
        found[name] = data
    return found


def digest(data: bytes) -> str:
    """Return the digest that shows whether a file has changed."""
    return hashlib.sha256(data).hexdigest()


def _refuse(path: Path) -> None:
    if (told := refusal(path)) is not None:
        raise ModelFileError(told)
