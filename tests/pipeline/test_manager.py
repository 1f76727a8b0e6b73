"""The pass manager: analyses are computed when asked for, and kept until a pass changes the graph."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import fx

from mla_compile.core.program import Program
from mla_compile.core.records import PassRecord
from mla_compile.pipeline.manager import Analyses, Pass, PassError, run_passes


def program() -> Program:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.neg, (x,)),))
    for node in graph.nodes:
        node.meta["val"] = torch.zeros(1)
    return Program(fx.GraphModule({}, graph))


@dataclass
class Passing:
    analyses: Analyses = field(default_factory=lambda: Analyses(program()))
    records: list[PassRecord] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)


def counting():
    """An analysis that numbers its own runs."""
    runs: list[Analyses] = []

    def analysis(known: Analyses) -> int:
        runs.append(known)
        return len(runs)

    return analysis


def reads(analysis):
    def work(state: Passing) -> int:
        state.seen.append(state.analyses.get(analysis))
        return 1

    return Pass("read", "", "", work)


@pytest.mark.parametrize(
    ("count", "kept", "seen"), [(1, False, [1, 1, 2]), (0, False, [1, 1, 1]), (1, True, [1, 1, 1])]
)
def test_an_analysis_is_kept_until_a_pass_has_changed_the_graph(count: int, kept: bool, seen: list[int]):
    known, state = counting(), Passing()
    between = Pass("change", "", "something", lambda _: count, keeps=(known,) if kept else ())
    run_passes((reads(known), reads(known), between, reads(known)), state)
    assert state.seen == seen
    assert [r.changes for r in state.records] == [0, 0, count, 0]


def test_a_trial_that_is_adopted_brings_its_analyses_along():
    known = counting()

    def adopt(state: Passing) -> int:
        state.analyses = Analyses(state.analyses.program.copy())
        return state.analyses.get(known)

    state = Passing()
    run_passes((reads(known), Pass("adopt", "", "the graph", adopt), reads(known)), state)
    assert state.seen == [1, 2]


def bare(state: Passing) -> int:
    graph = state.analyses.program.gm.graph
    with graph.inserting_before(graph.output_node()):
        graph.call_function(torch.neg, (next(iter(graph.nodes)),))
    return 1


def upside_down(state: Passing) -> int:
    x, negated, _ = state.analyses.program.gm.graph.nodes
    x.append(negated)
    negated.append(x)
    return 1


@pytest.mark.parametrize(
    ("work", "told"), [(bare, "the pass wrong left nodes without metadata: neg_1"), (upside_down, "invalid graph")]
)
def test_a_pass_that_leaves_an_invalid_graph_is_named(work, told):
    with pytest.raises(PassError, match=told):
        run_passes([Pass("wrong", "", "the graph", work)], Passing())
