"""Measures what each layer of a cache holds, on caches filled by prompts of three lengths.

Most layers hold one row per token. Some layers hold rows of only the last tokens (a window), or rows that each
summarise several tokens. These layers may also hold the keys of an indexer, tokens that are not summarised yet, and a
state that does not grow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from mla_compile.errors import InputError
from mla_compile.models import skeleton

_ROWS = ("keys", "values")
SHORT = 1024
"""The length of the short prompt: above most windows, and a multiple of the number of tokens that a row summarises."""


@dataclass(frozen=True)
class HeldRows:
    """What one layer holds: one row per ``every`` tokens (no rows if 0), and the rows of the last ``window`` tokens.

    If ``shared``, keys and values are one tensor. The dicts describe further tensors by name. ``more``: the values that
    each token adds. ``waiting``: the bytes for each token that is not summarised yet. ``state``: the bytes of a tensor
    that does not grow.
    """

    every: int = 1
    window: int = 0
    shared: bool = False
    more: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    state: dict[str, int] = field(default_factory=dict)


def held(cache: object, model: nn.Module) -> list[HeldRows]:
    """Return what each layer of ``cache`` holds. A short prompt has filled ``cache``."""
    layers = list(getattr(cache, "layers", ()))
    shared = [getattr(one, "values", None) is not None and one.values is getattr(one, "keys", None) for one in layers]
    plain = [not getattr(one, "is_sliding", False) and {*dict(tensors_of(one))} <= {*_ROWS} for one in layers]
    if all(plain):
        return [HeldRows(shared=one) for one in shared]
    try:
        filled = [skeleton.cached_call(model, length)[0] for length in (SHORT - 1, SHORT, 2 * SHORT)]
    except InputError:
        return [HeldRows(shared=one) for one in shared]
    each = zip(*([dict(tensors_of(layer)) for layer in one.layers] for one in filled), shared, strict=True)
    return [_of(before, short, long, shared=one) for before, short, long, one in each]


def _of(
    before: dict[str, torch.Tensor], short: dict[str, torch.Tensor], long: dict[str, torch.Tensor], *, shared: bool
) -> HeldRows:
    grown = {n: (long[n].numel() - x.numel()) / SHORT for n, x in short.items() if n in long}
    keys = short.get("keys")
    more = {n: int(v) if v == int(v) else v for n, v in grown.items() if n not in _ROWS and v > 0}
    state = {n: short[n].nbytes for n, v in grown.items() if n not in _ROWS and v <= 0}
    # The short prompt fills whole rows. With one token less, as many tokens as possible are not summarised yet.
    drained = {n: x.nbytes for n, x in before.items() if n not in short}
    if keys is None or keys.dim() != 4 or grown["keys"]:
        return HeldRows(shared=shared, more=more, state=state | drained)
    # If there is also a window, rows that are as wide as the window's keys summarise older tokens.
    row = keys.shape[1] * keys.shape[3]
    older = next((n for n in more if short[n].shape[-1] == keys.shape[3]), None)
    if older is None:
        return HeldRows(0, keys.shape[2], shared, more, state=state | drained)
    every = round(row / more.pop(older))
    waiting = {n: held // max(1, every - 1) for n, held in drained.items()}
    return HeldRows(every, keys.shape[2], shared, more, waiting, state)


def tensors_of(layer: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and value of each nonempty tensor with three or more axes in a cache layer or its dicts."""
    for name, value in vars(layer).items():
        for key, one in value.items() if isinstance(value, dict) else ((None, value),):
            if isinstance(one, torch.Tensor) and one.dim() > 2 and one.numel():
                yield name if key is None else f"{name}[{key}]", one
