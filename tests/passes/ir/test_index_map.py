"""Index maps against the operators that they describe."""

from __future__ import annotations

import pytest
import torch

from mla_compile.passes.canonical.views import canonicalize
from mla_compile.passes.ir.axes import Atom, IndexMap, flatten, fresh_axes, permuted, repeated, reshaped
from mla_compile.passes.ir.moves import Rearrange
from mla_compile.passes.ir.operators import decode
from tests.support.programs import seeded, trace

X = seeded(2, 1, 12, 5)
MOVED = {
    "view": lambda x: x.view(8, 15),
    "unflatten": lambda x: x.unflatten(2, (3, 4)),
    "squeeze": lambda x: x.squeeze(1),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "flatten": torch.flatten,
    "permute": lambda x: x.permute(2, 0, 3, 1),
    "transpose": lambda x: x.mT,
    "unfold": lambda x: x.unfold(2, 4, 4),
    "unfold the last axis": lambda x: x.unfold(-1, 5, 5),
    "expand": lambda x: x.expand(3, 2, 4, 12, -1),
    "expand to the same": lambda x: x.expand(2, 1, -1, -1),
    "tile": lambda x: x.tile(3, 1, 2, 1, 2),
    "interleaved": lambda x: x.repeat_interleave(3, 2),
    "one interleaved": lambda x: x.repeat_interleave(3, 1),
}


def map_of(fn) -> tuple[IndexMap, torch.Tensor]:
    graph = trace(fn, [X], []).gm.graph
    canonicalize(graph)
    how = decode(graph.output_node().args[0][0])
    assert isinstance(how, Rearrange)
    assert how.map is not None
    return how.map, fn(X)


def rearranged(x: torch.Tensor, index: IndexMap) -> torch.Tensor:
    """``x`` as einops would rearrange and repeat it."""
    own, new = flatten(index.before), flatten(index.after)
    x = x.reshape([a.size for a in own]).permute([own.index(a) for a in new if a in own])
    for k, atom in enumerate(new):
        x = x if atom in own else x.unsqueeze(k)
    return x.expand([a.size for a in new]).reshape([torch.Size(a.size for a in axis).numel() for axis in index.after])


@pytest.mark.parametrize("name", MOVED)
def test_values(name):
    index, wanted = map_of(MOVED[name])
    assert torch.equal(rearranged(X, index), wanted)


@pytest.mark.parametrize("name", MOVED)
def test_there_and_back(name):
    index, wanted = map_of(MOVED[name])
    axes = fresh_axes(X.shape)
    after, split = index.forward(axes)
    own = tuple(tuple(p for a in axis for p in split.get(a, (a,))) for axis in axes)
    assert torch.equal(rearranged(X, IndexMap(own, after)), wanted)
    assert index.backward(after) == own
    assert index.forward(index.before)[1] == {}
    assert {k for dim in range(len(after)) for k in index.read_along(dim)} >= {k for k, a in enumerate(own) if a}


def test_axes_in_other_factors():
    b, h, d = Atom(2), Atom(4), Atom(3)
    index = reshaped((2, 12), (2, 2, 6))
    ((_, outer, inner), split) = index.forward(((b,), (h, d)))
    assert [a.size for a in (*outer, *inner)] == [2, 2, 3]
    assert (*outer, *inner[:1]) == split[h]
    assert index.backward(((b,), (Atom(2),), (Atom(6),))) is not None
    assert reshaped((2, 2, 6), (2, 12)).backward(((b,), (Atom(12),))) is None  # an atom would have to be split
    assert reshaped((2, 12), (3, 8)) is None  # through the factors of the shape
    assert reshaped((2, 12), (2, 3, 4)).forward(((b,), (h, d))) is None  # through the factors of the axes


def test_what_stays_whole():
    assert reshaped((2, 12, 5), (2, 3, 4, 5)).kept(2) == 3
    assert reshaped((2, 12, 5), (2, 60)).kept(2) is None
    assert permuted((2, 3), (1, 0)).kept(1) == 0
    assert repeated((2, 3), (1, 2), interleaved=True).kept(1) is None


def test_repeats_are_new_axes_each_time():
    index, axes = repeated((2,), (3, 1), interleaved=False), fresh_axes([2])
    (one, _), (other, _) = index.forward(axes), index.forward(axes)
    assert one[0] != other[0]
    assert one[1] == other[1] == axes[0]
