"""Weights multiplied ahead of time: the same numbers, the right products, nothing folded that may not be."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

import mla_compile
from mla_compile.passes.decide.fold_sides import output_projection
from tests.support.programs import assert_equal, calls, export, optimized, trace
from tests.support.tiers import also

pytestmark = pytest.mark.thorough


class Projected(nn.Module):
    """An attention with everything around it: queries from a latent, output projection, optionally a gate before it."""

    def __init__(self, *, bias=False, gate=False, query_norm=False, dtype=torch.float64):
        super().__init__()
        self.H, self.L, self.R, self.N, self.V, self.Q, self.D = 4, 16, 6, 10, 7, 12, 20
        generator = torch.Generator().manual_seed(3)

        def weight(*shape):
            return nn.Parameter(
                torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) / shape[-1] ** 0.5
            )

        self.w_q = weight(self.H * (self.N + self.R), self.Q)
        self.w_kv = weight(self.H * (self.N + self.V), self.L)
        self.w_o = weight(self.D, self.H * self.V)
        self.b_q = weight(self.H * (self.N + self.R)) if bias else None
        self.b_kv = weight(self.H * (self.N + self.V)) if bias else None
        self.b_o = weight(self.D) if bias else None
        self.w_gate = weight(self.H * self.V, self.Q) if gate else None
        self.query_norm = query_norm

    def forward(self, c_q, c, k_rope):
        B, S, _ = c_q.shape
        linear = nn.functional.linear
        q = linear(c_q, self.w_q, self.b_q).view(B, S, self.H, -1).transpose(1, 2)
        if self.query_norm:
            q = q / q.square().mean(-1, keepdim=True).sqrt()
        kv = linear(c, self.w_kv, self.b_kv).view(B, c.shape[1], self.H, -1).transpose(1, 2)
        k, v = kv.split([self.N, self.V], -1)
        k = torch.cat([k, k_rope[:, None].expand(-1, self.H, -1, -1)], -1)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        out = out.transpose(1, 2).reshape(B, S, -1)
        if self.w_gate is not None:
            out = out * linear(c_q, self.w_gate).sigmoid()
        return linear(out, self.w_o, self.b_o)

    def inputs(self, B=2, S=1, T=9):
        g = torch.Generator().manual_seed(5)
        dtype = self.w_q.dtype
        shapes = (B, S, self.Q), (B, T, self.L), (B, T, self.R)
        return [torch.randn(*s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def folded(module, given, **options):
    program = export(module, given)
    outcome = optimized(program, fold="always", forms="absorbed", **options)
    return outcome


@pytest.mark.singly
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("lowering", ["op", "aten"])
def test_both_sides_fold_and_give_the_same_numbers(lowering, S, bias):
    module = Projected(bias=bias)
    given = module.inputs(S=S)
    outcome = folded(module, given, lowering=lowering)
    (site,) = outcome.report.sites
    assert site.form == "folded"
    assert (site.dims.Q, site.dims.D) == (12, 20)
    assert_equal(module, outcome.program, given)
    # W_kc and W_v are gone: what is left is the rotary part of the queries.
    assert calls(outcome.program).count("linear.default") == 1
    assert len(outcome.program.folds) == (4 if bias else 2)


def test_a_gate_keeps_the_output_side_chained():
    module = Projected(gate=True)
    outcome = folded(module, module.inputs())
    assert len(outcome.program.folds) == 1
    (site,) = outcome.report.sites
    assert site.dims.D is None
    assert_equal(module, outcome.program, module.inputs())


def test_a_norm_on_the_queries_keeps_the_query_side_chained():
    module = Projected(query_norm=True)
    outcome = folded(module, module.inputs())
    assert len(outcome.program.folds) == 1
    (site,) = outcome.report.sites
    assert site.dims.Q is None
    assert_equal(module, outcome.program, module.inputs())


class Named(Projected):
    """Its inputs are called as the fold would be, were it free to choose."""

    def forward(self, folded):
        return super().forward(*folded)


@torch.no_grad()
def test_an_input_may_have_the_name_of_a_fold():
    module = Named().eval()
    given = module.inputs()
    exported = torch.export.export(module, (given,), strict=False)
    program = mla_compile.optimize(exported, fold="always", forms="absorbed")
    names = [node.name for node in program.graph.find_nodes(op="placeholder")]
    assert {"folded_0", "folded_1", "folded_2"} < set(names)
    assert len(names) > len(exported.graph.find_nodes(op="placeholder"))
    torch.testing.assert_close(program.module()(given), module(given))


@pytest.mark.parametrize("fold", ["never", "auto"])
def test_nothing_is_folded_unless_asked_for(fold):
    module = Projected()
    outcome = optimized(export(module, module.inputs()), fold=fold, forms="absorbed")
    assert not outcome.program.folds
    assert [site.form for site in outcome.report.sites] == ["chained"]


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [(torch.bfloat16, 1e-4, 5e-3), *also("family", (torch.float32, 1e-9, 1e-6))]
)
def test_the_rounding_of_a_fold_is_measured(dtype, low, high):
    module = Projected(dtype=dtype)
    (site,) = folded(module, module.inputs()).report.sites
    assert low < site.fold_error < high


def test_folded_weights_are_rounded_once():
    """The product is formed in float32: its error is that of one rounding to bfloat16, not of a bfloat16 product."""
    module = Projected(dtype=torch.bfloat16)
    outcome = folded(module, module.inputs())
    for fold in outcome.program.folds:
        live = {name: outcome.program.weights[name] for name in fold.weights}
        exact = fold.compute({name: w.double() for name, w in live.items()})
        once = fold.compute(live)
        assert once.dtype == torch.bfloat16
        assert (once.double() - exact.double()).abs().max() <= 2**-8 * exact.double().abs().max()


def test_an_output_read_twice_is_not_folded():
    module = Projected()
    program = export(module, module.inputs())
    attention = next(n for n in program.gm.graph.nodes if "scaled_dot_product" in str(n.target))
    assert output_projection(attention) is not None
    view = next(iter(attention.users))
    with program.gm.graph.inserting_after(view):
        program.gm.graph.call_function(torch.ops.aten.neg.default, (attention,))
    assert output_projection(attention) is None


class Flat(Projected):
    """Tokens of all sequences in one axis, before and after; queries scaled."""

    def forward(self, c_q, c, k_rope):
        (B, S, _), N = c_q.shape, self.N
        linear = nn.functional.linear
        q = 0.5 * linear(c_q.reshape(B * S, -1), self.w_q).view(B, S, self.H, -1).transpose(1, 2)
        kv = linear(c, self.w_kv).view(B, c.shape[1], self.H, -1).transpose(1, 2)
        k = torch.cat([kv[..., :N], k_rope[:, None].expand(-1, self.H, -1, -1)], -1)
        out = nn.functional.scaled_dot_product_attention(q, k, kv[..., N:])
        return linear(out.transpose(1, 2).reshape(B * S, -1), self.w_o).view(B, S, -1)


@pytest.mark.parametrize("S", [3, *also("combination", 1)])
def test_tokens_in_one_axis_fold_too(S):
    module = Flat()
    outcome = folded(module, module.inputs(S=S))
    assert outcome.report.sites[0].form == "folded"
    assert len(outcome.program.folds) == 2
    assert_equal(module, outcome.program, module.inputs(S=S))


@pytest.mark.parametrize("batch", [False, *also("combination", True)])
def test_any_number_of_tokens_in_one_axis(batch):
    """Their numbers can be read off the output, not off the queries."""
    module, B, S = Flat(), Dim("B", min=2, max=64), Dim("S", min=2, max=64)
    program = export(module, module.inputs(S=3), ({0: B, 1: S}, {0: B}, {0: B}) if batch else ({1: S}, {}, {}))
    outcome = optimized(program, fold="always", forms="absorbed")
    for given in (module.inputs(S=3), module.inputs(B=3 if batch else 2, S=5)):
        assert_equal(module, outcome.program, given)


def test_weights_without_values_fold_with_an_unknown_rounding():
    module = Projected().to("meta")
    program = export(module, [x.to("meta") for x in Projected().inputs()])
    outcome = optimized(program, fold="always", forms="absorbed", verify=False)
    assert [site.fold_error for site in outcome.report.sites] == [None]
    assert len(outcome.program.folds) == 2


def test_columns_of_two_query_projections_are_not_folded():
    class Cut(Projected):
        """The queries' own join lies between the columns that meet the latent."""

        def forward(self, c_q, c, k_rope):
            (B, S, _), N = c_q.shape, self.N
            heads = nn.functional.linear(c_q, self.w_q).view(B, S, self.H, -1).transpose(1, 2)
            q = torch.cat([heads[..., : N - 3], heads[..., N - 3 :].sin()], -1)
            kv = nn.functional.linear(c, self.w_kv).view(B, c.shape[1], self.H, -1).transpose(1, 2)
            k = torch.cat([kv[..., :N], k_rope[:, None].expand(-1, self.H, -1, -1)], -1)
            out = nn.functional.scaled_dot_product_attention(q, k, kv[..., N:])
            return nn.functional.linear(out.transpose(1, 2).flatten(2), self.w_o)

    module = Cut()
    outcome = folded(module, module.inputs())
    assert outcome.report.sites[0].dims.Q is None
    assert len(outcome.program.folds) == 1
    assert_equal(module, outcome.program, module.inputs())


def test_an_output_that_reaches_no_projection():
    def fn(x):
        for _ in range(20):
            x = x.neg()
        return x

    program = trace(fn, [torch.ones(2)], [])
    assert output_projection(program.gm.graph.find_nodes(op="placeholder")[0]) is None
