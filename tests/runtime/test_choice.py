"""Which form a call takes, by the sizes of its inputs."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv

from mla_compile.core.dims import Dims
from mla_compile.core.program import Program
from mla_compile.dynamo import compiler as compiling
from mla_compile.passes.cost.cost import SiteCost
from mla_compile.passes.ir.sizes import size
from mla_compile.runtime import choice
from tests.support.compiling import compiled, compiler
from tests.support.tiers import also
from tests.support.toy import Toy, decode_inputs


@pytest.mark.thorough
@pytest.mark.parametrize("codegen", ["eager", *also("inductor", "inductor")])
def test_with_a_symbolic_number_of_queries_each_call_picks(codegen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    picked: list[bool] = []
    choose = choice.choose_by_call

    def spy(pays: Any, absorbed: Any, expanded: Any) -> Any:
        return choose(lambda inputs: picked.append(pays(inputs)) or picked[-1], absorbed, expanded)

    monkeypatch.setattr(compiling, "choose_by_call", spy)
    model = Toy().eval()
    backend = compiler(codegen=codegen)
    step = compiled(model, backend, dynamic=True)
    sizes = [(6, 5), (3, 40), (400, 7), (9, 300)]
    with torch.no_grad():
        for queries, cached in sizes:
            x, rows = decode_inputs(cached=cached, queries=queries)
            torch.testing.assert_close(step(x, rows), model(x, rows), rtol=1e-5, atol=1e-5)
    assert len(backend.reports) == 1
    from mla_compile.passes.cost.formulas import absorption_gain, evaluate
    from tests.support.toy import H, L, N, R, V

    dims = Dims(H=H, L=L, R=R, N=N, V=V)
    assert picked == [evaluate(absorption_gain(), dims, S=S, T=S + T) > 0 for S, T in sizes]
    assert {*picked} == {True, False}


def test_the_picker_understands_the_shape_expressions_of_torch() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(torch.ones(6, 50), static_shapes=False)
    graph = torch.fx.Graph()
    graph.placeholder("x").meta["val"] = fake
    graph.output(())
    program = Program(torch.fx.GraphModule({}, graph))
    S, T = (size.node.expr for size in fake.shape)
    site = SiteCost(Dims(H=4, L=16, R=6, N=12, V=10), 2, FloorDiv(S * S, S), T + 1)
    pays = choice.picker(program, [site, site])
    assert pays([torch.ones(1, 50)])
    assert not pays([torch.ones(500, 50)])
    assert choice.pays_as_traced(program, [site])
    unknown = SiteCost(site.dims, 2, S, sympy.Symbol("u0", integer=True))  # counts as UNSEEN
    pays = choice.picker(program, [unknown])
    assert pays([torch.ones(1, 50)])
    assert not pays([torch.ones(500, 50)])
    assert choice.pays_as_traced(program, [unknown])
    assert not choice.pays_as_traced(program, [SiteCost(site.dims, 2, S + 100, unknown.T)])


def test_the_picker_reads_sizes_by_the_name_that_guards_give_them() -> None:
    # Two caches of one length are two symbols to torch, as they are after a recompilation.
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env)
    earlier, later = (mode.from_tensor(torch.ones(50, 6), static_shapes=False).shape[0] for _ in range(2))
    queries = mode.from_tensor(torch.ones(50, 7), static_shapes=False)
    assert earlier + queries.shape[0] == later + queries.shape[0]  # a guard
    graph = torch.fx.Graph()
    graph.placeholder("x").meta["val"] = queries
    graph.placeholder("y").meta["val"] = later  # the older name, which the passes use, is no input
    graph.output(())
    program = Program(torch.fx.GraphModule({}, graph))
    S, T = size(queries.shape[0]), size(later)
    assert earlier.node.expr == T
    site = SiteCost(Dims(H=4, L=16, R=6, N=12, V=10), 2, S, T + S)
    pays = choice.picker(program, [site])
    assert pays([torch.ones(5, 7), 50])
    assert not pays([torch.ones(500, 7), 50])
    assert not choice.pays_as_traced(program, [site])  # 50 queries


@pytest.mark.thorough
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_context_whose_length_is_computed_in_the_graph() -> None:
    class Pruned(Toy):
        def forward(self, x: Any, rows: Any, kept: Any = None) -> Any:
            return self.attend(x, rows.index_select(1, kept.nonzero()[:, 0]), None)

    model = Pruned().eval()
    backend = compiler(verify=True, strict=True)
    step = compiled(model, backend)
    x, rows = decode_inputs(cached=19, queries=3)
    with torch.no_grad():
        for kept in (torch.arange(19) % 3 != 0, torch.arange(19) > 11):
            torch.testing.assert_close(step(x, rows, kept), model(x, rows, kept))
    assert len(backend.reports) == 1
    for report in backend.reports:
        assert report.absorbed == 1
        assert report.sites[0].precision_ratio is not None, "not verified"
