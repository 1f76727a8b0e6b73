"""Calls of the Hopper kernel for float8 rows on the CPU, from its own source, compared with the reference.

Rows are bytes of e4m3, and what no request owns or sees is NaN. As in tests/support/gluon_cases.py, unused table slots
name no page; with a window, so do those that only name rows before it, for this kernel looks up no others.
"""

from pathlib import Path

import numpy as np
import torch

from mla_compile.kernels import reference
from tests.support import schedules
from tests.support.gluon_cases import (
    NOWHERE,
    SOURCE,
    assert_wrong,
    compare,
    expected,
    problem,
    random_mask,
    scores,
    tiles_of,
    unseen,
    unwritten,
)
from tests.support.gluon_list_cases import beside, launch_lists, listed
from tests.support.gluon_simulator import Pointer, round_to

FP8_SOURCE = SOURCE | {
    f"mla_compile.kernels.hopper.{name}": (Path(reference.__file__).parent / "hopper" / f"{name}.py").read_text()
    for name in ("fp8_producer_gluon", "fp8_gluon")
}


def stored(cache, scales, groups, rng, apart=False):
    """``(arguments, stands)``: rows as the kernel is given them, and what they stand for, float64 as ``cache``.

    ``groups`` 0: all of a row is float8, with one scale or one for each token (``scales``: one, token). Else rows are
    as FlashMLA's of 656 bytes: float8, float32 scales, rope in bfloat16. So many scales are for a group of columns each
    (group); or one scale is for all of the latent, as above, and groups is 1. What nobody sees is NaN in all of them.
    """
    latent = torch.from_numpy(cache[..., :512] if groups else cache).to(torch.float8_e4m3fn)
    count = 1 if scales == "one" else max(1, groups) * cache[..., 0].size
    factor = np.array([0.37], np.float32) if scales == "one" else (0.01 + 3 * rng.random(count)).astype(np.float32)
    if scales != "one":
        factor = factor.reshape(*cache.shape[:2], max(1, groups))
        factor[np.isnan(cache[..., 0])] = np.nan
    stands = np.array(latent.double().numpy())
    data, room = latent.view(torch.uint8).numpy(), 0
    if groups:
        room = max(16, 4 * groups)  # for the scales
        rope = torch.from_numpy(cache[..., 512:]).bfloat16()
        behind = np.full((*cache.shape[:2], room), 0xFF, np.uint8)
        if scales != "one":
            behind[..., : 4 * groups] = factor.view(np.uint8)
        data = np.concatenate([data, behind, rope.view(torch.uint8).numpy()], -1)
        product = stands.astype(np.float32) * np.repeat(factor, 512 // factor.shape[-1], -1)
        stands = np.concatenate([round_to(product, "bf16").astype(np.float64), rope.double().numpy()], -1)
    else:
        stands *= factor
    flat, start, outer = beside(np.ascontiguousarray(data), apart)
    words, row, size = Pointer(flat.view(np.int32), "int32", start // 4), data.shape[-1], 2 if groups else 1
    given = {"latent": words, "latent_b": outer, "latent_t": row, "rope": words + (512 + room) // 4, "GROUPS": groups}
    given |= {"rope_b": outer // size, "rope_t": row // size, "kv_scale": None, "token_scale": Pointer(factor.ravel())}
    strides = (cache.shape[1], 1, 0)
    if scales == "one":
        strides = (0, 0, 0)
        if not groups:
            given |= {"kv_scale": given["token_scale"], "token_scale": None}
    elif groups:
        given["token_scale"] = Pointer(flat.view(np.float32), "fp32", (start + 512) // 4)
        strides = (outer // 4, row // 4, 1 if scales == "group" else 0)
    return given | dict(zip(("scale_b", "scale_t", "scale_g"), strides, strict=True)), stands


def simulate_fp8(
    loaded, seed, lens, H, S=1, page=0, splits=1, least=1, partitions=0, causal=True, sinks=False, dtype="bf16", T=None,
    all_rows=False, mask=None, softcap=0.0, window=0, scales="one", groups=0, apart=False, held=False,
):  # fmt: skip
    """Runs the kernel once and compares; raises AssertionError or SimulationError.

    ``scales`` and ``groups``: see :func:`stored`. ``apart``: pages of two layers lie side by side.
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
    rows, stands = stored(cache, scales, groups, rng, apart)
    sink = rng.standard_normal(H).astype(np.float32) if sinks else None
    plan = schedules.reference(lens, max(lens), partitions, reach) if partitions else None
    part, part_lse, out, lse = unwritten(plan.slots if plan else splits * B, B, M)
    without = dict.fromkeys(("indices", "mask", "places"))
    without |= dict.fromkeys(("mask_b", "mask_s", "mask_t", "indices_b", "indices_s", "entries"), 0)
    machine.launch(
        module.mla_seesaw_fp8, (-(-M // 64), partitions or splits, 1 if partitions else B), seed,
        query=Pointer(query.ravel(), dtype), query_b=M * 576, query_s=H * 576, query_h=576,
        table=None if table is None else Pointer(shown.ravel()), table_b=0 if table is None else table.shape[1],
        lengths=None if all_rows else Pointer(np.array(lens, np.int32)), sinks=Pointer(sink) if sinks else None,
        items=Pointer(plan.items.numpy().ravel()) if plan else None,
        slots=Pointer(plan.shift.numpy()) if plan else None,
        work=None if work is None else Pointer(work.view(np.int32).ravel()),
        work_b=0 if work is None else work.shape[2], plane=0 if work is None else work[0].size,
        o_part=Pointer(part), lse_part=Pointer(part_lse), out=Pointer(out, dtype), lse=Pointer(lse),
        **scores(scale, softcap), reach=reach, T=NOWHERE if page else cache.shape[1], B=B, S=S, H=H, least=least,
        DTYPE=dtype, PAGE=page if apart else 0, TABLE_PAGE=page, CAUSAL=causal,
        PARTIAL=2 if partitions else int(splits > 1), REGS=216, HELD=held, **without, **rows,
    )  # fmt: skip
    numbers = {"scale": scale, "causal": causal, "softcap": softcap, "window": window}
    want = expected(query, stands, table, lens, sink, mask, **numbers)
    compare((out, lse), (part, part_lse), want, plan, splits, sink)


def simulate_fp8_lists(
    loaded, seed, lens, H, k, page=0, apart=False, least=1, scales="one", groups=0, held=False, **how
):
    """The same with lists of keys; ``how``: see ``listed`` of tests/support/gluon_list_cases.py."""
    module, machine = loaded
    given = listed(seed, lens, H, k, page=page, **how)
    rows, stands = stored(given.cache, scales, groups, np.random.default_rng(seed), apart)
    latent, rope = torch.from_numpy(stands[..., :512]), torch.from_numpy(stands[..., 512:])
    given = given._replace(call=given.call._replace(latent=latent, rope=rope))
    launch_lists(
        machine, module.mla_seesaw_fp8, seed, given, "work", items=None, slots=None, work_b=0, plane=0, B=len(lens),
        least=least, DTYPE=given.dtype, PAGE=page if apart else 0, TABLE_PAGE=page, REGS=216, HELD=held, **rows,
    )  # fmt: skip


FLASH_MLA = {"scales": "group", "groups": 4}
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
    "656 bytes, page 64": {"lens": [63, 64, 65, 0, 1], "H": 20, "page": 64, **FLASH_MLA},
    "656 bytes, page 1": {"lens": [130, 3], "H": 24, "page": 1, **FLASH_MLA},
    "656 bytes, held query": {"lens": [190, 0, 65], "H": 24, "page": 64, "partitions": 2, "held": True, **FLASH_MLA},
    "656 bytes, two layers, splits": {"lens": [300, 17], "H": 24, "page": 16, "splits": 3, "apart": True, **FLASH_MLA},
    "656 bytes, contiguous": {"lens": [200, 130], "H": 20, "S": 2, "T": 333, "splits": 2, "sinks": True, **FLASH_MLA},
    "656 bytes, mask, soft-cap": {"lens": [300, 129, 70], "H": 12, "mask": "each", "softcap": 2.0, **FLASH_MLA},
    "656 bytes, window": {"lens": [130, 290, 0, 3], "H": 20, "S": 3, "page": 16, "window": 9, **FLASH_MLA},
    "656 bytes, schedule": {"lens": [65, 300, 1, 128, 0, 64], "H": 12, "page": 64, "partitions": 3, **FLASH_MLA},
    "8 groups": {"lens": [300, 70], "H": 70, "page": 64, "scales": "group", "groups": 8},
    "2 groups, not causal": {"lens": [200, 65], "H": 12, "S": 2, "causal": False, "scales": "group", "groups": 2},
    "a group": {"lens": [150, 64], "H": 20, "page": 16, "scales": "group", "groups": 1, "apart": True},
    "rope beside scales of tokens": {"lens": [150, 70], "H": 40, "scales": "token", "groups": 1, "T": 160},
    "rope beside one scale": {"lens": [190, 63], "H": 20, "page": 64, "scales": "one", "groups": 1, "splits": 2},
}
FP8_LIST_CASES = {
    "one entry": {"lens": [1], "H": 64, "k": 1},
    "63, 64 and 65 entries": {"lens": [63, 64, 65, 0], "H": 20, "k": 65, "page": 16},
    "80 heads, two tokens": {"lens": [260, 3], "H": 80, "S": 2, "k": 130, "sinks": True, "scales": "token"},
    "page of a row": {"lens": [130, 3], "H": 24, "k": 140, "page": 1, "scales": "token", "apart": True},
    "nothing": {"lens": [70, 30], "H": 20, "k": 130, "kind": "nothing", "scales": "token"},
    "blocks without a key, splits": {"lens": [300, 300], "H": 20, "S": 2, "k": 260, "kind": "holes", "splits": 2},
    "not causal, whole": {"lens": [200, 200], "H": 20, "S": 2, "k": 150, "all_rows": True, "causal": False},
    "fp16": {"lens": [100, 190], "H": 24, "S": 2, "k": 100, "page": 32, "dtype": "fp16"},
    "mask of tokens": {"lens": [300, 290], "H": 24, "S": 2, "k": 150, "mask": "S", "splits": 2, "scales": "token"},
    "656 bytes, page 64": {"lens": [300, 129], "H": 24, "k": 200, "page": 64, "sinks": True, **FLASH_MLA},
    "656 bytes, two layers, splits": {
        "lens": [300, 17], "H": 64, "S": 2, "k": 140, "page": 64, "apart": True, "splits": 2, **FLASH_MLA
    },
    "656 bytes, page 1": {"lens": [100, 129], "H": 24, "k": 270, "page": 1, "splits": 3, **FLASH_MLA},
    "656 bytes, contiguous, 128 heads": {"lens": [70, 200], "H": 128, "k": 90, "T": 333, **FLASH_MLA},
    "656 bytes, mask": {"lens": [300, 129], "H": 24, "S": 2, "k": 150, "mask": "BS", **FLASH_MLA},
    "656 bytes, soft-cap, window": {
        "lens": [300, 129], "H": 24, "S": 2, "k": 150, "softcap": 2.0, "window": 130, **FLASH_MLA
    },
    "656 bytes, two looks": {"lens": [1300], "H": 20, "k": 1100, **FLASH_MLA},
    "8 groups": {"lens": [200], "H": 20, "k": 192, "kind": "full", "scales": "group", "groups": 8},
    "2 groups": {"lens": [200, 1], "H": 20, "k": 100, "scales": "group", "groups": 2},
    "rope beside one scale": {"lens": [200, 60], "H": 20, "k": 100, "page": 16, "scales": "one", "groups": 1},
    "rope beside scales of tokens": {"lens": [200, 60], "H": 20, "k": 100, "scales": "token", "groups": 1},
}  # fmt: skip


def simulation(case):
    """What runs a case: of lists, or without."""
    return simulate_fp8_lists if "k" in case else simulate_fp8


def assert_fp8_caught(text, replacement, case):
    """As ``assert_caught`` of tests/support/gluon_cases.py."""
    assert_wrong(simulation(case), FP8_SOURCE, text, replacement, case)
