"""Rows that outlive a call: those that a cache holds, whatever is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from mla_compile.passes.ir.graph import is_tensor, packet, whole_rows
from mla_compile.passes.ir.operators import (
    CONTRACTIONS,
    Broadcast,
    Copy,
    Join,
    Permute,
    Regroup,
    Select,
    Slice,
    Write,
    WriteOne,
    WriteRows,
    decode,
)
from mla_compile.passes.ir.walk import REACH, reachable

_VIEWS = (Broadcast, Copy, Permute, Regroup, Select, Slice)


def are_cached(rows: fx.Node) -> bool:
    """Whether new rows stand behind, or are written between, rows that came in, perhaps under a norm of all of them.

    Then the caller keeps the rows and not what they are expanded into, which is made anew in every call. A projection
    on the way makes other rows of them.
    """
    return bool(pasts_of(rows))


def pasts_of(rows: fx.Node) -> set[fx.Node]:
    """The inputs and the state of the graph that hold what was there of ``rows`` before this call."""

    def same_rows(node: fx.Node) -> Iterable[fx.Node]:
        ends = packet(node) in CONTRACTIONS or _held(node)
        return () if ends else (n for n in node.all_input_nodes if is_tensor(n))

    start = whole_rows(rows)
    found = (_input(past) for node in reachable([start], same_rows, REACH) for past in _held(node))
    return {node for node in found if node is not None}


def _held(node: fx.Node) -> Sequence[fx.Node]:
    """The tensors among whose rows ``node`` puts others."""
    match decode(node):
        case Join(parts=parts):
            return parts
        case Write(base=base) | WriteOne(base=base) | WriteRows(base=base):
            return (base,)
    return ()


def _input(node: fx.Node) -> fx.Node | None:
    """The input of the graph, or the state that it owns, which ``node`` shows; ``None`` if it shows neither."""
    while isinstance(how := decode(node), _VIEWS):
        node = how.x
    return node if node.op in ("placeholder", "get_attr") else None
