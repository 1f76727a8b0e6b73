"""Place the boxes of a small graph in layers, with few crossings and short, straight edges.

The method of Sugiyama, Tagawa and Toda (1981) chooses layers by distance from the end, then the order within layers,
then positions. An edge that spans several layers has a point in each layer. Equal graphs get equal pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

GAP_X, GAP_Y = 16.0, 30.0
_SWEEPS = 12
_POINT = 8.0  # the width kept free for an edge that crosses a layer


@dataclass(frozen=True)
class Placed:
    """The centres of the boxes, the points that each edge passes through, and the total size."""

    boxes: tuple[tuple[float, float], ...]
    edges: tuple[tuple[tuple[float, float], ...], ...]
    width: float
    height: float


def place(widths: Sequence[float], edges: Sequence[tuple[int, int]], box_height: float) -> Placed:
    """Lay out boxes of these widths. Edges go down from source to reader and form no cycle."""
    if not widths:
        return Placed((), (), 0.0, 0.0)
    layer = _layers(len(widths), edges)
    sizes = list(widths)
    chains = []
    for source, reader in edges:
        chain = [source]
        for between in range(layer[source] + 1, layer[reader]):
            chain.append(len(sizes))
            sizes.append(_POINT)
            layer.append(between)
        chains.append([*chain, reader])
    links = [pair for chain in chains for pair in pairwise(chain)]
    rows = _ordered(layer, links)
    x = _positions(rows, links, sizes)
    left = min(x[i] - sizes[i] / 2 for i in range(len(sizes)))
    right = max(x[i] + sizes[i] / 2 for i in range(len(sizes)))
    step = box_height + GAP_Y
    at = [(x[i] - left, layer[i] * step + box_height / 2) for i in range(len(sizes))]
    return Placed(
        tuple(at[: len(widths)]),
        tuple(tuple(at[i] for i in chain) for chain in chains),
        right - left,
        len(rows) * step - GAP_Y,
    )


def _layers(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the layer of each box, as close to its readers as possible."""
    readers: list[list[int]] = [[] for _ in range(count)]
    for source, reader in edges:
        readers[source].append(reader)
    depth: dict[int, int] = {}

    def depth_of(i: int) -> int:
        if i not in depth:
            depth[i] = max((depth_of(r) + 1 for r in readers[i]), default=0)
        return depth[i]

    most = max(depth_of(i) for i in range(count))
    return [most - depth[i] for i in range(count)]


def _ordered(layer: Sequence[int], links: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Order the boxes and points of every layer by barycentres, in sweeps down and up. Keep the best order."""
    above, below = _neighbours(len(layer), links)
    rows: list[list[int]] = [[] for _ in range(max(layer) + 1)]
    for i in _depth_first(above, [i for i in range(len(layer)) if not below[i]]):
        rows[layer[i]].append(i)
    best, fewest = [list(row) for row in rows], _crossings(rows, links)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row in rows[1:] if down else rows[-2::-1]:
            near = above if down else below
            place_of = {i: p for other in rows for p, i in enumerate(other)}
            row.sort(key=partial(_barycentre, near, place_of))
        crossings = _crossings(rows, links)
        if crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
    return best


def _barycentre(near: Sequence[Sequence[int]], at: Mapping[int, int], i: int) -> float:
    return sum(at[n] for n in near[i]) / len(near[i]) if near[i] else at[i]


def _neighbours(count: int, links: Sequence[tuple[int, int]]) -> tuple[list[list[int]], list[list[int]]]:
    above: list[list[int]] = [[] for _ in range(count)]
    below: list[list[int]] = [[] for _ in range(count)]
    for source, reader in links:
        above[reader].append(source)
        below[source].append(reader)
    return above, below


def _depth_first(above: Sequence[Sequence[int]], ends: Sequence[int]) -> Iterator[int]:
    seen: set[int] = set()
    stack = list(reversed(ends))
    while stack:
        i = stack.pop()
        if i not in seen:
            seen.add(i)
            yield i
            stack += reversed(above[i])


def _crossings(rows: Sequence[Sequence[int]], links: Sequence[tuple[int, int]]) -> int:
    at = {i: (r, p) for r, row in enumerate(rows) for p, i in enumerate(row)}
    total = 0
    for n, (a, b) in enumerate(links):
        for c, d in links[n + 1 :]:
            if at[a][0] == at[c][0]:
                total += (at[a][1] - at[c][1]) * (at[b][1] - at[d][1]) < 0
    return total


def _positions(rows: Sequence[Sequence[int]], links: Sequence[tuple[int, int]], sizes: Sequence[float]) -> list[float]:
    """Return centres. Each is as close to the mean of its neighbours as the order and the widths allow."""
    above, below = _neighbours(len(sizes), links)
    x = [0.0] * len(sizes)
    for row in rows:
        for i, centre in zip(row, _apart([0.0] * len(row), [sizes[i] for i in row]), strict=True):
            x[i] = centre
    for sweep in range(2 * _SWEEPS):
        near = above if sweep % 2 else below
        both = sweep >= 2 * _SWEEPS - 4
        for row in rows if sweep % 2 else rows[::-1]:
            wanted = []
            for i in row:
                around = [*above[i], *below[i]] if both else near[i] or [i]
                wanted.append(sum(x[n] for n in around) / len(around) if around else x[i])
            for i, centre in zip(row, _apart(wanted, [sizes[i] for i in row]), strict=True):
                x[i] = centre
    return x


def _apart(wanted: Sequence[float], widths: Sequence[float]) -> list[float]:
    """Return the centres closest to ``wanted`` (least squares) that keep order and gaps ("pool adjacent violators")."""
    offsets = [0.0]
    for left, right in pairwise(widths):
        offsets.append(offsets[-1] + (left + right) / 2 + GAP_X)
    blocks: list[tuple[float, int]] = []  # (mean of the wanted centres, number of members)
    for want, offset in zip(wanted, offsets, strict=False):
        mean, size = want - offset, 1
        while blocks and blocks[-1][0] > mean:
            before, members = blocks.pop()
            mean, size = (mean * size + before * members) / (size + members), size + members
        blocks.append((mean, size))
    starts = [mean for mean, size in blocks for _ in range(size)]
    return [start + offset for start, offset in zip(starts, offsets, strict=False)]
