"""The name of the cache argument of transformers' causal language models.

It is ``cache`` since transformers 5.24, and was ``past_key_values`` before.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

OLD, NEW = "past_key_values", "cache"


def cache_argument(model: torch.nn.Module) -> str:
    """Return the name of ``forward``'s cache argument, or the older name if ``forward`` has no such argument."""
    return NEW if NEW in inspect.signature(model.forward).parameters else OLD


def cache_of(out: object) -> Any:
    """Return the cache in the result of ``forward``, or None."""
    # The newer name is tried first, because later releases warn about the older name.
    cache = getattr(out, NEW, None)
    return getattr(out, OLD, None) if cache is None else cache
