"""The name of the cache argument of causal language models of transformers: ``cache`` since 5.24.

Before, it was ``past_key_values``.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

OLD, NEW = "past_key_values", "cache"


def cache_argument(model: torch.nn.Module) -> str:
    """The argument of ``forward`` that takes the cache; the older name if its signature has neither."""
    return NEW if NEW in inspect.signature(model.forward).parameters else OLD


def cache_of(out: object) -> Any:
    """The cache in the result of ``forward``, or None."""
    # Try the newer name first: later releases warn about the older one.
    cache = getattr(out, NEW, None)
    return getattr(out, OLD, None) if cache is None else cache
