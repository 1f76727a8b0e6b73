"""Constants of the plan's formula (kernels/plan.py) from measured times, by least squares. Pure: needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mla_compile.kernels.devices import Pace

NEAR = 0.05  # relative difference below which two measured times are taken for the same
LATENCIES = [k / 100 for k in range(10, 401)]  # microseconds that are tried


class Tile(NamedTuple):
    """What was measured of one tile, in microseconds; ``links`` and ``depth`` are those of the formula.

    ``lone``: by a block that has an SM, and the memory, to itself; ``full``: by an SM on a full card.
    """

    links: int
    depth: int
    lone: float
    full: float


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """``(intercept, slope)`` of the least squares line; slope 0 where all x are the same."""
    mean_x, mean_y = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return mean_y - slope * mean_x, slope


def pace(tiles: Iterable[Tile], now: Pace) -> tuple[Pace, float]:
    """The pace that explains the lone tiles best, and the root mean square of the relative errors that it leaves.

    ``lone = max(links * link + step, latency / depth)`` is a line for each latency that is tried, through the tiles
    that it does not hold up; the latency with the least error counts. Where a full SM needs as long for a tile as a
    lone block, its units may be what holds both up: such tiles say nothing about waiting and are left out. What the
    others do not tell stays as it is ``now``: the latency if none of them is held up by it, and the link if all have
    equally many. Raises ValueError without a tile that says something.
    """
    found = [t for t in tiles if abs(t.full / t.lone - 1) > NEAR]
    if not found:
        raise ValueError("a full SM is as fast as a lone block in every tile: none tells how long a block waits")
    best, least = now, float("inf")
    for latency in (now.latency, *LATENCIES):
        made = _with_latency(found, latency, now)
        error = sum((_lone(made, t) / t.lone - 1) ** 2 for t in found) / len(found)
        if error < least - 1e-12:
            best, least = made, error
    return best, least**0.5


def _with_latency(tiles: Sequence[Tile], latency: float, now: Pace) -> Pace:
    chained = [t for t in tiles if t.lone > (1 + NEAR) * latency / t.depth]
    if not chained:
        return now._replace(latency=latency)
    link = now.link
    if len({t.links for t in chained}) > 1:
        link = max(0.0, line([(t.links, t.lone) for t in chained])[1])
    step = sum(t.lone - t.links * link for t in chained) / len(chained)
    return Pace(latency, round(link, 5), round(max(0.0, step), 4))


def _lone(of: Pace, tile: Tile) -> float:
    return max(tile.links * of.link + of.step, of.latency / tile.depth)
