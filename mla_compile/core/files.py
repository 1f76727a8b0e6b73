"""What several rooms need to write files."""

from __future__ import annotations

import os


def umask() -> int:
    """The permissions that new files of this process do not get; they can only be read by setting them."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
