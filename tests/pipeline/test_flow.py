"""The way of one graph from the door to the emitted code: through few rooms, and analysed once."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import fx

import mla_compile
from mla_compile import pipeline
from mla_compile.core.program import Program
from mla_compile.options import Options
from mla_compile.passes.attention.find import find_attention
from mla_compile.passes.canonical.normalize import normalize
from mla_compile.passes.decide.judge import judge
from mla_compile.pipeline.manager import Analyses
from mla_compile.pipeline.state import PassState
from tests.passes.test_growth import step
from tests.support.calls import counted
from tests.support.programs import export
from tests.support.toy import Toy, decode_inputs

GRAPHS = (Program, fx.Graph, fx.GraphModule, Analyses, PassState)
TOOLS = {"core", "passes.ir", "pipeline"}  # what every room uses, and the manager, to which every pass returns
ROOT = Path(mla_compile.__file__).parent


@functools.cache
def room(code: CodeType) -> str:
    """The room that a function lies in; empty for other packages."""
    path = Path(code.co_filename)
    for root, within in ((ROOT / "passes", "passes."), (ROOT, "")):
        for folder in (root, root.resolve()):
            if path.is_relative_to(folder):
                return within + path.relative_to(folder).with_suffix("").parts[0]
    return ""


def stays(function: Any, *args: Any) -> list[str]:
    """The rooms in the order in which they get the graph; a room is not named twice in a row."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not (here := room(code)) or here in TOOLS or code.co_name.startswith("<"):
            return
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if found[-1:] != [here] and any(isinstance(frame.f_locals.get(name), GRAPHS) for name in given):
            found.append(here)

    outer = sys.getprofile()
    sys.setprofile(note)
    try:
        function(*args)
    finally:
        sys.setprofile(outer)
    return found


def test_a_graph_goes_through_few_rooms_and_returns_to_few():
    fast = mla_compile.optimize(Toy(), codegen="eager")
    with torch.no_grad():
        found = stays(fast, *decode_inputs())
    assert fast.mla_report.absorbed == 1
    assert {"capture", "passes.canonical", "passes.attention", "passes.decide", "passes.rewrite"} <= {*found}
    assert len(found) <= 18, found
    assert len(found) - len({*found}) <= 8, found


@pytest.mark.parametrize(("rows", "times"), [(True, 1), (False, 2)], ids=["cache of rows", "cache of K and V"])
def test_a_graph_is_judged_once_and_analysed_once_for_each_form_of_its_cache(rows: bool, times: int):
    """Caches of K and V become rows, which makes another graph."""
    program = export(Toy(), decode_inputs()) if rows else step(1)
    counts: Counter[CodeType] = Counter()
    options = Options.parse({"cache": "latent", "verify": True})
    outcome = counted(pipeline.run, counts)(program, options, own_cache=True)
    assert outcome.absorbed == 1
    assert [counts[f.__code__] for f in (normalize, find_attention, judge)] == [times, times, 1]
