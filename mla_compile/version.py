"""The version of this release. This module imports nothing, so any module can import it."""

__version__ = "0.1.0"
