"""The launch plan: it fits the device, covers the cache, depends on sizes only, and says why it cannot."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from mla_compile.errors import InputError
from mla_compile.kernels import plan as planning
from mla_compile.kernels.devices import PRESETS, Device, Pace
from mla_compile.kernels.plan import CHUNK, check, plan
from mla_compile.kernels.tiles import NoPlanError, RowLayout, padded
from mla_compile.kernels.tuned import table
from tests.support.plans import FLOAT, FP8, H200, HALF, KB, make
from tests.support.tiers import also

DIMS = [
    (512, 64, None),
    (256, 32, None),
    (256, 64, None),
    (512, 0, None),
    (320, 24, None),
    (63, 17, 40),
    (512, 64, 128),
]


ROWS = [(1, 1), (1, 9), (1, 16), (2, 16), (3, 11), (1, 63), (1, 64), (4, 128)]


@pytest.mark.parametrize("step", [19, *also("combination", 5)])
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("cache_dtype", [HALF, *also("family", torch.float16), FLOAT, FP8])
def test_every_plan_fits_shared_memory_and_covers_the_cache(name, cache_dtype, step):
    """``step``: so many calls are left out after each; 19 goes through every pair of sizes."""
    device = PRESETS[name]
    limit = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99}[name] * KB
    query = FLOAT if cache_dtype == FLOAT else HALF
    calls = itertools.product(DIMS, ROWS, (None, 64), (1, 7, 128), (0, 63, 4097, 131072), (False, True))
    for (L, R, Lv), (S, H), page, B, T, masked in itertools.islice(calls, 0, None, step):
        if Lv is not None and page is not None:
            continue  # pages hold latent rows only
        sizes = {"B": B, "S": S, "H": H, "L": L, "R": R, "Lv": Lv, "T": T, "page_size": page, "masked": masked}
        dtypes = {"query_dtype": query, "cache_dtype": cache_dtype}
        try:
            got = plan(**sizes, **dtypes, device=device)
        except NoPlanError:
            # Two parts of a float32 query and one tile: more than these devices have. The reference takes it.
            assert cache_dtype == FLOAT
            assert limit == 99 * KB
            assert padded(L) + padded(R) + padded(Lv or 0) >= 512
            continue
        assert got.smem <= limit == device.smem
        assert got.kernel == "triton" or name == "sm_90"
        for size in (got.block_m, got.block_n):
            assert size >= 16
            assert size & (size - 1) == 0
        assert got.row_blocks(S * H) * got.block_m >= S * H
        tiles = -(-T // got.block_n)
        per = -(-max(tiles, 1) // got.splits)
        assert (got.splits - 1) * per < max(tiles, 1) <= got.splits * per  # all tiles covered, no split empty


def test_rows_are_heads_times_query_tokens():
    assert replace(make(S=4, H=8), splits=1) == replace(make(S=1, H=32), splits=1)


# Few heads: a block is a chain of small products, so two blocks on each SM are wanted. Many: one block fills its SM.
@pytest.mark.parametrize(
    ("B", "H", "splits"),
    [
        (1, 128, (4, 16, 64, 64)),
        (4, 128, (4, 16, 16, 16)),
        (16, 128, (4, 4, 4, 4)),
        (32, 128, (2, 2, 2, 2)),
        (64, 128, (1, 1, 1, 1)),
        (128, 128, (1, 1, 1, 1)),
        (1, 16, (4, 16, 64, 128)),
        (8, 16, (4, 16, 32, 29)),
        (32, 16, (4, 8, 8, 7)),
        (64, 16, (4, 4, 4, 4)),
        (128, 16, (2, 2, 2, 2)),
        (256, 16, (1, 1, 1, 1)),
    ],
)
def test_the_formula_reproduces_sensible_splits(B, H, splits):
    assert tuple(make(B=B, H=H, T=T, page_size=64).splits for T in (1024, 4096, 16384, 65536)) == splits


def test_the_splits_chosen_cost_least_by_the_documented_formula():
    row = next(r for r in table() if r.capability == (9, 0) and r.cache == "half" and r.max_rows is None)
    got = make(B=3, T=20000)
    layout = RowLayout(512, 64, 0, 2, 2, False)
    tiles = -(-20000 // got.block_n)
    cost = {n: planning._microseconds(row, got.smem, layout, H200, (3, 128, tiles), n) for n in range(1, 79)}
    assert cost[got.splits] <= 1.006 * min(cost.values())
    one = -(-3 * 2 * 1 // 132) * (row.t0_us + tiles * max(row.tile_us, 1e6 * 64 * 1152 * 3 / H200.bandwidth))
    assert cost[1] == pytest.approx(one)
    partials = planning.COMBINE_US + 1e6 * 8 * 3 * 128 * 2 * 512 / planning.L2_RATE
    per = -(-tiles // 2)
    assert cost[2] == pytest.approx(row.t0_us + per * max(row.tile_us, 1e6 * 64 * 1152 * 6 / H200.bandwidth) + partials)


SMALL = next(r for r in table() if r.capability == (9, 0) and r.cache == "half" and r.max_rows == 16 and r.paged)
BESIDE = RowLayout(512, 64, 0, 2, 2, True)
TILE_BYTES = 32 * 1152


@pytest.mark.parametrize(
    ("change", "splits", "tile"),
    [
        ({}, 1, 38 * H200.pace.link + H200.pace.step),  # a chain of 36 products for the scores and 2 for the sum
        ({}, 2, 1e6 * TILE_BYTES * 256 / 4.3e12),  # what the memory gives 256 blocks
        ({"pace": Pace(5.0, 0.0, 0.0)}, 1, 5.0 / 2),  # two tiles are under way: 5 stages, and addresses a stage earlier
        ({"pace": Pace(0.0, 0.0, 0.0)}, 1, 1e6 * TILE_BYTES * 128 / 4.3e12),
        ({"pace": Pace(0.0, 0.0, 0.0), "bandwidth": 1e15}, 1, 0.95),  # one block on an SM
        ({"pace": Pace(0.0, 0.0, 0.0), "bandwidth": 1e15}, 2, 2 * 0.95),  # two, which share its units
    ],
)
def test_what_holds_a_tile_up(change, splits, tile):
    device, tiles = replace(H200, **change), 256
    got = planning._microseconds(SMALL, make(H=16, page_size=64).smem, BESIDE, device, (128, 16, tiles), splits)
    combine = planning.COMBINE_US + 1e6 * 8 * 128 * 16 * 2 * 512 / planning.L2_RATE if splits > 1 else 0
    assert got == pytest.approx(SMALL.t0_us + tiles / splits * tile + combine)


@pytest.mark.parametrize("T", [4096, 8192, 32768])
def test_blocks_that_wait_share_an_sm(T):
    """128 requests of 16 rows are one block for each of 132 SMs, whose chain of products is slower than the memory."""
    few = {"B": 128, "H": 16, "T": T, "page_size": 64}
    assert -(-128 * make(**few).splits // H200.sms) >= 2
    assert make(**few, device=replace(H200, pace=Pace(0.0, 0.0, 0.0))).splits == 1  # nothing to wait for
    assert make(**few, device=replace(H200, bandwidth=2e12)).splits == 1  # a memory that one block each keeps busy


def test_deterministic_boundaries_depend_on_neither_batch_nor_capacity():
    chosen = {
        (T, B): make(B=B, T=T, H=H, page_size=page, deterministic=True)
        for H, page in ((16, 64), (128, None))
        for T, B in itertools.product((5, 1024, 1025, 50000), (1, 3, 200))
    }
    for (T, _), got in chosen.items():
        assert got.chunk == CHUNK
        assert got.splits == max(1, -(-T // CHUNK))
        assert CHUNK % got.block_n == 0
        first = chosen[5, 1]
        assert replace(got, splits=1) == replace(first, splits=1)


def test_override_is_respected_or_refused():
    assert make(splits=7).splits == 7
    assert make(splits=700, T=64).splits == 700  # splits past the end are empty, not wrong
    assert make(splits=0) == make(splits=None) == make()
    for wrong in (-1, 65536):
        with pytest.raises(InputError, match=f"num_splits is {wrong}, expected 0"):
            make(splits=wrong)
    with pytest.raises(InputError, match="num_splits is 4 beside deterministic"):
        make(splits=4, deterministic=True)


def test_a_callers_plan_is_checked():
    good = make()
    assert check(good, L=512, R=64, cache_dtype=HALF, device=H200) == good
    with pytest.raises(InputError, match=r"needs \d+ bytes of shared memory, NVIDIA L40S has 101376; make block_m"):
        check(good, L=512, R=64, cache_dtype=HALF, device=PRESETS["sm_89"])
    for change, message in (
        ({"block_m": 24}, "block_m is 24, expected a power of two, at least 16"),
        ({"block_n": 8}, "block_n is 8"),
        ({"num_warps": 3}, "num_warps is 3"),
        ({"num_stages": 0}, "num_stages is 0"),
        ({"splits": 0}, "splits is 0"),
        ({"chunk": 100}, "chunk is 100, expected a multiple of block_n = 64"),
        ({"barriers": 4}, r"barriers is 4, expected one of \(3, 9\)"),
        ({"cluster": 4}, r"cluster is 4, expected one of \(1, 2\)"),
        ({"kernel": "gluon", "block_n": 32}, "the tile is 64x32, the Hopper kernel has one of 64x64"),
    ):
        with pytest.raises(InputError, match=message):
            check(replace(good, **change), L=512, R=64, cache_dtype=HALF, device=H200)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"B": 0}, "B is 0, expected at least 1"),
        ({"H": -1}, "H is -1"),
        ({"R": -1}, "R is -1"),
        ({"B": 70000}, "B is 70000, more than the 65535"),
        ({"query_dtype": torch.float64}, "query is torch.float64"),
        ({"cache_dtype": torch.float64}, "the cache is torch.float64"),
        ({"cache_dtype": torch.int8}, "the cache is torch.int8"),
        ({"device": Device("NVIDIA T4", (7, 5), 40, 64 * KB)}, "NVIDIA T4 has capability"),
        ({"L": 8192}, "shared memory at the smallest tile"),
    ],
)
def test_what_cannot_be_planned_says_why(changes, message):
    with pytest.raises(InputError, match=message):
        make(**changes)


def test_hopper_kernel_is_for_what_it_was_written_for():
    suits = {"gluon": True, "page_size": 64}
    got = make(**suits)
    assert (got.kernel, got.block_m, got.block_n, got.tma) == ("gluon", 64, 64, True)
    assert make(gluon=True).kernel == make(**suits, R=0).kernel == "gluon"  # contiguous; without a rotary part
    for S, H in ((1, 17), (2, 9), (1, 32), (3, 20), (1, 64)):
        padded = make(**suits, S=S, H=H)
        assert (padded.kernel, padded.row_blocks(S * H)) == ("gluon", 1), (S, H)
    assert make(**suits, query_dtype=FLOAT).kernel == "gluon"
    assert make(gluon=True, masked=True, mask_bytes=0).kernel == "gluon"  # its list of tiles says all of it
    assert make(gluon=True, cache_dtype=FP8, page_size=1).kernel == "gluon"  # read row by row
    assert make(gluon=True, cache_dtype=FP8, listed=True).kernel == "gluon"
    assert [make(**suits, B=B).scheduled for B in (1, 4)] == [False, True]
    assert not make(**suits, B=4, deterministic=True).scheduled
    assert not make(**suits, B=4, splits=3).scheduled
    for change in (
        {"gluon": False},
        {"H": 16},
        {"L": 256},
        {"R": 0, "L": 576},
        {"R": 0, "H": 16},
        {"R": 0, "Lv": 512},
        {"R": 0, "cache_dtype": FP8},
        {"masked": True},
        {"page_size": 1},
        {"page_size": 8},
        {"cache_dtype": FP8, "H": 16},
        {"query_dtype": FLOAT, "cache_dtype": torch.float16},
        {"device": PRESETS["sm_80"]},
        {"device": PRESETS["sm_100"]},
        {"device": PRESETS["sm_120"]},
    ):
        assert make(**{**suits, **change}).kernel == "triton", change


@pytest.mark.parametrize("gluon", [False, True])
def test_splits_are_of_what_a_window_shows(gluon: bool):
    for T in (2048, 131072):
        got = make(gluon=gluon, T=T, window=500, S=3, splits=None)
        assert got.splits == make(gluon=gluon, T=500 + 2 + got.block_n - 1, S=3).splits
    assert make(T=131072, window=2000, deterministic=True).splits == 3  # it lies in up to 33 tiles of 64
    assert make(T=100, window=2000) == make(T=100)
    assert make(T=2048, window=9, listed=True).splits == make(T=2048, listed=True).splits


def test_the_plan_reads_no_tensor(monkeypatch):
    """Neither tensors nor the device are touched: what would wait for the device fails here."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("the plan touched a device")

    for name in ("synchronize", "current_device", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    plan.cache_clear()
    assert make().splits == 16


def test_a_repeated_plan_is_looked_up():
    make()
    before = plan.cache_info()
    for _ in range(200):
        make()
    after = plan.cache_info()
    assert (after.hits, after.misses) == (before.hits + 200, before.misses)
