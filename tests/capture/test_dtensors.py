"""Graphs of DTensors: what is captured is what one rank computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mla_compile.codes import Code
from mla_compile.dynamo.compiler import Compiler
from mla_compile.options import Options
from tests.support.one_rank import mesh  # noqa: F401  a fixture
from tests.support.programs import seeded

H, L, N, R, V, D, T = 4, 8, 6, 2, 5, 10, 7


class Layer(nn.Module):
    """A decode step over cached rows. ``local``: q, K and V are plain tensors of this rank's heads."""

    def __init__(self, *, local: bool = True) -> None:
        super().__init__()
        self.local = local
        self.q = nn.Linear(D, H * (N + R), bias=False, dtype=torch.float64)
        self.up = nn.Linear(L, H * (N + V), bias=False, dtype=torch.float64)
        self.o = nn.Linear(H * V, D, bias=False, dtype=torch.float64)
        for i, p in enumerate(self.parameters()):
            p.data = seeded(*p.shape, seed=i)
        self.requires_grad_(False)

    def forward(self, x, c, r):
        B, S, _ = x.shape
        q = self.q(x).view(B, S, -1, N + R).transpose(1, 2)
        k, v = self.up(c).view(B, c.shape[1], -1, N + V).transpose(1, 2).split([N, V], -1)
        k = torch.cat([k, r.unsqueeze(1).expand(B, k.shape[1], c.shape[1], R)], -1)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(B, S, -1))


def inputs(S=1):
    return seeded(2, S, D), seeded(2, T, L, seed=1), seeded(2, T, R, seed=2)


def by_heads(layer, over, **o):
    return parallelize_module(layer, over, {"q": ColwiseParallel(), "up": ColwiseParallel(), "o": RowwiseParallel(**o)})


def first_heads(layer):
    """What the first of two ranks computes, before the results of all are added up."""
    half = Layer()
    half.q.weight = nn.Parameter(layer.q.weight[: H // 2 * (N + R)], requires_grad=False)
    half.up.weight = nn.Parameter(layer.up.weight[: H // 2 * (N + V)], requires_grad=False)
    half.o.weight = nn.Parameter(layer.o.weight[:, : H // 2 * V], requires_grad=False)
    return half


def compiled(layer, **settings):
    compiler = Compiler(Options.parse({"codegen": "eager", "verify": True, "strict": True, **settings}))
    return torch.compile(layer, backend=compiler, fullgraph=True), compiler


def test_one_ranks_part_is_absorbed(mesh):  # noqa: F811
    whole = Layer()
    expected = first_heads(whole)(*inputs())
    step, compiler = compiled(by_heads(Layer(), mesh))
    result = step(*inputs())
    (site,) = compiler.reports[0].sites
    assert site.code is Code.ABSORBED
    assert site.dims.H == H // 2
    assert (result - expected).abs().max() < 1e-12  # the sum over ranks that play no part adds nothing


def test_weights_read_by_to_local(mesh):  # noqa: F811
    class Local(Layer):
        def forward(self, x, c, r):
            B, S, _ = x.shape
            q = F.linear(x, self.q.weight.to_local()).view(B, S, -1, N + R).transpose(1, 2)
            kv = F.linear(c, self.up.weight.to_local()).view(B, T, -1, N + V).transpose(1, 2)
            k, v = kv.split([N, V], -1)
            k = torch.cat([k, r.unsqueeze(1).expand(B, k.shape[1], T, R)], -1)
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, S, -1)
            return F.linear(y, self.o.weight.to_local())

    layer, expected = Local(), first_heads(Layer())(*inputs())
    for part, dim in ((layer.q, 0), (layer.up, 0), (layer.o, 1)):
        part.weight = nn.Parameter(distribute_tensor(part.weight, mesh, [Shard(dim)]), requires_grad=False)
    step, compiler = compiled(layer)
    assert (step(*inputs()) - expected).abs().max() < 1e-12
    assert compiler.reports[0].absorbed == 1


def test_changed_weights_are_used(mesh):  # noqa: F811
    layer = by_heads(Layer(), mesh)
    step, _ = compiled(layer, fold="always")
    before = step(*inputs())
    with torch.no_grad():
        layer.up.weight.to_local().mul_(2)
    twice = first_heads(Layer())
    with torch.no_grad():
        twice.up.weight.mul_(2)
    assert (before - first_heads(Layer())(*inputs())).abs().max() < 1e-12
    assert (step(*inputs()) - twice(*inputs())).abs().max() < 1e-12


def test_lengths_that_change(mesh):  # noqa: F811
    step, compiler = compiled(by_heads(Layer(), mesh))
    step = torch.compile(step._orig_mod, backend=compiler, fullgraph=True, dynamic=True)
    half = first_heads(Layer())
    for length in (7, 9, 12):
        given = seeded(2, 1, D), seeded(2, length, L, seed=1), seeded(2, length, R, seed=2)
        assert (step(*given) - half(*given)).abs().max() < 1e-12
    assert [report.absorbed for report in compiler.reports] == [1]


def test_a_vocabulary_of_several_ranks(mesh):  # noqa: F811
    """Its rows that this rank has not are masked, which no spec says."""

    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(11, D, dtype=torch.float64)
            self.layer = Layer()

        def forward(self, ids, c, r):
            return self.layer(self.words(ids), c, r)

    model = Embedded().requires_grad_(False)
    words = model.words.weight.detach().clone()
    parallelize_module(model.words, mesh, RowwiseParallel(input_layouts=Replicate()))
    by_heads(model.layer, mesh)
    step, compiler = compiled(model)
    _, c, r = inputs()
    ids = torch.tensor([[3], [5]])  # the first rank has 0 to 5
    assert (step(ids, c, r) - first_heads(Layer())(words[ids], c, r)).abs().max() < 1e-12
    assert compiler.reports[0].absorbed == 1


def test_a_graph_that_returns_a_dtensor_stays(mesh):  # noqa: F811
    layer = by_heads(Layer(), mesh, use_local_output=False)
    step, compiler = compiled(layer, strict=False)
    with pytest.warns(UserWarning, match="returns .*, a DTensor: return its to_local"):
        result = step(*inputs())
    assert isinstance(result, DTensor)
    assert not compiler.reports


def test_attention_on_dtensors(mesh):  # noqa: F811
    """Projections hand DTensors on, and the attention itself runs on them."""

    class Whole(Layer):
        def forward(self, x, c, r):
            c, r = (DTensor.from_local(t, mesh, [Replicate()], run_check=False) for t in (c, r))
            return super().forward(x, c, r).to_local()

    layer = Whole()
    parallelize_module(
        layer, mesh,
        {
            "q": ColwiseParallel(use_local_output=False),
            "up": ColwiseParallel(use_local_output=False),
            "o": RowwiseParallel(use_local_output=False),
        },
    )  # fmt: skip
    step, compiler = compiled(layer)
    result = step(*inputs())
    assert compiler.reports[0].absorbed == 1, compiler.reports[0]
    assert (result - first_heads(Layer())(*inputs())).abs().max() < 1e-12
