"""Chooses the tile of a launch: a row of ``tuned.json``, reduced until it fits the device's shared memory.

A *tile* is ``block_n`` cached tokens by ``block_m`` query rows (query row m is token m // H, head m % H).
``tuned.json`` has a row for each GPU generation, cache dtype and range of query rows. This module reads no tensor and
no device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mla_compile.errors import InputError
from mla_compile.kernels.devices import Device
from mla_compile.kernels.tuned import Kernel, TunedTile, table

KB = 1024
SLACK = 2 * KB  # reductions across warps, page ids, statistics: not counted individually in the bound below
LEAST = 16  # fewest query rows and fewest tokens of a tile: the smallest side of a matrix product


@dataclass(frozen=True)
class RowLayout:
    """The padded widths of a cached row in columns, and the bytes per element of the cache and of the products.

    ``values`` is 0 if the latent rows are the values. ``paged``: the place of a tile is looked up in a block table.
    ``mask_bytes``: bytes of the mask that the loop reads for each query row and token. The loop reads no mask if a list
    of tiles describes the mask completely.
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
        """The number of columns of the accumulator."""
        return self.values or self.latent


class NoPlanError(InputError):
    """Raised if rows are so wide that no tile fits the device's shared memory. The reference then has to run."""


def padded(width: int) -> int:
    """Return the number of columns that a kernel processes: the next power of two, at least 16; 0 for 0."""
    return 0 if width == 0 else max(LEAST, 1 << (width - 1).bit_length())


def depth(num_stages: int, *, paged: bool) -> int:
    """Return how many tiles are loading while another is processed. Paged tiles need an extra stage for addresses."""
    return max(1, (num_stages - 1) // 2) if paged else max(1, num_stages - 1)


def shared_memory(
    layout: RowLayout, block_m: int, block_n: int, num_warps: int, num_stages: int, capability: tuple[int, int]
) -> int:
    """Return an upper bound on the shared memory, in bytes, that Triton uses for one block of the attention kernel.

    The bound includes:

    * The queries. A float32 query is stored as two terms.
    * A ring of tiles. Hopper's warpgroups read a tile in place while the next tile arrives, so the ring has one more
      tile. Blackwell's products (64 rows or more) need a second copy of the tile, as values.
    * For fp8 rows, a converted copy of the tile that a product reads.
    * The softmax weights, unless warpgroups keep them in registers.
    * The mask.
    """
    # From 64 rows on, products use wgmma on Hopper (one warpgroup is 4 warps) and tcgen05 on Blackwell.
    warpgroup = capability[0] == 9 and block_m >= 64 and num_warps >= 4 and layout.dot_bytes == 2
    tensor_memory = capability[0] == 10 and block_m >= 64 and layout.dot_bytes == 2
    under_way = depth(num_stages, paged=layout.paged)
    buffers = under_way + (warpgroup or (tensor_memory and num_stages > 1))
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
    # A mask is converted from its load layout to the layout of the scores, with at least two bytes per element. With
    # warpgroups and a latent of up to 256 columns, the compiler was seen to use one more copy
    # (tests/kernels/test_tiles.py has the measured sizes).
    copies = under_way + (1 if warpgroup and layout.latent <= 256 else 0)
    mask = block_m * block_n * max(layout.mask_bytes, 2) * copies if layout.mask_bytes else 0
    return queries + block_n * (ring + converted) + weights + mask + SLACK


def starting_row(
    kind: str, rows: int, layout: RowLayout, device: Device, kernel: Kernel, *, listed: bool = False
) -> TunedTile:
    """Return the table's row for a device and a number of query rows.

    If the output is wider than all suitable rows allow, ``block_m`` is reduced.
    """
    known = [r for r in table() if (r.kernel, r.cache) == (kernel, kind) and r.capability <= device.capability]
    known = [r for r in known if listed or not r.listed]
    if not known:
        raise InputError(f"plan: tuned.json has no {kernel} row for {device.name}, capability {device.capability}")
    newest = max(r.capability for r in known)
    known = [r for r in known if r.capability == newest]
    suitable = [r for r in known if r.suits(rows, paged=layout.paged)] or known[-1:]
    suitable.sort(key=lambda r: not r.listed)
    for row in suitable:
        if row.max_width is None or layout.out <= row.max_width:
            return row
    widest = max(suitable, key=lambda r: r.max_width or 0)
    return replace(widest, block_m=max(LEAST, widest.block_m * (widest.max_width or layout.out) // layout.out))


def fitted(row: TunedTile, layout: RowLayout, device: Device) -> tuple[TunedTile, int]:
    """Reduce the row until it fits the device. Return the reduced row and its shared memory in bytes."""
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


def _smaller(row: TunedTile) -> list[TunedTile]:
    """Return the row and smaller versions: with fewer stages, then 32 tokens, then fewer query rows, then 16 tokens.

    Query rows are reduced late, because all query rows of a tile share one read of the cache. Tiles of more than 16
    query rows use 8 warps, because the registers of 4 warps cannot hold the sums.
    """
    steps = [row, replace(row, num_stages=2)]
    n, m = row.block_n, row.block_m
    while n > LEAST or m > LEAST:
        if n > LEAST and (n > 2 * LEAST or m == LEAST):
            n //= 2
        elif m > LEAST:
            m //= 2
        steps.append(replace(row, block_m=m, block_n=n, num_stages=2, num_warps=8 if m > LEAST else 4))
    return steps
