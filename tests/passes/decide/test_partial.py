"""Attentions absorbed in part: one side, or some columns of the keys. The numbers stay, the report says which."""

from __future__ import annotations

import copy
import json

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from mla_compile.codes import Code
from mla_compile.core.dims import Dims
from mla_compile.passes.cost import formulas
from mla_compile.passes.cost.cost import (
    DEVICES,
    AbsorbedColumns,
    break_even_S,
    choose_parts,
    part_break_even,
    part_gain,
)
from mla_compile.report.report import Report
from mla_compile.runtime.choice import pays_as_traced, picker
from tests.passes.decide.test_negatives import rotate, spoiled
from tests.passes.rewrite.test_absorb import no_expansion, softcap
from tests.support import modules
from tests.support.modules import EXACT, MLA, H, L, N, R, V, causal, inputs, padded
from tests.support.programs import (
    OP,
    absorbed,
    assert_equal,
    assert_untouched,
    calls,
    codes,
    decide,
    export,
    one_side,
    optimized,
    refused,
    run,
    seeded,
)
from tests.support.tiers import also, full
from tests.support.usual import usual

pytestmark = pytest.mark.thorough

DYN = Dim.DYNAMIC
SYMBOLIC = ({0: DYN, 1: DYN}, {0: DYN, 1: DYN}, {0: DYN, 1: DYN}, {0: DYN, 2: DYN, 3: DYN})


def rotated(**options):
    """RoPE on the whole K after the up-projection: only V can be absorbed."""
    return spoiled(lambda k, v: (rotate(k), v), **options)


def squashed(**options):
    """A nonlinear function of V: only K can be absorbed."""
    return spoiled(lambda k, v: (k, F.silu(v)), **options)


class PerHead(MLA):
    """Rotary keys of every head, r [B,H,T,R], beside the shared latent."""

    def join(self, k, r):
        return torch.cat([k, r], -1)


def per_head(B=2, S=1, T=7, dims=(H, R)):
    return [*inputs(B, S, T, R=0), seeded(B, dims[0], T, dims[1], seed=3)]


@pytest.mark.parametrize(
    "core",
    usual(EXACT, ("matmul", "bmm")),
)
def test_values_alone(core):
    one_side(rotated(core=core, bias=True), [*inputs(S=3), causal(3, 7)], "values", Code.POSITION_DEPENDENT)


@pytest.mark.parametrize("core", ["heads_last", *also("combination", "sdpa", "matmul")])
def test_keys_alone(core):
    one_side(squashed(core=core, bias=True), [*inputs(S=3), causal(3, 7)], "keys", Code.NONLINEAR)


@pytest.mark.parametrize("up", ["per_head", *also("combination", "joint", "lora")])
def test_up_projections_make_only_what_is_kept(up):
    outcome = one_side(rotated(up=up, V=9), inputs(), "values", Code.POSITION_DEPENDENT)
    assert no_expansion(outcome.program, H, 7, N + 9)
    assert no_expansion(outcome.program, 7, H * (N + 9))
    assert no_expansion(outcome.program, H, 7, 9)


@pytest.mark.parametrize(
    ("core", "lowering"), [("heads_last", "op"), ("matmul", "aten"), *also("combination", ("sdpa", "op"))]
)
def test_rotary_keys_of_every_head(core, lowering):
    program = absorbed(PerHead(core=core, bias=True), [*per_head(S=3), padded(2, 3, 7)], lowering=lowering)
    assert no_expansion(program, H, 7, N)
    assert calls(program).count(OP) == (lowering == "op")


@pytest.mark.singly
@pytest.mark.parametrize("make", [squashed, PerHead, *also("combination", rotated)])
@pytest.mark.parametrize(("core", "E"), [("sdpa", 2), ("matmul", 4)])
def test_sizes_that_are_all_equal(core, make, E):
    r = seeded(E, E, E, E, seed=4) if make is PerHead else seeded(E, E, E, seed=4)
    data = [seeded(E, E, modules.D, seed=1), seeded(E, E, E, seed=2), r, causal(E, E)]
    absorbed(make(H=E, L=E, N=E, R=E, V=E, core=core), data)


@full("combination")
@pytest.mark.parametrize(("make", "core"), [(squashed, "matmul"), (rotated, "sdpa")])
def test_everything_symbolic(core, make):
    module = make(core=core)
    program = absorbed(module, [*inputs(2, 3, 9), causal(3, 9, lead=(2, 1))], SYMBOLIC)
    for B, S, T in ((1, 1, 5), (3, 4, 4), (2, 2, 11)):
        assert_equal(module, program, [*inputs(B, S, T), causal(S, T, lead=(B, 1))])


@full("combination")
def test_rotary_keys_of_every_head_symbolic():
    module = PerHead()
    program = absorbed(module, per_head(2, 3, 9), (*SYMBOLIC[:2], {0: DYN, 2: DYN}))
    for B, S, T in ((1, 1, 5), (3, 4, 4), (2, 2, 11)):
        assert_equal(module, program, per_head(B, S, T))


@pytest.mark.parametrize(
    ("make", "core"),
    [(squashed, "matmul"), *also("combination", (rotated, "sdpa"), (rotated, "in_float64"))],
)
def test_queries_that_see_no_key(core, make):
    class Core(MLA):
        def spoil(self, k, v):
            return make().spoil(k, v)

        def attend(self, q, k, v, mask):
            if core == "in_float64":
                return (q @ k.mT * self.scale).masked_fill(~mask, -1e9).softmax(-1) @ v
            return super().attend(q, k, v, mask)

    absorbed(Core(core=core, bias=True), [*inputs(S=7), padded(2, 7, 7)])


@pytest.mark.parametrize("make", [squashed, *also("combination", rotated)])
def test_an_additive_mask_and_is_causal(make):
    class Masked(MLA):
        def spoil(self, k, v):
            return make().spoil(k, v)

        def attend(self, q, k, v, mask):
            causal = mask is None
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale)

    absorbed(Masked(), [*inputs(S=3), seeded(2, H, 3, 7, seed=9)])
    absorbed(Masked(), inputs(S=7))


@pytest.mark.parametrize("make", [rotated, *also("combination", squashed)])
def test_groups_of_query_heads(make):
    """GQA: twice as many query heads as heads of K and V."""

    class Grouped(MLA):
        def __init__(self):
            super().__init__()
            self.w_q = nn.Parameter(seeded(2 * H * (N + R), modules.D, seed=1))

        def spoil(self, k, v):
            return make().spoil(k, v)

        def query(self, x):
            return F.linear(x, self.w_q).view(*x.shape[:2], 2 * H, N + R).transpose(1, 2)

        def attend(self, q, k, v, mask):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True)

    absorbed(Grouped(), [*inputs(S=3), causal(3, 7)])


@pytest.mark.parametrize(("make", "core"), [(squashed, "matmul"), *also("combination", (rotated, "sdpa"))])
def test_one_head_of_queries_and_keys_for_all_values(make, core):
    class One(MLA):
        def spoil(self, k, v):
            return make().spoil(k, v)

        def attend(self, q, k, v, mask):
            return super().attend(q[:, :1], k[:, :1], v, mask)

    absorbed(One(core=core, up="two", bias=True), [*inputs(S=3), causal(3, 7)])


def test_probabilities_that_are_returned():
    class Returns(MLA):
        def spoil(self, k, v):
            return rotate(k), v

        def attend(self, q, k, v, mask):
            p = (q @ k.mT * self.scale).softmax(-1)
            return p @ v, p

        def finish(self, out, x):
            return super().finish(out[0], x), out[1]

    absorbed(Returns(bias=True), inputs(S=3))


@pytest.mark.parametrize("make", [rotated, *also("combination", squashed)])
def test_an_open_core(make):
    class Soft(MLA):
        def spoil(self, k, v):
            return make().spoil(k, v)

        def attend(self, q, k, v, mask):
            return softcap(q, k, v, mask, self.scale)

    absorbed(Soft(bias=True), [*inputs(S=3), causal(3, 7)])


def test_a_constant_beside_the_expanded_keys_of_an_open_core():
    """Its scores are the same for every key, but a soft cap sees them."""

    class Constant(MLA):
        def __init__(self):
            super().__init__(R=2)
            self.last = nn.Parameter(seeded(2, seed=30))

        def join(self, k, r):
            return torch.cat([k, self.last.expand(2, H, 7, 2)], -1)

        def attend(self, q, k, v, mask):
            return softcap(q, k, v, mask, self.scale)

    absorbed(Constant(), [*inputs(R=0, S=3), None, causal(3, 7)])


def test_a_latent_for_keys_and_another_for_values():
    class Two(MLA):
        def forward(self, x, c, r, c_v):
            (k, _), (_, v) = self.expand(c), self.expand(c_v)
            return self.finish(self.attend(self.query(x), self.join(k, r), v, None), x)

    for core in ("sdpa", "matmul"):
        program = absorbed(Two(up="two", core=core), [*inputs(S=3), seeded(2, 7, L, seed=4)], lowering="op")
        (call,) = (n for n in program.gm.graph.nodes if str(n.target) == OP)
        assert [n.name for n in call.args[1:4]] == ["c", "r", "c_v"]


def test_rows_of_three_tensors():
    class Three(MLA):
        def forward(self, x, c, r, e):
            k, _ = self.expand(c)
            _, other = self.expand(e)
            shared = [y[:, None].expand(-1, H, -1, -1) for y in (r[..., :2], e[..., :2])]
            return self.finish(self.attend(self.query(x), torch.cat([k, *shared], -1), other, None), x)

    program = absorbed(Three(up="two"), [*inputs(), seeded(2, 7, L, seed=4)], lowering="op")
    assert calls(program).count(OP) == 1
    assert no_expansion(program, H, 7, N)


def test_values_of_two_tensors():
    """Some columns of V come from the latent, the others are there for every head."""

    class Columns(MLA):
        def forward(self, x, c, r, extra):
            k, v = self.expand(c)
            return self.finish(self.attend(self.query(x), self.join(k, r), torch.cat([v, extra], -1), None), x)

    for core in ("sdpa", "matmul"):
        program = absorbed(Columns(core=core), [*inputs(S=3), seeded(2, H, 7, 2, seed=4)])
        assert no_expansion(program, H, 7, N)


@pytest.mark.parametrize(("which", "code"), [("k", Code.KEYS_USED_ELSEWHERE), ("v", Code.VALUES_USED_ELSEWHERE)])
@pytest.mark.parametrize("up", ["two", "joint"])
def test_a_side_that_is_returned_stays(which, code, up):
    class Returns(MLA):
        def attend(self, q, k, v, mask):
            return super().attend(q, k, v, mask), k if which == "k" else v

        def finish(self, out, x):
            return super().finish(out[0], x), out[1]

    module = Returns(up=up)
    program = export(module, inputs())
    outcome = optimized(program, forms="absorbed")
    (site,) = outcome.report.sites
    if (which, up) == ("v", "joint"):  # what is returned is a view of what was made for both: it stays that view
        assert site.code == Code.KEYS_USED_ELSEWHERE
        assert_untouched(program, outcome)
        return
    assert (site.code, site.parts) == (Code.ABSORBED, ("values",) if which == "k" else ("keys",))
    if up == "two":
        (kept,) = site.kept
        assert kept.code == code
        assert kept.reason == f"the expanded {kept.part} are returned, so they are computed anyway"
    assert_equal(module, outcome.program, inputs())


def test_the_latent_is_the_hidden_state():
    """V straight from what the queries are made of: no latent, however narrow it is."""

    class Plain(MLA):
        def forward(self, x):
            k, v = self.expand(x)
            return self.finish(self.attend(rotate(self.query(x)), rotate(self.join(k, None)), v, None), x)

    program = export(Plain(R=0, L=modules.D), [seeded(2, 7, modules.D)])
    outcome = optimized(program, forms="absorbed")
    assert_untouched(program, outcome)


# Cost.


def test_two_parts_gain_what_the_whole_does():
    heads, width = formulas.H, {formulas.L: 11, formulas.N: 5, formulas.V: 3, formulas.A: 0}
    parts = [AbsorbedColumns("keys", 4, 11, 5, 4), AbsorbedColumns("values", 4, 11, 3, 4)]
    whole = (heads * formulas.absorption_gain()).subs({heads: 4, **width})
    assert sympy.expand(sum(part_gain(p) for p in parts) - whole) == 0


def test_break_evens_of_parts():
    whole = Dims(H=16, L=512, R=64, N=128, V=128)
    both = [AbsorbedColumns("keys", 16, 512, 128, 16), AbsorbedColumns("values", 16, 512, 128, 16)]
    assert part_break_even(both) == pytest.approx(break_even_S(whole))
    assert part_break_even(both[1:]) == pytest.approx(512 * 128 / (512 - 128))
    assert part_break_even([AbsorbedColumns("values", 16, 64, 128, 16)]) == float("inf")


@pytest.mark.parametrize("writes", [False, True])
def test_few_queries_absorb_many_expand(writes):
    part = (AbsorbedColumns("values", 16, 512, 128, 16),)
    how = {"writes": writes, "B": 1, "T": 4096, "element_bytes": 4, "device": DEVICES["cpu"]}
    assert choose_parts(part, S=1, **how).absorbed
    assert choose_parts(part, S=100, **how).absorbed
    assert not choose_parts(part, S=200, **how).absorbed
    assert choose_parts(part, S=200, forms="absorbed", **how).absorbed


def test_many_queries_stay_refused_and_the_report_says_what_could_be():
    program = export(rotated(H=2, L=40, N=24, V=24), inputs(S=300, T=300, L=40))
    outcome = optimized(program)
    assert codes(outcome) == [Code.POSITION_DEPENDENT]
    assert_untouched(program, outcome)
    (note,) = outcome.report.sites[0].notes
    assert "values alone could be absorbed; expanding the values is cheaper" in note


def test_forms_expanded_changes_nothing():
    refused(rotated(V=60, L=60), inputs(L=60), Code.POSITION_DEPENDENT, forms=("expanded",))


def test_a_latent_wider_than_the_values_alone():
    """L = 8 is narrower than K and V together, and wider than V alone: what is said is what happens to K."""
    refused(rotated(V=2), inputs(), Code.POSITION_DEPENDENT)


@pytest.mark.parametrize(("width", "kept"), [(H * V, [Code.NONLINEAR, Code.COST_LATENT_WIDE]), (7, [Code.NONLINEAR])])
def test_a_summand_of_the_values_made_of_wide_rows(width, kept):
    """Of a sum, what comes from rows that are no narrower is read of each head, and it is for that that it is."""

    def fn(q, a, b, w_k, w_v, u_v):
        k, v, more = ((x @ w).unflatten(-1, (H, -1)).transpose(1, 2) for x, w in ((a, w_k), (a, w_v), (b, u_v)))
        return F.scaled_dot_product_attention(q, k.tanh(), v + more)

    given = [seeded(2, H, 1, N, seed=1), seeded(2, 9, width, seed=2), seeded(2, 9, 4, seed=3)]
    _, outcome = decide(fn, given, (width, H * N), (width, H * V), (4, H * V))
    (site,) = outcome.report.sites
    assert (site.code, site.parts) == (Code.ABSORBED, ("values",))
    assert [k.code for k in site.kept] == kept, site.kept


def test_a_symbolic_number_of_queries_is_picked_in_each_call():
    program = export(rotated(H=2, L=40, N=24, V=24), inputs(S=3, T=9, L=40), ({1: DYN}, {1: DYN}, {1: DYN}))
    outcome = optimized(program)
    assert codes(outcome) == [Code.ABSORBED]
    (variant,) = outcome.variants
    assert outcome.report.sites[0].reason == "each call picks by its number of queries whether the values are absorbed"
    assert [p.side for p in variant.parts] == ["values"]
    pays = picker(program, outcome.variants)
    fixed = len(program.placeholders) - 3
    for S, expected in ((1, True), (20, True), (90, False)):
        data = [*[None] * fixed, *inputs(S=S, T=100, L=40)]
        assert pays(data) is expected
    assert pays_as_traced(program, outcome.variants)


# Reports and precision.


def test_the_report_says_what_was_absorbed_and_what_stays():
    outcome = optimized(export(rotated(), inputs()))
    (site,) = outcome.report.sites
    assert (site.verdict, site.form, site.parts) == ("absorbed", "chained", ("values",))
    assert site.values_read_after is None, "what K reads is not known"
    shown = outcome.report.text()
    assert "absorbed (chained, values only)" in shown
    assert "keys (position_dependent)" in shown
    assert "aten.mul at support/modules.py:" in shown
    again = Report.from_dict(json.loads(outcome.report.to_json()))
    assert again == outcome.report
    old = outcome.report.to_dict()
    for record in old["sites"]:
        del record["parts"], record["kept"]
    assert Report.from_dict(old).sites[0].kept == ()


def test_the_report_on_rotary_keys_of_every_head():
    (site,) = optimized(export(PerHead(), per_head())).report.sites
    assert site.parts == ("keys", "values")
    assert [(k.part, k.code) for k in site.kept] == [("some columns of the keys", Code.PER_HEAD_ROPE)]
    assert (site.values_read_before, site.values_read_after) == (H * (N + R + V), L + H * R)


@pytest.mark.singly
@pytest.mark.parametrize("make", [PerHead, *also("combination", rotated, squashed)])
@pytest.mark.parametrize(("core", "dtype"), [("sdpa", torch.bfloat16), *also("family", ("matmul", torch.float16))])
def test_lower_precision_is_no_worse_than_the_original(core, make, dtype):
    module = make(core=core).to(dtype)
    exact = copy.deepcopy(module).double()
    shapes = [d.shape for d in (per_head(S=3, T=40) if make is PerHead else inputs(S=3, T=40))]
    program = export(module, [seeded(*s).to(dtype) for s in shapes])
    outcome = optimized(program, forms="absorbed")
    assert codes(outcome) == [Code.ABSORBED]
    squares = [0.0, 0.0]
    for seed in range(16):
        data = [seeded(*s, seed=seed).to(dtype) for s in shapes]
        with torch.no_grad():
            truth = exact(*[d.double() for d in data])
        for i, p in enumerate((outcome.program, program)):
            (out,) = run(p, *data)
            assert out.dtype == dtype
            squares[i] += float((out.double() - truth).square().sum())
    assert squares[0] <= 1.2**2 * squares[1]


def test_a_projection_that_rows_stay_behind_is_tried_as_their_end_once():
    """It makes the latent, and a rotary key that each sequence reads of the one before: rows behind the projection."""

    def attention(x, past, query, down, up, out):
        h = torch.cat([past, x], 1)
        (B, T), heads = h.shape[:2], out.shape[1] // 4
        latent, rope = F.linear(h, down).split(4, -1)
        q = F.linear(x, query).view(B, -1, heads, 8).transpose(1, 2)
        k, v = F.linear(F.rms_norm(latent, (4,)), up).view(B, T, heads, 8).transpose(1, 2).split(4, -1)
        rope = F.pad(rope.unsqueeze(1), (0, 0, 0, 0, 0, 0, 1, 0))[:B]
        k = torch.cat([k, rope.expand(-1, heads, -1, -1)], -1)
        scores = F.softmax(q @ k.transpose(-1, -2), -1)
        return F.linear((scores @ v).transpose(1, 2).flatten(2), out)

    given = [seeded(3, 2, 8), seeded(3, 11, 8)]
    _, outcome = decide(attention, given, (5 * 8, 8), (8, 8), (5 * 8, 4), (7, 5 * 4))
    (site,) = outcome.report.sites
    assert site.parts == ("values",)
