"""The table of tiles, tuned.json: read here, used by kernels/tiles.py, written by benchmarks/gpu/tune.py."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

Kernel = Literal["triton", "gluon"]
TABLE = Path(__file__).with_name("tuned.json")
WIDTH = 576  # the table's times are for rows of this many columns: 512 of the latent and 64 of the rotary key


@dataclass(frozen=True)
class TunedTile:
    """One row of ``tuned.json``: a tile and what is known about its speed.

    The row applies if all of these hold (None means any):

    * The device is of ``capability`` or newer, but older than the table's next capability.
    * There are ``min_rows`` to ``max_rows`` query rows.
    * The output has at most ``max_width`` columns.
    * The cache is paged (``paged`` True) or contiguous (False).
    * The call has index lists, if ``listed``. Such rows take precedence.

    ``barriers``, ``held`` and ``cluster`` are variants of the Hopper kernel, see
    :class:`mla_compile.kernels.plan.Plan`.

    Times are in microseconds, for cached rows of ``WIDTH`` columns. ``t0_us`` is the time of a block without tiles,
    ``tile_us`` the time that a tile occupies an SM.
    """

    kernel: Kernel
    capability: tuple[int, int]
    cache: str
    max_rows: int | None
    max_width: int | None
    paged: bool | None
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    occupancy: int
    t0_us: float
    tile_us: float
    tma: bool = False
    pdl: bool = False
    min_rows: int = 1
    listed: bool = False
    barriers: int = 3
    held: bool = False
    cluster: int = 1
    provenance: str = field(default="", compare=False)

    @classmethod
    def of(cls, entry: dict[str, Any], provenance: str = "") -> TunedTile:
        """Make a row from its JSON entry, where tuples are lists."""
        return cls(**{"provenance": provenance, **entry, "capability": tuple(entry["capability"])})

    def suits(self, rows: int, *, paged: bool) -> bool:
        """Whether the row applies to this number of query rows and kind of cache."""
        few_enough = self.max_rows is None or rows <= self.max_rows
        return self.min_rows <= rows and few_enough and self.paged in (None, paged)


@lru_cache(maxsize=8)
def table(path: Path = TABLE) -> tuple[TunedTile, ...]:
    """Return the table's rows. If the file changes, call ``table.cache_clear()`` and ``plan.cache_clear()``."""
    content = json.loads(path.read_text())
    return tuple(TunedTile.of(entry, content["provenance"]) for entry in content["rows"])
