"""The scores of an indexer as one operator: however they are written, and what nearly is an indexer stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from mla_compile.codes import Code
from mla_compile.errors import VerificationError
from mla_compile.passes.attention.indexer import Indexer
from mla_compile.passes.rewrite.index import index_scores
from mla_compile.pipeline import rewrites
from tests.support.programs import codes, error, export, optimized, run, seeded, trace
from tests.support.tiers import also
from tests.support.usual import usual

pytestmark = pytest.mark.thorough

B, H, S, T, L, N, V, K = 3, 4, 2, 11, 8, 6, 5, 3
J, D = 7, 10
INDEX = "mla_compile.index_scores.default"
Scores = Callable[[Tensor, Tensor, Tensor], Tensor]  # of a query [B,S,J,D], keys [B,T,D] and weights [B,S,J]


def attention(scores: Scores, heads: int = J, queries: int = S) -> Callable[..., Tensor]:
    """Absorbable attention to the keys with the best scores."""

    def fn(q, c, iq, ik, iw, w_k, w_v):
        k, v = (F.linear(c, w).unflatten(-1, (H, -1)).transpose(1, 2) for w in (w_k, w_v))
        index = scores(iq, ik, iw).topk(K, dim=-1).indices
        mask = torch.zeros(B, queries, T, dtype=torch.bool).scatter(-1, index, True)[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)

    return fn


def tensors(
    dtype: torch.dtype = torch.float64, weights: torch.dtype | None = None, heads: int = J
) -> tuple[list[Tensor], list[Tensor]]:
    """The inputs and the weights of ``attention``."""
    index = [seeded(B, S, heads, D), seeded(B, T, D), seeded(B, S, heads)]
    inputs = [seeded(B, H, S, N), seeded(B, T, L), *index[:2]]
    inputs = [x.to(dtype) for x in inputs] + [index[2].to(weights or dtype)]
    return inputs, [seeded(H * N, L, seed=3).to(dtype), seeded(H * V, L, seed=4).to(dtype)]


def rewritten(scores: Scores, *, heads: int = J, **options) -> fx.Graph:
    """The graph, after its numbers were compared with those of the function."""
    inputs, weights = tensors(heads=heads)
    fn = attention(scores, heads)
    program = trace(fn, inputs, weights)
    options = {"forms": "absorbed", "lowering": "op", "verify": True, "strict": True} | options
    outcome = optimized(program, **options)
    assert codes(outcome)[-1] is Code.ABSORBED
    (result,) = outcome.program.gm(*inputs, *weights)
    assert error(result, fn(*inputs, *weights)) < 1e-10
    return outcome.program.gm.graph


def calls(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if str(n.target) == INDEX]


def products(q: Tensor, k: Tensor) -> Tensor:
    """[B,S,J,T]."""
    return q @ k.mT[:, None]


def weighed(relus: Tensor, w: Tensor) -> Tensor:
    return (w[:, :, None] @ relus).squeeze(2)


def permuted(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """Heads before queries."""
    relus = (q.transpose(1, 2) @ k.mT[:, None]).relu()
    return weighed(relus.permute(0, 2, 1, 3), w)


def merged(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    relus = torch.bmm(q.reshape(B, S * J, D), k.mT).view(B, S, J, T).relu()
    return torch.bmm(w.reshape(B * S, 1, J), relus.view(B * S, J, T)).view(B, S, T)


def expanded(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """The keys repeated for each head."""
    relus = (q.transpose(1, 2) @ k[:, None].expand(-1, J, -1, -1).mT).relu()
    return (relus * w.mT[..., None]).sum(1)


WAYS: dict[str, Scores] = {
    "as transformers has it": lambda q, k, w: (
        torch.matmul(w.unsqueeze(-2), F.relu(torch.matmul(q, k.transpose(-1, -2).unsqueeze(1)) * 0.3)).squeeze(-2)
    ),
    "einsum": lambda q, k, w: torch.einsum("bsjt,bsj->bst", torch.einsum("bsjd,btd->bsjt", q, k).relu(), w),
    "einsum, keys first": lambda q, k, w: (
        torch.einsum("btjs,bsj->bst", torch.einsum("btd,bsjd->btjs", k, q).relu(), w)
    ),
    "multiplied and summed": lambda q, k, w: (products(q, k).relu() * w.unsqueeze(-1)).sum(2),
    "the sum keeps its axis": lambda q, k, w: (w.unsqueeze(-1) * products(q, k).relu()).sum(2, keepdim=True)[:, :, 0],
    "merged batched products": merged,
    "permuted": permuted,
    "keys of each head, all the same": expanded,
    "a scale of the query": lambda q, k, w: weighed(products(q * 0.3, k).relu(), w),
    "a scale after the relu": lambda q, k, w: weighed(products(q, k).relu() * 0.3, w),
    "a negative one": lambda q, k, w: weighed(-0.3 * (products(q, k) / -2.0).relu(), w),
    "weights that are scaled": lambda q, k, w: weighed(products(q, k).relu(), w * 0.3),
    "clamped": lambda q, k, w: weighed(products(q, k).clamp(min=0), w),
    "clamped by another name": lambda q, k, w: weighed(products(q, k).clamp_min(0.0), w),
    "the same weights for all queries": lambda q, k, w: (products(q, k).relu() * w[:, :1, :, None]).sum(2),
    "a mask on top": lambda q, k, w: (
        weighed(products(q, k).relu(), w).masked_fill(torch.arange(T) > torch.arange(T - S, T)[:, None], float("-inf"))
    ),
    "a bias on top": lambda q, k, w: weighed(products(q, k).relu(), w) + torch.linspace(0, 1, T, dtype=q.dtype),
    "copied and viewed": lambda q, k, w: (
        weighed(products(q, k).contiguous().view(B, S, 1, J, T).squeeze(2).clone().relu().contiguous(), w)
    ),
}  # fmt: skip


SELDOM = (
    "einsum, keys first", "the sum keeps its axis", "a scale of the query", "a scale after the relu",
    "weights that are scaled", "clamped by another name", "a bias on top", "permuted", "multiplied and summed",
)  # fmt: skip


@pytest.mark.parametrize("name", usual(WAYS, rare=SELDOM))
def test_the_scores_are_one_operator(name: str):
    graph = rewritten(WAYS[name])
    (node,) = calls(graph)
    query, keys, weights, _ = node.args
    assert [tuple(x.meta["val"].shape) for x in (query, keys, weights)] == [(B, S, J, D), (B, T, D), (B, S, J)]
    targets = {str(n.target) for n in graph.nodes}
    assert not any("relu" in t or "clamp" in t for t in targets)
    # No tensor of heads and keys is left.
    assert not any(n.meta["val"].numel() >= B * S * J * T for n in graph.nodes if isinstance(n.meta.get("val"), Tensor))


def test_keys_are_read_where_they_lie():
    """Through the cast, the permutation and the view that the model makes of them."""
    (node,) = calls(rewritten(WAYS["as transformers has it"]))
    assert node.args[1].op == "placeholder"
    assert node.args[0].op == "placeholder"


def half(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return weighed((products(q, k) * 0.3).relu(), w)


def in_float32(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return half(q.float(), k.float(), w.float())


def beside_float64(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return half(q.double(), k.double(), w.double())


@pytest.mark.singly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, *also("family", torch.float16)], ids=str)
@pytest.mark.parametrize("scores", [half, in_float32])
def test_sums_are_in_float32_of_the_dtype_that_is_kept(scores: Scores, dtype: torch.dtype):
    inputs, weights = tensors(dtype)
    program = trace(attention(scores), inputs, weights)
    outcome = optimized(program, forms="absorbed", lowering="op", verify=True, strict=True)
    (node,) = calls(outcome.program.gm.graph)
    assert [x.meta["val"].dtype for x in node.args[:2]] == [dtype, dtype]
    assert node.meta["val"].dtype == torch.float32
    (topk,) = (n for n in outcome.program.gm.graph.nodes if "topk" in str(n.target))
    wanted = dtype if scores is half else torch.float32
    assert topk.args[0].meta["val"].dtype == wanted


def test_sums_in_float64_stay_so():
    inputs, weights = tensors(torch.float32)
    outcome = optimized(trace(attention(beside_float64), inputs, weights), forms="absorbed", lowering="op", verify=True)
    for node in calls(outcome.program.gm.graph):
        assert node.meta["val"].dtype == torch.float64
    mixed = lambda q, k, w: weighed(products(q, k).relu().double(), w)  # noqa: E731
    inputs, weights = tensors(torch.float32, torch.float64)
    outcome = optimized(trace(attention(mixed), inputs, weights), forms="absorbed", lowering="op", verify=True)
    assert not calls(outcome.program.gm.graph)


def read_twice(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    relus = products(q, k).relu()
    return weighed(relus, w) + relus.amax((1, 2))[:, None]


def two_products(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return weighed((products(q[..., :4], k[..., :4]) + products(q[..., 4:], k[..., 4:])).relu(), w)


def of_each_head(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    keys = k[:, None] * torch.arange(1, J + 1, dtype=k.dtype)[:, None, None]  # [B,J,T,D]
    return weighed((q.transpose(1, 2) @ keys.mT).relu().transpose(1, 2), w)


STAY: dict[str, Scores] = {
    "the products are read by another": read_twice,
    "no relu": lambda q, k, w: weighed(products(q, k), w),
    "a softmax": lambda q, k, w: weighed(products(q, k).softmax(-1), w),
    "a gelu": lambda q, k, w: weighed(F.gelu(products(q, k)), w),
    "a relu with an end": lambda q, k, w: weighed(products(q, k).clamp(0, 6), w),
    "clamped at another number": lambda q, k, w: weighed(products(q, k).clamp(min=0.1), w),
    "a relu squared": lambda q, k, w: weighed(products(q, k).relu().square(), w),
    "a bias before the relu": lambda q, k, w: weighed((products(q, k) + 0.5).relu(), w),
    "weights of each key": lambda q, k, w: (products(q, k).relu() * (w[..., None] + k[:, None, None, :, 0])).sum(2),
    "no weights": lambda q, k, w: products(q, k).relu().sum(2),
    "two products": two_products,
    "keys of each head": of_each_head,
    "scores that are masked before the relu": lambda q, k, w: (
        weighed(products(q, k).masked_fill(torch.arange(T) > 5, float("-inf")).relu(), w)
    ),
    "a tensor for a scale": lambda q, k, w: weighed((products(q, k) * w[..., None]).relu(), w),
}  # fmt: skip


@pytest.mark.parametrize("name", usual(STAY, rare=("a softmax", "a gelu", "a relu squared")))
def test_what_is_no_indexer_stays(name: str):
    assert not calls(rewritten(STAY[name]))


def test_what_is_summed_over_are_the_heads():
    """As many heads as queries, so that every size fits. What is called queries may be the heads, and keys may not."""

    def scores(dim: int) -> Scores:
        return lambda q, k, w: (products(q, k).relu() * w.unsqueeze(-1)).sum(dim)

    for dim in (1, 2):
        (node,) = calls(rewritten(scores(dim), heads=S))
        assert [n for n in node.graph.nodes if "permute" in str(n.target) and n in node.all_input_nodes] or dim == 2
    assert not calls(rewritten(lambda q, k, w: scores(0)(q, k, w).expand(B, -1, -1, -1)[:, 0], heads=S))


@pytest.mark.parametrize("options", [{"lowering": "aten"}, {"sparse": "never"}], ids=str)
def test_off_where_it_is_not_asked_for(options: dict[str, str]):
    assert not calls(rewritten(WAYS["einsum"], **options))


def test_the_worst_keys_are_not_those_of_an_indexer():
    def fn(q, c, iq, ik, iw, w_k, w_v):
        k, v = (F.linear(c, w).unflatten(-1, (H, -1)).transpose(1, 2) for w in (w_k, w_v))
        index = WAYS["einsum"](iq, ik, iw).topk(K, dim=-1, largest=False).indices
        mask = torch.zeros(B, S, T, dtype=torch.bool).scatter(-1, index, True)[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)

    inputs, weights = tensors()
    outcome = optimized(trace(fn, inputs, weights), forms="absorbed", lowering="op")
    assert codes(outcome) == [Code.ABSORBED]
    assert not calls(outcome.program.gm.graph)


class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w_k, self.w_v = (torch.nn.Parameter(seeded(H * n, L, seed=3)) for n in (N, V))

    def forward(self, q, c, iq, ik, iw):
        k, v = (F.linear(c, w).unflatten(-1, (H, -1)).transpose(1, 2) for w in (self.w_k, self.w_v))
        index = half(iq, ik, iw).topk(K, dim=-1).indices
        mask = torch.zeros(q.shape[0], q.shape[2], c.shape[1], dtype=torch.bool).scatter(-1, index, True)[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)


@pytest.mark.parametrize("batches", [False, *also("combination", True)])
def test_symbolic_sizes(batches):
    """Context and perhaps batch, and what the report says of the scores."""
    batch, tokens = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("tokens", min=5, max=4096)
    some = {0: batch} if batches else {}
    dynamic = (some, {**some, 1: tokens}, some, {**some, 1: tokens}, some)
    inputs, _ = tensors()
    program = export(Step(), inputs, dynamic)
    outcome = optimized(program, forms="absorbed", lowering="op", verify=True, strict=True)
    assert len(calls(outcome.program.gm.graph)) == 1
    n = 5 if batches else B
    longer = [seeded(n, H, S, N), seeded(n, 700, L), seeded(n, S, J, D), seeded(n, 700, D), seeded(n, S, J)]
    for given in (inputs, longer):
        with torch.no_grad():
            want = Step()(*given)
        assert error(run(outcome.program, *given)[0], want) < 1e-10
    (site,) = outcome.report.sites
    assert (site.choosing_flops, site.choosing_bytes, site.choosing_fused) == (2 * J * (D + 1), 8 * D, True)
    assert "all heads in one operator" in str(outcome.report)


def wrong(found: Indexer, fake_mode: object) -> fx.Node:
    return index_scores(replace(found, scale=found.scale * 1.01), fake_mode)


def test_a_wrong_rewrite_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rewrites, "index_scores", wrong)
    inputs, weights = tensors()
    program = trace(attention(half), inputs, weights)
    how = {"forms": "absorbed", "lowering": "op", "verify": True}
    with pytest.raises(VerificationError, match="an indexer as one operator differs from the original"):
        optimized(program, strict=True, **how)
    outcome = optimized(program, **how)
    assert codes(outcome) == [Code.ABSORBED]
    assert not calls(outcome.program.gm.graph)
    assert outcome.report.sites[0].choosing_fused is False
    assert any(m.startswith("an indexer stays as the model computes it") for m in outcome.report.messages)
