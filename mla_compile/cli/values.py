"""Parse numbers and dtypes from the command line."""

from __future__ import annotations

import re
from collections.abc import Collection

from mla_compile.core.quantities import BYTES
from mla_compile.errors import InputError, nearest

_FACTORS = {"": 1, "k": 1024, "m": 1024**2}
_LONG = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float8": "fp8"}


def count(text: str, what: str, most: int, least: int = 1) -> int:
    """Parse a whole number from ``least`` to ``most``. k is 1,024, m is k * k. Raises :class:`InputError`."""
    found = re.fullmatch(r"\s*(\d{1,18})\s*([km]?)\s*", text.replace(",", "").replace("_", ""), re.IGNORECASE)
    number = int(found[1]) * _FACTORS[found[2].lower()] if found else 0
    if not found or not least <= number <= most:
        example = "4096 or 128k" if most >= 2**17 else "8"
        raise InputError(f"{what} is {text!r}, expected a whole number from {least} to {most:,}, such as {example}")
    return number


def counts(text: str, what: str, most: int) -> tuple[int, ...]:
    """Parse numbers separated by commas, and return them sorted, without duplicates. Raises :class:`InputError`."""
    return tuple(sorted({count(part, what, most) for part in text.split(",")}))


def dtype(text: str, what: str = "dtype", known: Collection[str] = BYTES.keys()) -> str:
    """Return the short name of a dtype, as in ``known``. ``text`` may be a long name (``bfloat16``).

    Raises :class:`InputError` for an unknown dtype.
    """
    name = _LONG.get(text.lower(), text.lower())
    if name not in known:
        raise InputError(f"{what} is {text!r}, expected one of {', '.join(known)}{nearest(name, known)}")
    return name
