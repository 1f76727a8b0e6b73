"""What ``plan`` says that a step exchanges over links, beside the collectives in the graph of that step."""

from __future__ import annotations

from unittest import mock

import pytest
from torch import fx

import mla_compile
from mla_compile.dynamo.code import CodeGenerator
from mla_compile.models.survey import survey_config
from mla_compile.passes.ir.collectives import received_bytes
from mla_compile.workbench.machines import machine
from mla_compile.workbench.planning import plan
from mla_compile.workbench.request import Request
from tests.distributed.jobs import EAGER, by_transformers, generated, saved
from tests.support import models
from tests.support.one_rank import first_of
from tests.support.tiers import full

USERS, VALUE = 2, 4  # generated() has two sequences; float32


def step_of_a_rank(family: str, count: int, directory: str) -> tuple[dict[str, int], str]:
    """What a decode step by transformers' own plan receives, by collective, and the messages of its report."""
    graphs: list[fx.Graph] = []
    honest = CodeGenerator.whole

    def seen(self: CodeGenerator, gm: fx.GraphModule, inputs: object, layers: int = 1) -> object:
        graphs.append(gm.graph)
        return honest(self, gm, inputs, layers)

    with first_of(count), mock.patch.object(CodeGenerator, "whole", seen):
        fast = mla_compile.optimize(by_transformers(models.build(family), directory), ranks="alone", **EAGER)
        generated(fast, 2)
        return received_bytes(graphs[-1]), " ".join(fast.mla_report.messages)


# Dynamo of torch 2.13 makes an object of an autograd function of DTensors.
@full("family")  # the plans above count it by formula
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "count", "sums"),
    [("deepseek_v2", 2, 1), ("minicpm3", 4, 0)],
)
def test_a_plan_counts_what_the_graph_of_a_step_receives(family, count, sums, tmp_path):
    """``sums``: layers whose shared expert transformers sums apart from the routed ones, which a plan need not."""
    saved(family, str(tmp_path))
    received, told = step_of_a_rank(family, count, str(tmp_path))
    config = models.build(family).config
    request = Request(context=16, users=USERS, weight_dtype="fp32", cache_dtype="fp32", tp=count)
    planned = plan(survey_config(config).facts, machine("h200"), request).layouts[0].network_bytes
    apart = sums * 2 * (count - 1) / count * USERS * config.hidden_size * VALUE
    assert sum(received.values()) == pytest.approx(planned + apart, rel=0.02)
    assert f"receives {sum(received.values()):,} bytes from other ranks (all_reduce {received['all_reduce']:,}" in told
