"""The launch plan of a decode attention call: tile, warps, pipeline depth and number of splits, from sizes alone.

A pure function of shapes, dtypes and a description of the device. It reads no tensor, so it never waits for the device
and may run while a CUDA graph is captured; equal arguments are answered from a cache.

A *tile* is ``block_n`` cached tokens met by ``block_m`` query rows (row m is token m // H, head m % H). The tile comes
from ``tuned.json``: one row per GPU generation, cache dtype and number of query rows; a row that does not fit the
device's shared memory is made smaller until it does.

The tokens of a request are divided into *splits* that run side by side. With ``C = B * row_blocks * splits`` blocks
over ``slots = SMs * blocks per SM``, each walking ``tiles = ceil(ceil(T / block_n) / splits)``, the splits chosen are
those with the least

    microseconds = ceil(C / slots) * (t0 + tiles * max(t_tile, bytes of a tile * readers / bandwidth)) + combine
    readers      = min(C, slots) / row_blocks       the row blocks of one split share the tile through the L2 cache
    combine      = 0 for one split, else launch + 8 * B * M * splits * Lv / L2 rate     float32 partials, out and in

and a split has at least 256 tokens, because below that writing its partial result costs as much as reading its tile.
``t0`` and ``t_tile`` stand in ``tuned.json``; the sizes of shared memory are computed by :func:`shared_memory`.

With ``deterministic`` every request is cut every ``CHUNK`` tokens, whatever the batch and the device: its result does
not depend on what else is in the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from mla_compile.errors import InputError
from mla_compile.kernels.devices import PRESETS, Device, preset
from mla_compile.kernels.tuned import Kernel, Row, table

CHUNK = 1024  # tokens of a split with deterministic=True; a multiple of every block_n
MIN_SPLIT = 256  # tokens below which a split is not worth its partial result
MAX_SPLITS = 128  # the plan's own; a caller may ask for more
GRID_LIMIT = 65535  # blocks along a grid's second and third axis (CUDA programming guide, compute capabilities)
COMBINE_US = 2.0  # a dependent launch inside a CUDA graph
L2_RATE = 8e12  # bytes/s at which partials are written and read again
MIN_CAPABILITY = (8, 0)  # cp.async and bfloat16 matrix products
_KB = 1024
_SLACK = 2 * _KB  # reductions across warps, page ids, statistics
_GLUON_SMEM = 220 * _KB  # Q 72, two stages of 72, statistics and barriers 2, and room to align
_HALF = (torch.float16, torch.bfloat16)

__all__ = [
    "CHUNK", "PRESETS", "Device", "Layout", "NoPlanError", "Plan", "Row", "check", "padded", "plan", "shared_memory",
    "table",
]  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """One launch. ``chunk`` is the tokens of a split where the splits are cut at fixed places, else None.

    ``tma``: tiles come by Hopper's copy engine; ``pdl``: the combine launch overlaps the end of the attention one;
    ``scheduled``: the Hopper kernel shares its work out on the device (kernels/triton/schedule.py) in place of
    ``splits``.
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

    def row_blocks(self, rows: int) -> int:
        """Blocks along the grid's first axis for ``rows`` = S*H query rows."""
        return -(-rows // self.block_m)


@dataclass(frozen=True)
class Layout:
    """The padded widths of a cached row, in columns, and the bytes of an element of the cache and of the products.

    ``values`` is 0 where the latent rows are the values. ``paged``: a tile's place is looked up in a block table.
    ``mask_bytes`` are read in the loop for each query row and token: 0 for no mask, and for one that only lists tiles.
    """

    latent: int
    rope: int
    values: int
    cache_bytes: int
    dot_bytes: int
    paged: bool
    mask_bytes: int = 0

    @property
    def out(self) -> int:
        """Columns of the accumulator."""
        return self.values or self.latent


def padded(width: int) -> int:
    """The columns a kernel works on: the next power of two, at least the 16 a matrix product needs; 0 stays 0."""
    return 0 if width == 0 else max(16, 1 << (width - 1).bit_length())


def shared_memory(
    layout: Layout, block_m: int, block_n: int, num_warps: int, num_stages: int, capability: tuple[int, int]
) -> int:
    """An upper bound of the bytes that Triton's compiler takes for one block of the attention kernel.

    The queries and a ring of tiles; the softmax weights where the product reads them from shared memory. A paged tile
    has half the depth, since its address is loaded a stage earlier. Products of Hopper's warpgroups read the tile where
    it lies while the next one arrives, so they hold one more; Blackwell's (64 rows or more) need the tile twice, once
    as values. An fp8 tile is held as it came and converted on the way into a product, through shared memory. A float32
    query is held as two parts, whose products add up to a float32 one.
    """
    warpgroup = capability[0] == 9 and block_m >= 64 and num_warps >= 4 and layout.dot_bytes == 2
    tensor_memory = capability[0] == 10 and block_m >= 64 and layout.dot_bytes == 2
    depth = max(1, (num_stages - 1) // 2) if layout.paged else max(1, num_stages - 1)
    buffers = depth + (warpgroup or (tensor_memory and num_stages > 1))
    queries = block_m * (layout.latent + layout.rope) * layout.dot_bytes * (2 if layout.dot_bytes == 4 else 1)
    columns = layout.latent + layout.rope + layout.values
    converted = 0
    if layout.cache_bytes < layout.dot_bytes:
        twice = layout.out if tensor_memory else 0
        converted = (columns + twice if warpgroup or tensor_memory else layout.out) * layout.dot_bytes
        ring = buffers * columns * layout.cache_bytes
    else:
        again = layout.latent if tensor_memory and not layout.values else 0
        ring = buffers * (columns + again) * layout.cache_bytes
    weights = 0 if warpgroup else block_m * block_n * layout.dot_bytes
    # A mask goes from the layout it is loaded in to that of the scores, as two bytes at least; with a narrow latent
    # the compiler holds one more.
    copies = depth + (1 if warpgroup and layout.latent <= 256 else 0)
    mask = block_m * block_n * max(layout.mask_bytes, 2) * copies if layout.mask_bytes else 0
    return queries + block_n * (ring + converted) + weights + mask + _SLACK


class NoPlanError(InputError):
    """Rows so wide that no tile fits this device's shared memory: the reference has to do."""


def _require(ok: bool, message: str) -> None:
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


def _layout(L: int, R: int, Lv: int | None, cache_dtype: torch.dtype, paged: bool, mask_bytes: int) -> Layout:
    return Layout(
        padded(L), padded(R), padded(Lv or 0), cache_dtype.itemsize, max(2, cache_dtype.itemsize), paged, mask_bytes
    )


def _mask_bytes(masked: bool, given: int | None) -> int:
    return given if given is not None else 4 * masked


def _starting_row(kind: str, rows: int, layout: Layout, device: Device, kernel: Kernel) -> Row:
    """The table's row for this device; for columns that none of its rows foresees, that of the widest, narrowed."""
    known = [r for r in table() if r.kernel == kernel and r.cache == kind and r.capability <= device.capability]
    _require(bool(known), f"tuned.json has no {kernel} row for {device.name}, capability {device.capability}")
    newest = max(r.capability for r in known)
    known = [r for r in known if r.capability == newest]
    suitable = [r for r in known if r.suits(rows, layout.paged)] or known[-1:]
    for row in suitable:
        if row.max_width is None or layout.out <= row.max_width:
            return row
    widest = max(suitable, key=lambda r: r.max_width or 0)
    return replace(widest, block_m=max(16, widest.block_m * (widest.max_width or layout.out) // layout.out))


def _smaller(row: Row) -> list[Row]:
    """The row itself, then ever smaller ones: less depth first, then fewer tokens, then fewer query rows."""
    steps = [row, replace(row, num_stages=2)]
    n, m = row.block_n, row.block_m
    while n > 16 or m > 16:
        if n > 16 and (n > 32 or m == 16):
            n //= 2
        elif m > 16:
            m //= 2
        steps.append(replace(row, block_m=m, block_n=n, num_stages=2, num_warps=8 if m > 16 else 4))
    return steps


def _fitted(row: Row, layout: Layout, device: Device) -> tuple[Row, int]:
    least = 0
    for smaller in _smaller(row):
        shape = (smaller.block_m, smaller.block_n, smaller.num_warps, smaller.num_stages)
        smem = shared_memory(layout, *shape, device.capability)
        if smem <= device.smem:
            return smaller, smem
        least = smem
    widths = f"{layout.latent}+{layout.rope}" + (f" and {layout.values}" if layout.values else "")
    raise NoPlanError(
        f"plan: rows of {widths} columns of {layout.cache_bytes} bytes need {least} bytes of shared memory at the "
        f"smallest tile, {device.name} has {device.smem}; use narrower rows, half precision or the reference"
    )


def _gluon_suits(
    rows: int,
    widths: tuple[int, int, int | None],
    dtypes: tuple[torch.dtype, torch.dtype],
    page: int | None,
    masked: bool,
    device: Device,
) -> bool:
    """Hopper's own kernel is written for 512+64 half precision rows, tiles of 64 tokens and no mask.

    What else it needs (strides, no soft-cap, no window) is for the launch to see: it asks again with ``gluon=False``.
    """
    return (
        device.capability == (9, 0)
        and device.smem >= _GLUON_SMEM
        and widths == (512, 64, None)
        and dtypes[1] in _HALF
        and (dtypes[0] == dtypes[1] or dtypes == (torch.float32, torch.bfloat16))
        and rows > 32  # below, padding to 64 rows is all it would add
        and not masked
        and (page or 16) % 16 == 0  # a box of TMA lies in one page
    )


def _microseconds(
    row: Row, smem: int, layout: Layout, device: Device, work: tuple[int, int, int], splits: int
) -> float:
    """The module's formula. ``work`` is batch, query rows and tiles of a request."""
    batch, rows, tiles = work
    row_blocks = -(-rows // row.block_m)
    per_sm = max(1, min(row.occupancy, (device.smem + _KB) // (smem + _KB)))  # a block also takes 1 KB of the SM's
    slots = device.sms * per_sm
    blocks = batch * row_blocks * splits
    columns = layout.latent + layout.rope + layout.values
    readers = min(blocks, slots) / row_blocks
    bandwidth = device.bandwidth or preset(device.capability).bandwidth or 1e12
    read = 1e6 * row.block_n * columns * layout.cache_bytes * readers / bandwidth
    combine = 0.0
    if splits > 1:
        combine = COMBINE_US + 1e6 * 8 * batch * rows * splits * layout.out / L2_RATE
    tile = max(row.tile_us * columns / 576, read)
    return math.ceil(blocks / slots) * (row.t0_us + math.ceil(tiles / splits) * tile) + combine


@lru_cache(maxsize=4096)
def _splits(row: Row, smem: int, layout: Layout, device: Device, batch: int, rows: int, tiles: int) -> int:
    """The number of splits that the formula finds fastest; of almost equal ones, the smallest."""
    most = max(1, min(MAX_SPLITS, tiles * row.block_n // MIN_SPLIT))
    best, least = 1, math.inf
    for splits in range(1, most + 1):
        per = -(-tiles // splits)
        if -(-tiles // per) != splits:
            continue  # some would be empty: fewer do the same work
        time = _microseconds(row, smem, layout, device, (batch, rows, tiles), splits)
        if time < 0.995 * least:
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
) -> Plan:
    """The launch for B requests of S query tokens and H heads over at most T tokens of L+R columns.

    ``T`` is the capacity (of the cache, or of the block table), not a request's length: a CUDA graph captured with it
    serves every length. ``Lv`` is the width of separate values (None: the latent rows are the values), ``page_size``
    None for a contiguous cache, ``masked`` whether a mask's list of tiles is walked, ``mask_bytes`` what of it is read
    for each query row and token in the loop (None: 4, a float32 mask; 0: nothing). ``splits`` None or 0: chosen here.
    ``gluon`` False: not the Hopper kernel (a feature it lacks is in use, or its compile probe failed).

    Raises :class:`InputError`: sizes below 1, a dtype no kernel takes, a GPU older than sm_80, splits beyond the grid
    or together with ``deterministic``; :class:`NoPlanError`, one of them, for rows too wide for shared memory.
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
    _require(B <= GRID_LIMIT, f"B is {B}, more than the {GRID_LIMIT} of a grid's axis; call it in parts")
    _require(
        not (deterministic and wanted),
        f"num_splits is {wanted} beside deterministic, which cuts every {CHUNK} tokens; give one of them",
    )
    rows, kind = S * H, _cache_kind(cache_dtype)
    layout = _layout(L, R, Lv, cache_dtype, page_size is not None, _mask_bytes(masked, mask_bytes))
    if gluon and _gluon_suits(rows, (L, R, Lv), (query_dtype, cache_dtype), page_size, masked, device):
        row, smem = _starting_row(kind, rows, layout, device, "gluon"), _GLUON_SMEM
    else:
        row, smem = _fitted(_starting_row(kind, rows, layout, device, "triton"), layout, device)
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
        scheduled=row.kernel == "gluon" and page_size is not None and B > 1 and not (deterministic or splits),
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
) -> Plan:
    """A caller's own plan with its shared memory filled in; raises :class:`InputError` where it cannot be launched."""
    for name, size, least in (
        ("block_m", chosen.block_m, 16), ("block_n", chosen.block_n, 16), ("num_warps", chosen.num_warps, 1)
    ):  # fmt: skip
        message = f"{name} is {size}, expected a power of two, at least {least}"
        _require(size >= least and size & (size - 1) == 0, message)
    _require(chosen.num_stages >= 1, f"num_stages is {chosen.num_stages}, expected at least 1")
    _require(1 <= chosen.splits <= GRID_LIMIT, f"splits is {chosen.splits}, expected 1 to {GRID_LIMIT}")
    _require(
        chosen.chunk is None or (chosen.chunk > 0 and chosen.chunk % chosen.block_n == 0),
        f"chunk is {chosen.chunk}, expected a multiple of block_n = {chosen.block_n}",
    )
    _cache_kind(cache_dtype)
    layout = _layout(L, R, Lv, cache_dtype, paged, _mask_bytes(masked, mask_bytes))
    smem = _GLUON_SMEM
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
    return replace(chosen, smem=smem)
