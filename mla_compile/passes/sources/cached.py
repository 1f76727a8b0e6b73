"""Find rows that outlive a call because a cache holds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from mla_compile.passes.ir.graph import ROWS, is_tensor, packet, whole_rows
from mla_compile.passes.ir.moves import Copy, Join, Rearrange, Select, Slice, Write, WriteOne, WriteRows
from mla_compile.passes.ir.operators import CONTRACTIONS, behind, decode
from mla_compile.passes.ir.walk import REACH, reachable


def are_cached(rows: fx.Node) -> bool:
    """Whether ``rows`` are cached: new rows are appended or written to an input, and no projection follows.

    If so, every call expands the cached rows again.
    """
    return bool(pasts_of(rows))


def pasts_of(rows: fx.Node) -> set[fx.Node]:
    """Return the inputs and ``get_attr`` tensors to which new rows are appended or written to make ``rows``."""

    def same_rows(node: fx.Node) -> Iterable[fx.Node]:
        return () if held(node) else unprojected(node)

    def unprojected(node: fx.Node) -> Iterable[fx.Node]:
        return () if packet(node) in CONTRACTIONS else (n for n in node.all_input_nodes if is_tensor(n))

    start = whole_rows(rows)
    # The search through pointwise operators and rolls is needed only for rows that replaced K.
    replaced = any(ROWS in n.meta for n in reachable([start], unprojected, REACH))
    held = _held_or_written if replaced else _held
    found = (_input(past) for node in reachable([start], same_rows, REACH) for past in held(node))
    return {node for node in found if node is not None}


def come_from(rows: Iterable[fx.Node], mark: str) -> bool:
    """Whether all ``rows`` are made from inputs with ``mark`` in the metadata (:func:`pasts_of`)."""
    return all(any(mark in past.meta for past in pasts_of(node)) for node in rows)


def _held(node: fx.Node) -> Sequence[fx.Node]:
    """Return the tensors that ``node`` joins, or the tensor that ``node`` writes to."""
    match decode(node):
        case Join(parts=parts):
            return parts
        case Write(base=base) | WriteOne(base=base) | WriteRows(base=base):
            return (base,)
    return ()


def _held_or_written(node: fx.Node) -> Sequence[fx.Node]:
    """Do what :func:`_held` does, and also follow pointwise updates and rolls of rows that replaced K."""
    if held := _held(node):
        return [past for n in held for past in _held_or_written(behind(n, Slice)[-1]) or [n]]
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    read = node.all_input_nodes if pointwise or packet(node) in (torch.ops.aten.where, torch.ops.aten.roll) else ()
    return [n for n in read if ROWS in behind(n, Slice)[-1].meta]


def _input(node: fx.Node) -> fx.Node | None:
    """Return the input or ``get_attr`` tensor of which ``node`` is a view, slice or copy; None if there is none."""
    shown = behind(node, (Copy, Rearrange, Select, Slice))[-1]
    return shown if shown.op in ("placeholder", "get_attr") else None
