"""Writing maps in the site's factors: what lines up after splitting, and what is said of what does not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from mla_compile.codes import Code
from mla_compile.passes.attention.find import find_attention
from mla_compile.passes.ir.axes import Atom, common_factors, regroup, substitute
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.ir.walk import weight_nodes
from mla_compile.passes.linear.analysis import LinearMaps
from mla_compile.passes.proof.plan import make_plan
from tests.support.modules import MLA, inputs
from tests.support.programs import absorbed, canonical, one_side, refused, seeded, trace


def sizes(axis, split):
    return [a.size for a in substitute(axis, split)]


@pytest.mark.parametrize(
    ("one", "other", "agreed"),
    [
        ((6,), (2, 3), [2, 3]),
        ((12,), (2, 3, 2), [2, 3, 2]),
        ((4, 3), (2, 6), [2, 2, 3]),
        ((2, 3), (3, 2), None),
        ((6,), (6, 2), None),
        ((), (2,), None),
    ],
)
def test_common_factors(one, other, agreed):
    axes = [tuple(Atom(s) for s in one), tuple(Atom(s) for s in other)]
    for first, second in (axes, axes[::-1]):
        splits = common_factors(first, second)
        if agreed is None:
            assert splits is None
        else:
            assert sizes(first, splits[0]) == sizes(second, splits[1]) == agreed


def test_the_same_atom_split_the_same_way_is_the_same_factors():
    whole = Atom(12)
    other = whole.split(3, 4)
    splits, none = common_factors((whole,), other)
    assert substitute((whole,), splits) == other
    assert none == {}


def test_a_reshape_of_nothing_that_keeps_no_factor():
    assert regroup([Atom(0)], [0, 7]) is None
    assert regroup([Atom(5), Atom(0)], [0]) is not None


class Grouped(MLA):
    """The scores are seen as groups of heads for a while; ``own``: K's heads come in factors of their own."""

    def __init__(self, groups, own):
        super().__init__(H=6)
        self.groups, self.own = groups, own
        self.bias, self.gain = nn.Parameter(seeded(groups, 1, 1, 1)), nn.Parameter(seeded(*own, 1, 1))

    def join(self, k, r):
        return (super().join(k, r).unflatten(1, self.own) * self.gain).flatten(1, len(self.own))

    def attend(self, q, k, v, mask):
        scores = (q @ k.mT * self.scale).unflatten(1, (self.groups, 6 // self.groups))
        return (scores + self.bias).flatten(1, 2).softmax(-1) @ v


@pytest.mark.parametrize("own", [(6,), (2, 3)])
def test_a_map_is_split_where_the_scores_are(own):
    absorbed(Grouped(2, own), inputs(S=3))


def test_factors_that_do_not_line_up():
    """Groups of three heads in the scores, of two in K: V alone is absorbed."""
    one_side(Grouped(3, (2, 3)), inputs(S=3), "values", Code.UNSUPPORTED_OP)


def plan_of(fn, data, weights):
    """The plan, or why there is none, of the only attention of ``fn``."""
    program = trace(fn, data, weights)
    graph = canonical(program)
    known = weight_nodes(graph, program.weights)
    (site,) = find_attention(graph, known)
    maps = LinearMaps(known, program.fake_mode)
    return make_plan(site, maps)


B, H, S, T, L, N, V = 2, 3, 1, 7, 8, 6, 5


def test_columns_that_are_never_written():
    def fn(q, c, w, u):
        k, v = (F.linear(c, x).unflatten(-1, (H, -1)).transpose(1, 2) for x in (w, u))
        partly = torch.ops.aten.slice_scatter(k.new_empty(B, H, T, N + 2), k, -1, 0, N)
        return (q @ partly.mT).softmax(-1) @ v

    stop = plan_of(fn, [seeded(B, H, S, N + 2), seeded(B, T, L)], [seeded(H * N, L), seeded(H * V, L)])
    assert isinstance(stop, Stop)
    assert (stop.code, stop.detail) == ("unsupported_op", "part of the tensor is never written")


def test_tokens_joined_along_the_last_axis():
    def fn(q, c, new, w, u, other):
        v = F.linear(torch.cat([c, new], 1), u).unflatten(-1, (H, -1)).transpose(1, 2)
        past, now = (F.linear(x, y).unflatten(-1, (H, -1)).permute(0, 2, 3, 1) for x, y in ((c, w), (new, other)))
        return (q @ torch.cat([past, now], -1)).softmax(-1) @ v

    data = [seeded(B, H, S, N), seeded(B, T, L), seeded(B, S, L, seed=3)]
    stop = plan_of(fn, data, [seeded(H * N, L), seeded(H * V, L), seeded(H * N, L, seed=5)])
    assert isinstance(stop, Stop)
    assert (stop.code, stop.detail) == ("token_mixing", "rows of several tensors are joined after the up-projection")


def test_attention_among_the_columns():
    """Features that are tokens, of which there may be any number."""

    class Across(MLA):
        def attend(self, q, k, v, mask):
            return (q.mT @ k * self.scale).softmax(-1) @ v.mT

    tokens = Dim("tokens", min=19, max=64)
    data = inputs(S=20, T=20)
    refused(Across(N=6, R=0, V=6), data[:2], Code.UNSUPPORTED_OP, dynamic=({1: tokens}, {1: tokens}))


def test_a_latent_for_each_head():
    """By one weight for all heads: they are as good as more sequences, of which nothing is saved."""
    stop = plan_of(
        lambda q, c, w, u: (q @ (c @ w).mT).softmax(-1) @ (c @ u),
        [seeded(B, H, S, N), seeded(B, H, T, L)],
        [seeded(L, N), seeded(L, V)],
    )
    assert isinstance(stop, Stop)
    assert (stop.code, stop.detail) == ("head_dependent_latent", "every head has rows of its own")


def test_a_factor_for_each_key_is_no_weight():
    """Along the last axis of K as [B,H,N,T], where a weight of features would stand."""

    class Positions(MLA):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(seeded(7, seed=9))

        def attend(self, q, k, v, mask):
            return (q @ (k.mT * self.p) * self.scale).softmax(-1) @ (v.mT * self.p).mT

    outcome = refused(Positions(), inputs(S=3), Code.POSITION_DEPENDENT)
    assert outcome.report.sites[0].reason == "a weight that differs from token to token"
