"""What stderr shows of a compilation, and the seconds of its stages in the report."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._inductor import compile_fx

import mla_compile
from mla_compile.dynamo import progress
from mla_compile.dynamo.progress import Compilations
from mla_compile.errors import OptionError
from tests.support.toy import Toy, decode_inputs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def stderr(monkeypatch: pytest.MonkeyPatch, *, terminal: bool = False) -> io.StringIO:
    """What is written there from now on, also about what compiles fast. No fixture: pytest replaces it after setup."""
    shown = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(progress, "_TOLD_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    return shown


def run(model: nn.Module) -> Any:
    with torch.no_grad():
        return model(*decode_inputs())


def optimized(**options: Any) -> nn.Module:
    return mla_compile.optimize(Toy().eval(), **{"codegen": "eager", "strict": True, **options})


def test_a_line_says_how_long_each_stage_took(monkeypatch: pytest.MonkeyPatch):
    shown = stderr(monkeypatch)
    fast = optimized(progress=True)
    assert not shown.getvalue()
    run(fast)
    (line,) = shown.getvalue().splitlines()
    assert line.startswith("mla_compile: Toy.forward, graph 1 took ")
    assert [part.split()[0] for part in line.partition("(")[2].split(", ")] == ["trace", "capture", "passes", "guards"]
    run(fast)  # nothing is compiled
    assert len(shown.getvalue().splitlines()) == 1


@pytest.mark.parametrize(("terminal", "wanted"), [(False, None), (True, False)])
def test_nothing_is_shown_without_a_terminal_or_where_it_is_not_wanted(
    terminal: bool, wanted: bool | None, monkeypatch: pytest.MonkeyPatch
):
    shown = stderr(monkeypatch, terminal=terminal)
    run(optimized(progress=wanted))
    assert not shown.getvalue()


def test_a_terminal_shows_what_is_being_done(monkeypatch: pytest.MonkeyPatch):
    shown = stderr(monkeypatch, terminal=True)
    described: list[str] = []
    update = progress.Compilations._describe

    def noting(self: Compilations) -> None:
        update(self)
        if self._shown is not None and self._stage:
            described.append(self._shown.tasks[0].description)

    monkeypatch.setattr(progress.Compilations, "_describe", noting)
    run(optimized())
    about = "mla_compile: Toy.forward, graph 1: "
    assert [line.removeprefix(about) for line in described] == [
        "tracing the model", "making the graph functional", "looking for attentions",
        "noting what the code assumes of the model",
    ]  # fmt: skip
    assert "mla_compile: Toy.forward, graph 1 took " in shown.getvalue().splitlines()[-1]
    assert sys.stderr is shown


@pytest.mark.parametrize("broken", [None, "closed"])
def test_a_process_without_stderr_compiles(broken: str | None, monkeypatch: pytest.MonkeyPatch):
    shown = None if broken is None else Terminal()
    if shown is not None:
        shown.close()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", shown)
        run(optimized(progress=True))


def test_the_report_has_what_is_not_ours_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compile_fx, "compile_fx", lambda gm, *_, **__: gm)  # whoever makes the code
    fast = optimized(codegen="inductor")
    run(fast)
    seconds = {record.name: record.seconds for record in fast.mla_report.passes}
    first, *passes, code, last = seconds
    assert (first, code, last) == ("trace", "code", "guards")
    assert min(seconds[first], seconds[code], seconds[last]) > 0
    assert fast.mla_report.seconds == pytest.approx(sum(seconds[name] for name in passes))


@pytest.mark.parametrize("before", [True, False])
def test_cycles_are_not_collected_in_the_meantime(before: bool, monkeypatch: pytest.MonkeyPatch):
    seen: list[bool] = []
    stage = Compilations.stage

    def noting(self: Compilations, name: str) -> None:
        seen.append(gc.isenabled())
        stage(self, name)

    monkeypatch.setattr(Compilations, "stage", noting)
    try:
        (gc.enable if before else gc.disable)()
        run(optimized())
        assert gc.isenabled() is before
    finally:
        gc.enable()
    assert seen
    assert not any(seen)


def test_a_failure_ends_it(monkeypatch: pytest.MonkeyPatch):
    stderr(monkeypatch, terminal=True)

    class Failing(Toy):
        def forward(self, *inputs: Any) -> Any:
            raise ValueError("not today")

    fast = mla_compile.optimize(Failing().eval())
    with pytest.raises(ValueError, match="not today"):
        run(fast)
    assert fast.forward.compilations._shown is None
    assert not fast.forward.compilations._stage
    assert gc.isenabled()
    assert not callback_handler.start_callbacks
    assert not callback_handler.end_callbacks


def test_another_thread_does_not_end_it():
    mine = Compilations("a model")

    def call() -> None:
        with mine.of_this_thread():
            pass

    with mine.of_this_thread():
        mine.begin("trace")
        other = threading.Thread(target=call)
        other.start()
        other.join()
        assert mine._stage == "trace"
    assert not mine._stage


def test_a_reset_within_the_call_is_survived():
    mine = Compilations("a model")
    with mine.of_this_thread():
        mine.begin("trace")
        callback_handler.clear()
    assert not mine._stage


def test_copies_show_it_too():
    fast = optimized(progress=True)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert other.forward.compilations.show is True


def test_programs_are_told_of_as_well(monkeypatch: pytest.MonkeyPatch):
    shown, model = stderr(monkeypatch), Toy().eval()
    mla_compile.optimize(torch.export.export(model, decode_inputs()), progress=True)
    assert shown.getvalue().startswith("mla_compile: the program, graph 1 took ")


def test_anything_else_is_refused():
    with pytest.raises(OptionError, match="progress is 'yes', expected True, False or None"):
        mla_compile.optimize(Toy(), progress="yes")
