"""What is decided about an attention: who else reads its keys and values, and what the queries are made of.

Every case is told apart by one condition of the judge; ``python -m tests.support.mutation passes/decide/judge.py``
shows which.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mla_compile.codes import Code
from tests.support.modules import sdpa
from tests.support.programs import assert_untouched, calls, codes, decide, seeded

B, S, T = 2, 1, 7
H, L, N, R, V, D = 3, 8, 6, 4, 5, 10


def heads(z, width):
    return z.unflatten(-1, (-1, width)).transpose(1, 2)


def with_rope(k, r):
    return torch.cat([k, r[:, None].expand(-1, k.shape[1], -1, -1)], -1)


def result(out, *others):
    """All that is returned, as one tensor."""
    return torch.cat([z.flatten() for z in (out, *others)])


def query(*shape):
    return seeded(B, *shape, seed=11)


def rows(width, seed=12):
    return seeded(B, T, width, seed=seed)


# One projection makes the latent and the rotary key, which is wider than what is projected.


def test_rows_that_are_computed_anyway_are_the_source():
    """Before the projection they are narrower, but it is needed for the latent: the rotary key is read as it is."""

    def fn(q, h, down, up):
        c, r = F.linear(h, down).split([L, R], -1)
        k, v = heads(F.linear(F.rms_norm(c, (L,)), up), N + V).split([N, V], -1)
        return sdpa(q, with_rope(k, r), v, None, 0.3)

    _, outcome = decide(fn, [query(H, S, N + R), rows(2)], (L + R, 2), (H * (N + V), L))
    (site,) = outcome.report.sites
    assert (site.code, site.parts, site.kept, site.dims.R) == (Code.ABSORBED, (), (), R)
    assert calls(outcome.program).count("linear.default") == 1


def test_rows_that_are_computed_anyway_may_be_one_source_too_many_for_the_whole():
    """The rows before the projection make other columns of K besides: three sources, which parts may have."""

    def fn(q, h, down, up, other):
        c, r = F.linear(h, down).split([L, R], -1)
        k, v = heads(F.linear(F.rms_norm(c, (L,)), up), N + V).split([N, V], -1)
        return sdpa(q, torch.cat([with_rope(k, r), heads(F.linear(h, other), 2)], -1), v, None, 0.3)

    _, outcome = decide(fn, [query(H, S, N + R + 2), rows(2)], (L + R, 2), (H * (N + V), L), (H * 2, 2))
    (site,) = outcome.report.sites
    assert (site.code, site.parts, site.kept) == (Code.ABSORBED, ("keys", "values"), ())


@pytest.mark.parametrize(("read", "code"), [(False, Code.TOKEN_MIXING), (True, Code.KEYS_USED_ELSEWHERE)])
def test_rows_that_are_computed_anyway_may_be_no_source(read, code):
    """Every head has rotary keys of its own, and a convolution makes the latent: no part of K is absorbed into that.

    Of the rows that are narrower than both, the convolution mixes the tokens. It is not the reason if something else
    reads the first product, too.
    """

    def fn(q, h, down, conv, up):
        both = F.linear(h, down)
        c, r = both.split([L, H * R], -1)
        k, v = heads(F.linear(F.conv1d(c.mT, conv, padding=1).mT, up), N + V).split([N, V], -1)
        out = sdpa(q, torch.cat([k, heads(r, R)], -1), v, None, 0.3)
        return result(out, both.tanh()) if read else out

    program, outcome = decide(fn, [query(H, S, N + R), rows(2)], (L + H * R, 2), (L, L, 3), (H * (N + V), L))
    assert codes(outcome) == [code]
    assert_untouched(program, outcome)


# Someone else reads K, V, or columns that their projection also makes.

MORE = 3


def reading(what, beside, V=V):
    """``what(k, v, more)`` is returned too, ``more`` being columns that the projection of ``beside`` also makes."""

    def fn(q, c, r, w_k, w_v):
        k, v = F.linear(c, w_k), F.linear(c, w_v)
        more = (k if beside == "k" else v)[..., -MORE:]
        k, v = heads(k[..., : H * N], N), heads(v[..., : H * V], V)
        return result(sdpa(q, with_rope(k, r), v, None, 0.3), what(k, v, more))

    shapes = (H * N + MORE * (beside == "k"), L), (H * V + MORE * (beside == "v"), L)
    return decide(fn, [query(H, S, N + R), rows(L), rows(R, seed=13)], *shapes)


READ = {
    "columns beside V": (lambda k, v, more: more * 2, "v", "keys", Code.VALUES_USED_ELSEWHERE),
    "columns beside K": (lambda k, v, more: more * 2, "k", "values", Code.KEYS_USED_ELSEWHERE),
    "V": (lambda k, v, more: v * 2, "v", "keys", Code.VALUES_USED_ELSEWHERE),
    "K": (lambda k, v, more: k * 2, "k", "values", Code.KEYS_USED_ELSEWHERE),
}


@pytest.mark.parametrize("name", READ)
def test_a_side_that_is_computed_anyway_stays(name):
    what, beside, part, code = READ[name]
    (site,) = reading(what, beside)[1].report.sites
    assert (site.code, site.parts, [k.code for k in site.kept]) == (Code.ABSORBED, (part,), [code])
    (kept,) = site.kept
    assert kept.reason == f"mul also reads the product that makes the {kept.part}, so it is computed anyway"
    assert kept.blame.op == "aten.mul"


def test_what_makes_a_side_is_no_other_reader_of_its_product():
    """K is returned behind a factor that is K's own, and the product is read for nothing besides."""

    def fn(q, c, r, w_k, w_v, factor):
        k, v = heads(F.linear(c, w_k), N) * factor, heads(F.linear(c, w_v), V)
        return result(sdpa(q, with_rope(k, r), v, None, 0.3), k)

    inputs = [query(H, S, N + R), rows(L), rows(R, seed=13)]
    (site,) = decide(fn, inputs, (H * N, L), (H * V, L), (N,))[1].report.sites
    (kept,) = site.kept
    assert (site.parts, kept.code) == (("values",), Code.KEYS_USED_ELSEWHERE)
    assert kept.reason == "the expanded keys are returned, so they are computed anyway"


def test_a_side_that_stays_leaves_the_other_only_where_that_saves_something():
    """K is read elsewhere, and V alone is narrower than the latent."""
    program, outcome = reading(lambda k, v, more: k * 2, "k", V=2)
    assert codes(outcome) == [Code.KEYS_USED_ELSEWHERE]
    assert_untouched(program, outcome)


@pytest.mark.parametrize("of", ["mask", "size"])
def test_a_mask_made_of_k_is_blamed_and_one_of_its_size_is_not(of):
    def fn(q, c, w_k, w_v):
        k, v = heads(F.linear(c, w_k), N), heads(F.linear(c, w_v), V)
        mask = (k * k).sum(-1)[:, :, None] if of == "mask" else c.new_ones(1, 1, 1, k.shape[2])
        return sdpa(q, k, v, mask, 0.3)

    (site,) = decide(fn, [query(H, S, N), rows(L)], (H * N, L), (H * V, L))[1].report.sites
    if of == "size":
        assert (site.code, site.kept) == (Code.ABSORBED, ())
        return
    (kept,) = site.kept
    assert (kept.part, kept.code, kept.blame.node) == ("keys", Code.MASK_DEPENDS_ON_KEYS, "unsqueeze")


@pytest.mark.parametrize("products", [1, 2])
def test_keys_that_rows_of_another_attention_are_made_of(products):
    """That attention has a cap between its products, so that each product reads rows of its own."""

    def fn(q, p, c, r, other, w_k, w_v, u_k, u_v):
        k, v = heads(F.linear(c, w_k), N), heads(F.linear(c, w_v), V)
        first = sdpa(q, k, v, None, 0.3)
        scores = q @ heads(F.linear(torch.relu(k).sum(1), u_k), N).mT
        scores = scores + p @ r[:, None].mT if products == 2 else scores
        return result(first, (scores * 0.1).tanh().softmax(-1) @ heads(F.linear(other, u_v), V))

    inputs = [query(H, S, N), query(H, S, R), rows(L), rows(R, seed=13), rows(L, seed=5)]
    _, outcome = decide(fn, inputs, (H * N, L), (H * V, L), (H * N, N), (H * V, L))
    first, second = outcome.report.sites
    assert (first.code, first.parts) == (Code.ABSORBED, ("values",))
    assert (second.code, second.parts) == (Code.ABSORBED, ())


# What the queries are made of.

GATES = {
    "gated by other rows": lambda x, y: x * y,
    "squared": lambda x, y: x * x,
    "rotated": lambda x, y: x * y[:, :, :1],
}


@pytest.mark.parametrize("name", GATES)
def test_rows_that_a_product_of_rows_makes_queries_of_are_no_projection(name):
    """Only a number that all rows are multiplied by leaves them the hidden state that queries are made of."""

    def fn(x, y, w_q, w_k, w_v):
        q, k, v = (heads(F.linear(z, w), N) for z, w in ((GATES[name](x, y), w_q), (x, w_k), (x, w_v)))
        return sdpa(q, k, v, None, 0.3)

    _, outcome = decide(fn, [rows(D), rows(D, seed=3)], (H * N, D), (H * N, D), (H * N, D))
    assert codes(outcome) == [Code.ABSORBED]


@pytest.mark.parametrize(("width", "code"), [(12, Code.ABSORBED), (13, Code.COST_LATENT_WIDE)])
def test_widths_of_two_rows_count_together(width, code):
    """Keys are a sum of images of both. Each is narrower than what is made of it: 20 < 18 + 15, and 13 < 18."""

    def fn(q, a, b, up, other, values):
        k = F.linear(a, up) + F.linear(b, other)
        return sdpa(q, heads(k, N), heads(F.linear(a, values), V), None, 0.3)

    weights = (H * N, 20), (H * N, width), (H * V, 20)
    _, outcome = decide(fn, [query(H, S, N), rows(20), rows(width, seed=13)], *weights)
    (site,) = outcome.report.sites
    assert site.code is code, site.reason
    if code is Code.COST_LATENT_WIDE:
        assert site.reason == "the latent rows hold 33 values, K and V 33"
