"""Tiny models that serve many users, each made once: tracing takes most of the time of these tests."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import mla_compile
from tests.support import models
from tests.support.serving import alone, prompts


@functools.cache
def serving(name: str, layers: int | None = None, **options: Any) -> tuple[Any, Any]:
    """A tiny model, and what ``continuous_batching`` makes of it, without compiled code."""
    # With tied embeddings a tiny random model says the last token again, whatever its attention does.
    model = models.build(name, tie_word_embeddings=False, **({"num_hidden_layers": layers} if layers else {}))
    return model, mla_compile.continuous_batching(model, codegen="eager", **options)


@pytest.fixture(scope="session")
def served() -> tuple[Any, Any]:
    """One layer, whose weights are folded."""
    return serving("deepseek_v3", layers=1, fold="always", verify=False)


@pytest.fixture(scope="session")
def expected(served: tuple[Any, Any]) -> list[list[int]]:
    """What ``generate()`` says to each of the prompts."""
    return [alone(served[0], one) for one in prompts()]


@pytest.fixture(autouse=True)
def no_manager_is_left(request: pytest.FixtureRequest):
    yield
    if "served" in request.fixturenames:
        request.getfixturevalue("served")[1].destroy_cached_continuous_batching_manager()


@pytest.fixture(autouse=True, scope="session")
def quiet():
    """Errors of requests are logged by transformers with their tracebacks; here they are meant."""
    from transformers.generation.continuous_batching.utils import logger

    before = logger.level
    logger.setLevel(100)
    yield
    logger.setLevel(before)
    torch.set_grad_enabled(True)
