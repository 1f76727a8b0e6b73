"""What writing files takes in several rooms."""

from __future__ import annotations

import os


def umask() -> int:
    """The permissions that new files of this process do not get. It can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
