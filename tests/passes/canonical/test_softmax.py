"""Softmaxes written with exponentials: found, rewritten, and what only looks like one left alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mla_compile
from mla_compile.codes import Code
from mla_compile.passes.canonical.softmax import write_softmax
from tests.support.modules import (
    MLA,
    H,
    N,
    V,
    bmm,
    exponentials,
    exponentials_by_max,
    heads_last,
    inputs,
    log_sum_exp,
    matmul,
    padded,
)
from tests.support.programs import absorbed, calls, codes, export, optimized, refused, run, seeded
from tests.support.tiers import also
from tests.support.usual import usual


class Written(MLA):
    def __init__(self, core, **options):
        super().__init__(**options)
        self.written = core

    def attend(self, q, k, v, mask):
        return self.written(q, k, v, mask, self.scale)


@pytest.mark.singly
@pytest.mark.parametrize("S", [3, 1])
@pytest.mark.parametrize("core", [exponentials_by_max, log_sum_exp, *also("combination", exponentials)])
def test_a_softmax_written_out_is_absorbed(core, S):
    absorbed(Written(core), [*inputs(S=S), padded(2, S, 7) | torch.eye(S, 7, dtype=torch.bool)])


def test_rows_without_a_visible_key_are_nan_as_before():
    module, data = Written(exponentials), [*inputs(S=7), padded(2, 7, 7)]
    outcome = optimized(export(module, data), forms="absorbed", verify=False)
    assert codes(outcome) == [Code.ABSORBED]
    (out,) = run(outcome.program, *data)
    with torch.no_grad():
        expected = module(*data)
    assert expected.isnan().any()
    assert torch.equal(out.isnan(), expected.isnan())
    assert (out - expected).nan_to_num().abs().max() < 1e-10


def divided_last(q, k, v, mask, scale):
    scores = (q @ k.mT * scale).masked_fill(~mask, float("-inf"))
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    return e @ v / e.sum(-1, keepdim=True)


def one_more_in_the_sum(q, k, v, mask, scale):
    e = (q @ k.mT * scale).masked_fill(~mask, float("-inf")).exp()
    return e / (1 + e.sum(-1, keepdim=True)) @ v


def multiplied_and_summed(q, k, v, mask, scale):
    scores = (q[:, :, :, None] * k[:, :, None]).sum(-1) * scale
    return (scores.masked_fill(~mask, float("-inf")).softmax(-1)[..., None] * v[:, :, None]).sum(-2)


def mask_in_the_product(q, k, v, mask, scale, beta=1.0):
    B, H, S, _ = q.shape
    mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -1e9).expand(B, H, S, -1).flatten(0, 1)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return (torch.baddbmm(mask, q, k.mT, beta=beta, alpha=scale).softmax(-1) @ v).view(B, H, S, -1)


def no_mask_in_the_product(q, k, v, mask, scale):
    return mask_in_the_product(q, k, v, mask, scale, beta=0.0)


def half_a_mask_in_the_product(q, k, v, mask, scale):
    return mask_in_the_product(q, k, v, mask, 1.0, beta=0.5)


OTHER_WORDS = {
    f.__name__: f
    for f in (
        divided_last, one_more_in_the_sum, multiplied_and_summed, mask_in_the_product, no_mask_in_the_product,
        half_a_mask_in_the_product,
    )
}  # fmt: skip


@pytest.mark.singly
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("S", [3, 1])
@pytest.mark.parametrize(
    "core", usual(OTHER_WORDS.values(), rare=(divided_last, no_mask_in_the_product)), ids=lambda f: f.__name__
)
def test_cores_in_other_words_are_absorbed(core, S, bias):
    module = Written(core)
    module.b = torch.nn.Parameter(seeded(H * (N + V), seed=8)) if bias else None
    absorbed(module, [*inputs(S=S), padded(2, S, 7) | torch.eye(S, 7, dtype=torch.bool)])


@pytest.mark.parametrize("core", [bmm, divided_last, *also("combination", matmul, heads_last, exponentials)])
def test_a_single_cached_token(core):
    """The weights are all 1, in every spelling."""
    absorbed(Written(core), [*inputs(T=1), padded(2, 1, 1) | True])


@pytest.mark.parametrize("dim", [1, 2])
def test_a_softmax_over_an_axis_of_one_that_is_not_the_keys_is_told(dim):
    def slip(q, k, v, mask, scale):
        return (q @ k.mT).softmax(dim) @ v

    module = Written(slip, H=1, L=4)
    refused(module, [*inputs(L=4), padded(2, 1, 7)], Code.SOFTMAX_AXIS)


def test_mixed_heads_between_the_products_are_told():
    """Talking heads: found, and refused, instead of nothing being said."""
    mix = seeded(H, H, seed=9)

    def before(q, k, v, mask, scale):
        return torch.einsum("bhst,gh->bgst", q @ k.mT, mix).softmax(-1) @ v

    def after(q, k, v, mask, scale):
        return F.linear((q @ k.mT).softmax(-1).transpose(1, 3), mix).transpose(1, 3) @ v

    for core in (before, after):
        refused(Written(core), [*inputs(), padded(2, 1, 7)], Code.UNSUPPORTED_OP)


@pytest.mark.thorough
def test_torch_compile_finds_it():
    module, data = Written(exponentials).float(), [*inputs(dtype=torch.float32), padded(2, 1, 7)]
    compiled = torch.compile(module, backend="mla", options={"codegen": "eager", "strict": True})
    with torch.no_grad():
        assert (compiled(*data) - module(*data)).abs().max() < 1e-5
        report = mla_compile.explain(module, *data)
    assert [s.code for s in report.sites] == [Code.ABSORBED]


NOT_A_SOFTMAX = {
    "another sum": lambda x: x.exp() / (2 * x).exp().sum(-1, keepdim=True),
    "another axis": lambda x: x.exp() / x.exp().sum(-1).unsqueeze(-2) if x.shape[-1] == x.shape[-2] else x,
    "two axes": lambda x: x.exp() / x.exp().sum((-1, -2), keepdim=True),
    "a least sum": lambda x: x.exp() / x.exp().sum(-1, keepdim=True).clamp(min=1e-3),
    "a shift along the row": lambda x: (x - torch.arange(x.shape[-1])).exp() / x.exp().sum(-1, keepdim=True),
    "twice shifted": lambda x: torch.exp(x - 2 * torch.logsumexp(x, -1, keepdim=True)),
}


@pytest.mark.parametrize("name", NOT_A_SOFTMAX)
def test_what_only_looks_like_a_softmax_stays(name):
    class Only(nn.Module):
        def forward(self, x):
            return NOT_A_SOFTMAX[name](x @ x.mT) @ x

    program = export(Only(), [torch.randn(3, 5, 5)])
    before = str(program.gm.graph)
    assert write_softmax(program.gm.graph, (), program.fake_mode) == 0
    assert str(program.gm.graph) == before


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_operator_takes_its_place(dim):
    class Only(nn.Module):
        def forward(self, x):
            scores = x @ x.mT
            e = (scores - 3 * scores.mean(dim, keepdim=True)).exp()
            return e / e.sum(dim, keepdim=True) @ x

    x = torch.randn(3, 5, 5, dtype=torch.float64)
    program = export(Only(), [x])
    assert write_softmax(program.gm.graph, (), program.fake_mode) == 1
    program.gm.recompile()
    assert "softmax.int" in calls(program)
    assert "exp.default" not in calls(program)
    assert (program.gm(x)[0] - (x @ x.mT).softmax(dim) @ x).abs().max() < 1e-12


def test_a_routers_softmax_stays_as_it_was_written():
    """Not between two products of activations: no attention, so nothing of ours."""

    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(5, 4, bias=False)

        def forward(self, x):
            e = self.gate(x).exp()
            return e / e.sum(-1, keepdim=True)

    outcome = optimized(export(Router(), [torch.randn(3, 5)]))
    assert "softmax.int" not in calls(outcome.program)


def reciprocal_after(q, k, v, mask, scale):
    e = (q @ k.mT * scale).masked_fill(~mask, float("-inf")).exp()
    return e @ v * e.sum(-1, keepdim=True).reciprocal()


def heads_last_after(q, k, v, mask, scale):
    e = (torch.einsum("bhsd,bhtd->bhst", q, k) * scale).masked_fill(~mask, float("-inf")).exp()
    return torch.einsum("bhtv,bhst->bhsv", v, e) / e.sum(-1, keepdim=True)


@pytest.mark.singly
@pytest.mark.parametrize("core", [divided_last, reciprocal_after, heads_last_after])
@pytest.mark.parametrize("S", [3, 1])
def test_a_division_after_the_product_is_a_softmax_before_it(core, S):
    """One operator then, where the two products were rewritten one by one before."""
    data = [*inputs(S=S), padded(2, S, 7) | torch.eye(S, 7, dtype=torch.bool)]
    program = absorbed(Written(core), data, lowering="op")
    assert sum("decode_attention" in op for op in calls(program)) == 1
    assert not any(op.startswith("exp") for op in calls(program))


def weights_used_besides(q, k, v, mask, scale):
    e = (q @ k.mT * scale).masked_fill(~mask, float("-inf")).exp()
    return e @ v / e.sum(-1, keepdim=True) + e.amax(-1, keepdim=True)


def sums_of_another_axis(q, k, v, mask, scale):
    e = (q @ k.mT * scale).masked_fill(~mask, float("-inf")).exp()
    return e @ v / e.sum(-2, keepdim=True).mT[..., : q.shape[2], :]


def sums_of_others(q, k, v, mask, scale):
    e = (q @ k.mT * scale).masked_fill(~mask, float("-inf")).exp()
    return e @ v / e.flip(1).sum(-1, keepdim=True)


def least_sums(q, k, v, mask, scale):
    e = (q @ k.mT * scale).masked_fill(~mask, float("-inf")).exp()
    return e @ v / e.sum(-1, keepdim=True).clamp(min=1)


def another_place(q, k, v, mask, scale):
    """The output has queries before heads, and the sums are aligned with it by place."""
    e = (q @ k.mT * scale).masked_fill(~mask, float("-inf")).exp()
    return (torch.einsum("bhst,bhtv->bshv", e, v) / e.sum(-1, keepdim=True)).transpose(1, 2)


@pytest.mark.parametrize(
    "core",
    [weights_used_besides, sums_of_others, another_place, *also("combination", sums_of_another_axis, least_sums)],
)
def test_what_only_looks_divided_after_the_product_keeps_its_exponentials(core):
    """The products are rewritten one by one, and the exponentials stay; S = H, so that places can be mixed up."""
    S = H
    data = [*inputs(S=S), padded(2, S, 7) | torch.eye(S, 7, dtype=torch.bool)]
    program = absorbed(Written(core), data)
    assert any(op.startswith("exp.") for op in calls(program))
