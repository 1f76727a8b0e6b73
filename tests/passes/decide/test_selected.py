"""Parts of keys and values that are selected, by groups of heads or by tokens: made of the same parts of their rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from mla_compile.codes import Code
from tests.support.programs import decide, seeded
from tests.support.usual import usual

B, G, H, S, T, D, L, N, V = 2, 2, 3, 1, 16, 30, 12, 6, 5


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=0.3)


def heads(x):
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def each(q, k, v):
    return torch.cat([attend(q[:, g], k[:, g], v[:, g]) for g in range(G)], 1)


def groups(c, w):
    return torch.einsum("btgl,glhn->bghtn", c, w)


def latents_of_groups(q, c, x, w_k, w_v):
    return each(q, groups(c, w_k), groups(c, w_v))


def unbound(q, c, x, w_k, w_v):
    k, v = torch.einsum("btgl,glhn->gbhtn", c, w_k).unbind(0), groups(c, w_v).unbind(1)
    return torch.stack([attend(*one) for one in zip(q.unbind(1), k, v, strict=True)], 1)


def projected_latents(q, c, x, down, w_k, w_v):
    c = (x @ down).unflatten(-1, (G, L))
    return each(q, groups(c, w_k), groups(c, w_v))


def latents_behind_a_past(q, c, x, down, w_k, w_v):
    c = torch.cat([c.flatten(2), x @ down], 1).unflatten(-1, (G, L))
    return each(q, groups(c, w_k), groups(c, w_v))


def streams_of_one_weight(q, c, x, w_k, w_v):
    k, v = ((c.transpose(1, 2) @ w).unflatten(-1, (H, -1)).transpose(2, 3) for w in (w_k, w_v))
    return attend(q[:, 0], k[:, 0], v[:, 0]) - attend(q[:, 1], k[:, 1], v[:, 1])


def one_sequence(q, c, x, w_k, w_v):
    k, v = heads(c[:, :, 0] @ w_k), heads(c[:, :, 0] @ w_v)
    return attend(q[0, 0], k[0], v[0])


def biases(q, c, x, w_k, w_v, b):
    return each(q, groups(c, w_k), groups(c, w_v) + b[:, :, None])


OF_GROUPS = [(G, L, H, N), (G, L, H, V)]
OF_ALL = [(L, H * N), (L, H * V)]
FORMS = {
    latents_of_groups: OF_GROUPS,
    unbound: OF_GROUPS,
    projected_latents: [(D, G * L), *OF_GROUPS],
    latents_behind_a_past: [(D, G * L), *OF_GROUPS],
    streams_of_one_weight: OF_ALL,
    one_sequence: OF_ALL,
    biases: [*OF_GROUPS, (G, H, V)],
}


@pytest.mark.parametrize("form", usual(FORMS, rare=(latents_of_groups, projected_latents)))
def test_a_part_is_made_of_a_part_of_the_rows(form):
    inputs = [seeded(B, G, H, S, N, seed=1), seeded(B, T, G, L, seed=2), seeded(B, T, D, seed=3)]
    program, outcome = decide(form, inputs, *FORMS[form], verify=form is biases)
    for site in outcome.report.sites:
        assert (site.code, site.kept) == (Code.ABSORBED, ()), site.reason
    assert_fewer_flops(program, outcome, inputs, FORMS[form])


def last_value(q, c, w_k, w_v):
    v = heads(c @ w_v)
    return attend(q, heads(c @ w_k), v) + 0.1 * v[:, :, -1:]


def selected_value(q, c, w_k, w_v):
    v = heads(c @ w_v)
    return attend(q, heads(c @ w_k), v) + v[:, :, 3].tanh().unsqueeze(2)


def of_a_joint_product(q, c, w):
    k, v = heads(c @ w).split([N, V], -1)
    return attend(q, k, v) + v[:, :, 2:4].mean(2, True) + k[:, :, :1, :V]


def few_keys_and_values(q, c, w_k, w_v):
    k, v = heads(c @ w_k), heads(c @ w_v)
    return attend(q, k, v) + v[:, :, -2:].sum(2, True) * k[:, :, -1:, :1]


READERS = {
    last_value: OF_ALL,
    selected_value: OF_ALL,
    of_a_joint_product: [(L, H * (N + V))],
    few_keys_and_values: OF_ALL,
}


@pytest.mark.parametrize("form", READERS)
def test_readers_of_a_few_tokens_get_them_made_alone(form):
    inputs = [seeded(B, H, S, N, seed=1), seeded(B, T, L, seed=2)]
    program, outcome = decide(form, inputs, *READERS[form])
    (site,) = outcome.report.sites
    assert (site.code, site.kept) == (Code.ABSORBED, ()), [k.reason for k in site.kept] or site.reason
    assert_fewer_flops(program, outcome, inputs, READERS[form], times=2)


def test_rows_that_are_as_wide_as_the_values():
    weights = [(L, H * N), (L, L)]
    inputs = [seeded(B, H, S, N, seed=1), seeded(B, T, L, seed=2)]
    program, outcome = decide(last_value, inputs, *weights)
    (site,) = outcome.report.sites
    assert (site.code, site.kept) == (Code.ABSORBED, ()), [k.reason for k in site.kept] or site.reason
    assert_fewer_flops(program, outcome, inputs, weights)


@pytest.mark.parametrize("part", ["v[:, :, 1:]", "v.tanh()[:, :, -1:]"])
def test_readers_of_many_tokens_keep_the_values(part):
    def form(q, c, w_k, w_v):
        v = heads(c @ w_v)
        return attend(q, heads(c @ w_k), v) + eval(part, {"v": v}).sum(2, True)

    inputs = [seeded(B, H, S, N, seed=1), seeded(B, T, L, seed=2)]
    _, outcome = decide(form, inputs, *OF_ALL)
    (site,) = outcome.report.sites
    assert site.parts == ("keys",)
    (kept,) = site.kept
    few = "some tokens of the product that makes the values are read" in kept.reason
    few = few and kept.code is Code.UNSUPPORTED_OP
    assert few or kept.code is Code.VALUES_USED_ELSEWHERE


@pytest.mark.parametrize("S", [1, 3])
def test_is_causal_with_fewer_queries_than_keys_begins_at_the_first_key(S):
    """One query sees the first key alone, which is what the model computes, and the report says."""

    def form(q, c, w_k, w_v):
        return F.scaled_dot_product_attention(q, heads(c @ w_k), heads(c @ w_v), is_causal=True)

    inputs = [seeded(B, H, S, N, seed=1), seeded(B, T, L, seed=2)]
    _, outcome = decide(form, inputs, *OF_ALL)
    (site,) = outcome.report.sites
    assert site.code is Code.ABSORBED
    told = "sees only that key" if S == 1 else "beyond the number of queries"
    assert any(told in note for note in site.notes)


def assert_fewer_flops(program, outcome, inputs, shapes, times=1):
    """At least so many ``times`` fewer than in the original."""
    weights = [seeded(*shape, seed=20 + k) / shape[-1] ** 0.5 for k, shape in enumerate(shapes)]
    counts = []
    for gm in (program.gm, outcome.program.gm):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            gm(*inputs, *weights)
        counts.append(counter.get_total_flops())
    assert counts[1] * times <= counts[0], counts
