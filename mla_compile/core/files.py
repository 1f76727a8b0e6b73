"""Helpers for writing files and folders. A folder is written completely or not at all."""

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
    """Yield a new temporary folder, and let it replace ``target`` if the block ends without an error.

    After an error, ``target`` keeps its previous contents. The new folder gets the permissions ``mode & ~umask``.

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
    """Return the error for a folder that the operating system does not let this process write."""
    return TargetError(f"{target} cannot be written: {error.strerror or error}")


def umask() -> int:
    """Return the process's umask. Python can read the umask only by setting it."""
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
