"""The schedule of a ragged batch: the rule itself, and its kernel and the combine kernel in Triton's interpreter."""

import math

import pytest
import torch

from mla_compile.errors import InputError
from mla_compile.kernels.triton import schedule
from tests.support import interpreter

BATCHES = [[1], [0], [64, 65], [0, 0, 0], [20, 900, 64], [5000, 1, 0, 130, 64], [100] * 37, [64 * 40, 1, 1, 1]]
COUNTS = [1, 2, 7, 16]


def pieces(plan, lengths):
    """(partition, request, first block, past the last) of all that is walked, as the Gluon kernel reads items."""
    for p in range(plan.partitions):
        (b0, t0), (b1, t1) = plan.items[p].tolist(), plan.items[p + 1].tolist()
        for b in range(b0, min(b1 + (t1 > 0), len(lengths))):
            n = -(-min(max(lengths[b], 0), plan.capacity) // 64)
            lo, hi = t0 if b == b0 else 0, t1 if b == b1 and t1 > 0 else n
            if lo < hi or n == 0:
                yield p, b, lo, hi


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("lengths", BATCHES)
def test_every_block_once_in_slots_of_its_own(lengths, count):
    plan = schedule.reference(lengths, 10**6, count)
    walked, used = {b: [] for b in range(len(lengths))}, set()
    for p, b, lo, hi in pieces(plan, lengths):
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
        assert walked[b][-1][1] == -(-n // 64)


def test_partitions_are_equal():
    lengths = torch.randint(1, 20_000, (64,), generator=torch.Generator().manual_seed(3)).tolist()
    plan = schedule.reference(lengths, 10**6, 66)
    work = [0] * 66
    for p, _, lo, hi in pieces(plan, lengths):
        work[p] += hi - lo + schedule.OVERHEAD
    assert max(work) <= sum(-(-n // 64) + schedule.OVERHEAD for n in lengths) / 66 + 2 * schedule.OVERHEAD + 1


def test_lengths_are_cut_to_the_capacity():
    assert torch.equal(schedule.reference([900, -3], 128, 4).items, schedule.reference([128, 0], 128, 4).items)


@pytest.mark.parametrize(("rows", "count"), [(1, 132), (64, 132), (65, 66), (128, 66), (10**6, 1)])
def test_one_partition_per_multiprocessor_and_row_block(rows, count):
    assert schedule.partitions(132, rows) == count


@pytest.mark.parametrize(
    ("lengths", "T", "count"),
    [(torch.zeros(2), 8, 1), (torch.zeros(1, 2, dtype=torch.int32), 8, 1), (torch.zeros(2, dtype=torch.int32), 8, 0)],
)
def test_wrong_arguments(lengths, T, count):
    with pytest.raises(InputError, match="schedule:"):
        schedule.schedule(lengths, T, count)


def on_device(lengths, T, count):
    """In the interpreter's process: items, shift, first and count by the kernel."""
    from mla_compile.kernels.triton import schedule_triton

    B = len(lengths)
    made = [torch.full((count + 1, 2), -7, dtype=torch.int32), *torch.full((3, B), -7, dtype=torch.int32)]
    schedule_triton.launch(torch.tensor(lengths, dtype=torch.int32), T, count, *made)
    return made


def combined(lengths, count, H, sinks):
    """In the interpreter's process: the combine kernel over random pieces, and the same by torch."""
    from mla_compile.kernels.triton import schedule_triton

    generator = torch.Generator().manual_seed(5)
    B, V, plan = len(lengths), 64, schedule.reference(lengths, 10**6, count)
    part = torch.full((max(1, plan.slots), H, V), torch.nan)
    part_lse = torch.full((max(1, plan.slots), H), torch.nan)
    out, lse = torch.full((B, H, V), 7.0), torch.full((B, H), 7.0)
    want, want_lse = out.clone(), lse.clone()
    sink = torch.randn(H, generator=generator) if sinks else None
    for b in range(B):
        n = int(plan.count[b])
        if n > 1:
            rows = slice(int(plan.first[b]), int(plan.first[b]) + n)
            part_lse[rows] = torch.randn(n, H, generator=generator)
            part[rows] = torch.randn(n, H, V, generator=generator)
            part_lse[rows.start, 0], part[rows.start, 0] = -torch.inf, torch.nan  # a piece that saw nothing
            part_lse[rows, 1] = -torch.inf  # a row that nobody saw
            natural = part_lse[rows] * math.log(2)
            want_lse[b] = natural.logsumexp(0)
            weight = torch.where(natural > -torch.inf, (natural - want_lse[b]).exp(), 0.0)
            want[b] = (weight[..., None] * torch.where(weight[..., None] > 0, part[rows], 0.0)).sum(0)
            if sink is not None:
                want[b] *= torch.sigmoid(want_lse[b] - sink)[:, None]
    schedule_triton.combine_slots[(B * H, 1)](
        part, part_lse, plan.first, plan.count, sink, out, lse, H, H, V=V, BLOCK_S=2, BLOCK_V=V, PDL=False
    )
    return out, lse, want, want_lse


@pytest.fixture(scope="module")
def worker():
    pytest.importorskip("triton")
    with interpreter.worker() as pool:
        yield pool


def test_the_kernel_follows_the_rule(worker):
    for lengths in BATCHES:
        for count in COUNTS:
            plan = schedule.reference(lengths, 4096, count)
            got = worker.submit(on_device, lengths, 4096, count).result(120)
            for x, want in zip(got, (plan.items, plan.shift, plan.first, plan.count), strict=True):
                assert torch.equal(x, want), (lengths, count)


@pytest.mark.parametrize("sinks", [False, True])
def test_pieces_are_put_together(worker, sinks):
    out, lse, want, want_lse = worker.submit(combined, [20, 2900, 64, 900], 7, 3, sinks).result(120)
    torch.testing.assert_close(lse, want_lse, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(out, want, atol=1e-6, rtol=1e-6)
