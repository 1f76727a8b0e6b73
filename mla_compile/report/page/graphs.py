"""Lay out a drawing as boxes and curves. The template writes boxes and curves as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mla_compile.core.drawing import Drawing, DrawnNode
from mla_compile.report.page.layout import place

_HEIGHT = 40.0
_MARGIN = 6.0
_NAME_WIDTH, _SHAPE_WIDTH = 6.9, 6.3  # per character, slightly wider than the page's fonts
_LONGEST = 30
TIMES = " \N{MULTIPLICATION SIGN} "


@dataclass(frozen=True)
class NodeBox:
    """One node with its corner, its size, and the text that is shown."""

    node: DrawnNode
    x: float
    y: float
    width: float
    height: float
    label: str
    shape: str

    @property
    def lowered(self) -> float:
        """How far the text is shifted down. The drum of a cache has a lid."""
        return 3.0 if self.node.role == "cache" else 0.0

    @property
    def outline(self) -> str:
        """The path of the border. Each role has its own shape, so that roles can be told apart without colour."""
        x, y, w, h = self.x, self.y, self.width, self.height
        if self.node.role == "weight":  # a parallelogram
            return f"M{x + 10:g},{y:g}h{w - 10:g}l-10,{h:g}h{10 - w:g}z"
        if self.node.role == "cache":  # a drum
            lid = f"a{w / 2:g},4,0,0,"
            return f"M{x:g},{y + 4:g}{lid}1,{w:g},0v{h - 8:g}{lid}1,{-w:g},0zm0,0{lid}0,{w:g},0"
        radius = {"latent": h / 2, "attention": 2.0, "input": 12.0}.get(self.node.role, 5.0)
        inner_w, inner_h = w - 2 * radius, h - 2 * radius
        arc = f"a{radius:g},{radius:g},0,0,1,"
        return (
            f"M{x + radius:g},{y:g}h{inner_w:g}{arc}{radius:g},{radius:g}v{inner_h:g}{arc}{-radius:g},{radius:g}"
            f"h{-inner_w:g}{arc}{-radius:g},{-radius:g}v{-inner_h:g}{arc}{radius:g},{-radius:g}z"
        )


@dataclass(frozen=True)
class PlacedGraph:
    """A drawing after its layout. Curves are SVG paths."""

    boxes: tuple[NodeBox, ...]
    curves: tuple[str, ...]
    width: float
    height: float
    alternative: str


def laid_out(drawing: Drawing) -> PlacedGraph:
    """Lay out a drawing with its sources at the top."""
    labels = [_cut(node.label) for node in drawing.nodes]
    shapes = [_shape(node) for node in drawing.nodes]
    widths = [
        max(len(label) * _NAME_WIDTH, len(shape) * _SHAPE_WIDTH) + 26
        for label, shape in zip(labels, shapes, strict=True)
    ]
    placed = place(widths, drawing.edges, _HEIGHT)
    boxes = tuple(
        NodeBox(node, _MARGIN + x - w / 2, _MARGIN + y - _HEIGHT / 2, w, _HEIGHT, label, shape)
        for node, (x, y), w, label, shape in zip(drawing.nodes, placed.boxes, widths, labels, shapes, strict=True)
    )
    curves = tuple(_curve([(x + _MARGIN, y + _MARGIN) for x, y in points]) for points in placed.edges)
    return PlacedGraph(boxes, curves, placed.width + 2 * _MARGIN, placed.height + 2 * _MARGIN, _in_words(drawing))


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Return the path of an edge: curved between layers, and straight through layers that the edge only crosses."""
    half = _HEIGHT / 2
    (x, y), rest = points[0], points[1:]
    path = f"M{x:.1f},{y + half:.1f}"
    y += half
    for i, (next_x, next_y) in enumerate(rest):
        top, bottom = next_y - half, next_y + half
        middle = (y + top) / 2
        path += f"C{x:.1f},{middle:.1f},{next_x:.1f},{middle:.1f},{next_x:.1f},{top:.1f}"
        if i < len(rest) - 1:
            path += f"V{bottom:.1f}"
        x, y = next_x, bottom
    return path


def _shape(node: DrawnNode) -> str:
    return TIMES.join(_cut(size) for size in node.shape) or ("number" if node.dtype else "")


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2 - 1]}…{text[-_LONGEST // 2 :]}"


def _in_words(drawing: Drawing) -> str:
    """Count the nodes of each kind and name the attention operator. A table on the page lists all nodes."""
    names = {"op": "operators", "weight": "weights", "cache": "caches", "latent": "latent rows", "input": "inputs"}
    counts = [f"{sum(n.role == role for n in drawing.nodes)} {name}" for role, name in names.items()]
    attention = ", ".join(dict.fromkeys(n.label for n in drawing.nodes if n.role == "attention"))
    end = drawing.nodes[-1]
    return f"{', '.join(counts)}; attention: {attention or 'written out'}; result {TIMES.join(end.shape)}"
