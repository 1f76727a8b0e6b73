"""Groups of heads with a latent each, where the group is an axis of its own: a group is a batch entry."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from mla_compile.codes import Code
from tests.support.programs import decide, seeded
from tests.support.tiers import also
from tests.support.usual import usual

B, G, H, S, T, L, N, R, V = 2, 4, 3, 1, 9, 12, 6, 4, 5


def sdpa(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)


def einsum(q, c, r, w_k, w_v, mask):
    return sdpa(q, torch.einsum("btgl,glhn->bghtn", c, w_k), torch.einsum("btgl,glhv->bghtv", c, w_v))


def matmul(q, c, r, w_k, w_v, mask):
    rows = c.permute(2, 0, 1, 3).flatten(1, 2)  # a product for each group: [G,B*T,L]
    k, v = (torch.bmm(rows, w.flatten(2)).view(G, B, T, H, -1).permute(1, 0, 3, 2, 4) for w in (w_k, w_v))
    return sdpa(q, k, v)


def masked(q, c, r, w_k, w_v, mask):
    k, v = torch.einsum("btgl,glhn->bghtn", c, w_k), torch.einsum("btgl,glhv->bghtv", c, w_v)
    return sdpa(q, k, v, mask[:, None, None] > 0)


def written_out(q, c, r, w_k, w_v, mask):
    k, v = torch.einsum("btgl,glhn->bgthn", c, w_k), torch.einsum("btgl,glhv->bgthv", c, w_v)
    scores = torch.einsum("bghsn,bgthn->bghst", q, k) * 0.3
    return torch.einsum("bghst,bgthv->bghsv", scores.softmax(-1), v)


def groups_share_a_rotary_key(q, c, r, w_k, w_v, mask):
    k = torch.einsum("btgl,glhn->bghtn", c, w_k[..., :-R])
    k = torch.cat([k, r[:, None, None].expand(-1, G, H, -1, -1)], -1)
    return sdpa(q, k, torch.einsum("btgl,glhv->bghtv", c, w_v))


def groups_add_a_shared_key(q, c, r, w_k, w_v, mask):
    k = torch.einsum("btgl,glhn->bghtn", c, w_k) + F.pad(r, (0, N - R))[:, None, None]
    return sdpa(q, k, torch.einsum("btgl,glhv->bghtv", c, w_v))


FORMS = (einsum, matmul, masked, written_out, groups_share_a_rotary_key, groups_add_a_shared_key)


@pytest.mark.parametrize("form", usual(FORMS, rare=(einsum,)))
@pytest.mark.parametrize("batch", [B, *also("combination", 1)])
def test_a_group_is_a_batch_entry(form, batch, monkeypatch):
    monkeypatch.setitem(globals(), "B", batch)
    inputs = [seeded(batch, G, H, S, N, seed=1), seeded(batch, T, G, L, seed=2), seeded(batch, T, R, seed=3)]
    shapes = [(G, L, H, N), (G, L, H, V)]

    def of(q, c, r, *weights):
        return form(q, c, r, *weights, mask=r[..., 0].mul(0).add(torch.arange(T) - 2)[:, None])

    _, outcome = decide(of, inputs, *shapes, verify=True)
    (site,) = outcome.report.sites
    assert (site.code, site.kept) == (Code.ABSORBED, ()), site.reason
    assert site.dims.G == G
    shared = R if form in (groups_share_a_rotary_key, groups_add_a_shared_key) else 0
    assert site.values_read_after == G * L + shared
    assert site.values_read_before == G * H * (N + V)


@pytest.mark.parametrize("along", ["groups", "heads of groups", "divided", "tokens"])
def test_a_factor_for_each_group(along):
    """Behind the product with a weight for each group; a factor for each token is a table of positions."""
    sizes = {"tokens": (T, 1), "heads of groups": (G, 1, H, 1)}.get(along, (G, 1, 1, 1))

    def fn(q, c, w_k, w_v, factor):
        k = torch.einsum("btgl,glhn->bgthn", c, w_k).transpose(2, 3)
        factor = factor.transpose(1, 2) if along == "heads of groups" else factor
        k = k / (2 + factor) if along == "divided" else k * factor
        return sdpa(q, k, torch.einsum("btgl,glhv->bghtv", c, w_v))

    inputs = [seeded(B, G, H, S, N, seed=1), seeded(B, T, G, L, seed=2)]
    _, outcome = decide(fn, inputs, (G, L, H, N), (G, L, H, V), sizes)
    (site,) = outcome.report.sites
    if along == "tokens":
        assert (site.parts, [k.code for k in site.kept]) == (("values",), [Code.POSITION_DEPENDENT]), site.reason
    else:
        assert (site.code, site.parts, site.dims.G) == (Code.ABSORBED, (), G), site.reason


@pytest.mark.parametrize(("width", "code"), [(30, Code.ABSORBED), (32, Code.COST_LATENT_WIDE)])
def test_rows_that_all_groups_share_are_held_once(width, code):
    """With the latent of a single group they are no narrower than its K and V."""
    inputs = [seeded(B, G, H, S, N, seed=1), seeded(B, T, G, width, seed=2), seeded(B, T, R, seed=3)]

    def fn(*given):
        return groups_add_a_shared_key(*given, mask=None)

    _, outcome = decide(fn, inputs, (G, width, H, N), (G, width, H, V))
    (site,) = outcome.report.sites
    rows, whole = G * width + R, G * H * (N + V)
    assert width + R >= whole // G
    assert site.code is code, site.reason
    if code is Code.COST_LATENT_WIDE:
        assert site.reason == f"the latent rows hold {rows} values, K and V {whole}"


def test_a_weight_for_each_token_is_none_of_a_group():
    def fn(q, c, w_k, w_v):
        return sdpa(q, torch.einsum("btl,tlhn->bhtn", c, w_k), torch.einsum("btl,lhv->bhtv", c, w_v))

    inputs = [seeded(B, H, S, N, seed=1), seeded(B, T, L, seed=2)]
    _, outcome = decide(fn, inputs, (T, L, H, N), (L, H, V))
    (site,) = outcome.report.sites
    assert site.parts == ("values",)


def test_width_is_no_reason_for_keys_that_each_head_has_of_its_own():
    """The rows that make the values are as wide as them, and the walk from the keys ends at the keys of each head."""

    def fn(q, c, w_k, w_v):
        k = torch.einsum("bthl,hln->bhtn", c, w_k).tanh()
        return sdpa(q, k, torch.einsum("bthl,hlv->bhtv", c, w_v))

    inputs = [seeded(1, H, S, N, seed=1), seeded(1, T, H, V, seed=2)]
    _, outcome = decide(fn, inputs, (H, V, N), (H, V, V))
    (site,) = outcome.report.sites
    assert (site.code, outcome.absorbed) == (Code.HEAD_DEPENDENT_LATENT, 0), site.reason


def test_rows_of_each_head_that_are_no_narrower_than_its_keys_and_values():
    def fn(q, c, w_k, w_v):
        return sdpa(q, torch.einsum("bthl,hln->bhtn", c, w_k), torch.einsum("bthl,hlv->bhtv", c, w_v))

    inputs = [seeded(1, H, S, N, seed=1), seeded(1, T, H, N + V, seed=2)]
    _, outcome = decide(fn, inputs, (H, N + V, N), (H, N + V, V))
    (site,) = outcome.report.sites
    assert (site.code, outcome.absorbed) == (Code.COST_LATENT_WIDE, 0), site.reason


def a_linear_layer_each(heads, q, c, w_k, w_v):
    """Groups that are made by weights of their own and stacked along their axis."""
    k, v = (
        torch.stack([(c[:, :, g] @ w[g]).unflatten(-1, (heads, -1)).transpose(1, 2) for g in range(2)], 1)
        for w in (w_k, w_v)
    )
    return sdpa(q, k, v)


def test_groups_that_are_stacked_are_attentions_of_their_own():
    """They were not, where the stack was not made one axis of heads; a head for each group shares nothing."""
    given = [seeded(B, 2, H, S, N, seed=1), seeded(B, T, 2, L, seed=2)]
    _, outcome = decide(partial(a_linear_layer_each, H), given, (2, L, H * N), (2, L, H * V))
    (site,) = outcome.report.sites
    assert (site.code, site.parts) == (Code.ABSORBED, ("group 0 of 2", "group 1 of 2")), site.reason
    given[0] = seeded(B, 2, 1, S, N, seed=1)
    _, outcome = decide(partial(a_linear_layer_each, 1), given, (2, L, N), (2, L, V))
    (site,) = outcome.report.sites
    assert site.code is not Code.ABSORBED


D, MANY = 15, 9  # more than an attention is split into


def of_entries(x, c, w_k, w_v, w_q):
    """Each sequence has rows and weights of its own, as adapters of several users do."""
    k, v = (torch.stack([c[i] @ w[i] for i in range(MANY)]).unflatten(-1, (H, -1)).transpose(1, 2) for w in (w_k, w_v))
    return sdpa((x @ w_q).unflatten(-1, (H, -1)).transpose(1, 2), k, v)


def of_entries_joined(x, c, w_k, w_v, w_q):
    k, v = (torch.cat([c[i : i + 1] @ w[i] for i in range(MANY)]) for w in (w_k, w_v))
    return sdpa(*(y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (x @ w_q, k, v)))


def of_entries_of_others(x, c, w_k, w_v, w_q):
    """The keys are added to those of other sequences."""
    k, v = (torch.einsum("btl,ln->btn", c, w[0]) for w in (w_k, w_v))
    k = k + torch.cat([k[4:], k[:4]])
    return sdpa(*(y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (x @ w_q, k, v)))


def of_heads(x, c, w_k, w_v, w_q):
    k, v = (torch.stack([c[h] @ w[h] for h in range(MANY)], 1) for w in (w_k, w_v))
    return sdpa((x @ w_q).unflatten(-1, (MANY, -1)).transpose(1, 2), k, v)


def of_heads_with_queries_of_their_own(x, c, w_k, w_v, w_q):
    k, v = (torch.stack([c[h] @ w[h] for h in range(MANY)], 1) for w in (w_k, w_v))
    return sdpa(torch.stack([x @ w for w in w_q.chunk(MANY, 1)], 1), k, v)


def of_given_queries(x, c, w_k, w_v, w_q):
    k, v = (torch.stack([c[h] @ w[h] for h in range(MANY)], 1) for w in (w_k, w_v))
    return sdpa(x.expand(-1, MANY, -1)[:, :, None, :N], k, v)


@pytest.mark.parametrize(
    ("form", "code", "words"),
    [
        (of_entries, Code.TOO_MANY_SOURCES, "entries of the batch"),
        (of_entries_joined, Code.TOO_MANY_SOURCES, "entries of the batch"),
        (of_heads, Code.HEAD_DEPENDENT_LATENT, "heads made of different rows"),
        (of_heads_with_queries_of_their_own, Code.HEAD_DEPENDENT_LATENT, "heads made of different rows"),
        (of_given_queries, Code.TOO_MANY_SOURCES, "batch or heads are"),
    ],
)
@pytest.mark.parametrize("width", [L, *also("combination", 3)])
def test_what_is_stacked_is_told_as_what_it_is(form, code, words, width):
    """Entries were told as heads; and rows that are wider than a key, but not than key and value, as none."""
    batch = MANY if "entries" in form.__name__ else B
    columns = H * N if batch == MANY else N
    given = [seeded(batch, S, D, seed=1), seeded(MANY, *(() if batch == MANY else (B,)), T, width, seed=2)]
    ups = [(MANY, width, columns), (MANY, width, columns if batch == MANY else 8)]
    _, outcome = decide(form, given, *ups, (D, H * N if batch == MANY else MANY * N))
    (site,) = outcome.report.sites
    assert (site.code, words in site.reason) == (code, True), site.reason


@pytest.mark.parametrize("entries", [True, False])
def test_parts_of_an_attention_are_named_by_what_they_count(entries):
    def fn(x, c, d, w_k, w_v, w_q):
        if entries:
            k, v = (torch.stack([c @ w[0], d @ w[1]]).unflatten(-1, (H, -1)).transpose(1, 2) for w in (w_k, w_v))
            return sdpa((x @ w_q).unflatten(-1, (H, -1)).transpose(1, 2), k, v)
        k, v = (torch.stack([c @ w[0], d @ w[1], d @ w[0]])[None] for w in (w_k, w_v))
        return sdpa((x @ w_q).unflatten(-1, (3, -1)).transpose(1, 2), *(y.expand(2, -1, -1, -1) for y in (k, v)))

    n = H * N if entries else N
    given = [seeded(2, S, D, seed=1), seeded(T, 3, seed=2), seeded(T, 3, seed=3)]
    _, outcome = decide(fn, given, (2, 3, n), (2, 3, n), (D, n if entries else 3 * N))
    (site,) = outcome.report.sites
    parts = ("batch entry 0 of 2", "batch entry 1 of 2") if entries else ("head 0 of 3", "heads 1-2 of 3")
    assert (site.code, site.parts) == (Code.ABSORBED, parts), site.reason


@pytest.mark.parametrize(
    ("make", "width", "code", "words"),
    [
        (torch.relu, 40, Code.NOT_MLA, "from rows that are no narrower"),
        (torch.relu, 20, Code.NONLINEAR, "relu"),
        (lambda y: y, 20, Code.ABSORBED, ""),
    ],
)
def test_a_weight_behind_what_ends_the_walk_is_not_said_to_be_missing(make, width, code, words):
    """The rows are wider than K and wider than V, and narrower than both together or not."""

    def fn(q, c, w_k, w_v):
        return sdpa(q, *(make(c @ w).unflatten(-1, (H, -1)).transpose(1, 2) for w in (w_k, w_v)))

    given = [seeded(B, H, S, N, seed=1), seeded(B, T, width, seed=2)]
    _, outcome = decide(fn, given, (width, H * N), (width, H * V))
    (site,) = outcome.report.sites
    assert (site.code, words in site.reason) == (code, True), site.reason


def test_keys_that_are_added_to_those_of_other_sequences_are_not_made_of_several_tensors():
    given = [seeded(MANY, S, D, seed=1), seeded(MANY, T, L, seed=2)]
    _, outcome = decide(of_entries_of_others, given, (MANY, L, H * N), (MANY, L, H * N), (D, H * N))
    (site,) = outcome.report.sites
    assert site.parts == ("values",)
    assert [(one.code, one.reason) for one in site.kept] == [
        (Code.UNSUPPORTED_OP, "no rule for cat along the batch, behind a weight")
    ]


def test_heads_projected_from_the_rows_of_the_queries_are_no_latents():
    def fn(x, w_k, w_v, w_q):
        q, k, v = (torch.stack([(x * g) @ w[g - 1] for g in (1, 2)], 1) for w in (w_q, w_k, w_v))
        return sdpa(q, k.tanh(), v.tanh())

    _, outcome = decide(fn, [seeded(B, T, 8, seed=2)], (2, 8, N), (2, 8, V), (2, 8, N))
    (site,) = outcome.report.sites
    assert (site.code, site.reason) == (Code.NOT_MLA, "K and V are projected from hidden states, as the queries are")
