"""The rule's kernel, and the combine kernel for its scratch slots, in Triton's interpreter."""

import math
from dataclasses import replace

import pytest
import torch

from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.devices import PRESETS
from mla_compile.kernels.hopper import steps
from mla_compile.kernels.merge import merge
from tests.support import schedules

BATCHES = [[1], [0], [64, 65], [0, 0, 0], [20, 900, 64], [5000, 1, 0, 130, 64], [100] * 37, [64 * 40, 1, 1, 1]]
COUNTS = [1, 2, 7, 16]


def on_device(lengths, T, count, window):
    """In the interpreter's process: items, shift, first and count by the kernel."""
    B = len(lengths)
    made = [torch.full((count + 1, 2), -7, dtype=torch.int32), *torch.full((3, B), -7, dtype=torch.int32)]
    call = DecodeCall(torch.empty(B, 1, 1, 576, device="meta"), torch.empty(B, T, 512, device="meta"), scale=1.0)
    call = call._replace(window=window)
    step = steps._cut(call, replace(PRESETS["sm_90"], sms=count))
    lens = torch.tensor(lengths, dtype=torch.int32)
    buffers = dict(zip(("lengths", "items", "shift", "first", "count"), (lens, *made), strict=True))
    step.fn[step.grid](**step.arguments(buffers))
    return made


def combined(lengths, count, H, sinks):
    """In the interpreter's process: the combine kernel over random pieces, and the same by torch."""
    from mla_compile.kernels.triton import schedule_triton

    generator = torch.Generator().manual_seed(5)
    B, V, plan = len(lengths), 64, schedules.reference(lengths, 10**6, count)
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
            natural = part_lse[rows, None, None] * math.log(2)
            found, sums = merge(part[rows, None, None], natural, sinks=sink)
            want[b], want_lse[b] = found[0, 0], sums[0, 0]
    schedule_triton.combine_slots[(B * H, 1)](
        part, part_lse, plan.first, plan.count, sink, out, lse, H, H, V=V, BLOCK_S=2, BLOCK_V=V, PDL=False
    )
    return out, lse, want, want_lse


def test_the_kernel_follows_the_rule(run):
    for lengths in BATCHES:
        for count, window in zip(COUNTS, (0, 200, 1, 0), strict=True):
            plan = schedules.reference(lengths, 4096, count, window or None)
            got = run(on_device, lengths, 4096, count, window)
            for x, want in zip(got, (plan.items, plan.shift, plan.first, plan.count), strict=True):
                assert torch.equal(x, want), (lengths, count, window)


@pytest.mark.parametrize("sinks", [False, True])
def test_pieces_are_put_together(run, sinks):
    out, lse, want, want_lse = run(combined, [20, 2900, 64, 900], 7, 3, sinks)
    torch.testing.assert_close(lse, want_lse, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(out, want, atol=1e-6, rtol=1e-6)
