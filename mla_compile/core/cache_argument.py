"""The name of the cache argument of transformers' causal language models.

It is ``cache`` since transformers 5.24, and was ``past_key_values`` before.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

OLD, NEW = "past_key_values", "cache"


def cache_argument(model: torch.nn.Module) -> str:
    """Return the name of the cache argument of ``forward``; the older name if ``forward`` has neither argument."""
    return NEW if NEW in inspect.signature(model.forward).parameters else OLD


def cache_of(out: object) -> Any:
    """Return the cache in the result of ``forward``; None if there is none."""
    # Try the newer name first: later releases warn about the older one.
    cache = getattr(out, NEW, None)
    return getattr(out, OLD, None) if cache is None else cache
