"""Where boxes go."""

from __future__ import annotations

import random
from itertools import pairwise

from mla_compile.report.page.layout import GAP_X, place


def test_layouts_keep_boxes_apart_and_edges_downwards():
    random_ = random.Random(3)
    for count in (1, 2, 5, 17, 40):
        edges = {(random_.randrange(i), i) for i in range(1, count) for _ in range(2)}
        widths = [random_.uniform(30, 150) for _ in range(count)]
        placed = place(widths, sorted(edges), 40)
        assert placed == place(widths, sorted(edges), 40)
        rows: dict[float, list[tuple[float, float]]] = {}
        for (x, y), width in zip(placed.boxes, widths, strict=True):
            rows.setdefault(y, []).append((x - width / 2, x + width / 2))
            assert x - width / 2 >= -1e-6
            assert x + width / 2 <= placed.width + 1e-6
        for row in rows.values():
            row.sort()
            assert all(b[0] - a[1] >= GAP_X - 1e-6 for a, b in pairwise(row))
        for points in placed.edges:
            assert all(a[1] < b[1] for a, b in pairwise(points))
