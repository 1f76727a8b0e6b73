"""Measures what each layer of a cache holds, on caches filled by prompts of two lengths.

Most layers hold one row per token. Others hold only the last tokens (a window), rows that each summarise several
tokens, or in addition the keys of an indexer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mla_compile.errors import InputError
from mla_compile.models import skeleton

_ROWS = ("keys", "values")
SHORT = 1024
"""The length of the short prompt: longer than most windows, and a multiple of the tokens that a row summarises."""


@dataclass(frozen=True)
class HeldRows:
    """One layer: one row per ``every`` tokens (0: none), beside the rows of the last ``window`` tokens.

    ``shared``: keys and values are one tensor. ``more``: the other tensors it holds, by name, with the number of values
    that a token adds to each.
    """

    every: int = 1
    window: int = 0
    shared: bool = False
    more: dict[str, float] = field(default_factory=dict)


def held(cache: Any, model: nn.Module) -> list[HeldRows]:
    """The contents of each layer of ``cache``, which a short prompt has filled."""
    layers = list(getattr(cache, "layers", ()))
    shared = [getattr(one, "values", None) is not None and one.values is getattr(one, "keys", None) for one in layers]
    plain = [not getattr(one, "is_sliding", False) and {*dict(tensors_of(one))} <= {*_ROWS} for one in layers]
    if all(plain):
        return [HeldRows(shared=one) for one in shared]
    try:
        short, long = (skeleton.cached_call(model, n * SHORT)[0] for n in (1, 2))
    except InputError:
        return [HeldRows(shared=one) for one in shared]
    pairs = zip(short.layers, long.layers, shared, strict=True)
    return [_of(dict(tensors_of(a)), dict(tensors_of(b)), shared=one) for a, b, one in pairs]


def _of(short: dict[str, torch.Tensor], long: dict[str, torch.Tensor], *, shared: bool) -> HeldRows:
    grown = {n: (long[n].numel() - x.numel()) / SHORT for n, x in short.items() if n in long}
    keys = short.get("keys")
    more = {n: int(v) if v == int(v) else v for n, v in grown.items() if n not in _ROWS}
    if keys is None or keys.dim() != 4 or grown["keys"]:
        return HeldRows(shared=shared, more=more)
    # Beside a window, rows of the same width as its keys summarise older tokens.
    row = keys.shape[1] * keys.shape[3]
    older = next((n for n, v in more.items() if v and short[n].shape[-1] == keys.shape[3]), None)
    every = 0 if older is None else round(row / more[older])
    return HeldRows(every, keys.shape[2], shared, {n: v for n, v in more.items() if n != older})


def tensors_of(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a cache layer that have a token axis, including those in dicts."""
    for name, value in vars(layer).items():
        for key, one in value.items() if isinstance(value, dict) else ((None, value),):
            if isinstance(one, torch.Tensor) and one.dim() > 2 and one.numel():
                yield name if key is None else f"{name}[{key}]", one
