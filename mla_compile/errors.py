"""The exceptions and warnings of mla_compile: one family, so that one ``except`` catches them all.

Every message says what was given, what was expected and what to do next. Raising one leaves the user's model, tensors
and files as they were.
"""

from __future__ import annotations

import difflib
import sys
import sysconfig
import warnings
from collections.abc import Iterable
from pathlib import Path


class MlaCompileError(Exception):
    """Base class of all errors that mla_compile raises on purpose."""


class OptionError(MlaCompileError, ValueError):
    """An option does not exist, or cannot have the given value."""


class InputError(MlaCompileError, TypeError):
    """An argument is of the wrong kind: not a model, example inputs that do not fit, tensors whose shapes disagree."""


class CaptureError(MlaCompileError, RuntimeError):
    """The model could not be captured as one functional ATen graph."""


class WeightError(MlaCompileError, RuntimeError):
    """A weight whose values are needed cannot be used: on the meta device, sparse, of an unsupported dtype."""


class StaleWeightError(WeightError):
    """A weight has changed in a way that a fold or a cache cannot follow."""


class VerificationError(MlaCompileError, RuntimeError):
    """A rewritten attention or indexer differs from the original by more than rounding (raised only in strict mode)."""


class RankError(MlaCompileError, RuntimeError):
    """Ranks that run one program compile different graphs, or one of them has failed; raised on all ranks."""


class SharedCacheError(MlaCompileError, RuntimeError):
    """A cache whose rows several ranks share was used in a way that needs all rows, or with other ranks."""


class ExportError(MlaCompileError, RuntimeError):
    """A model could not be exported, or its compiled code not saved; nothing was written to the requested path."""


class TargetError(ExportError):
    """The path of an export or of saved code already exists, or cannot be written."""


class ModelFileError(MlaCompileError, RuntimeError):
    """An exported model, saved code, one of their files, or a native library cannot be used here."""


class NothingToCompareError(MlaCompileError):
    """The demo or the benchmark has no figures: nothing was absorbed, or results differ."""


class MlaCompileWarning(UserWarning):
    """Nothing was absorbed, a fallback was taken, or compiled code was abandoned: results are right, but slow."""


_NOT_THE_USERS = tuple(
    {str(Path(__file__).parent), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))}
)


def warn(message: str) -> None:
    """Warn at the line of the user's code that led here: the innermost frame outside of this and other libraries.

    This is a warning and not a log record because Python shows a warning by default, once per line, and users can
    filter it or turn it into an error.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*_NOT_THE_USERS, "<")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, MlaCompileWarning, stacklevel=level)


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the known name closest to ``name``, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for use in a one-line message."""
    return next(iter(str(error).strip().splitlines()), "no message")


def brief(error: BaseException) -> str:
    """The type of an error and the first line of its message: ``ValueError: no such axis``."""
    return f"{type(error).__name__}: {first_line(error)}"
