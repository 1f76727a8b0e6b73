"""Formats quantities, and lists the bytes per value of each dtype."""

from __future__ import annotations

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def amount(number: int) -> str:
    """Format a number of parameters in billions or millions, or in full if it is small."""
    if number < 1e5:
        return f"{number:,}"
    return f"{number / 1e9:.4g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def gigabytes(size: float) -> str:
    """Format bytes in GB (10^9): with three digits, or as whole GB from 100 GB on."""
    return f"{size / 1e9:,.0f} GB" if size >= 1e11 else f"{size / 1e9:.3g} GB"


def gib(size: float) -> str:
    """Format bytes of memory in GiB (2^30)."""
    return f"{size / 2**30:,.1f} GiB"


def scaled(number: float, unit: str) -> str:
    """Format a number with three digits and a prefix: ``34.2 GFLOP``."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def seconds(time: float) -> str:
    """Format seconds with three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if time >= size:
            return f"{time / size:.3g} {unit}"
    return f"{time / 1e-9:.3g} ns" if time else "0"
