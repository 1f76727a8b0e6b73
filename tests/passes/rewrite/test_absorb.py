"""The rewrite: same numbers in float64, whatever the spelling, the sizes that are symbolic, and who else reads what."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from mla_compile.codes import Code
from tests.support import modules
from tests.support.modules import CORES, EXACT, MLA, UPS, H, L, N, R, V, additive, causal, inputs, padded
from tests.support.programs import (
    OP,
    absorbed,
    assert_equal,
    assert_untouched,
    calls,
    codes,
    export,
    optimized,
    run,
    seeded,
)
from tests.support.tiers import also, full
from tests.support.usual import usual

DYN = Dim.DYNAMIC
SYMBOLIC = ({0: DYN, 1: DYN}, {0: DYN, 1: DYN}, {0: DYN, 1: DYN}, {0: DYN, 2: DYN, 3: DYN})


def no_expansion(program, *sizes):
    """No node of the program holds a tensor with all of these sizes: K and V are gone."""
    for node in program.gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            left = [str(s) for s in value.shape]
            for s in sizes:
                if str(s) not in left:
                    break
                left.remove(str(s))
            else:
                return False
    return True


@pytest.mark.singly
@pytest.mark.parametrize("S", [3, 1])
@pytest.mark.parametrize("up", usual(UPS, ("joint", "per_head", "lora", "int8")))
def test_up_projections(up, S):
    program = absorbed(MLA(up=up), [*inputs(S=S), padded(2, S, 7)])
    assert no_expansion(program, H, 7, N + V)
    assert no_expansion(program, H, 7, N)


SOME_CORES = ("sdpa", "bmm", "two_products", "dropout_off", "padded_values")


@pytest.mark.singly
@pytest.mark.parametrize("S", [3, 1])
@pytest.mark.parametrize("core", usual(EXACT, SOME_CORES))
def test_cores(core, S):
    program = absorbed(MLA(core=core), [*inputs(S=S), causal(S, 7)])
    assert no_expansion(program, H, 7, N)


@pytest.mark.thorough
@pytest.mark.parametrize("core", usual(CORES, ("in_float32",)))
def test_cores_without_a_mask(core):
    options = {"verify": core != "in_float32"}
    module = MLA(core=core)
    program = export(module, inputs())
    outcome = optimized(program, **options)
    assert codes(outcome) == [Code.ABSORBED]
    assert_equal(module, outcome.program, inputs(), 1e-6 if core == "in_float32" else 1e-10)


@pytest.mark.thorough
@pytest.mark.singly
@pytest.mark.parametrize("order", ["rope_nope", *also("combination", "nope_rope")])
@pytest.mark.parametrize("share", ["assign", *also("combination", "interleave", "expand", "repeat")])
def test_shared_rotary_key(share, order):
    absorbed(MLA(share=share, order=order), inputs())


@full("combination")
@pytest.mark.thorough
@pytest.mark.parametrize("core", ["sdpa", "einsum", "heads_last", "two_products"])
def test_everything_symbolic(core):
    module = MLA(core=core)
    program = absorbed(module, [*inputs(B=2, S=3, T=9), causal(3, 9, lead=(2, 1))], SYMBOLIC)
    for B, S, T in ((1, 1, 5), (3, 4, 4), (2, 2, 11)):
        assert_equal(module, program, [*inputs(B, S, T), causal(S, T, lead=(B, 1))])


@full("combination")
@pytest.mark.thorough
def test_batch_and_heads_merged_symbolic():
    module = MLA(core="bmm", up="per_head")
    program = absorbed(module, inputs(B=2, S=3, T=9), SYMBOLIC[:3])
    for B, S, T in ((2, 1, 5), (3, 4, 4)):
        assert_equal(module, program, inputs(B, S, T))


@full("combination")
@pytest.mark.thorough
def test_a_symbolic_context_alone():
    module = MLA()
    program = absorbed(module, inputs(), ({}, {1: DYN}, {1: DYN}))
    assert_equal(module, program, inputs(T=33))


@full("combination")
@pytest.mark.thorough
def test_a_symbolic_number_of_queries_is_picked_in_each_call():
    outcome = optimized(export(MLA(), inputs(S=3, T=9), SYMBOLIC[:3]))
    assert codes(outcome) == [Code.ABSORBED]
    assert len(outcome.variants) == 1
    assert outcome.variants[0].S != outcome.variants[0].T
    assert not isinstance(outcome.variants[0].S, int)


def test_a_prompt_of_any_length_is_kept_by_cost():
    length = torch.export.Dim("length")
    outcome = optimized(export(MLA(), inputs(S=5, T=5), ({1: length},) * 3))
    assert codes(outcome) == [Code.COST_PREFILL]
    assert outcome.report.sites[0].reason.startswith("a prompt")


def test_one_query_is_absorbed_without_asking():
    outcome = optimized(export(MLA(), inputs(S=1)))
    assert codes(outcome) == [Code.ABSORBED]
    assert outcome.variants == ()


@pytest.mark.thorough
def test_many_queries_are_kept_by_cost():
    program = export(MLA(H=2, L=40, N=24, V=24 + R), inputs(S=300, T=300, L=40))
    outcome = optimized(program)
    assert codes(outcome) == [Code.COST_PREFILL]
    assert outcome.report.sites[0].reason.startswith("expanding K and V is cheaper: 300 queries against 300 cached")
    assert_untouched(program, outcome)


def test_forms_expanded_changes_nothing():
    program = export(MLA(), inputs())
    outcome = optimized(program, forms="expanded")
    assert codes(outcome) == [Code.FORMS_EXPANDED]
    assert_untouched(program, outcome)


@pytest.mark.thorough
@pytest.mark.singly
@pytest.mark.parametrize("core", ["sdpa", "matmul", "two_products"])
@pytest.mark.parametrize("S", [4, 1])
def test_with_the_operator(core, S):
    program = absorbed(MLA(core=core), [*inputs(S=S, T=70), padded(2, S, 70)], lowering="op")
    assert calls(program).count(OP) == 1
    assert not any("softmax" in c or "scaled_dot" in c for c in calls(program))


@pytest.mark.thorough
def test_aten_leaves_no_operator():
    program = absorbed(MLA(), inputs(), lowering="aten")
    assert all(c.split(".")[0] not in ("mla_compile", "scaled_dot_product_attention") for c in calls(program))


# The graph, literally.


_VIEWS = ("view", "transpose", "permute", "slice", "squeeze", "unsqueeze", "reshape")


def test_the_graph_of_the_fused_attention():
    program = export(MLA(), inputs())
    assert calls(program) == [
        "linear.default", "view.default", "transpose.int", "split_with_sizes.default",  # [k, v] = up(c), per head
        "view.default", "expand.default", "cat.default",  # K = [k, r]
        "linear.default", "view.default", "transpose.int",  # q
        "scaled_dot_product_attention.default",
        "transpose.int", "reshape.default",
    ]  # fmt: skip
    outcome = optimized(program, lowering="op")
    computed = [c for c in calls(outcome.program) if c.split(".")[0] not in _VIEWS]
    assert computed == [
        "linear.default",  # q
        "einsum.default",  # q W_k
        "cat.default",  # [q W_k, q_rope]
        OP,
        "einsum.default",  # W_v
        "clone.default",  # [B,S,H,V], in the memory order of the original
    ]
    call = next(n for n in outcome.program.gm.graph.nodes if str(n.target) == OP)
    query, latent, rope, values, mask = call.args
    assert (latent.name, rope.name, values, mask) == ("c", "r", None, None)
    assert list(query.meta["val"].shape) == [2, 1, H, L + R]
    assert call.kwargs == {"scale": MLA().scale, "causal": False}


@pytest.mark.thorough
def test_a_view_of_the_cache_is_read_where_it_lies():
    class Rows(MLA):
        def forward(self, x, rows):
            return super().forward(x, rows[..., :L], rows[..., L:])

    program = absorbed(Rows(), [inputs()[0], seeded(2, 7, L + R, seed=3)], lowering="op")
    call = next(n for n in program.gm.graph.nodes if str(n.target) == OP)
    for rows in call.args[1:3]:
        assert rows.meta["val"].stride() == (7 * (L + R), L + R, 1)
        assert str(rows.target) == "aten.slice.Tensor"
        assert rows.args[0].op == "placeholder"


# Masks.


@pytest.mark.thorough
@pytest.mark.singly
@pytest.mark.parametrize(
    "shape",
    [
        (2, H, 3, 7),
        (3, 7),
        *also("combination", ((2, 1, 3, 7),), ((1, 1),), ((1, 1, 3, 7),), ((2, 1, 1, 7),), ((1, 7),)),
    ],
)
@pytest.mark.parametrize("core", ["sdpa", "einsum"])
def test_masks_of_every_shape(core, shape):
    mask = seeded(*shape, seed=3) > -0.8
    mask[..., -1:] = True

    absorbed(MLA(core=core), [*inputs(S=3), mask])


@pytest.mark.thorough
@pytest.mark.singly
@pytest.mark.parametrize("lowest", [None, float("-inf"), -3.0])
@pytest.mark.parametrize("core", ["sdpa", "added"])
def test_additive_masks(core, lowest):
    class Added(MLA):
        def attend(self, q, k, v, mask):
            if core == "sdpa":
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
            return (q @ k.mT * self.scale + mask).softmax(-1) @ v

    absorbed(Added(), [*inputs(S=3), additive(causal(3, 7), lowest=lowest)])


@pytest.mark.thorough
def test_is_causal():
    class Causal(MLA):
        def attend(self, q, k, v, mask):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)

    absorbed(Causal(), inputs(S=7))
    absorbed(Causal(), inputs(S=1))  # PyTorch lets that query see the first key only


EMPTY_ROWS = {
    "sdpa": modules.sdpa,
    "masked_fill": modules.matmul,
    "lowest number": lambda q, k, v, m, s: (q @ k.mT * s).masked_fill(~m, torch.finfo(q.dtype).min).softmax(-1) @ v,
    "-1e9": lambda q, k, v, m, s: (q @ k.mT * s).masked_fill(~m, -1e9).softmax(-1) @ v,
    "-1e4": lambda q, k, v, m, s: (q @ k.mT * s).masked_fill(~m, -1e4).softmax(-1) @ v,
    "where": lambda q, k, v, m, s: torch.where(m, q @ k.mT * s, torch.finfo(torch.float32).min).softmax(-1) @ v,
    "filled then scaled": lambda q, k, v, m, s: ((q @ k.mT).masked_fill(~m, -1e10) * s).softmax(-1) @ v,
    "filled twice": lambda q, k, v, m, s: (
        (q @ k.mT * s).masked_fill(~m, -1e9).masked_fill(torch.arange(7) > 5, -1e9).softmax(-1) @ v
    ),
    "filled twice, unequally": lambda q, k, v, m, s: (
        (q @ k.mT * s).masked_fill(~m, -1e10).masked_fill(torch.arange(7) > 5, -1e9).softmax(-1) @ v
    ),
    "filled, then a distance added": lambda q, k, v, m, s: (
        ((q @ k.mT * s).masked_fill(~m, -1e9) - torch.arange(7, dtype=q.dtype)).softmax(-1) @ v
    ),
    "a distance added, then filled": lambda q, k, v, m, s: (
        (q @ k.mT * s + torch.arange(7, dtype=q.dtype)).masked_fill(~m, -1e9).softmax(-1) @ v
    ),
    "nothing filled, then nothing but": lambda q, k, v, m, s: (
        (q @ k.mT * s).masked_fill(~m, float("-inf")).masked_fill(torch.arange(7) > 5, -1e9).softmax(-1) @ v
    ),
    "nan to zero": lambda q, k, v, m, s: torch.nan_to_num(modules.matmul(q, k, v, m, s)),
    "probabilities to zero": lambda q, k, v, m, s: (
        (q @ k.mT * s).masked_fill(~m, float("-inf")).softmax(-1).masked_fill(~m, 0.0) @ v
    ),
}


SOME_EMPTY = (
    "lowest number", "filled then scaled", "filled, then a distance added", "nothing filled, then nothing but",
)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.singly
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", usual(EMPTY_ROWS, SOME_EMPTY))
def test_queries_that_see_no_key(name, bias):
    """Padding at the left makes them; what such a row holds is a convention, and each spelling has its own."""

    class Core(MLA):
        def attend(self, q, k, v, mask):
            return EMPTY_ROWS[name](q, k, v, mask, self.scale)

    mask = padded(2, 7, 7)
    assert not mask[1, 0, 0].any()
    absorbed(Core(bias=bias), [*inputs(S=7), mask])


# What a softmax does by itself, or what its result tells, leaves the attention one operator.


def sink(q, k, v, mask, scale):
    scores = q @ k.mT * scale + additive(mask, lowest=float("-inf"))
    sinks = torch.linspace(-1, 1, q.shape[1], dtype=q.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v


def maximum_subtracted(q, k, v, mask, scale):
    scores = q @ k.mT * scale + additive(mask, lowest=float("-inf"))
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1) @ v


def sink_and_maximum(q, k, v, mask, scale):
    """As hy_v4 of transformers writes it, with a finite mask."""
    scores = q @ k.mT * scale + additive(mask)
    sinks = torch.linspace(-1, 1, q.shape[1], dtype=q.dtype).reshape(1, -1, 1, 1)
    scores = torch.cat([scores, sinks.expand(q.shape[0], -1, q.shape[-2], -1)], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return scores.softmax(-1)[..., :-1].to(v.dtype) @ v


def sink_for_some_heads(q, k, v, mask, scale):
    scores = q @ k.mT * scale + additive(mask, lowest=float("-inf"))
    sinks = torch.tensor([0.5, float("-inf"), -2.0, 1e3], dtype=q.dtype)[: q.shape[1]].view(1, -1, 1, 1)
    return torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1] @ v


def sink_for_each_query(q, k, v, mask, scale):
    scores = q @ k.mT * scale + additive(mask, lowest=float("-inf"))
    return torch.cat([scores, q.mean(-1, keepdim=True)], -1).softmax(-1)[..., :-1] @ v


CLOSED = [
    sink,
    maximum_subtracted,
    sink_and_maximum,
    sink_for_some_heads,
    sink_for_each_query,
]


@pytest.mark.thorough
@pytest.mark.singly
@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "fn",
    usual(CLOSED, (sink_and_maximum, sink_for_some_heads, sink_for_each_query)),
    ids=lambda f: f.__name__,
)
def test_what_leaves_the_attention_one_operator(fn, bias, hidden):
    """``hidden``: some queries see no key."""
    mask = padded(2, 3, 7) if hidden else causal(3, 7)
    module, given = Core(fn, bias=bias), [*inputs(S=3), mask]
    exported = export(module, given)
    program = absorbed(module, given, program=exported, lowering="op")
    assert OP in calls(program)
    assert not any("softmax" in c or "max" in c for c in calls(program))
    if bias:
        absorbed(module, given, program=exported)


@pytest.mark.thorough
def test_a_maximum_taken_off_before_a_cast():
    """Rows without a visible key are zeros then, and float64's lowest number does not become infinite."""

    def fn(q, k, v, mask, scale):
        scores = (q @ k.mT * scale).masked_fill(~mask, torch.finfo(q.dtype).min)
        return (scores - scores.amax(-1, keepdim=True)).softmax(-1, dtype=torch.float32).to(v.dtype) @ v

    mask = padded(2, 3, 7).clone()
    mask[1, :, 1] = False
    module, given = Core(fn), [*inputs(S=3), mask]
    outcome = optimized(export(module, given), forms="absorbed", lowering="op")
    assert OP in calls(outcome.program)
    assert_equal(module, outcome.program, given, tolerance=1e-6)


# Open cores: something else happens between the products, which are then rewritten one by one.


def softcap(q, k, v, mask, scale):
    return ((q @ k.mT * scale / 5).tanh() * 5 + additive(mask, lowest=float("-inf"))).softmax(-1) @ v


def sink_first(q, k, v, mask, scale):
    # As long as the scores are, and so made of them.
    scores = q @ k.mT * scale + additive(mask, lowest=float("-inf"))
    return torch.cat([scores.new_zeros(*scores.shape[:-1], 1), scores], -1).softmax(-1)[..., 1:] @ v


def two_sinks(q, k, v, mask, scale):
    scores = q @ k.mT * scale + additive(mask, lowest=float("-inf"))
    return torch.cat([scores, scores.new_zeros(*scores.shape[:-1], 2)], -1).softmax(-1)[..., :-2] @ v


def sink_scaled(q, k, v, mask, scale):
    scores = torch.cat([q @ k.mT, q.new_ones(*q.shape[:-1], 1)], -1) * scale
    return scores.softmax(-1)[..., :-1] @ v


def sink_of_scores(q, k, v, mask, scale):
    scores = q @ k.mT * scale
    return torch.cat([scores, scores.mean(-1, keepdim=True)], -1).softmax(-1)[..., :-1] @ v


def maximum_of_others(q, k, v, mask, scale):
    scores = q @ k.mT * scale
    return (scores - scores.amax(-2, keepdim=True)).softmax(-1) @ v


def maximum_then_mask(q, k, v, mask, scale):
    scores = q @ k.mT * scale
    return (scores - scores.amax(-1, keepdim=True)).masked_fill(~mask, -1e9).softmax(-1) @ v


def scaled_per_query(q, k, v, mask, scale):
    return (q @ k.mT * scale * q.abs().mean(-1, keepdim=True)).masked_fill(~mask, float("-inf")).softmax(-1) @ v


def probabilities_times_mask(q, k, v, mask, scale):
    return ((q @ k.mT * scale).softmax(-1) * mask) @ v


def with_a_constant(q, k, v, mask, scale):
    return (q @ k.mT * scale + 1.0).masked_fill(~mask, float("-inf")).softmax(-1) @ v


def unequal_scales(q, k, v, mask, scale):
    scores = q[..., :N] @ k[..., :N].mT * scale + q[..., N:] @ k[..., N:].mT * (2 * scale)
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


def masked_then_added(q, k, v, mask, scale):
    scores = (q[..., :N] @ k[..., :N].mT).masked_fill(~mask, float("-inf")) + q[..., N:] @ k[..., N:].mT
    return (scores * scale).softmax(-1) @ v


def added_with_alpha(q, k, v, mask, scale):
    scores = torch.add(q[..., :N] @ k[..., :N].mT, q[..., N:] @ k[..., N:].mT, alpha=0.5) * scale
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


OPEN = [
    softcap, sink_first, two_sinks, sink_scaled, sink_of_scores, maximum_of_others, maximum_then_mask,
    scaled_per_query, probabilities_times_mask, with_a_constant, unequal_scales, masked_then_added, added_with_alpha,
]  # fmt: skip


class Core(MLA):
    def __init__(self, fn, **options):
        super().__init__(**options)
        self.fn = fn

    def attend(self, q, k, v, mask):
        return self.fn(q, k, v, mask, self.scale)


@pytest.mark.thorough
@pytest.mark.singly
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "fn",
    usual(OPEN, (softcap, sink_of_scores, maximum_then_mask, probabilities_times_mask, unequal_scales)),
    ids=lambda f: f.__name__,
)
def test_open_cores(fn, bias):
    program = absorbed(Core(fn, bias=bias), [*inputs(S=3), causal(3, 7)])
    assert any("softmax" in c for c in calls(program))
    assert no_expansion(program, H, 7, N)


@pytest.mark.thorough
def test_an_open_core_says_so_in_the_report():
    outcome = optimized(export(Core(softcap), [*inputs(), causal(1, 7)]))
    (site,) = outcome.report.sites
    assert "tanh" in " ".join(site.notes)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fn", "dynamic"),
    [
        (softcap, ({}, {1: DYN}, {1: DYN}, {3: DYN})),
        *also("combination", *((fn, SYMBOLIC) for fn in (softcap, two_sinks))),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_open_cores_symbolic(fn, dynamic):
    class Returns(Core):
        def finish(self, out, x):
            return super().finish(out, x), x.sum()

    module = Returns(fn, bias=True)
    program = absorbed(module, [*inputs(B=2, S=3, T=9), causal(3, 9, lead=(2, 1))], dynamic)
    for B, S, T in ((1, 1, 5), (3, 4, 4)) if dynamic is SYMBOLIC else ((2, 3, 5),):
        assert_equal(module, program, [*inputs(B, S, T), causal(S, T, lead=(B, 1))])


# Other readers.


class ReturnsProbabilities(MLA):
    def attend(self, q, k, v, mask):
        p = (q @ k.mT * self.scale).softmax(-1)
        return p @ v, p

    def finish(self, out, x):
        return super().finish(out[0], x), out[1]


@pytest.mark.thorough
@pytest.mark.singly
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("S", [1, 3])
def test_probabilities_also_returned(S, bias):
    program = absorbed(ReturnsProbabilities(bias=bias), inputs(S=S))
    assert no_expansion(program, H, 7, N)


@pytest.mark.thorough
def test_scores_also_returned():
    class Scores(MLA):
        def attend(self, q, k, v, mask):
            s = q @ k.mT * self.scale
            return s.softmax(-1) @ v, s

        def finish(self, out, x):
            return super().finish(out[0], x), out[1]

    absorbed(Scores(bias=True), inputs(S=3))


@pytest.mark.thorough
def test_several_query_blocks_against_one_k():
    class Blocks(MLA):
        def attend(self, q, k, v, mask):
            return torch.cat([super(Blocks, self).attend(b, k, v, None) for b in q.split(2, dim=2)], 2)

    program = absorbed(Blocks(), inputs(S=6), sites=3)
    assert no_expansion(program, H, 7, N)


@pytest.mark.thorough
def test_query_blocks_of_which_one_cannot_be_absorbed_keep_k():
    class Blocks(MLA):
        def attend(self, q, k, v, mask):
            first, second = q.chunk(2, dim=2)
            dropped = F.scaled_dot_product_attention(first, k, v, dropout_p=0.5)
            return torch.cat([dropped, super().attend(second, k, v, None)], 2)

    program = export(Blocks(), inputs(S=6))
    outcome = optimized(program, forms="absorbed")
    assert codes(outcome) == [Code.DROPOUT, Code.KEYS_USED_ELSEWHERE]
    assert_untouched(program, outcome)


def test_k_and_v_used_elsewhere():
    class Returns(MLA):
        def attend(self, q, k, v, mask):
            return super().attend(q, k, v, mask), k.sum(), v

        def finish(self, out, x):
            return super().finish(out[0], x), *out[1:]

    for up in ("two", "joint"):
        program = export(Returns(up=up), inputs())
        outcome = optimized(program, forms="absorbed")
        assert codes(outcome) == [Code.KEYS_USED_ELSEWHERE]
        assert_untouched(program, outcome)


@pytest.mark.thorough
def test_the_shape_of_k_used_elsewhere_does_not_matter():
    class UsesShape(MLA):
        def attend(self, q, k, v, mask):
            return super().attend(q, k, v, mask) * k.shape[2]

    module = UsesShape()
    program = absorbed(module, inputs(), ({}, {1: DYN}, {1: DYN}))
    assert_equal(module, program, inputs(T=12))


@pytest.mark.thorough
def test_the_latent_used_elsewhere_does_not_matter():
    class ReturnsLatent(MLA):
        def forward(self, x, c, r):
            c = F.rms_norm(c, (L,))
            return super().forward(x, c, r), c

    absorbed(ReturnsLatent(), inputs())


def test_two_layers_are_two_sites():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = MLA(), MLA(core="matmul")
            self.out = nn.Linear(H * V, modules.D, dtype=torch.float64)

        def forward(self, x, c, r):
            return self.b(x + self.out(self.a(x, c, r)), c.flip(0), r)

    absorbed(Two(), inputs(), sites=2)


# Dtypes and layouts.


@pytest.mark.thorough
@pytest.mark.parametrize("core", ["bmm", *also("combination", "heads_last", "sdpa", "einsum")])
def test_the_output_keeps_its_memory_order(core):
    class Raw(MLA):
        def finish(self, out, x):
            return out

    absorbed(Raw(core=core), inputs(S=3))


@pytest.mark.thorough
@pytest.mark.singly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *also("family", torch.float32)])
@pytest.mark.parametrize("core", ["sdpa", "in_float32", *also("combination", "matmul")])
def test_lower_precision_is_no_worse_than_the_original(core, dtype):
    """Errors pooled over inputs: for a single one the ratio is a matter of luck, 0.7 to 1.8 in float32."""
    module = MLA(core=core).to(dtype)
    exact = copy.deepcopy(module).double()
    program = export(module, [d.to(dtype) for d in inputs(S=3, T=40)])
    outcome = optimized(program, forms="absorbed")
    assert codes(outcome) == [Code.ABSORBED]
    squares = [0.0, 0.0]
    for seed in range(16):
        data = [seeded(*d.shape, seed=seed).to(dtype) for d in inputs(S=3, T=40)]
        with torch.no_grad():
            truth = exact(*[d.double() for d in data])
        (out,), (before,) = run(outcome.program, *data), run(program, *data)
        assert out.dtype == dtype
        for i, got in enumerate((out, before)):
            squares[i] += float((got.double() - truth).square().sum())
    assert squares[0] <= 1.2**2 * squares[1]


@pytest.mark.thorough
def test_a_large_latent_does_not_overflow_float16():
    """q . (W c) fits float16, q W alone does not: the products of the absorbed query are kept in float32."""
    module = MLA().half()
    with torch.no_grad():
        module.w.mul_(300)
        module.w_q.mul_(300)
    x, c, r = (d.half() for d in inputs())
    outcome = optimized(export(module, (x, c / 3000, r / 3000)))
    (out,) = run(outcome.program, x, c / 3000, r / 3000)
    assert out.isfinite().all()


@pytest.mark.thorough
def test_folds_of_both_sides():
    class Projected(MLA):
        def __init__(self):
            super().__init__()
            self.w_o = nn.Parameter(seeded(9, H * V, seed=20))

        def finish(self, out, x):
            return F.linear(super().finish(out, x), self.w_o)

    program = absorbed(Projected(), inputs(S=3), fold="always")
    assert len(program.folds) == 2


@pytest.mark.thorough
@pytest.mark.singly
@pytest.mark.parametrize("lowering", ["aten", "op"])
@pytest.mark.parametrize("how", ["add", "fill", "scaled fill"])
@pytest.mark.parametrize("lowest", [torch.finfo(torch.float64).min, -1e30, -torch.inf])
def test_a_mask_that_is_finite_only_until_the_softmax(lowest, how, lowering):
    """Scores in float64, softmax in float32, where float64's lowest value is minus infinity: the same rows are NaN."""

    def core(q, k, v, mask, scale):
        scores = q @ k.mT * scale
        if how == "add":
            scores = scores + additive(mask, lowest=lowest)
        else:
            scores = scores.masked_fill(~mask, lowest)
            scores = scores * 2 if how == "scaled fill" else scores
        return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v

    class Cast(MLA):
        def attend(self, q, k, v, mask):
            return core(q, k, v, mask, 0.3)

    module, data = Cast(), [*inputs(S=7), padded(2, 7, 7)]
    outcome = optimized(export(module, data), forms="absorbed", lowering=lowering, verify=False)
    assert codes(outcome) == [Code.ABSORBED]
    (out,) = run(outcome.program, *data)
    with torch.no_grad():
        expected = module(*data)
    assert expected.isnan().any() == (lowest < -1e300)
    assert torch.equal(out.isnan(), expected.isnan())
    assert (out - expected).nan_to_num().abs().max() < 1e-6
