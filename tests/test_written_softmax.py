"""Softmaxes written with exponentials: found, rewritten, and what only looks like one left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mla_compile
from mla_compile.codes import Code
from mla_compile.passes.written_softmax import write_softmax
from tests.modules import MLA, WRITTEN_OUT, exponentials, inputs, padded
from tests.programs import absorbed, calls, codes, export, optimized, run


class Written(MLA):
    def __init__(self, core):
        super().__init__()
        self.written = core

    def attend(self, q, k, v, mask):
        return self.written(q, k, v, mask, self.scale)


@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("core", WRITTEN_OUT.values(), ids=WRITTEN_OUT)
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
    "a protected sum": lambda x: x.exp() / (x.exp().sum(-1, keepdim=True) + 1e-3),
    "a shift along the row": lambda x: (x - torch.arange(x.shape[-1])).exp() / x.exp().sum(-1, keepdim=True),
    "one more in the sum": lambda x: x.exp() / (1 + x.exp().sum(-1, keepdim=True)),
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
