"""Parts of a tensor along one axis: what is made of them is what a slice of the whole would be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mla_compile.passes.dependence.parts import AxisParts, PartMaker
from mla_compile.passes.dependence.steps import step
from mla_compile.passes.ir.graph import shape
from mla_compile.passes.ir.walk import weight_nodes
from tests.support.programs import canonical, seeded, trace

A, B_, C = (seeded(2, h, 7, 5, seed=s) for h, s in ((3, 1), (2, 2), (5, 3)))


# What is made of a [2,3,7,5] and b [2,2,7,5], joined along axis 1; the axis of the result, and where it may be cut.
LEGAL = {
    "cat": (lambda a, b, c: torch.cat([a, b], 1), 1, 3),
    "cat_of_columns": (lambda a, b, c: torch.cat([torch.cat([a, b], 1), c], -1), 1, 3),
    "pointwise": (lambda a, b, c: torch.where(c > 0, torch.cat([a, b], 1) * 2 + c[0, :, :1], -c), 1, 3),
    "permuted": (lambda a, b, c: torch.cat([a, b], 1).permute(3, 1, 0, 2).mT, 1, 3),
    "flat_columns": (lambda a, b, c: torch.cat([a, b], 1).transpose(1, 2).reshape(2, 7, 25), 2, 15),
    "outer_factor": (lambda a, b, c: torch.cat([a, b], 1).transpose(1, 2).reshape(2, 7, 25).view(14, 5, 5), 1, 3),
    "grouped": (lambda a, b, c: torch.cat([a, b], 1)[:, :, None].expand(2, 5, 4, 7, 5).reshape(2, 20, 7, 5), 1, 12),
    "repeated": (lambda a, b, c: torch.cat([a, b], 1).repeat_interleave(2, 1), 1, 6),
    "split": (lambda a, b, c: torch.cat([a, b], 1).split([2, 3], -1)[1], 1, 3),
    "unbound": (lambda a, b, c: torch.cat([a, b], 1).unbind(2)[4], 1, 3),
    "sliced": (lambda a, b, c: torch.cat([a, b], 1)[:, 1:4, 2:], 1, 2),
    "softmax": (lambda a, b, c: torch.cat([a, b], 1).softmax(-1).to(torch.float32), 1, 3),
    "norm": (lambda a, b, c: F.rms_norm(torch.cat([a, b], 1), (5,), c[0, 0, 0]), 1, 3),
    "products": (lambda a, b, c: torch.cat([a, b], 1) @ c.mT @ c, 1, 3),
    "einsum": (lambda a, b, c: torch.einsum("bhtd,bhsd->bsht", torch.cat([a, b], 1), c), 2, 3),
    "linear": (lambda a, b, c: F.linear(torch.cat([a, b], 1), c[0, 0]), 1, 3),
    "attention": (
        lambda a, b, c: F.scaled_dot_product_attention(c, torch.cat([a, b], 1), c, c[0, :, 0, :1, None]),
        1,
        3,
    ),
    "shared_heads": (
        lambda a, b, c: F.scaled_dot_product_attention(torch.cat([c, c], 1), torch.cat([a, b], 1), c, enable_gqa=True),
        1,
        6,
    ),
}


def made(fn, dim, start, stop):
    """Positions of the result, from their parts; the whole; and where the axis may be cut."""
    program = trace(fn, [A, B_, C], [])
    graph = canonical(program)
    (result,) = graph.output_node().args[0]
    parts = AxisParts(weight_nodes(graph, ()), (), lambda node: frozenset([node]))
    runs = parts.runs(result, dim)
    part = PartMaker(parts, graph.output_node(), program.fake_mode, ()).make(result, dim, start, stop)
    graph.output_node().args = ((part, result),)
    assert shape(part) == (*shape(result)[:dim], stop - start, *shape(result)[dim + 1 :])
    program.gm.recompile()
    got, whole = program.gm(A, B_, C)
    return got, whole, [r.stop for r in runs]


@pytest.mark.parametrize("name", LEGAL)
def test_parts_are_slices(name):
    fn, dim, at = LEGAL[name]
    length = fn(A, B_, C).shape[dim]
    for start, stop in ((0, at), (at, length), (at - 1, at + 1)):
        got, whole, cuts = made(fn, dim, start, stop)
        assert at in cuts
        torch.testing.assert_close(got, whole.narrow(dim, start, stop - start), rtol=1e-12, atol=1e-12)


MIXING = {
    "softmax": (lambda x, c: x.softmax(1), 1),
    "norm": (lambda x, c: F.layer_norm(x.transpose(1, 3), (5,)), 3),
    "repeated_in_turn": (lambda x, c: x.repeat(1, 2, 1, 1), 1),
    "flipped": (lambda x, c: x.flip(1), 1),
    "every_second": (lambda x, c: x[:, ::2], 1),
    "itself": (lambda x, c: torch.einsum("bhtd,bgtd->bhg", x, x), 1),
    "random": (lambda x, c: torch.rand_like(x), 1),
    "other_bytes": (lambda x, c: x.view(torch.int64), 1),
    "gathered": (lambda x, c: x[:, torch.tensor([1, 0, 2, 4, 3])], 1),
    "summed_up": (lambda x, c: x.cumsum(1), 1),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_the_axis_has_no_step(name):
    fn, dim = MIXING[name]
    program = trace(lambda a, b, c: fn(torch.cat([a, b], 1), c), [A, B_, C], [])
    (result,) = program.gm.graph.output_node().args[0]
    assert step(result, dim) is None
