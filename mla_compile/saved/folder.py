"""The folder on disk: a manifest that says what the other files are, and how they are read before they are used.

Unpickling a file and loading a library run code, so neither is done with a file that somebody else could have written,
nor with one that is not what was written.
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
"""What a manifest says of the code."""
_LARGEST = 1 << 26  # bytes of a manifest
_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")


def write(folder: Path, kind: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    """Writes a new folder, whole or not at all. Raises :class:`TargetError` where there is something already."""
    check_new(folder)
    digests = {name: digest(data) for name, data in files.items()}
    said = json.dumps({"format": FORMAT, "kind": kind, "files": digests}, indent=1)
    with new_folder(folder, 0o755) as draft:  # what a group may write is not trusted when it is read
        for name, data in {**files, MANIFEST: said.encode()}.items():
            (draft / name).write_bytes(data)
            (draft / name).chmod(0o644 & ~umask())
        check_new(folder)  # somebody may have made it meanwhile


def check_new(folder: Path) -> None:
    """Raises :class:`TargetError` where there is something already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TargetError(f"{folder} exists already; give a new folder, or remove it")


def manifest(folder: Path, needed: Iterable[str]) -> dict[str, Any]:
    """What the folder says of itself; ``needed``: files that every folder has.

    Raises :class:`ModelFileError` for one that is none, or somebody else's.
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
    """The files, each as it was written.

    Raises :class:`ModelFileError` for a file that is missing, has changed since or belongs to another user.
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
    """What tells one content from every other."""
    return hashlib.sha256(data).hexdigest()


def _refuse(path: Path) -> None:
    if (told := refusal(path)) is not None:
        raise ModelFileError(told)
