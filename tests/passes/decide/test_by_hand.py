"""Attention that is in the absorbed form as it is written: it stays, is told apart from attention without a latent, and
no warning is given."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_compile
from mla_compile import backend
from mla_compile.codes import Code
from mla_compile.errors import MlaCompileWarning
from tests.support.modules import H, L, N, R, V
from tests.support.programs import assert_untouched, codes, export, optimized, seeded
from tests.support.tiers import also
from tests.support.usual import usual

pytestmark = pytest.mark.thorough

B, D, PAST, SCALE = 2, 10, 7, 0.3


class ByHand(nn.Module):
    """One decode step: x [B,S,D] and cached rows [B,T,L+R] in, the output and all rows out."""

    def __init__(self, attend=None, norm=True):
        super().__init__()
        self.attend, self.norm = attend, norm
        self.q = nn.Parameter(seeded(H * (N + R), D, seed=1))
        self.down = nn.Parameter(seeded(L + R, D, seed=2))
        self.up = nn.Parameter(seeded(H * (N + V), L, seed=3))

    def queries(self, x):
        """[B,S,H,N] and [B,S,H,R]."""
        return F.linear(x, self.q).unflatten(-1, (H, -1)).split([N, R], -1)

    def rows(self, x, past):
        c, r = F.linear(x, self.down).split([L, R], -1)
        c = F.rms_norm(c, (L,)) if self.norm else c
        return torch.cat([past, torch.cat([c, r], -1)], 1)

    def forward(self, x, past):
        w_k, w_v = self.up.view(H, N + V, L).split([N, V], 1)
        q, q_rope = self.queries(x)
        rows = self.rows(x, past)
        o = self.attend(torch.einsum("bshn,hnl->bshl", q, w_k), q_rope, rows)
        return torch.einsum("bshl,hvl->bshv", o, w_v).flatten(2), rows


def einsums(q, q_rope, rows):
    c, r = rows.split([L, R], -1)
    scores = torch.einsum("bshl,btl->bsht", q, c) + torch.einsum("bshr,btr->bsht", q_rope, r)
    return torch.einsum("bsht,btl->bshl", (scores * SCALE).softmax(-1, dtype=torch.float64), c)


def heads_first(q, q_rope, rows):
    c, r = rows[..., None, :, :L], rows[:, None, :, L:]
    scores = q.transpose(1, 2) @ c.mT + q_rope.transpose(1, 2) @ r.mT
    return ((scores * SCALE).softmax(-1) @ c).transpose(1, 2)


def heads_among_queries(q, q_rope, rows):
    scores = torch.cat([q, q_rope], -1).flatten(1, 2) @ rows.mT
    return ((scores * SCALE).softmax(-1) @ rows[..., :L]).view(q.shape)


def fused(q, q_rope, rows, keys=lambda k: k, values=lambda k: k[..., :L], **options):
    k = keys(rows[:, None])
    q = torch.cat([q, q_rope], -1).transpose(1, 2)
    o = F.scaled_dot_product_attention(q, k, values(k), scale=SCALE, **options)
    return o[..., :L].transpose(1, 2)


def causal(q, q_rope, rows):
    S, T = q.shape[1], rows.shape[1]
    return fused(q, q_rope, rows, attn_mask=torch.arange(T) <= torch.arange(T - S, T)[:, None])


def joined_again(q, q_rope, rows):
    c, r = rows.split([L, R], -1)
    return fused(q, q_rope, torch.cat([c, r], -1), values=lambda _: c[:, None])


def rope_first(q, q_rope, rows):
    c, r = rows.split([L, R], -1)
    k, v = torch.cat([r, c], -1)[:, None], c[:, None]
    return F.scaled_dot_product_attention(torch.cat([q_rope, q], -1).transpose(1, 2), k, v).transpose(1, 2)


def first_tokens_hidden(q, q_rope, rows):
    return fused(q, q_rope, rows, keys=lambda k: k[:, :, 2:], values=lambda k: k[..., :L])


def cut_apart(q, q_rope, rows):
    """Keys and values are cut to the same tokens, each by itself."""
    return fused(q, q_rope, rows[:, 2:], values=lambda _: rows[..., :L][:, None, 2:])


def copied(order, over=None):
    """Keys of every head in a tensor of their own, written in this order of columns; then others ``over`` some."""

    def attend(q, q_rope, rows):
        k = rows.new_empty(rows.shape[0], H, rows.shape[1], L + R)
        for start, stop in order:
            k[..., start:stop] = rows[:, None, :, start:stop]
        if over is not None:
            start, stop = over
            k[..., start:stop] = rows[:, None, :, start - 1 : stop - 1]
        return fused(q, q_rope, rows, keys=lambda _: k, values=lambda _: rows[:, None, :, :L].expand(-1, H, -1, -1))

    return attend


def copied_by_halves(q, q_rope, rows):
    """Two heads read the rows, the others those of another token."""
    k = torch.cat([one[:, None].expand(-1, n, -1, -1) for one, n in ((rows, 2), (rows.flip(1), H - 2))], 1)
    return fused(q, q_rope, rows, keys=lambda _: k)


SPELLINGS = {
    "einsum": einsums,
    "heads first": heads_first,
    "heads among the queries": heads_among_queries,
    "fused": fused,
    "fused, causal": causal,
    "fused, grouped": lambda *a: fused(*a, enable_gqa=True),
    "fused, expanded": lambda *a: fused(*a, keys=lambda k: k.expand(-1, H, -1, -1)),
    "fused, repeated": lambda *a: fused(*a, keys=lambda k: k.repeat(1, H, 1, 1)),
    "fused, repeated one by one": lambda *a: fused(*a, keys=lambda k: k.repeat_interleave(H, 1)),
    "fused, the keys as values": lambda *a: fused(*a, values=lambda k: k),
    "fused, joined again": joined_again,
    "fused, the rotary key first": rope_first,
    "fused, some tokens": first_tokens_hidden,
    "fused, cut apart": cut_apart,
    "copied to heads": copied([(0, L), (L, L + R)]),
    "copied to heads, the rotary key first": copied([(L, L + R), (0, L)]),
    "copied to heads in parts": copied([(2, L - 1), (0, 2), (L - 1, L + R)]),
}


def step(S=1):
    return [seeded(B, S, D, seed=8), seeded(B, PAST, L + R, seed=9)]


FEW = (
    "einsum", "heads first", "fused", "fused, expanded", "fused, the keys as values", "fused, cut apart",
    "copied to heads in parts",
)  # fmt: skip
"""Of spellings that tests/passes/decide/test_fuse.py goes through, but for the last one."""


@pytest.mark.singly
@pytest.mark.parametrize("S", [3, 1])
@pytest.mark.parametrize(
    "name",
    usual(SPELLINGS, ("fused, cut apart", "copied to heads in parts")),
)
def test_it_is_said_to_be_absorbed(name, S):
    program = export(ByHand(SPELLINGS[name]), step(S))
    outcome = optimized(program)
    assert codes(outcome) == [Code.ALREADY_ABSORBED]
    assert_untouched(program, outcome)
    (site,) = outcome.report.sites
    assert (site.verdict, site.blame) == ("kept", None)
    assert "nothing is left to absorb" in site.reason


def test_why_no_operator_takes_its_place_is_told():
    def at_least_one(q, q_rope, rows):
        c, r = rows.split([L, R], -1)
        scores = torch.einsum("bshl,btl->bsht", q, c) + torch.einsum("bshr,btr->bsht", q_rope, r)
        weights = (scores * SCALE).exp()
        return torch.einsum("bsht,btl->bshl", weights / weights.sum(-1, keepdim=True).clamp(min=1), c)

    (site,) = optimized(export(ByHand(at_least_one), step())).report.sites
    assert (site.code, site.notes) == (
        Code.ALREADY_ABSORBED,
        ("no operator takes its place: weights without a softmax",),
    )


@pytest.mark.singly
@pytest.mark.parametrize("S", [1, 4])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    "name", ["einsum", "fused", *also("combination", "heads first", "fused, expanded", "copied to heads")]
)
def test_rows_that_are_not_cached(name, norm, S):
    class Prompt(ByHand):
        def rows(self, x, past):
            return super().rows(x, past)[:, PAST:]

    assert codes(optimized(export(Prompt(SPELLINGS[name], norm), step(S)))) == [Code.ALREADY_ABSORBED]


class NormedQueries(ByHand):
    """Queries have heads before they are taken into the latent space."""

    def queries(self, x):
        q, q_rope = super().queries(x)
        return F.rms_norm(q, (N,)), q_rope


class InBuffers(ByHand):
    """DeepSeek's own code: rows in two buffers that are longer, for more sequences than there are."""

    def __init__(self):
        super().__init__()
        self.register_buffer("c", torch.zeros(B + 1, 2 * PAST, L, dtype=torch.float64))
        self.register_buffer("r", torch.zeros(B + 1, 2 * PAST, R, dtype=torch.float64))

    def forward(self, x, past):
        start, end, size = past.shape[1], past.shape[1] + x.shape[1], x.shape[0]
        c, r = F.linear(x, self.down).split([L, R], -1)
        self.c[:size, start:end], self.r[:size, start:end] = F.rms_norm(c, (L,)), r
        w = self.up.view(H, N + V, L)
        q, q_rope = self.queries(x)
        q = torch.einsum("bshn,hnl->bshl", q, w[:, :N])
        scores = torch.einsum("bshl,btl->bsht", q, self.c[:size, :end])
        scores = (scores + torch.einsum("bshr,btr->bsht", q_rope, self.r[:size, :end])) * SCALE
        o = torch.einsum("bsht,btl->bshl", scores.softmax(-1), self.c[:size, :end])
        return torch.einsum("bshl,hvl->bshv", o, w[:, -V:]).flatten(2)


@pytest.mark.parametrize("module", [NormedQueries(einsums), InBuffers()], ids=["queries normed", "buffers"])
def test_more_ways(module):
    assert codes(optimized(export(module, step()))) == [Code.ALREADY_ABSORBED]


# Rows that all heads share, and yet not one that is key and value.


def of_two(cut):
    """Keys and values are other columns of one tensor, as in multi-query attention."""

    def attend(q, q_rope, rows):
        k, v = cut(rows[:, None])
        o = F.scaled_dot_product_attention(q.transpose(1, 2)[..., : k.shape[-1]], k, v)
        return o[..., :1].expand(-1, -1, -1, L).transpose(1, 2)

    return attend


OTHERS = {
    "other columns": of_two(lambda k: k.split([L, R], -1)),
    "columns that overlap": of_two(lambda k: (k[..., :6], k[..., 4:10])),
    "other tokens": of_two(lambda k: (k[:, :, 1:, :L], k[:, :, :-1, :L])),
    "columns written over": copied([(0, L), (L, L + R)], over=(L - 2, L)),
    "heads of two kinds": copied_by_halves,
    "a norm of the keys": of_two(lambda k: (F.rms_norm(k[..., :L], (L,)), k[..., :L])),
    "a norm of the values": of_two(lambda k: (k[..., :L], F.rms_norm(k[..., :L], (L,)))),
}


@pytest.mark.singly
@pytest.mark.parametrize("S", [1, 4])
@pytest.mark.parametrize("name", usual(OTHERS, rare=("other columns", "a norm of the keys")))
def test_multi_query_attention_is_not_said_to_be_absorbed(name, S):
    assert codes(optimized(export(ByHand(OTHERS[name]), step(S)))) == [Code.NOT_MLA]


@pytest.mark.parametrize("batch", [1, 2])
def test_heads_with_rows_of_their_own_share_none(batch):
    """Queries meet a weight of each head, and so do rows that are key and value at once."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(seeded(H, N, L, seed=3))

        def forward(self, q, rows):
            return F.scaled_dot_product_attention(F.rms_norm(q, (N,)) @ self.w, rows, rows)

    given = [seeded(batch, H, 4, N), seeded(batch, H, PAST, L)]
    assert Code.ALREADY_ABSORBED not in codes(optimized(export(Own(), given)))


def test_axes_of_queries_that_no_weight_tells_apart_are_not_said_to_be_absorbed():
    """The rows and columns of an image attend to tokens that are key and value, as heads may."""

    class Image(nn.Module):
        def forward(self, q, c):
            return torch.einsum("bxyt,btl->bxyl", torch.einsum("bxyl,btl->bxyt", q, c).softmax(-1), c)

    assert codes(optimized(export(Image(), [seeded(2, 3, 4, L), seeded(2, PAST, L)]))) == [Code.SHARED_ROWS]


# The doors.


def doors(module, call):
    """What each door says: codes, and warnings of ours."""
    said = []
    for compiled in (
        mla_compile.optimize(module, codegen="eager"),
        torch.compile(module, backend="mla", options={"codegen": "eager"}),
    ):
        backend._recent.clear()
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.testing.assert_close(compiled(*call), module(*call), rtol=1e-10, atol=1e-10)
        report = compiled.mla_report if hasattr(compiled, "mla_report") else backend.reports()[-1]
        ours = [str(w.message) for w in caught if issubclass(w.category, MlaCompileWarning)]
        said.append(([site.code for site in report.sites], ours))
    return said


@pytest.mark.parametrize("name", ["einsum", *also("combination", "heads first", "fused")])
def test_no_door_warns(name):
    module = ByHand(SPELLINGS[name]).eval()
    assert doors(module, step()) == [([Code.ALREADY_ABSORBED], [])] * 2
    with torch.no_grad():
        report = mla_compile.explain(module, *step())
    assert "1 kept (already_absorbed)" in report.summary()
    assert "docs/refusals.md#already_absorbed" in report.text()


class Beside(ByHand):
    """Another attention without a latent behind it."""

    def forward(self, x, past):
        y, rows = super().forward(x, past)
        k: Tensor = rows[:, None, :, :V]
        return F.scaled_dot_product_attention(y.unflatten(-1, (H, V)).transpose(1, 2), k, 2 * k), rows


def test_with_another_attention_beside_it_the_warning_names_both():
    for found, told in doors(Beside(einsums).eval(), step()):
        assert found == [Code.ALREADY_ABSORBED, Code.NOT_MLA]
        assert len(told) == 1
        assert "1 kept (already_absorbed), 1 not MLA" in told[0]
