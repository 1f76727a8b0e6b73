"""Numbers and dtypes as they are typed on the command line."""

from __future__ import annotations

import re

from mla_compile.errors import InputError, nearest

_FACTORS = {"": 1, "k": 1024, "m": 1024**2}
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_LONG = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float8": "fp8"}


def count(text: str, what: str, most: int) -> int:
    """A whole number from 1, with k for 1,024 and m for 1,048,576: ``128k``. Raises :class:`InputError`."""
    found = re.fullmatch(r"\s*(\d{1,18})\s*([km]?)\s*", text.replace(",", "").replace("_", ""), re.IGNORECASE)
    number = int(found[1]) * _FACTORS[found[2].lower()] if found else 0
    if not 1 <= number <= most:
        raise InputError(f"{what} is {text!r}, expected a whole number from 1 to {most:,}, such as 4096 or 128k")
    return number


def dtype(text: str) -> str:
    """``fp32``, ``bf16``, ``fp16`` or ``fp8``, also by the long name. Raises :class:`InputError`."""
    name = _LONG.get(text.lower(), text.lower())
    if name not in BYTES:
        raise InputError(f"dtype is {text!r}, expected one of {', '.join(BYTES)}{nearest(name, BYTES)}")
    return name


def gigabytes(size: float) -> str:
    """Bytes in GB (10^9), three digits."""
    return f"{size / 1e9:,.0f} GB" if size >= 1e11 else f"{size / 1e9:.3g} GB"


def scaled(number: float, unit: str) -> str:
    """A number with three digits and a prefix: ``34.2 GFLOP``."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def seconds(time: float) -> str:
    """Seconds with three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if time >= size:
            return f"{time / size:.3g} {unit}"
    return f"{time / 1e-9:.3g} ns" if time else "0"
