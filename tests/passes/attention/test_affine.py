"""Positions that masks compare, read through operators that rearrange axes, against the tensors themselves."""

from __future__ import annotations

import pytest
import torch

from mla_compile.passes.attention.affine import IndexReader, OpaqueError, place_of
from mla_compile.passes.attention.site import Affine, Block
from mla_compile.passes.canonical.views import canonicalize
from mla_compile.passes.ir.axes import fresh_axes
from tests.support.programs import trace

MOVED = {
    "split": lambda i: i.view(3, 4),
    "split and merged": lambda i: i.view(2, 6).t().reshape(12),
    "merged of three": lambda i: i.view(2, 3, 2).permute(2, 1, 0).reshape(6, 2),
    "blocks": lambda i: i.unfold(0, 3, 3)[:, 1:],
    "expanded": lambda i: i[:, None].expand(5, 12, 2),
    "interleaved": lambda i: i.repeat_interleave(3, 0),
    "repeated": lambda i: i.repeat(2, 3),
    "one repeated": lambda i: i[:, None].repeat(1, 3),
}


@pytest.mark.parametrize("name", MOVED)
def test_positions(name):
    fn = MOVED[name]
    graph = trace(lambda x: fn(torch.arange(12)) + x.long() * 0, [torch.zeros(())], []).gm.graph
    canonicalize(graph)
    node = graph.output_node().args[0][0].args[0]
    axes, wanted = fresh_axes(fn(torch.arange(12)).shape), fn(torch.arange(12))
    at = IndexReader().read(node, place_of(axes))
    assert not at.terms
    for place in torch.cartesian_prod(*(torch.arange(n) for n in wanted.shape)).view(-1, wanted.dim()).tolist():
        assert value(at, dict(zip(axes, place, strict=True))) == wanted[tuple(place)]


def value(at: Affine, place: dict) -> int:
    def position(along) -> int:
        return position(along.axis) // along.size if isinstance(along, Block) else place[along]

    return at.const + sum(step * position(along) for along, step in at.steps.items())


def test_a_product_of_positions_is_not_affine():
    graph = trace(lambda x: torch.arange(12) * torch.arange(12) + x.long(), [torch.zeros(())], []).gm.graph
    with pytest.raises(OpaqueError):
        IndexReader()._computed(graph.output_node().args[0][0].args[0], place_of(fresh_axes([12])))
