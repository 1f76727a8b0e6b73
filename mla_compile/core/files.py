"""Helpers for writing files, and folders that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mla_compile.errors import TargetError


@contextmanager
def new_folder(target: Path, mode: int = 0o777) -> Iterator[Path]:
    """Create a folder beside ``target`` that takes its place if the block ends without an error.

    If anything fails, the previous contents of ``target`` stay. The folder gets the permissions of ``mode``, less the
    process's umask.

    Raises:
        TargetError: the folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    except OSError as error:
        raise unwritable(target, error) from error
    try:
        yield stage
        stage.chmod(mode & ~umask())
        _take_place(stage, target)
    except OSError as error:
        raise unwritable(target, error) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def unwritable(target: Path, error: OSError) -> TargetError:
    """The error for a folder that the operating system does not let us write."""
    return TargetError(f"{target} cannot be written: {error.strerror or error}")


def umask() -> int:
    """The permissions that new files of this process do not get. The only way to read the mask is to set it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


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
