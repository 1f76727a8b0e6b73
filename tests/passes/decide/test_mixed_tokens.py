"""Rows of tokens that a weight mixes: what it makes are rows again, which may be absorbed like any others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from mla_compile.codes import Code
from tests.support.programs import decide, seeded
from tests.support.tiers import also
from tests.support.usual import usual

B, H, T, L, R, N, V = 2, 3, 9, 12, 4, 6, 5


def heads(x):
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def for_heads(r):
    return r[:, None].expand(-1, H, -1, -1)


def attend(q, k, r, v):
    return F.scaled_dot_product_attention(q, torch.cat([k, r], -1), v, scale=0.3)


def shifted(x):
    return F.pad(x[:, :-1], (0, 0, 1, 0))


LEGAL = {
    "rotary": lambda q, c, r, m, w_k, w_v: attend(q, heads(c @ w_k), for_heads(m @ r), heads(c @ w_v)),
    "rotary, of each head": lambda q, c, r, m, w_k, w_v: attend(
        q, heads(c @ w_k), m @ for_heads(r).clone(), heads(c @ w_v)
    ),
    "rotary, by einsum": lambda q, c, r, m, w_k, w_v: attend(
        q, heads(c @ w_k), for_heads(torch.einsum("st,btr->bsr", m, r)), heads(c @ w_v)
    ),
    "rotary, by linear": lambda q, c, r, m, w_k, w_v: attend(
        q, heads(c @ w_k), for_heads(F.linear(r.mT, m).mT), heads(c @ w_v)
    ),
    "rotary, shifted": lambda q, c, r, m, w_k, w_v: attend(
        q, heads(c @ w_k), for_heads(0.5 * r + shifted(r)), heads(c @ w_v)
    ),
    "latent": lambda q, c, r, m, w_k, w_v: attend(q, heads(m @ c @ w_k), for_heads(r), heads(m @ c @ w_v)),
    "latent of the keys": lambda q, c, r, m, w_k, w_v: attend(q, heads(m @ c @ w_k), for_heads(r), heads(c @ w_v)),
    "latent, shifted": lambda q, c, r, m, w_k, w_v: attend(
        q, heads(shifted(c) @ w_k), for_heads(r), heads(shifted(c) @ w_v)
    ),
    "both": lambda q, c, r, m, w_k, w_v: attend(q, heads(m @ c @ w_k), for_heads(m @ r), heads(m @ c @ w_v)),
    "twice": lambda q, c, r, m, w_k, w_v: attend(q, heads(m @ (m @ c) @ w_k), for_heads(r), heads(c @ w_v)),
}
SHAPES = ((T, T), (L, H * N), (L, H * V))


def given(queries=1):
    return [seeded(B, H, queries, N + R, seed=3), seeded(B, T, L, seed=1), seeded(B, T, R, seed=2)]


@pytest.mark.singly
@pytest.mark.parametrize("S", [1, *also("combination", 3)])
@pytest.mark.parametrize("name", usual(LEGAL, rare=("rotary", "rotary, by einsum", "rotary, by linear", "latent")))
def test_mixed_rows_are_rows(name, S):
    program, outcome = decide(LEGAL[name], given(S), *SHAPES)
    (site,) = outcome.report.sites
    assert (site.code, site.parts, site.kept) == (Code.ABSORBED, (), ()), site.reason
    weights = [seeded(*shape, seed=20 + k) / shape[-1] ** 0.5 for k, shape in enumerate(SHAPES)]
    assert count(outcome.program.gm, given(S), weights) < count(program.gm, given(S), weights)


def test_all_sizes_equal():
    n = 4

    def form(q, c, r, m, w_k, w_v):
        k, v = ((x.unflatten(-1, (n, -1)).transpose(1, 2)) for x in (m @ c @ w_k, m @ c @ w_v))
        return F.scaled_dot_product_attention(q, torch.cat([k, (m @ r)[:, None].expand(-1, n, -1, -1)], -1), v)

    inputs = [seeded(n, n, n, 2 * n, seed=3), seeded(n, n, n, seed=1), seeded(n, n, n, seed=2)]
    _, outcome = decide(form, inputs, (n, n), (n, n * n), (n, n * n))
    (site,) = outcome.report.sites
    assert (site.code, site.parts) == (Code.ABSORBED, ()), site.reason


STAYING = {  # what mixes the tokens of K or V that are expanded already, or of each head in its own way
    "keys": ("values", lambda q, c, r, m, w_k, w_v: attend(q, m[0] @ heads(c @ w_k), for_heads(r), heads(c @ w_v))),
    "values": ("keys", lambda q, c, r, m, w_k, w_v: attend(q, heads(c @ w_k), for_heads(r), m[0] @ heads(c @ w_v))),
    "rotary": ("values", lambda q, c, r, m, w_k, w_v: attend(q, heads(c @ w_k), m @ for_heads(r), heads(c @ w_v))),
    "latent": (
        "values",
        lambda q, c, r, m, w_k, w_v: attend(
            q, torch.einsum("bhsl,lhn->bhsn", m @ c[:, None], w_k.view(L, H, N)), for_heads(r), heads(c @ w_v)
        ),
    ),
}


@pytest.mark.parametrize("name", STAYING)
def test_what_is_mixed_behind_the_up_projection_or_for_each_head_stays(name):
    side, form = STAYING[name]
    _, outcome = decide(form, given(), (H, T, T), *SHAPES[1:])
    (site,) = outcome.report.sites
    (kept,) = site.kept
    assert (site.parts, kept.code) == ((side,), Code.TOKEN_MIXING), (site.reason, site.kept)


def count(gm, inputs, weights):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        gm(*inputs, *weights)
    return counter.get_total_flops()
