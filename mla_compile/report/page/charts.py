"""Charts as positions and words. The template writes charts as SVG. Marks keep unrounded values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mla_compile.core.quantities import scaled

WIDTH, HEIGHT = 360.0, 250.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 14.0, 16.0, 40.0
_ROOM_BELOW = 0.15  # in decades: space for the name of the lowest line
_BAR, _BAR_GAP, _BAR_LEFT, _BAR_RIGHT = 22.0, 12.0, 44.0, 62.0


@dataclass(frozen=True)
class Bar:
    """One bar, with ``text`` at its end."""

    name: str
    value: float
    text: str
    y: float
    length: float
    own: bool


@dataclass(frozen=True)
class BarChart:
    """Bars from zero, on a linear scale."""

    title: str
    alternative: str
    bars: tuple[Bar, ...]
    left: float
    thickness: float
    height: float


@dataclass(frozen=True)
class Mark:
    """A marked point, which is also in the table: position, values and text."""

    x: float
    y: float
    at: float
    value: float
    text: str


@dataclass(frozen=True)
class Line:
    """One line in a ``style`` of the page's palette. ``label`` is the position of the line's name."""

    name: str
    style: str
    path: str
    marks: tuple[Mark, ...]
    label: tuple[float, float]


@dataclass(frozen=True)
class Tick:
    """A position on an axis."""

    at: float
    text: str


@dataclass(frozen=True)
class LineChart:
    """Lines on logarithmic axes. ``limit`` is a vertical line with a text."""

    title: str
    alternative: str
    across: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    limit: Tick | None
    left: float = _LEFT
    right: float = WIDTH - _RIGHT
    top: float = _TOP
    bottom: float = HEIGHT - _BOTTOM


@dataclass(frozen=True)
class Series:
    """A line's values at the chart's positions."""

    name: str
    style: str
    values: Sequence[float]


def bars(title: str, rows: Sequence[tuple[str, float, bool]], unit: str) -> BarChart:
    """Return a chart with a bar for each row: name, value, and whether the model is of this kind."""
    most = max(value for _, value, _ in rows)
    room = WIDTH - _BAR_LEFT - _BAR_RIGHT
    drawn = tuple(
        Bar(name, value, f"{value:,}", 4 + i * (_BAR + _BAR_GAP), max(1.5, value / most * room), own)
        for i, (name, value, own) in enumerate(rows)
    )
    words = "; ".join(f"{bar.name} {bar.text}" for bar in drawn)
    return BarChart(title, f"{words} {unit}", drawn, _BAR_LEFT, _BAR, 8 + len(rows) * (_BAR + _BAR_GAP) - _BAR_GAP)


def lines(
    title: str,
    across: str,
    places: Sequence[int],
    series: Sequence[Series],
    *,
    marked: Sequence[int],
    unit: str,
    limit: tuple[float, str] | None = None,
) -> LineChart:
    """Return a chart of series over ``places``, with marks at the ``marked`` places."""
    scale = _Scale.of(places, series)
    drawn = tuple(
        _line(one, places, marked, scale, unit, above=one is series[0] or one is not series[-1]) for one in series
    )
    every = max(1, math.ceil((scale.high - scale.low) / 6))
    exponents = range(math.ceil(scale.low), math.floor(scale.high) + 1, every)
    y_ticks = tuple(Tick(scale.y(10.0**e), scaled(10.0**e, unit).strip()) for e in exponents)
    step = max(1, round((scale.last - scale.first) / 4))
    x_ticks = tuple(Tick(scale.x(at), short(at)) for at in places if round(math.log2(at) - scale.first) % step == 0)
    cut = Tick(scale.x(limit[0]), limit[1]) if limit and places[0] < limit[0] < places[-1] else None
    words = "; ".join(f"{line.name}: " + ", ".join(m.text for m in line.marks) for line in drawn)
    return LineChart(title, words + (f"; {cut.text}" if cut else ""), across, drawn, x_ticks, y_ticks, cut)


def short(number: int) -> str:
    """Format a whole number, with k for multiples of 1,024 and M for multiples of 1,048,576."""
    for sign, size in (("M", 1024**2), ("k", 1024)):
        if number % size == 0:
            return f"{number // size:,}{sign}"
    return f"{number:,}"


@dataclass(frozen=True)
class _Scale:
    """The exponents at the ends of both axes.

    The horizontal axis has powers of two, the vertical axis powers of ten.
    """

    first: float
    last: float
    low: float
    high: float

    @classmethod
    def of(cls, places: Sequence[int], series: Sequence[Series]) -> _Scale:
        values = [value for one in series for value in one.values]
        low, high = math.floor(math.log10(min(values)) - _ROOM_BELOW), math.ceil(math.log10(max(values)))
        return cls(math.log2(places[0]), math.log2(places[-1]), low, max(high, low + 1))

    def x(self, at: float) -> float:
        share = (math.log2(at) - self.first) / (self.last - self.first)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _BOTTOM - _TOP)


def _line(one: Series, places: Sequence[int], marked: Sequence[int], scale: _Scale, unit: str, *, above: bool) -> Line:
    points = [(scale.x(at), scale.y(value)) for at, value in zip(places, one.values, strict=True)]
    marks = tuple(
        Mark(x, y, at, value, f"{scaled(value, unit).strip()} at {short(at)}")
        for (x, y), at, value in zip(points, places, one.values, strict=True)
        if at in marked
    )
    x, y = points[len(points) * 2 // 5]
    path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return Line(one.name, one.style, path, marks, (x - 8, y - 9) if above else (x + 8, y + 17))
