"""The rule by which a ragged batch is cut."""

import pytest
import torch

from mla_compile.kernels.triton import schedule
from tests.support import schedules

BATCHES = [[1], [0], [64, 65], [0, 0, 0], [20, 900, 64], [5000, 1, 0, 130, 64], [100] * 37, [64 * 40, 1, 1, 1]]
COUNTS = [1, 2, 7, 16]


def blocks(n, reach):
    return -(-n // 64) - (0 if reach is None else max(n - reach, 0) // 64)


def pieces(plan, lengths, reach=None):
    """(partition, request, first block, past the last) of all that is walked, as the Gluon kernel reads items."""
    for p in range(plan.partitions):
        (b0, t0), (b1, t1) = plan.items[p].tolist(), plan.items[p + 1].tolist()
        for b in range(b0, min(b1 + (t1 > 0), len(lengths))):
            n = blocks(min(max(lengths[b], 0), plan.capacity), reach)
            lo, hi = t0 if b == b0 else 0, t1 if b == b1 and t1 > 0 else n
            if lo < hi or n == 0:
                yield p, b, lo, hi


@pytest.mark.parametrize("reach", [None, 1, 200])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("lengths", BATCHES)
def test_every_block_once_in_slots_of_its_own(lengths, count, reach):
    plan = schedules.reference(lengths, 10**6, count, reach)
    walked, used = {b: [] for b in range(len(lengths))}, set()
    for p, b, lo, hi in pieces(plan, lengths, reach):
        walked[b].append((lo, hi))
        if plan.count[b] > 1:
            slot = int(plan.shift[b]) + p
            assert slot == plan.first[b] + len(walked[b]) - 1
            assert 0 <= slot < plan.slots
            assert slot not in used
            used.add(slot)
    for b, n in enumerate(lengths):
        assert len(walked[b]) == plan.count[b]
        assert [lo for lo, _ in walked[b]] == [0, *[hi for _, hi in walked[b][:-1]]]
        assert walked[b][-1][1] == blocks(n, reach)


def test_partitions_are_equal():
    lengths = torch.randint(1, 20_000, (64,), generator=torch.Generator().manual_seed(3)).tolist()
    plan = schedules.reference(lengths, 10**6, 66)
    work = [0] * 66
    for p, _, lo, hi in pieces(plan, lengths):
        work[p] += hi - lo + schedule.OVERHEAD
    assert max(work) <= sum(-(-n // 64) + schedule.OVERHEAD for n in lengths) / 66 + 2 * schedule.OVERHEAD + 1


def test_lengths_are_cut_to_the_capacity():
    assert torch.equal(schedules.reference([900, -3], 128, 4).items, schedules.reference([128, 0], 128, 4).items)


@pytest.mark.parametrize(("rows", "count"), [(1, 132), (64, 132), (65, 66), (128, 66), (10**6, 1)])
def test_one_partition_per_multiprocessor_and_row_block(rows, count):
    assert schedule.partitions(132, rows) == count
