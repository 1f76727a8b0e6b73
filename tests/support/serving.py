"""Requests to a model that serves many users, and what ``generate()`` says to each of them alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from tests.support.models import VOCAB

LENGTHS = (21, 5, 1, 33, 7, 50, 3, 12)


def prompts(lengths: Sequence[int] = LENGTHS, seed: int = 1) -> list[list[int]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB - 10, (n,), generator=generator).tolist() for n in lengths]


def alone(model: Any, ids: Sequence[int], new: int = 12, **options: Any) -> list[int]:
    """The tokens of ``generate()`` for one prompt, greedily."""
    with torch.no_grad():
        out = model.generate(torch.tensor([list(ids)]), max_new_tokens=new, do_sample=False, **options)
    return out[0, len(ids) :].tolist()


def greedy(new: int = 12, eos: Any = -1, **more: Any) -> GenerationConfig:
    """Greedy decoding of so many tokens, which no token ends."""
    return GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=eos, **more)


def pages(page: int = 16, blocks: int = 64, **more: Any) -> ContinuousBatchingConfig:
    """A pool of so many blocks."""
    return ContinuousBatchingConfig(page_size=page, num_blocks=blocks, **more)


def tokens(fast: Any, ids: Sequence[Sequence[int]], new: int = 12, **config: Any) -> list[list[int]]:
    """The tokens of ``generate_batch`` for all of them at once; none may fail."""
    out = fast.generate_batch(
        [list(one) for one in ids], generation_config=greedy(new), continuous_batching_config=pages(**config)
    )
    assert [one.error for one in out.values()] == [None] * len(ids)
    return [one.generated_tokens for one in out.values()]


@contextmanager
def running(fast: Any, new: int = 12, generation: GenerationConfig | None = None, **config: Any) -> Iterator[Any]:
    """A manager that takes requests."""
    with fast.continuous_batching_context_manager(
        generation_config=generation or greedy(new), continuous_batching_config=pages(**config), timeout=60
    ) as manager:
        yield manager


def results(manager: Any, count: int, seconds: float = 300.0) -> dict[str, Any]:
    """So many finished requests by their ids."""
    found: dict[str, Any] = {}
    end = time.monotonic() + seconds
    while len(found) < count:
        one = manager.get_result(timeout=0.5)
        if one is not None and one.is_finished():
            assert one.request_id not in found, "answered twice"
            found[one.request_id] = one
        assert time.monotonic() < end, f"{len(found)} of {count} requests were answered"
    return found


def free_blocks(manager: Any) -> int:
    """Blocks of the pool that no running request holds: free ones, and those kept for their content."""
    return manager.batch_processor.cache.unheld()
