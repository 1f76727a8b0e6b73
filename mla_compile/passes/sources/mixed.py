"""Finds products with a weight that mix the rows of tokens, and whose results can serve as the rows instead.

In ``attention(q, up(M c), ...)`` with a weight M over tokens (such as a fixed convolution), a token of K is an image
not of its row in c but of its row in ``M c``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import fx

from mla_compile.passes.attention.site import AttentionSite, Operand
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.linear.records import LinearMap, Maps, Piece


def mixing_products(site: AttentionSite, failed: Stop, maps: Maps) -> set[fx.Node]:
    """Return products whose results, used as rows, make K and V token by token; none unless ``failed`` is a mixing."""
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
    """Return the pieces that have, along the axes ``tokens``, an atom that their rows lack."""
    rows = [p for p in lmap.pieces if p.source is not None]
    return [p for p in rows if any(a not in p.source_atoms for dim in tokens for a in p.axes[dim])]
