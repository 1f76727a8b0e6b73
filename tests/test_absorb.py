"""The rewrite: same numbers in float64, whatever the spelling, the sizes that are symbolic, and who else reads what."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from mla_compile.codes import Code
from tests import modules
from tests.modules import CORES, EXACT, MLA, UPS, H, L, N, R, V, additive, causal, inputs, padded
from tests.programs import (
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


@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("up", UPS)
def test_up_projections(up, S):
    program = absorbed(MLA(up=up), [*inputs(S=S), padded(2, S, 7)])
    assert no_expansion(program, H, 7, N + V)
    assert no_expansion(program, H, 7, N)


@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("core", EXACT)
def test_cores(core, S):
    program = absorbed(MLA(core=core), [*inputs(S=S), causal(S, 7)])
    assert no_expansion(program, H, 7, N)


@pytest.mark.parametrize("core", CORES)
def test_cores_without_a_mask(core):
    options = {"verify": core != "in_float32"}
    module = MLA(core=core)
    program = export(module, inputs())
    outcome = optimized(program, **options)
    assert codes(outcome) == [Code.ABSORBED]
    assert_equal(module, outcome.program, inputs(), 1e-6 if core == "in_float32" else 1e-10)


@pytest.mark.parametrize("order", ["nope_rope", "rope_nope"])
@pytest.mark.parametrize("share", ["expand", "repeat", "interleave", "assign"])
def test_shared_rotary_key(share, order):
    absorbed(MLA(share=share, order=order), inputs())


@pytest.mark.parametrize("core", [c for c in EXACT if c != "bmm"])
def test_everything_symbolic(core):
    module = MLA(core=core)
    program = absorbed(module, [*inputs(B=2, S=3, T=9), causal(3, 9, lead=(2, 1))], SYMBOLIC)
    for B, S, T in ((1, 1, 5), (3, 4, 4), (2, 2, 11)):
        assert_equal(module, program, [*inputs(B, S, T), causal(S, T, lead=(B, 1))])


def test_batch_and_heads_merged_symbolic():
    module = MLA(core="bmm", up="per_head")
    program = absorbed(module, inputs(B=2, S=3, T=9), SYMBOLIC[:3])
    for B, S, T in ((2, 1, 5), (3, 4, 4)):
        assert_equal(module, program, inputs(B, S, T))


def test_a_symbolic_context_alone():
    module = MLA()
    program = absorbed(module, inputs(), ({}, {1: DYN}, {1: DYN}))
    assert_equal(module, program, inputs(T=33))


def test_a_symbolic_number_of_queries_is_picked_in_each_call():
    outcome = optimized(export(MLA(), inputs(S=3, T=9), SYMBOLIC[:3]))
    assert codes(outcome) == [Code.ABSORBED]
    assert len(outcome.variants) == 1
    assert outcome.variants[0].S != outcome.variants[0].T
    assert not isinstance(outcome.variants[0].S, int)


def test_one_query_is_absorbed_without_asking():
    outcome = optimized(export(MLA(), inputs(S=1)))
    assert codes(outcome) == [Code.ABSORBED]
    assert outcome.variants == ()


def test_many_queries_are_kept_by_cost():
    program = export(MLA(H=2, L=40, N=24, V=24), inputs(S=300, T=300, L=40))
    outcome = optimized(program)
    assert codes(outcome) == [Code.COST_PREFILL]
    assert_untouched(program, outcome)


def test_forms_expanded_changes_nothing():
    program = export(MLA(), inputs())
    outcome = optimized(program, forms="expanded")
    assert codes(outcome) == [Code.FORMS_EXPANDED]
    assert_untouched(program, outcome)


@pytest.mark.parametrize("core", ["sdpa", "matmul", "two_products"])
@pytest.mark.parametrize("S", [1, 4])
def test_with_the_operator(core, S):
    program = absorbed(MLA(core=core), [*inputs(S=S, T=70), padded(2, S, 70)], lowering="op")
    assert calls(program).count(OP) == 1
    assert not any("softmax" in c or "scaled_dot" in c for c in calls(program))


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
        "transpose.int", "view.default",
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


@pytest.mark.parametrize("shape", [(2, 1, 3, 7), (1, 1, 3, 7), (2, H, 3, 7), (2, 1, 1, 7), (3, 7), (1, 7), (1, 1)])
@pytest.mark.parametrize("core", ["sdpa", "einsum"])
def test_masks_of_every_shape(core, shape):
    mask = seeded(*shape, seed=3) > -0.8
    mask[..., -1:] = True

    absorbed(MLA(core=core), [*inputs(S=3), mask])


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
