"""Finding attention: every usual order of its steps is one record, and what is no attention is not found."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from mla_compile.passes.attention.find import find_attention
from mla_compile.passes.ir.axes import axis_size
from mla_compile.passes.ir.walk import weight_nodes
from tests.support.modules import CORES, causal
from tests.support.programs import canonical, seeded, trace

B, H, S, T, K, V = 2, 3, 4, 7, 6, 5


def qkv(B=B, H=H, S=S, T=T, K=K, V=V, dtype=torch.float64):
    return [seeded(B, H, n, w, seed=i).to(dtype) for i, (n, w) in enumerate(((S, K), (T, K), (T, V)))]


def find(fn, inputs, weights=()):
    program = trace(fn, inputs, weights)
    graph = canonical(program)
    return find_attention(graph, weight_nodes(graph, program.weights))


def one(fn, inputs, weights=()):
    (site,) = find(fn, inputs, weights)
    assert site.problem is None
    return site


def sizes(site):
    return tuple(axis_size(a) for a in (site.lead, site.queries, site.keys))


def closed(site, *, scale=1.0, masks=0):
    """The plain formula with these parameters, whatever it was written like."""
    assert site.open_core is None
    assert site.scale == pytest.approx(scale, rel=1e-12)
    assert len(site.masks) == masks
    return site


# Fused.


@pytest.mark.parametrize("scale", [None, 0.3])
def test_fused(scale):
    site = closed(
        one(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=scale), qkv()), scale=scale or K**-0.5
    )
    assert sizes(site) == (B * H, S, T)
    assert site.empty == "zero"
    assert not site.causal
    assert [p.q.node.name for p in site.products] == ["q_1"]
    assert (site.products[0].k.node.name, site.v.node.name) == ("k_1", "v_1")


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
@pytest.mark.parametrize("shape", [(B, H, S, T), (B, 1, S, T), (1, 1, 1, T), (S, T), (1, T)])
def test_fused_with_a_mask(shape, dtype):
    mask = torch.ones(shape, dtype=dtype)
    site = closed(
        one(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m), [*qkv(), mask]),
        scale=K**-0.5,
        masks=1,
    )
    assert site.masks[0].kind == ("keep" if dtype == torch.bool else "add")
    axes = site.masks[0].operand.axes
    assert [axis_size(a) for a in axes] == list(shape)
    assert axes[-1] == site.keys


def test_fused_causal():
    site = one(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), qkv(S=T))
    assert site.causal
    (site,) = find(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), qkv(S=1))
    assert site.problem.code == "unsupported_op"


def test_fused_grouped():
    q, k, v = qkv(H=6)
    k, v = k[:, :2], v[:, :2]
    site = closed(
        one(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), [q, k, v]), scale=K**-0.5
    )
    group = site.products[0].k.axes[1]
    assert [a.size for a in site.products[0].q.axes[1]] == [2, 3]
    assert group == site.products[0].q.axes[1][:1]


def test_fused_with_one_head_of_keys():
    q, k, v = qkv()
    site = one(F.scaled_dot_product_attention, [q, k[:, :1], v[:, :1]])
    assert site.products[0].k.axes[1] == ()
    assert axis_size(site.lead) == B * H


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_fused_of_other_ranks(rank):
    lead = (2, 3, 4)[: rank - 2]
    data = [seeded(*lead, n, w) for n, w in ((S, K), (T, K), (T, V))]
    assert sizes(one(F.scaled_dot_product_attention, data)) == (math.prod(lead), S, T)


def test_fused_with_dropout():
    (site,) = find(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1), qkv())
    assert site.problem.code == "dropout"


# Written out: scale, mask and casts in every order.

_STEPS = {
    "mul": lambda s, m: s * 0.5,
    "div": lambda s, m: s / 4,
    "fill": lambda s, m: s.masked_fill(~m, float("-inf")),
    "cast": lambda s, m: s.to(torch.float32),
}


@pytest.mark.parametrize("order", list(itertools.permutations(_STEPS)), ids="-".join)
def test_every_order_of_scale_mask_and_cast(order):
    def attention(q, k, v, m):
        s = q @ k.mT
        for step in order:
            s = _STEPS[step](s, m)
        return s.softmax(-1).to(v.dtype) @ v

    site = closed(one(attention, [*qkv(), causal(S, T)]), scale=0.125, masks=1)
    assert sizes(site) == (B * H, S, T)
    assert (site.masks[0].kind, site.masks[0].fill) == ("drop", float("-inf"))
    assert site.empty == "nan"


@pytest.mark.parametrize("order", list(itertools.permutations(["mul", "add", "div"])), ids="-".join)
def test_an_added_mask_is_scaled_by_what_comes_after_it(order):
    steps = {**_STEPS, "add": lambda s, m: s + m}

    def attention(q, k, v, m):
        s = q @ k.mT
        for step in order:
            s = steps[step](s, m)
        return s.softmax(-1) @ v

    site = closed(one(attention, [*qkv(), seeded(B, 1, S, T)]), scale=0.125, masks=1)
    after = {"mul": 0.5, "div": 0.25}
    expected = math.prod(after[step] for step in order[order.index("add") + 1 :])
    assert site.masks[0].scale == pytest.approx(expected)


MASKS = {
    "added": (lambda s, m: s + torch.where(m, 0.0, float("-inf")), "add", None),
    "added, mask first": (lambda s, m: torch.where(m, 0.0, float("-inf")) + s, "add", None),
    "masked_fill": (lambda s, m: s.masked_fill(~m, float("-inf")), "drop", float("-inf")),
    "masked_fill, lowest": (
        lambda s, m: s.masked_fill(~m, torch.finfo(torch.float32).min),
        "drop",
        -3.4028234663852886e38,
    ),
    "masked_fill_": (lambda s, m: aten_fill(s, ~m), "drop", float("-inf")),
    "where": (lambda s, m: torch.where(m, s, float("-inf")), "keep", float("-inf")),
    "where not": (lambda s, m: torch.where(~m, float("-inf"), s), "drop", float("-inf")),
    "where with a tensor": (lambda s, m: torch.where(m, s, torch.full((), -1e9, dtype=s.dtype)), "keep", -1e9),
    "0/1 numbers": (lambda s, m: s.masked_fill(m.to(s.dtype) == 0, -1e9), "drop", -1e9),
    "triu of -inf": (lambda s, m: s + torch.full((S, T), float("-inf")).triu(T - S + 1), "add", None),
}


def aten_fill(s, m):
    return torch.ops.aten.masked_fill.Scalar(s, m, float("-inf"))


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    apply, kind, fill = MASKS[name]
    site = closed(one(lambda q, k, v, m: apply(q @ k.mT, m).softmax(-1) @ v, [*qkv(), causal(S, T)]), masks=1)
    assert site.masks[0].kind == kind
    assert kind == "add" or site.masks[0].fill == fill
    assert site.masks[0].operand.axes[-2:] == (site.queries, site.keys)


def test_several_masks():
    def attention(q, k, v, m, p):
        return (q @ k.mT + p).masked_fill(~m, float("-inf")).softmax(-1) @ v

    site = closed(one(attention, [*qkv(), causal(S, T), seeded(H, S, T)]), masks=2)
    assert [m.kind for m in site.masks] == ["add", "drop"]


# Written out: products.


@pytest.mark.parametrize("core", CORES)
def test_spellings_of_the_core(core):
    site = one(lambda q, k, v, m: CORES[core](q, k, v, m, 0.3), [*qkv(K=10), causal(S, T)])
    assert site.open_core is None
    assert site.scale == pytest.approx(0.3)
    assert sizes(site) == (B * H, S, T)
    assert len(site.products) == (2 if core == "two_products" else 1)
    assert len(site.masks) == 1
    assert all(
        p.q.node.name.startswith(("q", "split", "getitem", "view", "transpose", "reshape", "slice"))
        for p in site.products
    )


WRITTEN = {
    "matmul of transposed": lambda q, k, v: torch.matmul(q, k.transpose(-1, -2)).softmax(-1) @ v,
    "permuted": lambda q, k, v: (q @ k.permute(0, 1, 3, 2)).softmax(dim=3) @ v,
    "keys first": lambda q, k, v: (k @ q.mT).mT.softmax(-1) @ v,
    "softmax over axis 2": lambda q, k, v: v.mT @ (k @ q.mT).softmax(2),
    "einsum": lambda q, k, v: torch.einsum("bhst,bhtv->bshv", torch.einsum("bhsk,bhtk->bhst", q, k).softmax(-1), v),
    "einsum, values first": lambda q, k, v: torch.einsum(
        "bhtv,bhst->bhsv", v, torch.einsum("bhtk,bhsk->bhst", k, q).softmax(-1)
    ),
    "einsum, keys before queries": lambda q, k, v: torch.einsum(
        "bhts,bhtv->bhsv", torch.einsum("bhsk,bhtk->bhts", q, k).softmax(2), v
    ),
    "einsum with ellipsis": lambda q, k, v: torch.einsum(
        "...st,...tv->...sv", torch.einsum("...sk,...tk->...st", q, k).softmax(-1), v
    ),
    "softmax in float32": lambda q, k, v: (q @ k.mT).softmax(-1, dtype=torch.float32).to(q.dtype) @ v,
    "softmax of floats": lambda q, k, v: F.softmax((q @ k.mT).float(), dim=-1).type_as(q) @ v,
    "dropout that is off": lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.1, training=False) @ v,
    "copies": lambda q, k, v: (q @ k.mT).clone().contiguous().softmax(-1).contiguous() @ v,
    "heads merged": lambda q, k, v: torch.bmm(
        torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).softmax(-1), v.flatten(0, 1)
    ).view(B, H, S, V),
    "scores viewed": lambda q, k, v: (
        (q.flatten(0, 1) @ k.flatten(0, 1).mT).view(B, H, S, T).softmax(-1).flatten(0, 1) @ v.flatten(0, 1)
    ),
    "an axis added and removed": lambda q, k, v: (q @ k.mT).unsqueeze(2).softmax(-1).squeeze(2) @ v,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_written_out(name):
    site = closed(one(WRITTEN[name], qkv()))
    assert sizes(site) == (B * H, S, T)
    (product,) = site.products
    assert set(site.keys) <= {a for axis in product.k.axes for a in axis}
    assert not set(site.keys) & {a for axis in product.q.axes for a in axis}


def test_heads_of_one_shared_key():
    """MQA written out: K and V have no head axis at all."""
    q, k, v = qkv()
    site = one(
        lambda q, k, v: torch.einsum("bhst,btv->bhsv", torch.einsum("bhsk,btk->bhst", q, k).softmax(-1), v),
        [q, k[:, 0], v[:, 0]],
    )
    assert sizes(site) == (B * H, S, T)
    assert len(site.queries) == 1


def test_grouped_heads_written_out():
    q, k, v = qkv(H=6)
    k, v = k[:, :2], v[:, :2]

    def attention(q, k, v):
        scores = torch.einsum("bgisk,bgtk->bgist", q.view(B, 2, 3, S, K), k)
        return torch.einsum("bgist,bgtv->bgisv", scores.softmax(-1), v)

    assert sizes(one(attention, [q, k, v])) == (B * 6, S, T)


@pytest.mark.singly
@pytest.mark.parametrize(
    "sizes_",
    [{"S": 1}, {"T": 1}, {"H": 1}, {"B": 1}, {"B": 1, "H": 1, "S": 1}, {"S": T}, dict.fromkeys("BHSKV", T)],
    ids=str,
)
@pytest.mark.parametrize("core", ["sdpa", "matmul", "heads_last", "bmm"])
def test_sizes_that_are_one_or_equal(core, sizes_):
    (site,) = find(lambda q, k, v: CORES[core](q, k, v, None, 1.0), qkv(**sizes_))
    full = {"B": B, "H": H, "S": S, "T": T} | sizes_
    assert sizes(site) == (full["B"] * full["H"], full["S"], full["T"])


# Open cores and problems.


OPEN = {
    "soft cap": lambda q, k, v: (q @ k.mT).tanh().softmax(-1) @ v,
    "two sinks": lambda q, k, v: torch.cat([q @ k.mT, q.new_zeros(B, H, S, 2)], -1).softmax(-1)[..., :-2] @ v,
    "two sinks in front": lambda q, k, v: torch.cat([q.new_zeros(B, H, S, 2), q @ k.mT], -1).softmax(-1)[..., 2:] @ v,
    "one product of two capped": lambda q, k, v: (q @ k.mT + (q @ k.mT).tanh()).softmax(-1) @ v,
    "one product of two capped, first": lambda q, k, v: ((q @ k.mT).tanh() + q @ k.mT).softmax(-1) @ v,
    "unequal scales": lambda q, k, v: (q @ k.mT + 2 * (q @ k.mT)).softmax(-1) @ v,
    "a constant": lambda q, k, v: (q @ k.mT + 1).softmax(-1) @ v,
    "a factor per query": lambda q, k, v: (q @ k.mT * q.sum(-1, keepdim=True)).softmax(-1) @ v,
    "nan to zero": lambda q, k, v: torch.nan_to_num((q @ k.mT).softmax(-1)) @ v,
    "a fill that counts": lambda q, k, v: (q @ k.mT).masked_fill(~causal(S, T), -5.0).softmax(-1) @ v,
    "probabilities twice": lambda q, k, v: (lambda p: p @ v + p.sum())((q @ k.mT).softmax(-1)),
    "exponentials divided last": lambda q, k, v: (e := (q @ k.mT).exp()) @ v / e.sum(-1, True).clamp(min=1),
    "a least sum": lambda q, k, v: (e := (q @ k.mT).exp()) / e.sum(-1, keepdim=True).clamp(min=1) @ v,
    "exponentials alone": lambda q, k, v: (q @ k.mT - 1).exp() @ v,
    "safe softmax": lambda q, k, v: torch.ops.aten._safe_softmax(q @ k.mT, -1) @ v,
}


@pytest.mark.parametrize("name", OPEN)
def test_open_cores(name):
    site = one(OPEN[name], qkv())
    assert site.open_core
    assert sizes(site) == (B * H, S, T)


def test_a_softmax_over_the_queries_is_a_problem():
    (site,) = find(lambda q, k, v: (q @ k.mT).softmax(-2) @ v, qkv())
    assert site.problem.code == "softmax_axis"
    assert site.products[0].q.node.op == "placeholder"  # else K would be judged by how the queries are made


def test_a_softmax_over_the_heads_is_a_problem():
    (site,) = find(lambda q, k, v: (q @ k.mT).softmax(1) @ v, qkv())
    assert site.problem.code == "softmax_axis"


def test_active_dropout_is_a_problem():
    (site,) = find(lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.1, training=True) @ v, qkv())
    assert site.problem.code == "dropout"


def test_keys_are_known_without_a_softmax_whichever_operand_comes_first():
    (site,) = find(lambda q, k, v: (k @ q.mT).exp().mT @ v, qkv())
    assert sizes(site) == (B * H, S, T)
    assert site.products[0].k.node.name == "k_1"


MULTIPLIED_AND_SUMMED = {
    "both": lambda q, k, v: ((q[:, :, :, None] * k[:, :, None]).sum(-1).softmax(-1)[..., None] * v[:, :, None]).sum(3),
    "keys first": lambda q, k, v: (
        v[:, :, None] * (k[:, :, None] * q[:, :, :, None]).sum(-1).softmax(-1)[..., None]
    ).sum(3),
    "scores with an axis kept": lambda q, k, v: (
        (q[:, :, :, None] * k[:, :, None]).sum(-1, keepdim=True).softmax(3) * v[:, :, None]
    ).sum(3),
    "scores only": lambda q, k, v: (q[:, :, :, None] * k[:, :, None]).sum(-1).softmax(-1) @ v,
    "values only": lambda q, k, v: ((q @ k.mT).softmax(-1)[..., None] * v[:, :, None]).sum(-2),
}


@pytest.mark.parametrize("name", MULTIPLIED_AND_SUMMED)
def test_products_that_are_multiplied_and_summed(name):
    site = one(MULTIPLIED_AND_SUMMED[name], qkv())
    assert sizes(site) == (B * H, S, T)


# What is no attention.

NOTHING = {
    "a router": (
        lambda x, w, e: torch.einsum("te,td->ed", (x @ w).softmax(-1), x @ e),
        [seeded(9, 4)],
        [seeded(4, 3), seeded(4, 5)],
    ),
    "a router over values": (lambda x, v, w: (x @ w).softmax(-1) @ v, [seeded(9, 4), seeded(3, 5)], [seeded(4, 3)]),
    "a mixture by weights": (lambda x, a, b: x @ (a @ b.mT).softmax(-1), [seeded(9, 3)], [seeded(3, 4), seeded(3, 4)]),
    "a softmax that is returned": (lambda q, k: (q @ k.mT).softmax(-1), qkv()[:2], []),
    "products without a softmax": (lambda q, k, v: (q @ k.mT) @ v, qkv(), []),
    "decay between products": (
        lambda q, k, v: (q @ k.mT * (q.sum(-1, keepdim=True) - k.sum(-1)[:, :, None]).exp()) @ v,
        qkv(),
        [],
    ),
    "squares that are summed": (lambda q, k, v: (q * q).sum(-1).softmax(-1)[..., None] * v[:, :, :1], qkv(), []),
    "a gate": (lambda q, k, v: (q @ k.mT).sigmoid() @ v, qkv(), []),
    "a softmax of the input": (lambda q, k, v: q.softmax(-1) @ k.mT, qkv(), []),
    "two softmaxes": (lambda q, k, v: (q @ k.mT).softmax(-1).softmax(-1) @ v, qkv(), []),
    "an MLP": (lambda x, a, b: F.silu(x @ a) @ b, [seeded(9, 4)], [seeded(4, 6), seeded(6, 4)]),
}


@pytest.mark.parametrize("name", NOTHING)
def test_no_attention(name):
    fn, inputs, weights = NOTHING[name]
    assert find(fn, inputs, weights) == []


def test_attentions_come_in_the_order_of_the_graph():
    def both(q, k, v):
        first = F.scaled_dot_product_attention(q, k, v)
        return ((first @ k[..., :V].mT).softmax(-1) @ v) + first

    first, second = find(both, qkv())
    assert first.node.target is torch.ops.aten.scaled_dot_product_attention.default
    assert second.products[0].q.node is first.node
