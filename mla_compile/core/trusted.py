"""Loads compiled code from disk only if the file is complete and no other user can have written it.

Loading runs code of the library, so another user's code would run as this user. Loading also maps the file into memory,
so a truncated file would end the process with SIGBUS.
"""

from __future__ import annotations

import ctypes
import grp
import hashlib
import os
import pwd
import stat
from pathlib import Path


class NotWholeError(Exception):
    """The library at this path is not the one that was built; ``args`` holds only the path."""


def load(path: str | os.PathLike[str], built_since: float | None = None) -> ctypes.CDLL:
    """Load a compiled library after checking it.

    If ``built_since`` (seconds since the epoch) is given, the library must match its seal. A library that was built
    after this time is sealed now if necessary. Raises :class:`PermissionError` for a file that others may have written,
    :class:`NotWholeError` for an older file without a matching seal, and :class:`OSError` for a file that cannot be
    loaded.
    """
    if (told := refusal(path)) is not None:
        raise PermissionError(told)
    if built_since is not None and not is_whole(path):
        if os.stat(path).st_mtime < built_since:
            raise NotWholeError(os.fspath(path))
        seal(path)
    return ctypes.CDLL(os.fspath(path))


def refusal(path: str | os.PathLike[str]) -> str | None:
    """Return an error message if :func:`distrust` rejects a file, else ``None``."""
    why = distrust(path)
    return None if why is None else f"{os.fspath(path)} is not loaded, because {why}; have it in a folder of your own"


def distrust(path: str | os.PathLike[str]) -> str | None:
    """Return in words why this user must not run a file, or ``None`` if only this user and root can have written it.

    Parent folders are checked, too, because a user who can write to a parent folder can replace the file.
    """
    file = Path(path).resolve()
    for one in (file, *file.parents):
        if not one.exists():
            continue
        status = one.stat()
        if status.st_uid not in (0, os.geteuid()):
            return f"{one} belongs to {_user(status.st_uid)}"
        # Others cannot replace the entries of a sticky folder.
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if status.st_mode & stat.S_IWOTH and not sticky:
            return f"everybody may write to {one}"
        if status.st_mode & stat.S_IWGRP and not sticky and not _private(status.st_gid):
            return f"the group {_group(status.st_gid)} may write to {one}"
    return None


def seal(path: str | os.PathLike[str]) -> None:
    """Write the seal of a file: a second file with the checksum, which :func:`is_whole` reads."""
    seal_of, draft = _seal(path), _seal(path).with_suffix(f".{os.getpid()}")
    draft.write_text(_digest(path))
    os.replace(draft, seal_of)


def is_whole(path: str | os.PathLike[str]) -> bool:
    """Whether a file matches its seal."""
    try:
        return _seal(path).read_text() == _digest(path)
    except OSError:
        return False


def _seal(path: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(path)}.sha256")


def _digest(path: str | os.PathLike[str]) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _private(group: int) -> bool:
    """Whether a group is root's, or has no other member than this user. Many systems give each user a private group."""
    if group == 0:
        return True
    try:
        members = set(grp.getgrgid(group).gr_mem) | {u.pw_name for u in pwd.getpwall() if u.pw_gid == group}
        return members <= {pwd.getpwuid(os.geteuid()).pw_name}
    except KeyError:
        return False


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
