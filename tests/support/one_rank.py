"""One process that plays a rank of many, for tests of graphs: nothing is sent, and nothing is waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@contextmanager
def first_of(count: int) -> Iterator[None]:
    """This process is the first of so many ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks, of which this process is the first."""
    with first_of(2):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
