"""Drawings of attentions as plain data: nodes of a traced graph and the values that flow between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["attention", "op", "weight", "cache", "latent", "input"]
"""``input``: a value computed outside the drawing. ``latent``: the rows that all heads read."""


@dataclass(frozen=True)
class DrawnNode:
    """One node of the graph, or a chain of views drawn as one node.

    Attributes:
        name: the name of the node in the graph, or of the last node of a chain.
        label: the node's operators, or the origin of an input or a weight.
        shape: the sizes of the node's value as text, symbols included.
        dtype: the dtype of the node's value.
        role: the node's role in the attention.
        source, code: ``file:line`` and the text of the user's source line, if the trace recorded it.
        blamed: whether this node prevents absorption.
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
    """Nodes and edges. An edge has two positions in ``nodes``: a value and a node that reads the value."""

    nodes: tuple[DrawnNode, ...]
    edges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SiteDrawing:
    """One attention before and after the rewrite. ``after`` is ``None`` without a rewrite."""

    before: Drawing
    after: Drawing | None = None
