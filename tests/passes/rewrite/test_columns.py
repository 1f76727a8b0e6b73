"""Slices of joins that become the parts they lie in, and those that have to stay."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.passes.ir.graph import OURS
from mla_compile.passes.rewrite.columns import read_parts
from tests.support import models
from tests.support.modules import MLA, N, inputs
from tests.support.programs import OP, absorbed, seeded
from tests.support.tiers import full

aten = torch.ops.aten


def traced(fn, *inputs: torch.Tensor, ours: bool = True) -> fx.GraphModule:
    gm = make_fx(fn, tracing_mode="fake", pre_dispatch=True)(*inputs)
    for node in gm.graph.nodes:
        if ours and node.target is aten.slice.Tensor:
            node.meta[OURS] = True
    return gm


def slices(gm: fx.GraphModule) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=aten.slice.Tensor))


def joined(a: torch.Tensor, b: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return aten.slice.Tensor(torch.cat([a, b], -1), 2, start, stop) * 2


@pytest.mark.parametrize(
    ("start", "stop", "left"), [(0, 3, 0), (3, 8, 0), (0, 2, 1), (4, 8, 1), (5, 7, 1), (2, 5, 1), (0, 8, 1)]
)
def test_columns_of_one_part_are_read_from_it(start: int, stop: int, left: int) -> None:
    given = seeded(2, 4, 3), seeded(2, 4, 5, seed=1)
    gm = traced(lambda a, b: joined(a, b, start, stop), *given)
    fake = next(iter(gm.graph.nodes)).meta["val"].fake_mode
    inside = stop <= 3 or start >= 3
    assert read_parts(gm.graph, fake) == inside
    gm.graph.lint()
    gm.recompile()
    assert slices(gm) == left
    assert (not gm.graph.find_nodes(op="call_function", target=aten.cat.default)) == inside
    assert torch.equal(gm(*given), joined(*given, start, stop))
    for node in gm.graph.nodes:
        assert node.op == "output" or "val" in node.meta


def test_joins_of_joins_are_looked_through() -> None:
    def nested(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return aten.slice.Tensor(torch.cat([a, torch.cat([b, a], -1)], -1), 2, 3, 8) + 1

    given = seeded(2, 4, 3), seeded(2, 4, 5, seed=1)
    gm = traced(nested, *given)
    assert read_parts(gm.graph, next(iter(gm.graph.nodes)).meta["val"].fake_mode) == 1
    gm.recompile()
    assert slices(gm) == 0
    assert torch.equal(gm(*given), given[1] + 1)


@pytest.mark.parametrize("kind", ["dtype", "axis", "model's"])
def test_what_is_not_the_part_itself_stays(kind: str) -> None:
    """A part that the join converts, a join along another axis, and slices of the model's own."""
    dtype = torch.float32 if kind == "dtype" else torch.float64
    given = seeded(2, 4, 3, dtype=dtype), seeded(2, 4, 3, seed=1)
    dim = 1 if kind == "axis" else 2
    gm = traced(lambda a, b: aten.slice.Tensor(torch.cat([a, b], dim), 2, 0, 3) * 1, *given, ours=kind != "model's")
    before = str(gm.graph)
    assert read_parts(gm.graph, next(iter(gm.graph.nodes)).meta["val"].fake_mode) == 0
    assert str(gm.graph) == before


class Joined(MLA):
    """A query of which the last columns are turned, and joined to the others again."""

    def query(self, x: torch.Tensor) -> torch.Tensor:
        q = super().query(x)
        return torch.cat([q[..., :N], q[..., N:].sin()], -1)


def slices_of_joins(graph: fx.Graph) -> list[fx.Node]:
    """What the passes cut from tensors [B,H,S,K] that the model joins."""
    cats = [n for n in graph.nodes if n.target is aten.cat.default and n.meta["val"].dim() == 4]
    return [n for n in graph.nodes if n.target is aten.slice.Tensor and OURS in n.meta and n.args[0] in cats]


def test_both_parts_of_an_absorbed_query_are_read_before_they_are_joined() -> None:
    graph = absorbed(Joined(), inputs(S=3), lowering="op").gm.graph
    assert [str(n.target) for n in graph.nodes].count(OP) == 1
    assert not slices_of_joins(graph)


@full("family")
def test_an_absorbed_query_is_read_before_the_model_joins_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model's rotation leaves alone and what it turns go to the operator by themselves."""
    import mla_compile
    from mla_compile import pipeline

    made = []
    real = pipeline.run
    monkeypatch.setattr(pipeline, "run", lambda *a, **k: made.append(real(*a, **k)) or made[-1])
    fast = mla_compile.optimize(models.build("minicpm3", attn="sdpa"), codegen="eager", strict=True)
    ids = models.prompt(2, 6, 0)["input_ids"]
    with torch.no_grad():
        cache = fast(ids, use_cache=True).past_key_values
        fast(ids[:, :1], past_key_values=cache)
    graph = made[-1].program.gm.graph
    sites = [n for n in graph.nodes if str(n.target) == OP]
    assert len(sites) == models.FAMILIES["minicpm3"].mla_sites
    assert not slices_of_joins(graph)
