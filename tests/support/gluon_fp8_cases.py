"""Calls of the Hopper kernel for float8 rows on the CPU, from its own source, compared with the reference.

Rows are bytes of e4m3, and what no request owns or sees is NaN. As in tests/support/gluon_cases.py, unused table slots
name no page; with a window, so do those that only name rows before it, for this kernel looks up no others.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from mla_compile.kernels import reference
from mla_compile.kernels.triton import schedule
from tests.support.gluon_cases import (
    NOWHERE,
    SOURCE,
    compare,
    expected,
    problem,
    random_mask,
    scores,
    tiles_of,
    unseen,
    unwritten,
)
from tests.support.gluon_machine import load
from tests.support.gluon_simulator import Pointer

FP8_SOURCE = SOURCE | {
    f"mla_compile.kernels.hopper.{name}": (Path(reference.__file__).parent / "hopper" / f"{name}.py").read_text()
    for name in ("fp8_producer_gluon", "fp8_gluon")
}


def quantized(cache, scales, rng):
    """``(words, scale)`` as the kernel is given them, and what they stand for: float64, as ``cache``."""
    stored = torch.from_numpy(cache).to(torch.float8_e4m3fn)
    scale = np.array([0.37], np.float32)
    if scales == "token":
        scale = (0.01 + 3 * rng.random(cache.shape[:2])).astype(np.float32)
    factor = scale[..., None] if scales == "token" else scale
    return stored.view(torch.uint8).numpy().view(np.int32), scale, stored.double().numpy() * factor


def simulate_fp8(
    loaded, seed, lens, H, S=1, page=0, splits=1, least=1, partitions=0, causal=True, sinks=False, dtype="bf16", T=None,
    all_rows=False, mask=None, softcap=0.0, window=0, scales="one", apart=False,
):  # fmt: skip
    """Runs the kernel once and compares; raises AssertionError or SimulationError.

    ``scales``: one or token. ``apart``: places are taken apart into pages again, as where pages of layers lie mixed.
    """
    module, machine = loaded
    rng = np.random.default_rng(seed)
    query, cache, table = problem(lens, H, S, page, dtype, seed, T)
    B, M, scale = len(lens), S * H, 192**-0.5
    work, reach = None, window + S - 1 if window else None
    if mask is not None:
        mask = random_mask(lens, cache.shape[1], mask, seed)
        cache[~np.broadcast_to(mask, cache.shape[:2])] = np.nan
        work = tiles_of(mask, lens, reach)
    shown = unseen(cache, table, lens, reach, 1) if window else table
    words, factor, stands = quantized(cache, scales, rng)
    sink = rng.standard_normal(H).astype(np.float32) if sinks else None
    plan = schedule.reference(lens, max(lens), partitions, reach) if partitions else None
    given = Pointer(factor.ravel())
    part, part_lse, out, lse = unwritten(plan.slots if plan else splits * B, B, M)
    rows = cache.shape[1]
    machine.launch(
        module.mla_seesaw_fp8, (-(-M // 64), partitions or splits, 1 if partitions else B), seed,
        query=Pointer(query.ravel(), dtype), query_b=M * 576, query_s=H * 576, query_h=576,
        latent=Pointer(words.ravel(), "int32"), latent_b=rows * 576, latent_t=576,
        rope=Pointer(words.ravel(), "int32", 128), rope_b=rows * 576, rope_t=576,
        table=None if table is None else Pointer(shown.ravel()), table_b=0 if table is None else table.shape[1],
        lengths=None if all_rows else Pointer(np.array(lens, np.int32)), sinks=Pointer(sink) if sinks else None,
        kv_scale=given if scales == "one" else None, token_scale=given if scales == "token" else None,
        scale_b=rows if scales == "token" else 0, scale_t=int(scales == "token"),
        items=Pointer(plan.items.numpy().ravel()) if plan else None,
        slots=Pointer(plan.shift.numpy()) if plan else None,
        work=None if work is None else Pointer(work.view(np.int32).ravel()),
        work_b=0 if work is None else work.shape[2], plane=0 if work is None else work[0].size,
        o_part=Pointer(part), lse_part=Pointer(part_lse), out=Pointer(out, dtype), lse=Pointer(lse),
        **scores(scale, softcap), reach=reach, T=NOWHERE if page else rows, B=B, S=S, H=H, least=least, DTYPE=dtype,
        PAGE=page if apart else 0, TABLE_PAGE=page, CAUSAL=causal, PARTIAL=2 if partitions else int(splits > 1),
        REGS=216,
    )  # fmt: skip
    numbers = {"scale": scale, "causal": causal, "softcap": softcap, "window": window}
    want = expected(query, stands, table, lens, sink, mask, **numbers)
    compare((out, lse), (part, part_lse), want, plan, splits, sink)


FP8_CASES = {
    "one row": {"lens": [1], "H": 64},
    "63, 64 and 65": {"lens": [63, 64, 65, 0], "H": 20, "page": 16},
    "contiguous": {"lens": [200, 130], "H": 20, "S": 2, "T": 333, "splits": 2},
    "whole cache, not causal": {"lens": [200, 200], "H": 12, "all_rows": True, "causal": False, "sinks": True},
    "two row blocks": {"lens": [447], "H": 128, "page": 64, "scales": "token"},
    "page of a row": {"lens": [130, 3], "H": 24, "page": 1, "scales": "token"},
    "page 8, splits": {"lens": [300, 17], "H": 24, "page": 8, "splits": 3, "sinks": True, "apart": True},
    "page 48": {"lens": [161, 48], "H": 20, "page": 48, "scales": "token", "apart": True},
    "page 128": {"lens": [300], "H": 33, "S": 2, "page": 128},
    "scales of tokens, contiguous": {"lens": [150, 70], "H": 40, "scales": "token", "T": 160},
    "fp16": {"lens": [190, 100], "H": 24, "page": 32, "dtype": "fp16"},
    "mask": {"lens": [300, 129, 70], "H": 12, "mask": "each", "scales": "token"},
    "mask, splits": {"lens": [300, 300], "H": 20, "mask": "all", "all_rows": True, "splits": 2},
    "window inside a block": {"lens": [130, 290, 0, 3], "H": 20, "S": 3, "page": 16, "window": 9, "scales": "token"},
    "window, soft-cap": {"lens": [447, 100], "H": 12, "window": 150, "softcap": 2.0},
    "window, mask": {"lens": [400, 129], "H": 12, "S": 2, "window": 90, "mask": "each"},
    "schedule": {"lens": [65, 300, 1, 128, 0, 64, 190], "H": 12, "page": 64, "partitions": 3, "scales": "token"},
    "schedule, window": {"lens": [900, 64, 300, 0], "H": 12, "page": 32, "window": 200, "partitions": 3},
}


def hunt(loaded, case):
    for seed in range(60):
        simulate_fp8(loaded, seed, **case)


def assert_fp8_caught(text, replacement, case):
    """As ``assert_caught`` of tests/support/gluon_cases.py."""
    assert sum(source.count(text) for source in FP8_SOURCE.values()) == 1, "the kernel has changed: seed the bug anew"
    simulate_fp8(load(FP8_SOURCE), 0, **case)
    loaded = load({name: source.replace(text, replacement) for name, source in FP8_SOURCE.items()})
    with pytest.raises(AssertionError):  # of the comparison, or SimulationError
        hunt(loaded, case)
