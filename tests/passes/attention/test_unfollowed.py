"""What looks like an attention and is not found to be one, and what only has a softmax."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from mla_compile import backend
from mla_compile.errors import MlaCompileWarning
from tests.support.programs import codes, export, optimized, seeded


class Pooled(nn.Module):
    """Tokens are put together in pairs, each column by a softmax of its own, between two products of activations."""

    def __init__(self, each: bool):
        super().__init__()
        self.each = each

    def forward(self, x, y):
        x = torch.tanh(x @ y.mT) @ y
        pairs, gates = x.unflatten(1, (-1, 2)), torch.tanh(x).unflatten(1, (-1, 2))
        if self.each:
            rows = (pairs * gates.softmax(2)).sum(2)
        else:  # one weight for all columns
            rows = (pairs * gates.sum(-1, keepdim=True).tanh().softmax(2)).sum(2)
        return torch.tanh(rows) @ y.mT


def test_a_gate_of_each_column_is_no_attention():
    given = [seeded(2, 6, 4), seeded(2, 5, 4, seed=1)]
    assert codes(optimized(export(Pooled(each=True), given))) == []
    assert codes(optimized(export(Pooled(each=False), given))) != []


class Broken(nn.Module):
    """``logits(x, y)``, a graph break, and what ``weigh`` makes of their softmax."""

    def __init__(self, logits, weigh):
        super().__init__()
        self.logits, self.weigh = logits, weigh

    def forward(self, x, y):
        scores = self.logits(x, y)
        torch._dynamo.graph_break()
        return self.weigh((scores * 2).softmax(-1), y)


def told(module: nn.Module) -> list[tuple[str, str]]:
    torch._dynamo.reset()
    backend._recent.clear()
    compiled = torch.compile(module.eval(), backend="mla", options={"codegen": "eager"}, dynamic=False)
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore", MlaCompileWarning)
        compiled(seeded(2, 6, 4), seeded(2, 5, 4, seed=1))
    return [(site.code, site.fix or "") for report in backend.reports() for site in report.sites]


def test_scores_from_before_a_graph_break_are_told():
    ((code, fix),) = told(Broken(lambda x, y: x @ y.mT, lambda p, y: p @ y))
    assert code == "graph_break"
    assert "between the scores and the softmax" in fix


def test_a_router_behind_a_graph_break_is_no_attention():
    """Each token has its own rows to weigh, or the weights are not those of a product."""

    def of_tokens(p, y):
        rows = torch.tanh(y[:, None] * p[..., None])
        return torch.einsum("bte,bted->btd", p, rows)

    assert told(Broken(lambda x, y: x @ y.mT, of_tokens)) == []
    assert told(Broken(lambda x, y: x @ y.mT, lambda p, y: p * 2)) == []


class TalkingHeads(nn.Module):
    """The scores of all heads are mixed, by a product that no other operator can spell."""

    def __init__(self):
        super().__init__()
        self.k, self.v = (nn.Parameter(seeded(3, 2, 5, seed=seed)) for seed in (1, 2))
        self.mix = nn.Linear(3, 3, bias=False, dtype=torch.float64)

    def forward(self, q, c):
        scores = self.mix((q @ (c @ self.k).mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return scores.softmax(-1) @ (c @ self.v)


def test_what_is_advised_of_mixed_heads_can_be_done():
    (site,) = optimized(export(TalkingHeads(), [seeded(2, 3, 4, 5), seeded(2, 1, 6, 2, seed=3)])).report.sites
    assert site.code == "unsupported_op"
    assert "linear" in site.reason
    assert "multiply the queries by W_k" in (site.fix or "")


class Padded(nn.Module):
    """A function of torch that is written in Python stands between the weight and the attention."""

    def forward(self, q, c, w):
        return nn.functional.scaled_dot_product_attention(q, nn.functional.normalize(c @ w, dim=-1), c @ w)


def test_the_line_is_the_users():
    given = [seeded(2, 3, 4, 5), seeded(2, 1, 6, 2, seed=1), seeded(3, 2, 5, seed=2)]
    (site,) = optimized(export(Padded(), given)).report.sites
    blamed = [place for place in (site.blame, *(part.blame for part in site.kept)) if place is not None]
    assert blamed
    assert {place.file for place in blamed} == {__file__}
