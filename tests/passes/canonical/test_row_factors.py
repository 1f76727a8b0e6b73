"""Sinks in other words than a joined column: every factor of a row that is a fraction of sums of exponentials."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mla_compile.codes import Code
from mla_compile.passes.canonical.softmax import write_softmax
from tests.support.modules import MLA, inputs, padded
from tests.support.programs import OP, absorbed, calls, error, export, optimized, run, seeded
from tests.support.usual import usual

B, H, S, T, W = 2, 3, 4, 5, 8
GIVEN = [seeded(B, H, 1, W, seed=1), seeded(B, 1, T, W, seed=2)]


def lse(x):
    return torch.logsumexp(x, -1, keepdim=True)


def combined(x, sink):
    """As transformers' interface of flex_attention has it."""
    sinks = sink.expand(*x.shape[:-1], 1)
    return torch.logsumexp(torch.cat([lse(x), sinks], -1), -1, keepdim=True)


def by_hand(x, sink):
    top = torch.maximum(x.amax(-1, keepdim=True), sink)
    e = (x - top).exp()
    return e / (e.sum(-1, keepdim=True) + (sink - top).exp())


def joined_by_hand(x, sink):
    both = torch.cat([x, sink.expand(*x.shape[:-1], 1)], -1)
    top = both.amax(-1, keepdim=True)
    return (x - top).exp() / (both - top).exp().sum(-1, keepdim=True)


SINKS = {
    "exp(lse - logsumexp([lse, sink]))": lambda x, sink: x.softmax(-1) * (lse(x) - combined(x, sink)).exp(),
    "sigmoid(lse - sink)": lambda x, sink: x.softmax(-1) * (lse(x) - sink).sigmoid(),
    "exp(x - logaddexp(lse, sink))": lambda x, sink: (x - torch.logaddexp(lse(x), sink)).exp(),
    "exp(x - logsumexp([x, sink]))": lambda x, sink: (x - lse(torch.cat([x, sink.expand(*x.shape[:-1], 1)], -1))).exp(),
    "one term more in the sum": by_hand,
    "one column more in the sum": joined_by_hand,
    "an axis added again": lambda x, sink: (
        x.softmax(-1) * (torch.logsumexp(x, -1) - sink[..., 0]).sigmoid().unsqueeze(-1)
    ),
    "less than one by the sink's share": lambda x, sink: x.softmax(-1) * (1 - (sink - lse(x)).sigmoid()),
    "a factor of the exponentials": lambda x, sink: x.exp() * (lse(x).exp() + sink.exp()).reciprocal(),
    "a logarithm of a sum": lambda x, sink: (x - (x.exp().sum(-1, keepdim=True) + sink.exp()).log()).exp(),
    "two sinks": lambda x, sink: x.exp() / (x.exp().sum(-1, keepdim=True) + sink.exp() + 2 * (3 * sink).exp()),
    "a number": lambda x, sink: x.exp() / (x.exp().sum(-1, keepdim=True) + 1e-3),
    "one": lambda x, sink: x.exp() / (1 + x.exp().sum(-1, keepdim=True)),
}


UNLIKE = (
    "exp(lse - logsumexp([lse, sink]))", "one column more in the sum", "an axis added again", "two sinks", "a number",
    "less than one by the sink's share", "a logarithm of a sum",
)  # fmt: skip
"""Spellings whose steps differ; those of a latent, of hidden keys and behind the values show the others."""


class Shared(nn.Module):
    """Queries [B,H,S,W] over rows [B,1,T,W] that all heads share, with a sink of each head."""

    def __init__(self, weights, scores=None):
        super().__init__()
        self.weights, self.scores = weights, scores
        self.sinks = nn.Parameter(seeded(H, 1, 1, seed=5))

    def forward(self, q, rows):
        k = rows.expand(-1, H, -1, -1)
        return self.weights(q @ k.mT * 0.4, self.sinks) @ k


def attended(module, given=GIVEN):
    """The operators of the only site, whose numbers are the module's own."""
    done = optimized(export(module, given), lowering="op", verify=True)
    assert [site.code for site in done.report.sites] == [Code.SHARED_ROWS]
    with torch.no_grad():
        assert error(run(done.program, *given)[0], module(*given)) < 1e-12
    return done.fused, calls(done.program), done


@pytest.mark.parametrize("name", usual(SINKS, UNLIKE))
def test_rows_that_heads_share_are_read_by_the_operator(name):
    fused, found, _ = attended(Shared(SINKS[name]))
    assert (fused, sum(op == OP for op in found)) == (1, 1)
    assert not any(op.startswith(("softmax", "logsumexp")) for op in found)


AFTER = {
    "exp(lse - logsumexp([lse, sink]))": lambda x, sink, v: x.softmax(-1) @ v * (lse(x) - combined(x, sink)).exp(),
    "sigmoid(lse - sink)": lambda x, sink, v: x.softmax(-1) @ v * (lse(x) - sink).sigmoid(),
    "a division": lambda x, sink, v: x.exp() @ v / (x.exp().sum(-1, keepdim=True) + sink.exp()),
    "a transpose before": lambda x, sink, v: (
        (x.softmax(-1) @ v).transpose(1, 2) * (lse(x) - sink).sigmoid().transpose(1, 2)
    ),
    "FlashAttention's layout": lambda x, sink, v: (
        (x.softmax(-1) @ v).transpose(1, 2)
        * (torch.logsumexp(x, -1).transpose(1, 2) - sink[:, 0, 0]).sigmoid().unsqueeze(-1)
    ),
    "a permuted sum, two views": lambda x, sink, v: (
        (x.softmax(-1) @ v).permute(2, 0, 1, 3)[..., None]
        * (lse(x).permute(2, 0, 1, 3) - sink[:, 0]).sigmoid().unsqueeze(-1)
    ),
    "tokens of all sequences in one axis": lambda x, sink, v: (
        (x.softmax(-1) @ v).transpose(1, 2).reshape(-1, H, W)
        * (torch.logsumexp(x, -1).transpose(1, 2).reshape(-1, H) - sink.view(H)).sigmoid()[..., None]
    ),
    "sequences and heads in one axis": lambda x, sink, v: (
        (x.softmax(-1) @ v).flatten(0, 1) * (lse(x) - sink).sigmoid().flatten(0, 1)
    ),
    "an einsum in another order": lambda x, sink, v: (
        torch.einsum("bhst,bhtv->bshv", x.softmax(-1), v) * (lse(x) - sink).sigmoid().transpose(1, 2)
    ),
    "weights and values, each with one": lambda x, sink, v: (
        ((x.exp().transpose(1, 2) * 0.5).transpose(1, 2) @ v).transpose(1, 2)
        / (x.exp().sum(-1, keepdim=True) + sink.exp()).transpose(1, 2)
        * 2
    ),
}


class After(Shared):
    def forward(self, q, rows):
        k = rows.expand(-1, H, -1, -1)
        return self.weights(q @ k.mT * 0.4, self.sinks, k)


@pytest.mark.singly
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("name", AFTER)
def test_a_factor_after_the_values(name, queries):
    fused, found, _ = attended(After(AFTER[name]), [seeded(B, H, queries, W, seed=1), GIVEN[1]])
    assert (fused, sum(op == OP for op in found)) == (1, 1)
    assert not any(op.startswith(("softmax", "logsumexp", "exp")) for op in found)


NOT_AFTER = {
    "sums of another head": lambda x, sink, v: (x.softmax(-1) @ v) * (lse(x).transpose(1, 2) - sink).sigmoid(),
    "of heads and queries exchanged": lambda x, sink, v: (
        (x.softmax(-1) @ v).transpose(1, 2) * (lse(x) - sink).sigmoid()
    ),
    "of heads and queries in another order": lambda x, sink, v: (
        (x.softmax(-1) @ v).flatten(1, 2) * (lse(x) - sink).sigmoid().transpose(1, 2).flatten(1, 2)
    ),
    "a sink for each feature": lambda x, sink, v: (x.softmax(-1) @ v).mT * (lse(x) - sink).sigmoid(),
    "an output that is read besides": lambda x, sink, v: (
        (y := (x.softmax(-1) @ v).transpose(1, 2)) * (lse(x) - sink).sigmoid().transpose(1, 2) + y
    ),
    "an axis that is cut": lambda x, sink, v: (
        (x.softmax(-1) @ v).flatten(0, 1).unflatten(0, (H, B))
        * (lse(x) - sink).sigmoid().flatten(0, 1).unflatten(0, (H, B))
    ),
}


@pytest.mark.parametrize("name", NOT_AFTER)
def test_a_factor_that_is_aligned_otherwise_stays(name):
    """With as many heads as queries and features, so that each of them broadcasts."""

    given = [seeded(B, H, H, H, seed=1), seeded(B, 1, T, H, seed=2)]
    program = export(After(NOT_AFTER[name]), given)
    before = str(program.gm.graph)
    assert write_softmax(program.gm.graph, (), program.fake_mode) == 0
    assert str(program.gm.graph) == before
    assert optimized(program, lowering="op").fused == 0


class Latent(MLA):
    def __init__(self, core):
        super().__init__()
        self.written, self.sinks = core, nn.Parameter(seeded(self.H, 1, 1, seed=5))

    def attend(self, q, k, v, mask):
        return self.written((q @ k.mT * self.scale).masked_fill(~mask, float("-inf")), self.sinks) @ v


@pytest.mark.thorough
@pytest.mark.singly
@pytest.mark.parametrize("queries", [3, 1])
@pytest.mark.parametrize(
    "name",
    usual(SINKS, ("exp(lse - logsumexp([lse, sink]))", "exp(x - logsumexp([x, sink]))", "one term more in the sum")),
)
def test_a_latent_is_absorbed_into_one_operator(name, queries):
    mask = padded(2, queries, 7) | torch.eye(queries, 7, dtype=torch.bool)
    program = absorbed(Latent(SINKS[name]), [*inputs(S=queries), mask], lowering="op")
    assert calls(program).count(OP) == 1


@pytest.mark.parametrize("name", ["sigmoid(lse - sink)", "exp(x - logaddexp(lse, sink))", "a number"])
def test_a_query_that_sees_no_key(name):
    """The sink takes all where the original's numbers are finite. Those of a softmax of nothing are not."""

    def hidden(x, sink):
        seen = torch.arange(T) < T * torch.arange(B).view(B, 1, 1, 1)
        return SINKS[name](x.masked_fill(~seen, float("-inf")), sink)

    done = optimized(export(Shared(hidden), GIVEN), lowering="op", verify=False)
    assert done.fused == 1
    with torch.no_grad():
        expected = Shared(hidden)(*GIVEN)
    assert expected[0].isnan().all() == (name == "sigmoid(lse - sink)")
    assert error(run(done.program, *GIVEN)[0], expected.nan_to_num()) < 1e-12


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_any_axis(dim):
    class Only(nn.Module):
        def __init__(self):
            super().__init__()
            self.sink = nn.Parameter(seeded(3, 5, 5, seed=6).select(dim, 0))

        def forward(self, x):
            scores = x @ x.mT
            total = torch.logsumexp(scores, dim)
            return scores.softmax(dim) * (total - self.sink).sigmoid().unsqueeze(dim) @ x

    x, module = seeded(3, 5, 5), Only()
    program = export(module, [x])
    assert write_softmax(program.gm.graph, (), program.fake_mode) == 1
    program.gm.recompile()
    assert "sigmoid.default" not in calls(program)
    with torch.no_grad():
        assert error(program.gm(*(module.sink, x))[0], module(x)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_in_float32_beside_scores_in_half_precision(dtype):
    """A sink stays as precise as it was, whatever the scores were converted to."""

    def weights(x, sink):
        x = x.to(torch.bfloat16)
        p = x.softmax(-1, dtype=torch.float32)
        return (p * (lse(x.float()) - sink.to(dtype)).sigmoid()).to(torch.float64)

    module = Shared(weights)
    program = export(module, GIVEN)
    assert write_softmax(program.gm.graph, (), program.fake_mode) == 1
    with torch.no_grad():
        program.gm.recompile()
        out = program.gm(module.sinks, *GIVEN)[0]
        x = (GIVEN[0] @ GIVEN[1].mT * 0.4).to(torch.bfloat16).double()
        truth = by_hand(x, module.sinks.to(dtype).double()) @ GIVEN[1].expand(-1, H, -1, -1)
        assert error(out, truth) < 1e-6


STAY = {
    "a sink of the scores": lambda x, sink: by_hand(x, x.mean(-1, keepdim=True) + sink),
    "a guard beside a maximum": lambda x, sink: (
        (x - x.amax(-1, keepdim=True)).exp() / ((x - x.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True) + 1e-3)
    ),
    "a number that may be negative": lambda x, sink: x.exp() / (x.exp().sum(-1, keepdim=True) + sink),
    "a term taken off": lambda x, sink: x.exp() / (x.exp().sum(-1, keepdim=True) - sink.exp()),
    "a least sum": lambda x, sink: x.exp() / x.exp().sum(-1, keepdim=True).clamp(min=2.0),
    "sums of other scores": lambda x, sink: x.softmax(-1) * (lse(2 * x) - sink).sigmoid(),
    "sums of another head": lambda x, sink: x.softmax(-1) * (lse(x.flip(1)) - sink).sigmoid(),
    "sums along another axis": lambda x, sink: x.softmax(-1) * (torch.logsumexp(x, 1, keepdim=True) - sink).sigmoid(),
    "a sink for each key": lambda x, sink: x.softmax(-1) * (lse(x) - sink * torch.arange(x.shape[-1])).sigmoid(),
    "a gate": lambda x, sink: x.softmax(-1) * sink.sigmoid(),
    "the sink's share": lambda x, sink: x.softmax(-1) * (sink - lse(x)).sigmoid(),
    "twice the factor": lambda x, sink: x.softmax(-1) * (lse(x) - sink).sigmoid() ** 2,
    "half the keys": lambda x, sink: x.softmax(-1) * (lse(x[..., ::2]) - sink).sigmoid(),
    "half the sum": lambda x, sink: x.exp() / (2 * x.exp().sum(-1, keepdim=True) + sink.exp()),
    "rounded": lambda x, sink: torch.div(x.exp(), x.exp().sum(-1, keepdim=True) + sink.exp(), rounding_mode="floor"),
}


@pytest.mark.parametrize("name", STAY)
def test_what_is_no_sink_stays(name):
    module = Shared(STAY[name])
    program = export(module, GIVEN)
    before = str(program.gm.graph)
    assert write_softmax(program.gm.graph, (), program.fake_mode) == 0
    assert str(program.gm.graph) == before
    assert optimized(program, lowering="op").fused == 0


def test_a_gate_of_each_head_stays_beside_a_sink():
    """Only the sink becomes a part of the softmax: the gate is no fraction of its sums."""

    def weights(x, sink):
        return x.softmax(-1) * (lse(x) - sink).sigmoid() * F.softplus(sink)

    program = export(Shared(weights), GIVEN)
    assert write_softmax(program.gm.graph, (), program.fake_mode) == 1
    assert "softplus.default" in calls(program)
    assert "logsumexp.default" not in calls(program)
    attended(Shared(weights))


def test_a_sum_that_the_caller_reads_too():
    """The scores are then needed besides, so no operator takes their place."""

    class Both(Shared):
        def forward(self, q, rows):
            k = rows.expand(-1, H, -1, -1)
            x = q @ k.mT * 0.4
            return x.softmax(-1) * (lse(x) - self.sinks).sigmoid() @ k, lse(x)

    done = optimized(export(Both(None), GIVEN), lowering="op", verify=True)
    assert done.fused == 0
    for found, expected in zip(run(done.program, *GIVEN), Both(None)(*GIVEN), strict=True):
        assert error(found, expected.detach()) < 1e-12
