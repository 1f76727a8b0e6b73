"""Where the walk back from K and V should end: the narrowest rows that weights expand into them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from mla_compile.passes.ir.graph import bytes_hint
from mla_compile.passes.linear.records import Piece


@dataclass(frozen=True)
class Cut:
    """A tensor on the way from a source to ``piece``, and the bytes it holds."""

    node: fx.Node
    bytes: int
    piece: Piece


def cut(piece: Piece, proper: bool, without: Collection[fx.Node] = ()) -> Cut | None:
    """The narrowest tensor on the way from the source to the piece, before (proper) or after its last projection."""
    last = piece.path[-1]
    best: tuple[int, int, int] | None = None
    where: fx.Node | None = None
    for index, visit in enumerate(piece.path):
        if (visit.contractions < last.contractions) != proper or (proper and visit.node in without):
            continue
        key = (bytes_hint(visit.node), last.scalings - visit.scalings, index)
        if best is None or key < best:
            best, where = key, visit.node
    return None if best is None or where is None else Cut(where, best[0], piece)


def choose_sources(
    pieces: Sequence[Piece], without: Collection[fx.Node] = (), any_width: bool = False
) -> tuple[set[fx.Node], fx.Node | None]:
    """Where the walks should end, and a source that was passed over because its rows are no narrower.

    ``without``: nodes that are not to be the source of a projection; ``any_width``: none is passed over.
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
        if any_width or bytes_hint(node) < sum({c.node: c.bytes for c in cuts}.values()):
            chosen.add(node)
        else:
            as_they_are += cuts
            wide = node
    return chosen | _rejoined(as_they_are), wide


def _rejoined(cuts: Sequence[Cut]) -> set[fx.Node]:
    """The nodes of ``cuts``, parts that are joined again further on replaced by what they are joined to.

    A rotary key is often ``cat(a cos - b sin, b cos + a sin)``: two sources that nothing expands, but one row.
    """
    chosen = {c.node: c.bytes for c in cuts}
    after = [(c.node, _after(c)) for c in cuts]
    for joint in dict.fromkeys(node for _, further in after for node in further):
        parts = {node for node, further in after if node in chosen and joint in further}
        if len(parts) > 1 and bytes_hint(joint) <= sum(chosen[n] for n in parts):
            for part in parts:
                del chosen[part]
            chosen[joint] = bytes_hint(joint)
    return set(chosen)


def _after(one: Cut) -> list[fx.Node]:
    """The nodes between a cut and the tensor it is a part of."""
    nodes = [v.node for v in one.piece.path]
    return nodes[nodes.index(one.node) + 1 :]
