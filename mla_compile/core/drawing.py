"""An attention as it can be drawn: nodes of a traced graph around it and what flows between them, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["attention", "op", "weight", "cache", "latent", "input"]
"""``input``: computed outside of what is drawn. ``latent``: the rows that all heads read."""


@dataclass(frozen=True)
class DrawnNode:
    """One node of the graph, or a chain of views shown as one.

    Attributes:
        name: of the node in the graph, the last one of a chain.
        label: its operators, or where an input or a weight comes from.
        shape: sizes as they are written, symbols included.
        dtype: of its value.
        role: what it is to the attention.
        source, code: the line of the user's source, where the trace recorded it.
        blamed: whether this is the node that prevents absorption.
    """

    name: str
    label: str
    shape: tuple[str, ...]
    dtype: str
    role: Role
    source: str | None = None
    code: str | None = None
    blamed: bool = False


@dataclass(frozen=True)
class Drawing:
    """Nodes, and edges as pairs of their positions: from a value to what reads it."""

    nodes: tuple[DrawnNode, ...]
    edges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SiteDrawing:
    """One attention before the rewrite and after it; ``after`` is ``None`` where it was left as it is."""

    before: Drawing
    after: Drawing | None = None
