"""One process that interprets Triton kernels (tests/support/interpreter.py), for all files of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests.support import interpreter


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPoolExecutor]:
    with interpreter.worker() as started:
        yield started


@pytest.fixture
def run(pool: ProcessPoolExecutor) -> Callable[..., Any]:
    """Calls a function over there, by its name and that of its module."""
    return lambda function, *given: pool.submit(function, *given).result(timeout=300)
