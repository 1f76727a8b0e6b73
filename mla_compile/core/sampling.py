"""Checks the settings with which tokens are sampled from a model's scores."""

from __future__ import annotations

import math

from mla_compile.errors import OptionError


def check_sampling(temperature: object, top_k: object, top_p: object, seed: object) -> None:
    """Raise :class:`OptionError` for an illegal setting. A temperature of 0 (greedy) and a seed of None are legal."""
    if _number("temperature", temperature) < 0:
        raise OptionError(f"temperature is {temperature}, expected 0 (greedy) or more")
    if not 0 < _number("top_p", top_p) <= 1:
        raise OptionError(f"top_p is {top_p}, expected more than 0 and at most 1")
    for name, value in (("top_k", top_k), ("seed", 0 if seed is None else seed)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise OptionError(f"{name} is {value!r}, expected a whole number of at least 0")


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise OptionError(f"{name} is {value!r}, expected a number")
    return value
