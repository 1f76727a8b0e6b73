"""Sinks beside flex_attention, which has none: a factor of its output that is made of its own log-sum-exp."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from mla_compile import backend
from mla_compile.codes import Code
from tests.support.modules import MLA, inputs
from tests.support.programs import OP, assert_equal, calls, codes, error, export, optimized, run, seeded
from tests.support.tiers import also
from tests.support.usual import usual

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore:return_lse is deprecated")]

B, H, T, W = 2, 3, 7, 8


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch):
    """Dynamo takes as long for each call as the test; without tensors in a score_mod, the graph is the same."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def given(queries, dtype=torch.float64):
    return [seeded(B, H, queries, W, seed=1).to(dtype), seeded(B, 1, T, W, seed=2).to(dtype)]


def renormalized(out, lse, sinks):
    """As transformers' interface has it."""
    lse = lse.to(out.dtype).unsqueeze(-1)
    sinks = sinks.view(1, -1, 1, 1).expand(*out.shape[:-1], 1)
    return out * (lse - torch.logsumexp(torch.cat([lse, sinks], -1), -1, keepdim=True)).exp()


FACTORS = {
    "exp(lse - logsumexp([lse, sink]))": renormalized,
    "sigmoid(lse - sink)": lambda out, lse, sinks: out * (lse - sinks.view(H, 1)).sigmoid()[..., None].to(out.dtype),
    "behind a transpose": lambda out, lse, sinks: (
        out.transpose(1, 2) * (lse.transpose(1, 2) - sinks).sigmoid()[..., None]
    ).contiguous(),
    "heads and features in one axis": lambda out, lse, sinks: (
        (out * (lse - sinks.view(H, 1)).sigmoid().unsqueeze(-1)).transpose(1, 2).flatten(2)
    ),
    "a division": lambda out, lse, sinks: out / (1 + (sinks.view(H, 1) - lse).exp()).unsqueeze(-1),
    "one": lambda out, lse, sinks: out * lse.sigmoid().unsqueeze(-1),
    "a sink for each query": lambda out, lse, sinks: out * (lse - torch.arange(out.shape[2]) / 3).sigmoid()[..., None],
}


class Sinks(nn.Module):
    """Queries [B,H,S,W] over rows [B,1,T,W] of all heads."""

    def __init__(self, factor, dtype=torch.float64, **options):
        super().__init__()
        self.sinks = nn.Parameter(seeded(H, seed=5).to(dtype))
        self.factor, self.options = factor, {"return_aux": AuxRequest(lse=True), "scale": 0.4, **options}

    def forward(self, q, rows):
        if not self.options.get("enable_gqa"):
            rows = rows.expand(-1, H, -1, -1)
        out, aux = flex_attention(q, rows, rows, **self.options)
        return self.factor(out, aux if torch.is_tensor(aux) else aux.lse, self.sinks)


@functools.cache
def of_one_query():
    """The program of the usual factor, for all tests of it: the pipeline leaves what it is given as it is."""
    return export(Sinks(renormalized), given(1))


def attended(module, x, program=None, tolerance=1e-6):
    """The operator alone computes what the module does, up to the float32 in which torch returns its sums."""
    done = optimized(program or export(module, x), lowering="op", verify=True)
    assert [site.code for site in done.report.sites] == [Code.SHARED_ROWS]
    found = calls(done.program)
    assert (found.count(OP), done.fused) == (1, 1)
    assert not any("flex" in op or op.startswith(("softmax", "logsumexp", "exp.")) for op in found)
    with torch.no_grad():
        assert error(run(done.program, *x)[0], module(*x)) < tolerance


@pytest.mark.parametrize("queries", [1, *also("combination", 3)])
@pytest.mark.parametrize(
    "name", usual(FACTORS, ("exp(lse - logsumexp([lse, sink]))", "heads and features in one axis"))
)
def test_rows_that_all_heads_share(name, queries):
    """The other factors beside softmaxes that are written out: tests/passes/canonical/test_row_factors.py."""
    usual_one = queries == 1 and FACTORS[name] is renormalized
    attended(Sinks(FACTORS[name]), given(queries), of_one_query() if usual_one else None)


def causal(b, h, i, j):
    return i + 4 >= j


HOW = {
    "the older spelling": {"return_lse": True, "return_aux": None},
    "groups": {"enable_gqa": True},
    "a block mask": {"block_mask": create_block_mask(causal, None, None, 3, T, "cpu", BLOCK_SIZE=2)},
    "a query that sees no key": {"block_mask": create_block_mask(lambda b, h, i, j: i > j, None, None, 3, T, "cpu")},
    "a mask of scores": {"score_mod": lambda score, b, h, i, j: torch.where(i + 4 >= j, score, float("-inf"))},
}


@pytest.mark.parametrize("name", usual(HOW, ("groups", "a query that sees no key")))
def test_every_way_to_call_it(name):
    attended(Sinks(renormalized, **HOW[name]), given(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, *also("family", torch.float32)])
def test_in_fewer_bits(dtype):
    """As near to float64 as the original, which rounds the output before it is multiplied."""
    module, x = Sinks(renormalized, dtype), given(1, dtype)
    done = optimized(export(module, x), lowering="op", verify=True)
    assert done.fused == 1
    with torch.no_grad():
        truth = Sinks(renormalized)
        truth.sinks.copy_(module.sinks)
        expected = truth(*(t.double() for t in x))
        assert error(run(done.program, *x)[0].double(), expected) <= error(module(*x).double(), expected)


class Latent(MLA):
    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(seeded(self.H, seed=5))

    def attend(self, q, k, v, mask):
        out, aux = flex_attention(q, k, v, scale=self.scale, return_aux=AuxRequest(lse=True))
        return renormalized(out, aux.lse, self.sinks)


@pytest.fixture(scope="module")
def latent():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        return export(Latent(), inputs(S=3))


def test_a_latent_is_absorbed(latent):
    done = optimized(latent, forms="absorbed", lowering="op")
    assert codes(done) == [Code.ABSORBED]
    assert calls(done.program).count(OP) == 1
    with torch.no_grad():
        assert error(run(done.program, *inputs(S=3))[0], Latent()(*inputs(S=3))) < 1e-6


def test_what_is_not_absorbed_stays(latent):
    """The call, with its second result and the factor."""
    done = optimized(latent, forms="expanded")
    assert codes(done) == [Code.FORMS_EXPANDED]
    found = calls(done.program)
    assert (found.count("flex_attention"), "softmax.int" in found, "exp.default" in found) == (1, False, True)
    assert_equal(Latent(), done.program, inputs(S=3))


def shifted(out, lse, sinks):
    return out * (lse.roll(1, 1) - sinks.view(H, 1)).sigmoid().unsqueeze(-1)


STAY = {
    "a gate": lambda out, lse, sinks: out * sinks.view(H, 1, 1).sigmoid() + 0 * lse.unsqueeze(-1),
    "the sum is read besides": lambda out, lse, sinks: renormalized(out, lse, sinks) + lse.unsqueeze(-1),
    "the output is read besides": lambda out, lse, sinks: renormalized(out, lse, sinks) + out,
    "sums of another head": shifted,
    "the sink's share": lambda out, lse, sinks: out * (sinks.view(H, 1) - lse).sigmoid().unsqueeze(-1),
    "another base": lambda out, lse, sinks: out * (lse * 1.5 - sinks.view(H, 1)).sigmoid().unsqueeze(-1),
    "a sink of the sums": lambda out, lse, sinks: out * (lse - lse.mean(1, keepdim=True)).sigmoid().unsqueeze(-1),
    "a sink for each feature": lambda out, lse, sinks: out * (lse.unsqueeze(-1) - torch.arange(W)).sigmoid(),
    "heads and queries exchanged": lambda out, lse, sinks: (
        out * (lse.transpose(1, 2) - sinks.view(H, 1)).sigmoid().unsqueeze(-1)
    ),
}


@pytest.mark.parametrize(
    "name", usual(STAY, ("the sum is read besides", "the output is read besides", "sums of another head"))
)
def test_what_is_no_sink_stays(name):
    module, x = Sinks(STAY[name]), given(H)  # as many queries as heads
    done = optimized(export(module, x), lowering="op")
    (site,) = done.report.sites
    assert (site.code, done.fused) == (Code.UNSUPPORTED_OP, 0)
    assert "the log-sum-exp, besides the output, is used for more than sinks" in site.reason
    assert calls(done.program).count("flex_attention") == 1
    assert_equal(module, done.program, x)


def test_greatest_scores_stay():
    """On a GPU the operator returns them as its third result; a CPU cannot export that."""
    program = of_one_query().copy()
    (_, second) = (n for n in program.gm.graph.nodes if n.target is operator.getitem)
    second.args = (second.args[0], 2)
    done = optimized(program, lowering="op", verify=False)
    assert [(s.code, s.reason) for s in done.report.sites] == [
        (Code.UNSUPPORTED_OP, "flex_attention: result 2 is used")
    ]


def test_by_the_backend(monkeypatch):
    module, x = Sinks(renormalized), given(1)
    before = backend.reports()
    with torch.no_grad():
        found = torch.compile(module, backend="mla", options={"codegen": "eager", "strict": True})(*x)
        monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        assert error(found, module(*x)) < 1e-6
    (report,) = [r for r in backend.reports() if r not in before]
    assert [s.code for s in report.sites] == [Code.SHARED_ROWS]
