"""Tiles: by the number of query rows, smaller where they do not fit, and the bound on their shared memory."""

from __future__ import annotations

import pytest

from mla_compile.kernels.devices import PRESETS, Device
from mla_compile.kernels.tiles import RowLayout, padded, shared_memory
from tests.support.plans import KB, make


@pytest.mark.parametrize(
    ("name", "rows", "tile"),
    [
        ("sm_90", 1, (16, 32, 4)),
        ("sm_90", 16, (16, 32, 4)),
        ("sm_90", 17, (32, 32, 4)),
        ("sm_90", 32, (32, 32, 4)),
        ("sm_90", 33, (64, 64, 8)),
        ("sm_90", 512, (64, 64, 8)),
        ("sm_80", 16, (16, 32, 4)),
        ("sm_80", 32, (32, 32, 8)),
        ("sm_80", 64, (64, 32, 8)),
        ("sm_86", 64, (32, 32, 8)),
        ("sm_120", 128, (32, 32, 8)),
        ("sm_100", 128, (32, 32, 4)),
    ],
)
def test_tile_by_query_rows(name, rows, tile):
    got = make(H=rows, device=PRESETS[name])
    assert (got.block_m, got.block_n, got.num_warps) == tile


@pytest.mark.parametrize("L", [576, 1024, 1536, 2048])
def test_wide_rows_get_smaller_tiles(L):
    got = make(L=L)
    assert got.block_m * padded(L) <= 64 * 512


def test_newer_devices_use_the_newest_rows_not_newer_than_they_are():
    b300 = Device("B300", (10, 3), 148, 227 * KB)
    assert make(device=b300).block_m == make(device=PRESETS["sm_100"]).block_m
    orin = Device("Orin", (8, 7), 16, 163 * KB)
    assert make(device=orin).block_m == make(device=PRESETS["sm_86"]).block_m


# What Triton 3.6.0 took, in KB (compiled without a GPU): block_m, block_n, warps, stages, capability.
@pytest.mark.parametrize(
    ("config", "taken"),
    [
        ((16, 32, 4, 5, (9, 0)), 91),
        ((16, 32, 4, 3, (9, 0)), 55),
        ((32, 32, 4, 3, (9, 0)), 74),
        ((32, 32, 8, 5, (9, 0)), 110),
        ((64, 64, 8, 2, (9, 0)), 216),
        ((64, 32, 8, 5, (9, 0)), 180),
        ((64, 32, 8, 7, (9, 0)), 216),
        ((16, 32, 4, 5, (8, 0)), 91),
        ((32, 32, 8, 3, (8, 0)), 74),
        ((64, 32, 8, 2, (8, 0)), 112),
        ((64, 64, 8, 2, (8, 0)), 152),
        ((64, 32, 8, 2, (10, 0)), 208),
        ((64, 64, 8, 2, (10, 0)), 344),
        ((64, 16, 8, 2, (10, 0)), 141),
    ],
)
def test_the_estimate_is_an_upper_bound_and_close(config, taken):
    estimate = shared_memory(RowLayout(512, 64, 0, 2, 2, paged=True), *config) / KB
    assert taken <= estimate <= taken + 10


@pytest.mark.parametrize(
    ("layout", "config", "taken"),
    [
        (RowLayout(512, 64, 0, 2, 2, paged=False), (16, 32, 4, 3, (9, 0)), 93184),
        (RowLayout(512, 64, 0, 2, 2, paged=False), (16, 32, 4, 5, (9, 0)), 166912),
        (RowLayout(512, 64, 0, 2, 2, paged=False), (64, 64, 8, 2, (9, 0)), 221184),
        (RowLayout(512, 64, 0, 2, 2, False, mask_bytes=4), (64, 64, 8, 2, (9, 0)), 237568),
        (RowLayout(512, 64, 0, 2, 2, False, mask_bytes=1), (64, 64, 8, 2, (9, 0)), 225280),
        (RowLayout(512, 64, 0, 2, 2, False, mask_bytes=1), (64, 64, 4, 2, (9, 0)), 229376),
        (RowLayout(512, 64, 0, 2, 2, False, mask_bytes=1), (64, 32, 4, 3, (9, 0)), 192512),
        (RowLayout(256, 32, 0, 2, 2, False, mask_bytes=1), (64, 64, 8, 2, (9, 0)), 126976),
        (RowLayout(256, 32, 0, 2, 2, False, mask_bytes=1), (64, 64, 4, 3, (9, 0)), 163840),
        (RowLayout(256, 32, 0, 2, 2, False, mask_bytes=2), (64, 64, 4, 2, (9, 0)), 126976),
        (RowLayout(512, 64, 0, 2, 2, False, mask_bytes=4), (16, 32, 4, 3, (9, 0)), 97280),
        (RowLayout(512, 64, 0, 2, 2, False, mask_bytes=4), (64, 32, 8, 2, (8, 0)), 122880),
        (RowLayout(512, 64, 128, 2, 2, paged=False), (64, 32, 8, 2, (9, 0)), 163840),
        (RowLayout(512, 32, 0, 2, 2, paged=False), (64, 64, 8, 2, (9, 0)), 208896),
        (RowLayout(512, 64, 0, 4, 4, paged=True), (16, 32, 4, 2, (9, 0)), 147456),
        (RowLayout(512, 64, 0, 4, 4, paged=False), (16, 16, 4, 2, (8, 6)), 110592),
        (RowLayout(512, 64, 0, 4, 4, paged=False), (16, 64, 4, 2, (9, 0)), 221184),
        (RowLayout(512, 64, 0, 4, 4, paged=False), (32, 16, 8, 2, (9, 0)), 184320),
        (RowLayout(512, 64, 0, 1, 2, paged=True), (16, 32, 4, 5, (8, 0)), 55560),
        (RowLayout(512, 64, 0, 1, 2, paged=True), (16, 64, 4, 3, (8, 0)), 71940),
        (RowLayout(512, 64, 0, 1, 2, paged=True), (32, 32, 8, 3, (8, 0)), 71812),
        (RowLayout(512, 64, 0, 1, 2, paged=True), (64, 64, 8, 2, (8, 0)), 143616),
        (RowLayout(512, 64, 0, 1, 2, paged=True), (64, 64, 8, 3, (9, 0)), 184580),
        (RowLayout(512, 64, 0, 1, 2, paged=True), (64, 32, 8, 3, (9, 0)), 131072),
        (RowLayout(512, 64, 0, 1, 2, paged=True), (32, 32, 4, 3, (9, 0)), 71812),
    ],
)
def test_the_estimate_of_our_kernel_is_an_upper_bound(layout, config, taken):
    assert taken <= shared_memory(layout, *config) <= 1.8 * taken


def test_a_mask_that_is_read_in_the_loop_makes_the_tile_smaller():
    listed, added = make(masked=True, mask_bytes=0), make(masked=True)
    assert (listed.block_m, listed.block_n) == (64, 64)
    assert (added.block_m, added.block_n) == (64, 32)
    assert listed == make()


def test_padded_widths():
    assert [padded(w) for w in (0, 1, 16, 17, 64, 512, 513, 576)] == [0, 16, 16, 32, 64, 512, 1024, 1024]
