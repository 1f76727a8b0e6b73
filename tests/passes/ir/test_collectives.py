"""Operators that ranks run together: rows behind one are a source, K behind one is refused, and none is lost."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_reduce
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.codes import Code
from mla_compile.passes.ir.collectives import collectives, gathered
from mla_compile.passes.verify.evaluate import Evaluation
from tests.support.modules import MLA, H, N, V, inputs
from tests.support.one_rank import mesh  # noqa: F401  a fixture
from tests.support.programs import codes, export, optimized


class Reduced(MLA):
    """The rows are a sum over ranks."""

    over = None

    def latent(self, c):
        return all_reduce(c, "sum", self.over)


class Gathered(MLA):
    """K and V are: each rank makes some of the columns, or all ranks add theirs up."""

    over = None

    def spoil(self, k, v):
        return all_reduce(k, "sum", self.over), all_reduce(v, "sum", self.over)


class OfAll(MLA):
    """Each rank has a part of the up-projection, and the parts come together in every call."""

    over = None

    def expand(self, c):
        k, v = F.linear(c, all_reduce(self.w, "sum", self.over)).split([H * N, H * V], -1)
        heads = (*c.shape[:2], H, -1)
        return k.view(heads).transpose(1, 2), v.view(heads).transpose(1, 2)


def test_rows_behind_a_collective_are_a_source(mesh):  # noqa: F811
    module = Reduced()
    module.over = mesh.get_group()
    outcome = optimized(export(module, inputs()), verify=True)
    assert codes(outcome) == [Code.ABSORBED]
    assert [name for name, _ in collectives(outcome.program.gm.graph)] == [
        "_c10d_functional::all_reduce",
        "_c10d_functional::wait_tensor",
    ]


def test_keys_and_values_behind_one_are_refused(mesh):  # noqa: F811
    module = Gathered()
    module.over = mesh.get_group()
    outcome = optimized(export(module, inputs()), forms="absorbed")
    assert codes(outcome) == [Code.COLLECTIVE]
    assert "all_reduce" in outcome.report.sites[0].reason or "wait_tensor" in outcome.report.sites[0].reason


def test_a_weight_that_is_gathered_in_the_graph(mesh):  # noqa: F811
    module = OfAll()
    module.over = mesh.get_group()
    outcome = optimized(export(module, inputs()), verify=True, fold="always")
    assert codes(outcome) == [Code.ABSORBED]
    assert not outcome.program.folds  # which would be computed outside of the graph, by this rank alone
    assert len(collectives(outcome.program.gm.graph)) == 2


def test_what_comes_from_other_ranks_is_drawn_and_not_asked_for(mesh):  # noqa: F811
    def rows(x):
        return all_reduce(x, "sum", mesh.get_group()) * 2

    gm = make_fx(rows, tracing_mode="fake")(torch.randn(3, 4))
    (result,) = gm.graph.output_node().all_input_nodes
    given = {}
    first, again = (Evaluation({}, given, {}, 0, torch.float64).value(result) for _ in range(2))
    assert torch.equal(first, again)
    assert gathered([result])
    assert not gathered(gm.graph.find_nodes(op="placeholder"))
