"""The launch plan of a decode attention call: tile, warps, pipeline depth and number of splits, from sizes alone.

Planning is a pure function of shapes, dtypes and a description of the device. It reads no tensor, so it never waits for
the device and may run while a CUDA graph is captured. Results are cached.

The tile is chosen by kernels/tiles.py. The tokens of a request are divided into *splits* that run side by side. A
launch has ``C = B * row_blocks * splits`` blocks. Each block walks ``tiles = ceil(ceil(T / block_n) / splits)`` tiles.
The device has ``slots = SMs * blocks per SM``. So ``active = min(C, slots)`` blocks run at the same time, and
``beside = ceil(active / SMs)`` blocks share an SM. The plan takes the number of splits with the lowest time:

    microseconds = ceil(C / slots) * (t0 + tiles * tile) + combine
    tile         = max(memory, units, chain, latency / depth)
    memory       = bytes of a tile * active / row_blocks / bandwidth    row blocks share the tile through the L2 cache
    units        = beside * t_tile                                      blocks on one SM share its units
    chain        = (columns of a row + block_n) / 16 * link + step      chained matrix products
    combine      = 0 for one split, else launch + 8 * B * M * splits * Lv / L2 rate   float32 partials, written and read

A split has at least 256 tokens, because writing the partial result of a shorter split costs as much as reading its
rows. ``t0`` and ``t_tile`` are in ``tuned.json``; bandwidth, ``latency``, ``link`` and ``step`` are in
kernels/devices.py.

``chain`` and ``latency / depth`` do not depend on the number of blocks. If an SM runs only one block, the memory may
therefore be idle at times, and more splits make the launch faster. At 576 columns and 32 tokens, the chain of a tile
has 36 products for the scores and 2 for the weighted sum. ``depth`` tiles are in flight at a time, and each arrives
``latency`` after its request or later.

With ``deterministic``, each request is cut every ``CHUNK`` tokens on every device. The result of a request then does
not depend on the rest of the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from mla_compile.errors import InputError
from mla_compile.kernels.devices import Device, preset
from mla_compile.kernels.tiles import (
    KB,
    LEAST,
    NoPlanError,
    RowLayout,
    depth,
    fitted,
    padded,
    shared_memory,
    starting_row,
)
from mla_compile.kernels.tuned import WIDTH, Kernel, TunedTile, table

# Constants and limits of the formula, not measured on a GPU yet. mla_compile/onnx/csrc/plan.c has a copy.
CHUNK = 1024  # tokens of a split with deterministic=True: a multiple of every block_n; 128 Ki tokens make 128 splits
MIN_SPLIT = 256  # fewest tokens of a split, see above
MAX_SPLITS = 128  # the planner's limit, about one per SM for a single request; a caller may ask for more
GRID_LIMIT = 65535  # blocks along a grid's second and third axis (CUDA programming guide, compute capabilities)
COMBINE_US = 2.0  # time of a dependent launch inside a CUDA graph
L2_RATE = 8e12  # bytes/s at which partials are written and read again
WORTHWHILE = 0.995  # more splits are chosen only if they reduce the estimated time to less than this share
MIN_CAPABILITY = (8, 0)  # cp.async and bfloat16 matrix products
_HALF = (torch.float16, torch.bfloat16)
# Query rows of a tile if there are per-group scales. With 32 rows, Triton 3.6 and 3.7 load the query early, and spill
# 400 to 520 bytes per thread (Triton 3.9: none). Tiles of 64 rows or more are not affected, because warpgroups read the
# query from shared memory.
GROUPED_ROWS = 16

# The sizes for which the Hopper kernel (kernels/hopper/decode_gluon.py) is written.
HOPPER_WIDTHS = (512, 64)  # latent and rope; rows in half precision may lack rope, as in DeepSeek-V4
HOPPER_BLOCK = 64  # query rows of a tile, and also its cached tokens
BARRIERS = (3, 9)  # per stage: one for rope, and one for each half (or each eighth) of the latent columns
CLUSTERS = (1, 2)  # CTAs that share the copies of a block; each CTA has its own query rows
HOPPER_PAGE = 16  # page sizes are multiples of this: a TMA box is 16, 32 or 64 rows of one page
HOPPER_SMEM = 220 * KB  # in KB: query 72, two stages of 72 each, statistics and barriers 2, and alignment

__all__ = ["Device", "NoPlanError", "Plan", "check", "plan"]


@dataclass(frozen=True)
class Plan:
    """The plan of a launch. ``chunk`` is the number of tokens per split if splits are cut at fixed places, else None.

    * ``tma``: tiles arrive by TMA.
    * ``pdl``: the combine launch overlaps the end of the attention launch.
    * ``scheduled``: the Hopper kernel partitions its work on the device (kernels/triton/schedule.py) and ignores
      ``splits``.
    * ``barriers``: the number of barriers for the copies of a block, 3 or 9. With 9, scores can begin with the first 64
      columns.
    * ``held``: the Hopper kernel keeps the rotary columns of the query in registers.
    * ``cluster``: the number of CTAs that share a block's TMA copies, 1 or 2. If the number of query row blocks is odd,
      or Triton is older than 3.9, 1 is used.
    """

    kernel: Kernel
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int
    chunk: int | None
    smem: int
    tma: bool = False
    pdl: bool = False
    scheduled: bool = False
    barriers: int = 3
    held: bool = False
    cluster: int = 1

    def row_blocks(self, rows: int) -> int:
        """Return the number of blocks along the grid's first axis for ``rows`` = S*H query rows."""
        return -(-rows // self.block_m)


def _require(ok: bool, message: str) -> None:  # noqa: FBT001
    if not ok:
        raise InputError(f"plan: {message}")


def _cache_kind(dtype: torch.dtype) -> str:
    if dtype in _HALF:
        return "half"
    if dtype == torch.float32:
        return "float32"
    _require(
        dtype == torch.float8_e4m3fn,
        f"the cache is {dtype}, expected float16, bfloat16, float32 or float8_e4m3fn; the reference takes others",
    )
    return "float8"


def _layout(L: int, R: int, Lv: int | None, cache_dtype: torch.dtype, mask_bytes: int, *, paged: bool) -> RowLayout:
    return RowLayout(
        padded(L), padded(R), padded(Lv or 0), cache_dtype.itemsize, max(2, cache_dtype.itemsize), paged, mask_bytes
    )


def _mask_bytes(given: int | None, *, masked: bool) -> int:
    return given if given is not None else 4 * masked


def _hopper_suits(
    rows: int,
    widths: tuple[int, int, int | None],
    dtypes: tuple[torch.dtype, torch.dtype],
    page: int | None,
    mask_bytes: int,
    device: Device,
) -> bool:
    """Whether the Hopper kernel suits calls of these sizes: enough query rows, supported widths, and no mask to read.

    The launch checks the kernel's other requirements: strides, a boolean mask with index lists, and for float8 a query
    in the dtype of the products. If a requirement is not met, the launch plans again with ``gluon=False``.
    """
    L, R, Lv = widths
    converted = dtypes[1] == torch.float8_e4m3fn  # rows are converted one by one, so pages may have any size
    known = (r for r in table() if (r.kernel, r.cache) == ("gluon", _cache_kind(dtypes[1])))
    return (
        device.capability == (9, 0)
        and device.smem >= HOPPER_SMEM
        and (L, R or HOPPER_WIDTHS[1], Lv) == (*HOPPER_WIDTHS, None)
        and not (converted and R == 0)
        and (converted or (dtypes[1] in _HALF and dtypes[0] == dtypes[1]) or dtypes == (torch.float32, torch.bfloat16))
        and any(r.min_rows <= rows for r in known)  # with fewer rows, padding them to a block does not pay
        and mask_bytes == 0
        and ((page or HOPPER_PAGE) % HOPPER_PAGE == 0 or converted)
    )


def _microseconds(
    row: TunedTile, smem: int, layout: RowLayout, device: Device, work: tuple[int, int, int], splits: int
) -> float:
    """Estimate the time of a launch with the module's formula. ``work`` is (batch, query rows, tiles of a request)."""
    batch, rows, tiles = work
    row_blocks = -(-rows // row.block_m)
    per_sm = max(1, min(row.occupancy, (device.smem + KB) // (smem + KB)))  # the SM reserves 1 KB for each block
    slots = device.sms * per_sm
    blocks = batch * row_blocks * splits
    active = min(blocks, slots)
    beside = -(-active // device.sms)
    columns = layout.latent + layout.rope + layout.values
    usual = preset(device.capability)
    bandwidth, pace = device.bandwidth or usual.bandwidth, device.pace or usual.pace
    assert bandwidth is not None  # every preset has both
    assert pace is not None
    tile = max(
        1e6 * row.block_n * columns * layout.cache_bytes * (active / row_blocks) / bandwidth,
        beside * row.tile_us * columns / WIDTH,
        links(layout, row.block_n) * pace.link + pace.step,
        pace.latency / depth(row.num_stages, paged=layout.paged),
    )
    combine = 0.0
    if splits > 1:
        combine = COMBINE_US + 1e6 * 8 * batch * rows * splits * layout.out / L2_RATE
    return math.ceil(blocks / slots) * (row.t0_us + math.ceil(tiles / splits) * tile) + combine


def links(layout: RowLayout, block_n: int) -> int:
    """Return the number of chained products of a tile: one per 16 columns (scores) and per 16 tokens (sum)."""
    return (layout.latent + layout.rope + block_n) // LEAST


@lru_cache(maxsize=4096)
def _splits(row: TunedTile, smem: int, layout: RowLayout, device: Device, batch: int, rows: int, tiles: int) -> int:
    """Return the number of splits with the lowest estimated time. If times are almost equal, prefer fewer splits."""
    most = max(1, min(MAX_SPLITS, tiles * row.block_n // MIN_SPLIT))
    best, least = 1, math.inf
    for splits in range(1, most + 1):
        per = -(-tiles // splits)
        if -(-tiles // per) != splits:
            continue  # some splits would be empty; fewer splits do the same work
        time = _microseconds(row, smem, layout, device, (batch, rows, tiles), splits)
        if time < WORTHWHILE * least:
            best, least = splits, time
    return best


@lru_cache(maxsize=16384)
def plan(
    *,
    B: int,
    S: int,
    H: int,
    L: int,
    R: int,
    T: int,
    query_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: Device,
    Lv: int | None = None,
    page_size: int | None = None,
    masked: bool = False,
    mask_bytes: int | None = None,
    splits: int | None = None,
    deterministic: bool = False,
    gluon: bool = True,
    listed: bool = False,
    window: int = 0,
    grouped: bool = False,
) -> Plan:
    """Return the plan for B requests of S query tokens and H heads over at most T cached tokens of L+R columns.

    * ``T`` is the capacity of the cache or of the block table, not a request's length. A CUDA graph that was captured
      with the plan thus serves every length.
    * ``Lv`` is the width of separate values, or None if the latent rows are the values.
    * ``page_size`` is None for a contiguous cache.
    * ``masked``: whether the kernel walks a mask's list of tiles. ``mask_bytes`` is the number of mask bytes that the
      loop reads for each query row and token. None means 4 (float32) if ``masked``, else 0.
    * ``splits``: None or 0 lets the planner choose.
    * ``gluon``: False excludes the Hopper kernel (it lacks a feature of the call, or did not compile).
    * ``listed``: the T tokens are the entries of an index list. B is then the number of query tokens, and has no limit.
      The places of rows are looked up before the loop, so the loop runs as over a contiguous cache without a mask.
    * ``window``: the plan counts only tiles that some query token of a request sees. With index lists, it counts all
      tiles, because every entry is read.
    * ``grouped``: float8 rows are multiplied by per-group scales, see GROUPED_ROWS.

    Raises :class:`InputError` for sizes below 1, a dtype that no kernel takes, a GPU older than sm_80, too many splits
    for the grid, or splits together with ``deterministic``. Raises its subclass :class:`NoPlanError` if rows are too
    wide for shared memory.
    """
    for letter, size in (("B", B), ("S", S), ("H", H), ("L", L)):
        _require(size >= 1, f"{letter} is {size}, expected at least 1")
    _require(R >= 0 and T >= 0, f"R is {R} and T is {T}, expected at least 0")
    _require(
        query_dtype in (*_HALF, torch.float32),
        f"query is {query_dtype}, expected float16, bfloat16 or float32; the reference takes float64",
    )
    _require(
        device.capability >= MIN_CAPABILITY,
        f"{device.name} has capability {device.capability}, the kernels need (8, 0); use the reference",
    )
    wanted = splits or 0
    _require(0 <= wanted <= GRID_LIMIT, f"num_splits is {wanted}, expected 0 (chosen) to {GRID_LIMIT}")
    _require(listed or B <= GRID_LIMIT, f"B is {B}, more than the {GRID_LIMIT} of a grid's axis; call it in parts")
    _require(
        not (deterministic and wanted),
        f"num_splits is {wanted} beside deterministic, which cuts every {CHUNK} tokens; give one of them",
    )
    rows, kind = S * H, _cache_kind(cache_dtype)
    page, mask_bytes = (None, 0) if listed else (page_size, _mask_bytes(mask_bytes, masked=masked))
    layout = _layout(L, R, Lv, cache_dtype, mask_bytes, paged=page is not None)
    dtypes = (query_dtype, cache_dtype)
    if gluon and _hopper_suits(rows, (L, R, Lv), dtypes, page, mask_bytes, device):
        row, smem = starting_row(kind, rows, layout, device, "gluon"), HOPPER_SMEM
    else:
        row = starting_row(kind, rows, layout, device, "triton", listed=listed)
        if grouped and GROUPED_ROWS < row.block_m < HOPPER_BLOCK:
            row = starting_row(kind, GROUPED_ROWS, layout, device, "triton", listed=listed)
        row, smem = fitted(row, layout, device)
    if window and not listed:
        T = min(T, window + S - 1 + row.block_n - 1)  # the first and the last tile are partly visible
    if deterministic:
        wanted = max(1, -(-T // CHUNK))
        _require(wanted <= GRID_LIMIT, f"T is {T}, more than {GRID_LIMIT} chunks of {CHUNK} tokens")
    elif not wanted:
        wanted = _splits(row, smem, layout, device, B, rows, max(1, -(-T // row.block_n)))
    return Plan(
        kernel=row.kernel,
        block_m=row.block_m,
        block_n=row.block_n,
        num_warps=row.num_warps,
        num_stages=row.num_stages,
        splits=wanted,
        chunk=CHUNK if deterministic else None,
        smem=smem,
        tma=row.tma,
        pdl=row.pdl and wanted > 1,
        scheduled=row.kernel == "gluon" and page is not None and B > 1 and not (deterministic or splits),
        barriers=row.barriers,
        held=row.held and R > 0,
        cluster=row.cluster,
    )


def check(
    chosen: Plan,
    *,
    L: int,
    R: int,
    cache_dtype: torch.dtype,
    device: Device,
    Lv: int | None = None,
    paged: bool = False,
    masked: bool = False,
    mask_bytes: int | None = None,
    listed: bool = False,
) -> Plan:
    """Check a caller's own plan, and return the plan with ``smem`` filled in.

    Raises :class:`InputError` if the plan cannot be launched.
    """
    for name, size, least in (
        ("block_m", chosen.block_m, LEAST), ("block_n", chosen.block_n, LEAST), ("num_warps", chosen.num_warps, 1)
    ):  # fmt: skip
        message = f"{name} is {size}, expected a power of two, at least {least}"
        _require(size >= least and size & (size - 1) == 0, message)
    _require(
        chosen.kernel == "triton" or (chosen.block_m, chosen.block_n) == (HOPPER_BLOCK, HOPPER_BLOCK),
        f"the tile is {chosen.block_m}x{chosen.block_n}, the Hopper kernel has one of {HOPPER_BLOCK}x{HOPPER_BLOCK}",
    )
    _require(chosen.barriers in BARRIERS, f"barriers is {chosen.barriers}, expected one of {BARRIERS}")
    _require(chosen.cluster in CLUSTERS, f"cluster is {chosen.cluster}, expected one of {CLUSTERS}")
    _require(chosen.num_stages >= 1, f"num_stages is {chosen.num_stages}, expected at least 1")
    _require(1 <= chosen.splits <= GRID_LIMIT, f"splits is {chosen.splits}, expected 1 to {GRID_LIMIT}")
    _require(
        chosen.chunk is None or (chosen.chunk > 0 and chosen.chunk % chosen.block_n == 0),
        f"chunk is {chosen.chunk}, expected a multiple of block_n = {chosen.block_n}",
    )
    _cache_kind(cache_dtype)
    read = 0 if listed else _mask_bytes(mask_bytes, masked=masked)
    layout = _layout(L, R, Lv, cache_dtype, read, paged=paged and not listed)
    smem = HOPPER_SMEM
    if chosen.kernel == "triton":
        smem = shared_memory(
            layout, chosen.block_m, chosen.block_n, chosen.num_warps, chosen.num_stages, device.capability
        )
    _require(
        smem <= device.smem,
        (
            f"this plan needs {smem} bytes of shared memory, {device.name} has {device.smem}; "
            "make block_m, block_n or num_stages smaller"
        ),
    )
    return replace(chosen, smem=smem, held=chosen.held and R > 0)
