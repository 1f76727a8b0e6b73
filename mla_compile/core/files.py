"""Helpers for writing files."""

from __future__ import annotations

import os


def umask() -> int:
    """The permissions that new files of this process do not get. The only way to read the mask is to set it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
