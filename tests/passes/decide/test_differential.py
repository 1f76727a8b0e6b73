"""Differential attention, (P1 - l P2) V: the products of both softmaxes are rewritten, and all between stays."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mla_compile.codes import Code
from tests.support.programs import decide, seeded
from tests.support.usual import usual

B, H, S, T, L, N, V = 2, 3, 2, 11, 12, 6, 5


def heads(x, count=H):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def weights(q, k, mask=None):
    scores = q @ k.mT * 0.3
    return (scores if mask is None else scores.masked_fill(~mask, float("-inf"))).softmax(-1)


def apart(q, c, r, w_k, w_v, w_k2):
    return (weights(q[:, :H], heads(c @ w_k)) - 0.4 * weights(q[:, H:], heads(c @ w_k2))) @ heads(c @ w_v)


def added(q, c, r, w_k, w_v, w_k2):
    return (0.6 * weights(q[:, :H], heads(c @ w_k)) + weights(q[:, H:], heads(c @ w_k2))) @ heads(c @ w_v)


def in_one(q, c, r, w_k, w_v, x):
    p = weights(q, heads(c @ w_k, 2 * H)).unflatten(1, (H, 2))
    return (p[:, :, 0] - x.exp() * p[:, :, 1]) @ heads(c @ w_v)


def unbound(q, c, r, w_k, w_v, x):
    one, other = weights(q, heads(c @ w_k, 2 * H)).unflatten(1, (2, H)).unbind(1)
    return (one - x.exp() * other) @ heads(c @ w_v)


def masked(q, c, r, w_k, w_v, x):
    mask = torch.ones(S, T, dtype=torch.bool).tril(T - S)
    p = weights(q, heads(c @ w_k, 2 * H), mask).unflatten(1, (H, 2))
    return (p[:, :, 0] - x.exp() * p[:, :, 1]) @ heads(c @ w_v)


def with_a_rotary_key(q, c, r, w_k, w_v, x):
    k = torch.cat([heads(c @ w_k[:, : 2 * H * (N - 2)], 2 * H), r[:, None].expand(-1, 2 * H, -1, -1)], -1)
    p = weights(q, k).unflatten(1, (H, 2))
    return (p[:, :, 0] - x.exp() * p[:, :, 1]) @ heads(c @ w_v)


ONE, TWO = [(L, 2 * H * N), (L, H * V), (1,)], [(L, H * N), (L, H * V), (L, H * N)]
FORMS = {apart: TWO, added: TWO, in_one: ONE, unbound: ONE, masked: ONE, with_a_rotary_key: ONE}


def inputs():
    return [seeded(B, 2 * H, S, N, seed=1), seeded(B, T, L, seed=2), seeded(B, T, 2, seed=3)]


@pytest.mark.parametrize("form", usual(FORMS, rare=(added, in_one)))
def test_both_products_are_rewritten(form):
    program, outcome = decide(form, inputs(), *FORMS[form], verify=True)
    (site,) = outcome.report.sites
    assert (site.code, site.kept) == (Code.ABSORBED, ()), site.reason
    rotary = 2 if form is with_a_rotary_key else 0
    assert site.values_read_after == L + rotary
    of_keys = 2 * (N - rotary) * L + 2 * N
    assert site.decode_flops_before == 2 * H * (of_keys + L * V + V)
    assert site.decode_flops_after == 2 * H * (2 * (L + rotary) + L)
    given = [seeded(*shape, seed=20 + k) / shape[-1] ** 0.5 for k, shape in enumerate(FORMS[form])]
    counts = []
    for gm in (program.gm, outcome.program.gm):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            gm(*inputs(), *given)
        counts.append(counter.get_total_flops())
    assert counts[1] < counts[0]


def test_keys_with_rows_of_their_own_for_each_softmax_stay():
    def form(q, c, w_k, w_v):  # c [B,2,T,L]: the two softmaxes read different latents
        k = (c @ w_k).unflatten(-1, (H, N)).permute(0, 3, 1, 2, 4).flatten(1, 2)
        p = weights(q, k).unflatten(1, (H, 2))
        return (p[:, :, 0] - 0.4 * p[:, :, 1]) @ heads(c[:, 0] @ w_v)

    _, outcome = decide(form, [seeded(B, 2 * H, S, N, seed=1), seeded(B, 2, T, L, seed=2)], (L, H * N), (L, H * V))
    (site,) = outcome.report.sites
    assert "keys" not in site.parts or site.code is not Code.ABSORBED
