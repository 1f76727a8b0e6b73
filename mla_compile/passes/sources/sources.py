"""Choose where the walk back from K and V ends: at the narrowest rows that weights expand into K and V.

Candidates are compared by their bytes, not by their role. A cache should hold the narrowest tensor upstream of the last
projection, whatever the model calls that tensor.
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
    """A tensor on the way from a source to ``piece``, and its bytes."""

    node: fx.Node
    bytes: int
    piece: Piece


def narrowest(visits: Iterable[Visit]) -> fx.Node | None:
    """Return the tensor with the fewest bytes; None if there are no visits.

    Among equally narrow tensors, choose the one with the fewest scalings downstream, so that the weight of a norm is
    already applied to the rows.
    """
    best = min(visits, key=lambda v: (bytes_hint(v.node), -v.scalings), default=None)
    return None if best is None else best.node


def cut(piece: Piece, without: Container[fx.Node] = (), *, proper: bool) -> Cut | None:
    """Return the narrowest tensor on the path to ``piece``; None if there is none.

    With ``proper``, only tensors upstream of the last projection and not in ``without`` are considered. Otherwise, only
    tensors downstream of that projection are.
    """
    last = piece.path[-1].contractions
    node = narrowest(v for v in piece.path if (v.contractions < last) == proper and not (proper and v.node in without))
    return None if node is None else Cut(node, bytes_hint(node), piece)


def choose_sources(
    pieces: Sequence[Piece], without: Container[fx.Node] = (), *, any_width: bool = False
) -> tuple[set[fx.Node], fx.Node | None]:
    """Return where walks should end, and a source that was skipped because it is no narrower than its expansion.

    ``without``: nodes that may not be the source of a projection. ``any_width``: whether no source is skipped.
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
        # K and V may be two tensors made from the same rows, so the rows' bytes are compared with the sum of both.
        # Cached rows are chosen in any case.
        if any_width or bytes_hint(node) < sum({c.node: c.bytes for c in cuts}.values()) or are_cached(node):
            chosen.add(node)
        else:
            # The rows are no narrower than their expansion, so it is better to cache K and V.
            as_they_are += cuts
            wide = node
    return chosen | _rejoined(as_they_are), wide


def _rejoined(cuts: Sequence[Cut]) -> set[fx.Node]:
    """Return the nodes of ``cuts``; replace nodes that are joined downstream by the joined tensor.

    A rotary key is often ``cat(a cos - b sin, b cos + a sin)``: two sources, but one row to cache.
    """
    chosen = {c.node: c.bytes for c in cuts}
    after = [(c.node, _after(c)) for c in cuts]
    for joint in dict.fromkeys(node for _, further in after for node in further):
        parts = {node for node, further in after if node in chosen and joint in further}
        # A join that is wider than its parts together repeats them or contains other tensors.
        if len(parts) > 1 and bytes_hint(joint) <= sum(chosen[n] for n in parts):
            for part in parts:
                del chosen[part]
            chosen[joint] = bytes_hint(joint)
    return set(chosen)


def _after(one: Cut) -> list[fx.Node]:
    """Return the nodes that follow a cut on the path to its piece."""
    nodes = [v.node for v in one.piece.path]
    return nodes[nodes.index(one.node) + 1 :]
