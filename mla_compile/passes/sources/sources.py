"""Choose where the walk back from K and V ends: at the narrowest rows that weights expand into K and V.

Candidates are compared by their bytes, not by their role. A cache should hold the narrowest tensor upstream of the last
projection, whatever its name.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from mla_compile.passes.ir.graph import bytes_hint
from mla_compile.passes.linear.records import Piece, Visit
from mla_compile.passes.sources.cached import are_cached


@dataclass(frozen=True)
class Cut:
    """A tensor on the path to ``piece``, and the tensor's size in bytes."""

    node: fx.Node
    bytes: int
    piece: Piece


def narrowest(visits: Iterable[Visit]) -> fx.Node | None:
    """Return the tensor with the fewest bytes; None if there are no visits.

    Among equally narrow tensors, choose the tensor with the most upstream scalings, to include the weight of a norm.
    """
    best = min(visits, key=lambda v: (bytes_hint(v.node), -v.scalings), default=None)
    return None if best is None else best.node


def cut(piece: Piece, without: Container[fx.Node] = (), *, proper: bool) -> Cut | None:
    """Return the narrowest tensor on the path to ``piece``; None if there is none.

    If ``proper`` is set, consider only tensors upstream of the last projection that are not in ``without``. Otherwise,
    consider only tensors downstream of the projection.
    """
    last = piece.path[-1].contractions
    node = narrowest(v for v in piece.path if (v.contractions < last) == proper and not (proper and v.node in without))
    return None if node is None else Cut(node, bytes_hint(node), piece)


def choose_sources(
    pieces: Sequence[Piece], without: Container[fx.Node] = (), *, any_width: bool = False
) -> tuple[set[fx.Node], fx.Node | None]:
    """Return the sources at which walks should end, and any source that was skipped for its width.

    A source is skipped if it is no narrower than its expansion. ``without``: nodes that may not be the source of a
    projection. ``any_width``: accept any width.
    """
    proper: dict[fx.Node, list[Piece]] = {}
    as_they_are: list[Cut] = []
    wide: fx.Node | None = None
    for piece in pieces:
        narrow = cut(piece, proper=True, without=without)
        trivial = cut(piece, proper=False)
        if narrow is not None:
            proper.setdefault(narrow.node, []).append(piece)
        elif trivial is not None:
            as_they_are.append(trivial)
    chosen: set[fx.Node] = set()
    for node, using in proper.items():
        cuts = [c for c in (cut(p, proper=False) for p in using) if c is not None]
        # The same rows may make K and V. So the bytes of rows are compared with the bytes of K plus V.
        # Cached rows are chosen at any width.
        if any_width or bytes_hint(node) < sum({c.node: c.bytes for c in cuts}.values()) or are_cached(node):
            chosen.add(node)
        else:
            # It is better to cache K and V than rows that are no narrower.
            as_they_are += cuts
            wide = node
    return chosen | _rejoined(as_they_are), wide


def _rejoined(cuts: Sequence[Cut]) -> set[fx.Node]:
    """Return the nodes of ``cuts``. If several nodes are joined later, return the join instead.

    A rotary key is often ``cat(a cos - b sin, b cos + a sin)``: two sources, but one row to cache.
    """
    chosen = {c.node: c.bytes for c in cuts}
    after = [(c.node, _after(c)) for c in cuts]
    for joint in dict.fromkeys(node for _, further in after for node in further):
        parts = {node for node, further in after if node in chosen and joint in further}
        # If the join is wider than all parts together, it repeats parts or contains other tensors.
        if len(parts) > 1 and bytes_hint(joint) <= sum(chosen[n] for n in parts):
            for part in parts:
                del chosen[part]
            chosen[joint] = bytes_hint(joint)
    return set(chosen)


def _after(one: Cut) -> list[fx.Node]:
    """Return the nodes downstream of a cut on the path to the piece."""
    nodes = [v.node for v in one.piece.path]
    return nodes[nodes.index(one.node) + 1 :]
