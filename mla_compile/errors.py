"""The exceptions and warnings of mla_compile. ``except MlaCompileError`` catches all of the exceptions.

Every message says what was given, what was expected and what to do next. After an exception, the user's model, tensors
and files are unchanged.
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
    """An argument is wrong: not a model, example inputs that do not fit the model, or tensors whose shapes disagree."""


class CaptureError(MlaCompileError, RuntimeError):
    """The model could not be captured as one functional ATen graph."""


class WeightError(MlaCompileError, RuntimeError):
    """The values of a weight are needed, but the weight is on the meta device, sparse, or of an unsupported dtype."""


class StaleWeightError(WeightError):
    """A weight has changed in a way that a fold or a cache cannot follow."""


class VerificationError(MlaCompileError, RuntimeError):
    """A rewritten attention or indexer differs from the original by more than rounding (raised only in strict mode)."""


class RankError(MlaCompileError, RuntimeError):
    """The ranks of a program compile different graphs, or a rank has failed. All ranks raise this error."""


class SharedCacheError(MlaCompileError, RuntimeError):
    """A cache whose rows are spread over ranks was used by other ranks, or by code that needs all rows."""


class ExportError(MlaCompileError, RuntimeError):
    """A model could not be exported, or its compiled code could not be saved. Nothing was written to the given path."""


class TargetError(ExportError):
    """The path of an export or of saved code already exists, or cannot be written."""


class ModelFileError(MlaCompileError, RuntimeError):
    """An exported model, saved code, one of their files, or a native library cannot be used on this machine."""


class NothingToCompareError(MlaCompileError):
    """The demo or the benchmark has nothing to show: no attention was absorbed, or the results differ."""


class MlaCompileWarning(UserWarning):
    """No attention was absorbed, a fallback was taken, or compiled code was abandoned. Results are right, but slow."""


_NOT_THE_USERS = tuple(
    {str(Path(__file__).parent), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))}
)


def warn(message: str) -> None:
    """Issue a warning that shows the user's line: the innermost frame outside of all installed libraries.

    A warning is used instead of a log record because Python shows warnings by default, once per line. Users can filter
    warnings or turn them into errors.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*_NOT_THE_USERS, "<")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, MlaCompileWarning, stacklevel=level)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the known name closest to ``name``; an empty string if no name is close."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), "no message")


def brief(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, such as ``ValueError: no such axis``."""
    return f"{type(error).__name__}: {first_line(error)}"
