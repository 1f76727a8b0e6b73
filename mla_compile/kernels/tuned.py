"""The table of tiles, tuned.json: read here, used by kernels/tiles.py, written by benchmarks/gpu/tune.py."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

Kernel = Literal["triton", "gluon"]
TABLE = Path(__file__).with_name("tuned.json")
WIDTH = 576  # columns of the rows for which the table has times: 512 of the latent and 64 of the rotary key


@dataclass(frozen=True)
class TunedTile:
    """One row of ``tuned.json``: a tile and what is known about its speed.

    It applies to devices from this ``capability`` up to the next one in the table, to ``min_rows`` to ``max_rows``
    query rows, to at most ``max_width`` columns of output, and to a cache that is ``paged`` or not; None means any.
    Rows with ``listed`` apply only to calls with index lists, and take precedence there over those for a contiguous
    cache.

    ``barriers``, ``held`` and ``cluster`` are variants of the Hopper kernel, see
    :class:`mla_compile.kernels.plan.Plan`.

    Times are microseconds, for rows of ``WIDTH`` columns: ``t0_us`` for a block without tiles, ``tile_us`` for the time
    that a tile occupies an SM's units.
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
        """Whether the row applies to this many query rows, and to a cache of this kind."""
        few_enough = self.max_rows is None or rows <= self.max_rows
        return self.min_rows <= rows and few_enough and self.paged in (None, paged)


@lru_cache(maxsize=8)
def table(path: Path = TABLE) -> tuple[TunedTile, ...]:
    """The rows of ``tuned.json``. After writing a new one, call ``table.cache_clear()`` and ``plan.cache_clear()``."""
    content = json.loads(path.read_text())
    return tuple(TunedTile.of(entry, content["provenance"]) for entry in content["rows"])
