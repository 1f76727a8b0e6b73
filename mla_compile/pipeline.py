"""The passes, in order, over one captured program.

normalize          first, so that every later pass sees one spelling;
find_attention,
linear_map, judge  read only: they decide everything before anything is changed;
absorb             rewrites the sites that were judged legal and worth it;
verify             checks each distinct rewrite against float64 while the original is still at hand;
lower              last, because absorb speaks in terms of the operator.

The program that comes in is never changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import sympy
import torch
from torch import fx

from mla_compile.dims import Dims
from mla_compile.options import Options
from mla_compile.passes.absorb import absorb
from mla_compile.passes.cost import default_device
from mla_compile.passes.find_attention import find_attention
from mla_compile.passes.graph import weight_nodes
from mla_compile.passes.judge import Verdict, judge
from mla_compile.passes.linear_map import LinearMaps
from mla_compile.passes.lower import lower_to_aten
from mla_compile.passes.normalize import normalize
from mla_compile.passes.site_report import site_report
from mla_compile.program import Program
from mla_compile.records import PassRecord
from mla_compile.report import Report

R = TypeVar("R")


@dataclass(frozen=True)
class SiteCost:
    """The sizes that decide between the forms in one call; symbols are those of the graph's shapes."""

    dims: Dims
    B: int | sympy.Expr
    S: int | sympy.Expr
    T: int | sympy.Expr


@dataclass(frozen=True)
class Outcome:
    """What came of a program: the rewritten copy, the report, how many sites were absorbed, and the sites whose form is
    to be picked in every call (then the original is kept beside the rewritten program)."""

    program: Program
    report: Report
    absorbed: int
    variants: tuple[SiteCost, ...] = ()


class _Clock:
    """Times passes and checks the graph after each of them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.records: list[PassRecord] = []

    def run(self, name: str, work: Callable[[], R], changes: Callable[[R], int]) -> R:
        start = time.perf_counter()
        result = work()
        if changes(result):
            self.program.gm.graph.lint()
        self.records.append(PassRecord(name, changes(result), time.perf_counter() - start))
        return result


def run(program: Program, options: Options, name: str = "") -> Outcome:
    """Rewrites a copy of ``program`` as far as it can be proved right and pays."""
    program = program.copy()
    graph = program.gm.graph
    clock = _Clock(program)
    clock.run("normalize", lambda: normalize(graph), int)
    weights = weight_nodes(graph, program.weights)
    sites = clock.run("find_attention", lambda: find_attention(graph, weights), lambda _: 0)
    maps = LinearMaps(weights, program.fake_mode)
    device = default_device(_device_type(program.gm))
    verdicts = clock.run("judge", lambda: judge(graph, sites, maps, device, options.forms, options.fold), lambda _: 0)
    reports = [site_report(index, verdict) for index, verdict in enumerate(verdicts)]
    chosen = [v for v in verdicts if v.absorb]
    clock.run("absorb", lambda: _absorb_all(program, chosen), int)
    if options.lowering == "aten":
        clock.run("lower", lambda: lower_to_aten(graph, program.fake_mode), int)
    graph.eliminate_dead_code()
    program.gm.recompile()
    variants = tuple(_site_cost(v) for v in chosen if v.by_call)
    report = Report(tuple(reports), graph=name, passes=tuple(clock.records))
    return Outcome(program, report, len(chosen), variants)


def _absorb_all(program: Program, verdicts: list[Verdict]) -> int:
    for verdict in verdicts:
        assert verdict.plan is not None
        absorb(verdict.plan, program.fake_mode)
    program.gm.graph.eliminate_dead_code()
    return len(verdicts)


def _site_cost(verdict: Verdict) -> SiteCost:
    assert verdict.plan is not None
    return SiteCost(verdict.plan.dims, *verdict.plan.sizes())


def _device_type(gm: fx.GraphModule) -> str:
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return value.device.type
    return "cpu"


