"""What a causal language model of transformers calls its cache: ``cache`` since 5.24, ``past_key_values`` before."""

from __future__ import annotations

import inspect
from typing import Any

import torch

OLD, NEW = "past_key_values", "cache"


def cache_argument(model: torch.nn.Module) -> str:
    """The argument of ``forward`` that takes the cache; the older name where neither is written in its signature."""
    return NEW if NEW in inspect.signature(model.forward).parameters else OLD


def cache_of(out: Any) -> Any:
    """The cache in what ``forward`` returned, None where there is none."""
    # The newer name first: later releases warn of the older one.
    cache = getattr(out, NEW, None)
    return getattr(out, OLD, None) if cache is None else cache
