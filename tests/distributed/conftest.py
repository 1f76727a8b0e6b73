from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, Ranks]]:
    pools: dict[int, Ranks] = {}
    yield pools
    for pool in pools.values():
        pool.stop()


@pytest.fixture
def ranks(_pools):
    """``ranks(count)``: so many processes, kept for all tests until one of them ends; jobs leave nothing behind."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch has no gloo here")

    def of(count: int) -> Ranks:
        if count not in _pools or not _pools[count].alive:
            _pools[count] = Ranks(count)
        return _pools[count]

    return of
