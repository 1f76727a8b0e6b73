"""Find products with a weight that mix the rows of several tokens. Their results can be used as rows instead.

In ``attention(q, up(M c), ...)``, let M be a weight that mixes tokens, such as a fixed convolution. Each token of K is
then an image of one row of ``M c``, but of several rows of c.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import fx

from mla_compile.passes.attention.site import AttentionSite, Operand
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.linear.records import LinearMap, Maps, Piece


def mixing_products(site: AttentionSite, failed: Stop, maps: Maps) -> set[fx.Node]:
    """Return the products whose results can be used as rows that make K and V token by token.

    The set is empty unless ``failed`` says that tokens are mixed.
    """
    if failed.code != "token_mixing":
        return set()
    operands = (*(p.k for p in site.products), site.v)
    return {node for o in operands for node in _of_operand(o, site, maps)}


def _of_operand(operand: Operand, site: AttentionSite, maps: Maps) -> Iterator[fx.Node]:
    tokens = [dim for dim, axis in enumerate(operand.axes) if set(axis) & set(site.keys)]
    for piece in _mixed(maps.map(operand.node), tokens):
        for before, visit in pairwise(piece.path):
            if visit.contractions > before.contractions:
                behind = maps.with_sources([visit.node]).map(operand.node)
                if not any(p.source is visit.node for p in _mixed(behind, tokens)):
                    yield visit.node
                    break


def _mixed(lmap: LinearMap, tokens: list[int]) -> list[Piece]:
    """Return the pieces that mix tokens. Such a piece has an atom along the axes ``tokens`` that its rows lack."""
    rows = [p for p in lmap.pieces if p.source is not None]
    return [p for p in rows if any(a not in p.source_atoms for dim in tokens for a in p.axes[dim])]
