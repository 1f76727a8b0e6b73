"""Where the walk back from K and V should end: at the narrowest rows that weights expand into them.

Candidates are compared by the bytes they hold, not by their role: the narrowest tensor before the last projection is
what a cache would best hold, whatever the model calls it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from mla_compile.passes.decide.cached import are_cached
from mla_compile.passes.ir.graph import bytes_hint
from mla_compile.passes.linear.records import Piece, Visit


@dataclass(frozen=True)
class Cut:
    """A tensor on the way from a source to ``piece``, and the bytes it holds."""

    node: fx.Node
    bytes: int
    piece: Piece


def narrowest(visits: Iterable[Visit]) -> fx.Node | None:
    """The tensor that holds the fewest bytes.

    Of equally narrow ones, the one with the fewest scalings after it: the weight of a norm stays on the rows' side.
    """
    best = min(visits, key=lambda v: (bytes_hint(v.node), -v.scalings), default=None)
    return None if best is None else best.node


def cut(piece: Piece, without: Container[fx.Node] = (), *, proper: bool) -> Cut | None:
    """The narrowest tensor on the way to the piece, before its last projection (``proper``) or after it."""
    last = piece.path[-1].contractions
    node = narrowest(v for v in piece.path if (v.contractions < last) == proper and not (proper and v.node in without))
    return None if node is None else Cut(node, bytes_hint(node), piece)


def choose_sources(
    pieces: Sequence[Piece], without: Container[fx.Node] = (), *, any_width: bool = False
) -> tuple[set[fx.Node], fx.Node | None]:
    """Where the walks should end, and a source that was passed over because it is no narrower than what it makes.

    ``without``: nodes that may not be the source of a projection; ``any_width``: no source is passed over.
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
        # K and V may be two tensors made of the same rows: together they are what the rows stand for.
        # Rows that a cache holds are there, however few heads K and V are made for.
        if any_width or bytes_hint(node) < sum({c.node: c.bytes for c in cuts}.values()) or are_cached(node):
            chosen.add(node)
        else:
            # No narrower than what it makes: a cache would rather hold K and V as they are.
            as_they_are += cuts
            wide = node
    return chosen | _rejoined(as_they_are), wide


def _rejoined(cuts: Sequence[Cut]) -> set[fx.Node]:
    """The nodes of ``cuts``, where those that are joined further on are replaced by the tensor they are joined into.

    A rotary key is often ``cat(a cos - b sin, b cos + a sin)``: two sources, but one row to cache.
    """
    chosen = {c.node: c.bytes for c in cuts}
    after = [(c.node, _after(c)) for c in cuts]
    for joint in dict.fromkeys(node for _, further in after for node in further):
        parts = {node for node, further in after if node in chosen and joint in further}
        # Not where the join is wider than its parts: it repeats them, or holds something else too.
        if len(parts) > 1 and bytes_hint(joint) <= sum(chosen[n] for n in parts):
            for part in parts:
                del chosen[part]
            chosen[joint] = bytes_hint(joint)
    return set(chosen)


def _after(one: Cut) -> list[fx.Node]:
    """The nodes between a cut and the tensor it is a part of."""
    nodes = [v.node for v in one.piece.path]
    return nodes[nodes.index(one.node) + 1 :]
