"""Keys and values that are sums of images of several rows: absorbed as an image of the joined rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from mla_compile.codes import Code
from mla_compile.passes.ir.graph import val
from tests.support.programs import decide, optimized, seeded, trace
from tests.support.tiers import also
from tests.support.usual import usual

B, H, T, L, M, N, V = 2, 3, 9, 12, 7, 6, 5  # M: width of the second rows


def heads(x):
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=0.3)


def shared_key_added(q, a, b, r, w_k, w_v):
    return attend(q, heads(a @ w_k) + r[:, None], heads(a @ w_v))


def shared_key_of_the_same_rows_added(q, a, b, r, w_k, w_v, low):
    return attend(q, heads(a @ w_k) + torch.tanh(a @ low)[:, None], heads(a @ w_v))


def shared_key_taken_off_first(q, a, b, r, w_k, w_v):
    return attend(q, torch.sub(r[:, None], heads(a @ w_k), alpha=0.5), heads(a @ w_v))


def keys_of_two(q, a, b, r, w_k, w_v, u_k):
    return attend(q, heads(a @ w_k + b @ u_k), heads(a @ w_v))


def values_of_two(q, a, b, r, w_k, w_v, u_v):
    return attend(q, heads(a @ w_k), 0.7 * heads(a @ w_v) + heads(b @ u_v) * 0.3)


def values_of_the_second_alone_and_keys_of_two(q, a, b, r, w_k, u_k, u_v):
    return attend(q, heads(a @ w_k) - heads(b @ u_k), heads(b @ u_v))


def both_of_two(q, a, b, r, w, u):
    k, v = heads(a @ w + b @ u).split([N, V], -1)
    return attend(q, k, v)


def both_of_two_and_a_rotary_key(q, a, b, r, w, u):
    k, v = heads(a @ w + b @ u).split([N - 2, V], -1)
    return attend(q, torch.cat([k, r[:, None, :, :2].expand(-1, H, -1, -1)], -1), v)


def a_sum_beside_a_rotary_key(q, a, b, r, w_k, u_k, w_v):
    k = heads(a @ w_k) + heads(b @ u_k)
    return attend(q, torch.cat([r[:, None, :, :2].expand(-1, H, -1, -1), k], -1), heads(a @ w_v))


def joined_columns_added(q, a, b, r, w_k, u_k, w_v):
    k = torch.cat([heads(a @ w_k), r[:, None, :, :2].expand(-1, H, -1, -1)], -1)
    return attend(q, k + heads(b @ u_k), heads(a @ w_v))


def three_and_biases(q, a, b, r, w_k, u_k, w_v, u_v, x, y, z):
    k = heads(F.linear(a, w_k.mT, x)) + heads(F.linear(b, u_k.mT, y)) + r[:, None]
    return attend(q, k, heads(a @ w_v) + heads(F.linear(b, u_v.mT, z)) - r[:, None, :, :V])


def projected_again(q, a, b, r, w_k, u_k, w_v, again):
    return attend(q, (heads(a @ w_k) + heads(b @ u_k)) @ again, heads(a @ w_v))


W_K, W_V, U_K, U_V = (L, H * N), (L, H * V), (M, H * N), (M, H * V)
FORMS = {
    shared_key_added: (W_K, W_V),
    shared_key_of_the_same_rows_added: (W_K, W_V, (L, N)),
    shared_key_taken_off_first: (W_K, W_V),
    keys_of_two: (W_K, W_V, U_K),
    values_of_two: (W_K, W_V, U_V),
    values_of_the_second_alone_and_keys_of_two: (W_K, U_K, U_V),
    both_of_two: ((L, H * (N + V)), (M, H * (N + V))),
    both_of_two_and_a_rotary_key: ((L, H * (N - 2 + V)), (M, H * (N - 2 + V))),
    a_sum_beside_a_rotary_key: ((L, H * (N - 2)), (M, H * (N - 2)), W_V),
    joined_columns_added: ((L, H * (N - 2)), U_K, W_V),
    three_and_biases: (W_K, U_K, W_V, U_V, (H * N,), (H * N,), (H * V,)),
    projected_again: (W_K, U_K, W_V, (N, N)),
}


UNLIKE = (
    shared_key_of_the_same_rows_added,
    shared_key_taken_off_first,
    values_of_the_second_alone_and_keys_of_two,
    both_of_two_and_a_rotary_key,
    a_sum_beside_a_rotary_key,
    three_and_biases,
    projected_again,
)
"""Forms that have all parts of the others."""


def rows():
    return [seeded(B, T, width, seed=width) for width in (L, M, N)]


@pytest.mark.parametrize("form", usual(FORMS, UNLIKE))
@pytest.mark.parametrize("S", [1, *also("combination", 3)])
def test_a_sum_is_an_image_of_joined_rows(form, S):
    inputs = [seeded(B, H, S, N, seed=3), *rows()]
    program, outcome = decide(form, inputs, *FORMS[form])
    (site,) = outcome.report.sites
    assert (site.code, site.kept) == (Code.ABSORBED, ()), site.reason
    weights = [seeded(*shape, seed=20 + k) / shape[-1] ** 0.5 for k, shape in enumerate(FORMS[form])]
    assert count(outcome.program.gm, inputs, weights) <= count(program.gm, inputs, weights)


def test_what_is_added_for_each_head_is_no_row_of_its_own():
    """As wide as the keys that it is added to: no row that all heads share."""

    def form(q, a, b, r, w_k, w_v, again):
        return attend(q, heads(a @ w_k) + torch.tanh(heads(a @ again)), heads(a @ w_v))

    _, outcome = decide(form, [seeded(B, H, 1, N, seed=3), *rows()], W_K, W_V, W_K)
    (site,) = outcome.report.sites
    assert [(k.part, k.code) for k in site.kept] == [("keys", Code.NONLINEAR)], site.reason


def gated(of):
    def form(q, a, b, r, w_k, w_v, low, up):
        k, v = heads(a @ w_k), heads(a @ w_v)
        more = heads(of(a, a @ low @ up))
        return attend(q, k + more, v - more[..., :V])

    return form


def first(v):
    return v[:, :, :1]


def last(v):
    return v[:, :, -1:]


def selected(v):
    return v[:, :, -1, None]


def read_beside(of, *cuts):
    """Values of two rows, of which some tokens are read beside the attention, too."""

    def form(q, a, b, r, w_k, w_v, u_v):
        v = of(a @ w_v, b @ u_v, r)
        return attend(q, heads(a @ w_k), v) + sum(cut(v) for cut in cuts)

    return form


SUMS_READ = {
    "joint": lambda x, y, r: heads(x + y),
    "taken off": lambda x, y, r: heads(x) - 0.5 * heads(y),
    "three": lambda x, y, r: heads(x) + heads(y) + r[:, None, :, :V],
    "a factor": lambda x, y, r: heads(x) + heads(y * r[..., :1].sigmoid()),
    "a factor in front": lambda x, y, r: heads(r[..., :1].sigmoid() * x) - heads(y),
    "two factors": lambda x, y, r: heads(x / r[..., 1:2].exp() + y * r[..., :1]),
    "one with a factor": lambda x, y, r: heads(x * r[..., :1].sigmoid()),
    "a row of all heads": lambda x, y, r: 0.3 * r[:, None, :, :V] + heads(x),
}


@pytest.mark.singly
@pytest.mark.parametrize(
    "cuts", [(first,), (last,), (selected,), (first, last)], ids=lambda c: "-".join(f.__name__ for f in c)
)
@pytest.mark.parametrize("of", usual(SUMS_READ, ("joint", "taken off", "three", "two factors", "a row of all heads")))
def test_tokens_of_a_sum_that_are_read_beside_are_made_alone(of, cuts):
    form, shapes = read_beside(SUMS_READ[of], *cuts), (W_K, W_V, U_V)
    inputs = [seeded(B, H, 1, N, seed=3), *rows()]
    program, outcome = decide(form, inputs, *shapes)
    (site,) = outcome.report.sites
    assert (site.code, site.parts, site.kept) == (Code.ABSORBED, (), ()), site.reason
    weights = [seeded(*shape, seed=20 + k) / shape[-1] ** 0.5 for k, shape in enumerate(shapes)]
    assert count(outcome.program.gm, inputs, weights) < 0.8 * count(program.gm, inputs, weights)


@pytest.mark.parametrize("of", ["one", "joint"])
def test_columns_of_some_tokens_that_are_read_beside_are_not_made_alone(of):
    """Attention to the first tokens, half of whose product is read elsewhere: the rows are those of a slice."""
    sums = {"one": lambda x, y, r: heads(x), **SUMS_READ}

    def form(q, a, b, r, w, u):
        k, v = sums[of](a @ w, b @ u, r)[:, :, :2].split([N, V], -1)
        return attend(q, k, v).sum() + k.square().sum()

    _, outcome = decide(form, [seeded(B, H, 1, N, seed=3), *rows()], (L, H * (N + V)), (M, H * (N + V)))
    (site,) = outcome.report.sites
    assert site.code is Code.UNSUPPORTED_OP, site.reason
    assert "some tokens of the product that makes the keys are read outside" in site.reason


def test_columns_of_a_sum_that_are_returned_are_made_alone():
    """Keys and values are halves of one sum; the keys are needed anyway, so the values alone are absorbed."""

    def form(q, a, b, r, w, u):
        k, v = heads(a @ w + b @ u).split([N, V], -1)
        return attend(q, k, v).sum() + k.square().sum()

    inputs = [seeded(B, H, 1, N, seed=3), *rows()]
    _, outcome = decide(form, inputs, (L, H * (N + V)), (M, H * (N + V)))
    (site,) = outcome.report.sites
    assert (site.parts, [k.code for k in site.kept]) == (("values",), [Code.KEYS_USED_ELSEWHERE]), site.reason
    assert site.kept[0].blame.op in ("aten.pow", "aten.square"), site.kept
    made = [val(n).shape[-1] for n in outcome.program.gm.graph.nodes if n.target is torch.ops.aten.linear.default]
    assert made.count(H * N) == 2, made


@pytest.mark.parametrize("S", [1, *also("combination", 2)])
def test_tokens_of_a_sum_in_half_precision_are_what_they_were(S):
    """Two products, each rounded and then added, as before."""

    def form(q, a, b, r, w_k, w_v, u_v):
        v = heads(a @ w_v) - heads(b @ u_v)
        return torch.cat([attend(q, heads(a @ w_k), v), v[:, :, :1]], 2)

    inputs = [x.bfloat16() for x in (seeded(B, H, S, N, seed=3), *rows())]
    weights = [seeded(*shape, seed=20 + k).bfloat16() for k, shape in enumerate((W_K, W_V, U_V))]
    program = trace(form, inputs, weights)
    outcome = optimized(program, forms="absorbed")
    (site,) = outcome.report.sites
    assert (site.code, site.parts) == (Code.ABSORBED, ()), site.reason
    with torch.no_grad():
        (result,) = outcome.program.gm(*inputs, *weights)
        assert torch.equal(result[:, :, S:], form(*inputs, *weights)[:, :, S:])


NOT_ALONE = {  # of the values, and what is read of them; the code of what stays
    "most tokens": (SUMS_READ["joint"], lambda v: v[:, :, : T - 1].sum(2, keepdim=True), Code.UNSUPPORTED_OP),
    "most tokens with a factor": (SUMS_READ["a factor"], lambda v: v[:, :, : T - 1].sum(2, True), Code.UNSUPPORTED_OP),
    "all tokens with a factor": (SUMS_READ["a factor"], lambda v: v.sum(2, True), Code.VALUES_USED_ELSEWHERE),
    "all tokens": (SUMS_READ["joint"], lambda v: v.sum(2, keepdim=True), Code.VALUES_USED_ELSEWHERE),
}


@pytest.mark.parametrize("name", NOT_ALONE)
def test_what_is_read_of_a_sum_and_cannot_be_made_alone(name):
    of, cut, code = NOT_ALONE[name]
    _, outcome = decide(read_beside(of, cut), [seeded(B, H, 1, N, seed=3), *rows()], W_K, W_V, U_V)
    (site,) = outcome.report.sites
    assert (site.parts, [k.code for k in site.kept]) == (("keys",), [code]), site.reason
    assert code is Code.UNSUPPORTED_OP or site.kept[0].reason.startswith("sum also"), site.kept


def test_in_half_precision_a_sum_of_three_keeps_its_order():
    inputs = [x.bfloat16() for x in (seeded(B, H, 1, N, seed=3), *rows())]
    weights = [seeded(*shape, seed=20 + k).bfloat16() for k, shape in enumerate((W_K, W_V, U_V))]
    for name, parts in (
        ("joint", ()),
        ("taken off", ("keys",)),
        ("three", ("keys",)),
        ("one with a factor", ("keys",)),
    ):
        program = trace(read_beside(SUMS_READ[name], first), inputs, weights)
        (site,) = optimized(program, forms="absorbed").report.sites
        assert (site.code, site.parts) == (Code.ABSORBED, parts), (name, site.reason)


GATES = {
    "of the row": lambda a, x: x * a[..., :1].sigmoid(),
    "before": lambda a, x: a[..., :1].sigmoid() * x,
    "divided": lambda a, x: x / (1 + a[..., 1:2].square()),
    "of the sequence": lambda a, x: x * a.mean((1, 2), keepdim=True),
}
STAYING = {  # along the columns; from what the weight makes
    "rotation": lambda a, x: x * a[..., :1].add(torch.arange(H * N)).cos(),
    "norm": lambda a, x: x * x.square().mean(-1, keepdim=True).add(1).rsqrt(),
}


@pytest.mark.parametrize("gate", usual([*GATES, *STAYING], rare=("before", "of the sequence")))
def test_a_factor_for_each_row_moves_before_the_weight(gate):
    inputs = [seeded(B, H, 1, N, seed=3), *rows()]
    shapes = (W_K, W_V, (L, 2), (2, H * N))
    program, outcome = decide(gated({**GATES, **STAYING}[gate]), inputs, *shapes, verify=True)
    (site,) = outcome.report.sites
    assert ((site.code, site.kept) == (Code.ABSORBED, ())) is (gate in GATES), site.reason
    if gate in GATES:
        weights = [seeded(*shape, seed=20 + k) / shape[-1] ** 0.5 for k, shape in enumerate(shapes)]
        assert count(outcome.program.gm, inputs, weights) < count(program.gm, inputs, weights)


def count(gm, inputs, weights):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        gm(*inputs, *weights)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("a", "b", "joins"),
    [((0, L), (L, L + M), 0), ((M, L + M), (0, M), 1), ((0, L), (L - 1, L + M - 1), 1)],
    ids=["in order", "the other order", "overlapping"],
)
def test_columns_beside_each_other_in_one_tensor_are_read_as_one(a, b, joins):
    """A cache that holds both rows is read as it is."""

    def fn(q, both, w_k, u_k, w_v, u_v):
        one, two = both[..., slice(*a)], both[..., slice(*b)]
        return attend(q, *(heads(F.linear(one, w) + F.linear(two, u)) for w, u in ((w_k, u_k), (w_v, u_v))))

    inputs = [seeded(B, H, 1, N), seeded(B, T, L + M, seed=1)]
    _, outcome = decide(fn, inputs, (H * N, L), (H * N, M), (H * V, L), (H * V, M))
    assert [s.code for s in outcome.report.sites] == [Code.ABSORBED]
    joined = outcome.program.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert sum(T in n.meta["val"].shape for n in joined) == joins
