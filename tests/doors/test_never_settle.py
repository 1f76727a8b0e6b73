from __future__ import annotations

import copy
import logging
import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mla_compile import MlaCompileWarning, optimize
from mla_compile.backend import mla
from mla_compile.dynamo import settings
from mla_compile.dynamo.causes import cause
from mla_compile.dynamo.compiler import Compiler
from mla_compile.dynamo.recompiles import SYMBOLIC
from tests.support import unsettled
from tests.support.unsettled import (
    ByIndex,
    GrowingBuffer,
    IntPosition,
    Layers,
    ListOfTokens,
    ListOutOfSight,
    Periodic,
    ReadBeforeWritten,
    steps,
)

OPTIONS: dict[str, Any] = {"codegen": "eager", "lowering": "aten", "forms": "absorbed"}
LIMITS = ("recompile_limit", "accumulated_recompile_limit")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every run of a rewritten graph."""
    counted: list[int] = []
    assemble = Compiler._assemble

    def spied(self: Compiler, *args: Any) -> Any:
        call = assemble(self, *args)

        def counting(*inputs: Any) -> Any:
            counted.append(1)
            return call(*inputs)

        return counting

    monkeypatch.setattr(Compiler, "_assemble", spied)
    return counted


def absorbed_runs(fast: Callable[..., Any], model: nn.Module, runs: list[int], count: int = 24) -> list[int]:
    """How many rewritten graphs ran in each step; the results are those of ``model``, which is a copy."""
    ran = []
    with torch.no_grad():
        for x in steps(count):
            before = len(runs)
            got, want = fast(x), model(x)
            assert (got - want).abs().max() <= 1e-12 * want.abs().max()
            ran.append(len(runs) - before)
    return ran


def seen_settings() -> dict[str, Any]:
    return {name: getattr(torch._dynamo.config, name) for name in (*SYMBOLIC, *LIMITS)}


@pytest.mark.parametrize(
    ("make", "each_step", "graphs"),
    [
        (GrowingBuffer, 1, [1, 1]),
        (Periodic, 1, [1, 1, 1]),
        (lambda: Layers(IntPosition, 2), 1, [2, 2]),
        (lambda: Layers(GrowingBuffer, 2, breaks=True), 2, [1, 1]),
    ],
    ids=["buffer", "periodic", "ints_of_layers", "buffers_of_layers_apart"],
)
def test_what_changes_in_every_step_is_compiled_once(
    make: Any, each_step: int, graphs: list[int], runs: list[int]
) -> None:
    model, before = make().eval(), seen_settings()
    fast = optimize(copy.deepcopy(model), **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert absorbed_runs(fast, model, runs) == [each_step] * 25
    assert [report.absorbed for report in fast.forward.compiler.reports] == graphs
    assert seen_settings() == before


def test_layers_that_run_one_code_do_not_use_up_each_others_limit(runs: list[int]) -> None:
    model = Layers(ByIndex, 3, breaks=True).eval()
    fast = optimize(copy.deepcopy(model), **OPTIONS)
    with torch._dynamo.config.patch(recompile_limit=2), warnings.catch_warnings():
        warnings.simplefilter("error")
        before = seen_settings()
        assert absorbed_runs(fast, model, runs, count=4) == [3] * 5
        assert seen_settings() == before
    assert fast.mla_report.absorbed == 2 * 3


def test_a_layer_that_never_settles_costs_the_others_nothing(runs: list[int]) -> None:
    model = Layers(lambda index: (ByIndex, ListOfTokens)[index](index), 2, breaks=True).eval()
    fast = optimize(copy.deepcopy(model), **OPTIONS)
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        pytest.warns(MlaCompileWarning, match=r"resume_in_one.* runs it uncompiled"),
    ):
        assert absorbed_runs(fast, model, runs, count=4) == [2, 2, 1, 1, 1]


def test_code_without_attention_is_given_up_with_what_it_calls(runs: list[int]) -> None:
    class Outer(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.words = f"{getattr(self, 'words', '')}x"
            return super().forward(x + len(self.words))

    model = Outer(GrowingBuffer, 1, breaks=True).eval()
    fast = torch.compile(copy.deepcopy(model), backend=mla, options=OPTIONS)
    with (
        torch._dynamo.config.patch(recompile_limit=3),
        pytest.warns(MlaCompileWarning, match=r"forward' .* what it calls may .*self\.words =="),
    ):
        assert absorbed_runs(fast, model, runs, count=3) == [1, 1, 1, 0]


def test_a_buffer_that_was_seen_in_several_sizes_is_no_weight(runs: list[int]) -> None:
    model = ReadBeforeWritten().eval()
    fast = optimize(copy.deepcopy(model), **OPTIONS)
    with pytest.warns(MlaCompileWarning, match="nothing was absorbed"):  # the first graph takes it for one
        assert absorbed_runs(fast, model, runs, count=4) == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("door", ["optimize", "backend"])
def test_a_list_that_grows_is_said_once_with_its_line(door: str, runs: list[int]) -> None:
    model = ListOfTokens().eval()
    copied = copy.deepcopy(model)
    fast = optimize(copied, **OPTIONS) if door == "optimize" else torch.compile(copied, backend=mla, options=OPTIONS)
    with torch._dynamo.config.patch(recompile_limit=2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert absorbed_runs(fast, model, runs, count=4) == [1, 1, 0, 0, 0]
    (message,) = [str(w.message) for w in caught if issubclass(w.category, MlaCompileWarning)]
    name = "model.tokens" if door == "optimize" else "self.tokens"
    assert f"the length of {name} changes from call to call ({unsettled.__file__}:" in message
    assert "in forward: position = len(self.tokens))" in message
    assert "@torch.compiler.disable" in message
    assert ("ListOfTokens.forward" in message) == (door == "optimize")
    assert "mla_compile/dynamo" not in message
    if door == "optimize":
        assert fast.mla_report.messages == (message,)


def test_what_the_warning_about_lists_advises_helps(runs: list[int]) -> None:
    model = ListOutOfSight().eval()
    fast = optimize(copy.deepcopy(model), **OPTIONS)
    with torch._dynamo.config.patch(recompile_limit=3), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert absorbed_runs(fast, model, runs, count=8) == [1] * 9


@pytest.mark.parametrize(
    ("make", "options", "what", "advice"),
    [
        (IntPosition, None, "the int self.position changes", "call mla_compile.optimize"),
        (GrowingBuffer, None, "axis 1 of the tensor self.rows changes its size", "call mla_compile.optimize"),
        (IntPosition, {"dynamic": True}, "the int model.position changes", "leave out the option dynamic"),
    ],
    ids=["int", "buffer", "dynamic"],
)
def test_where_nothing_can_be_made_symbolic_the_warning_says_what_would_be(
    make: Any, options: dict[str, Any] | None, what: str, advice: str, runs: list[int]
) -> None:
    model = make().eval()
    copied = copy.deepcopy(model)
    if options is None:
        fast = torch.compile(copied, backend=mla, options=OPTIONS)
    else:
        fast = optimize(copied, **OPTIONS, **options)
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        pytest.warns(MlaCompileWarning, match=rf"{what} from call to call.* \(.*unsettled.py:\d+ in .*{advice}"),
    ):
        assert absorbed_runs(fast, model, runs, count=3)[-1] == 0


@pytest.mark.parametrize("door", ["optimize", "backend"])
def test_with_logging_off_the_last_variant_that_fits_comes_with_the_warning(
    door: str, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("torch._dynamo.convert_frame"), "level", logging.ERROR)
    logging.getLogger("torch._dynamo.convert_frame").manager._clear_cache()  # type: ignore[attr-defined]
    model = ListOfTokens().eval()
    copied = copy.deepcopy(model)
    fast = optimize(copied, **OPTIONS) if door == "optimize" else torch.compile(copied, backend=mla, options=OPTIONS)
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        pytest.warns(MlaCompileWarning, match=r"2 variants of '.*forward' .* are compiled") as caught,
    ):
        assert absorbed_runs(fast, model, runs, count=3) == [1, 1, 0, 0]
    assert len(caught) == 1
    logging.getLogger().manager._clear_cache()  # type: ignore[attr-defined]


def test_other_compilations_have_the_users_settings() -> None:
    fast = optimize(IntPosition().eval(), **OPTIONS)
    other = IntPosition().eval()
    graphs: list[torch.fx.GraphModule] = []
    step = torch.compile(other, backend=lambda gm, _: graphs.append(gm) or gm)
    with torch.no_grad():
        for x in steps(3):
            fast(x)
            step(x)
    assert len(graphs) == 4


def test_settings_are_restored_whatever_happens_inside() -> None:
    before = seen_settings()

    def fail() -> None:
        with settings.held(SYMBOLIC):
            assert seen_settings() == {**before, **SYMBOLIC}
            with settings.held({"recompile_limit": 99}):
                assert seen_settings() == {**before, **SYMBOLIC, "recompile_limit": 99}
                assert settings.user_value("recompile_limit") == before["recompile_limit"]
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen_settings() == before


@pytest.mark.parametrize("shared", [False, True], ids=["as_installed", "one_for_all_threads"])
def test_threads_that_overlap_leave_no_setting_behind(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if shared:  # as in torch 2.11
        state, config = settings._Shared(), SimpleNamespace(**seen_settings())
        monkeypatch.setattr(settings, "_state", lambda: state)
        monkeypatch.setattr(settings, "config", config)
    config = settings.config
    (name, wanted), before = next(iter(SYMBOLIC.items())), seen_settings()
    inside, leave, seen = threading.Event(), threading.Event(), []

    def second() -> None:
        with settings.held(SYMBOLIC):
            inside.set()
            leave.wait(30)
            seen.append(getattr(config, name))
        seen.append(getattr(config, name))

    thread = threading.Thread(target=second)
    with settings.held(SYMBOLIC):  # enters first and leaves first
        thread.start()
        assert inside.wait(30)
    leave.set()
    thread.join(30)
    assert seen == [wanted, before[name]]
    assert {key: getattr(config, key) for key in before} == before


@pytest.mark.parametrize(
    ("guard", "kind", "what"),
    [
        ("module._modules['a']._modules['0'].pos == 11", "number", "the int model.a.0.pos changes"),
        ("L['module'].pos == -1", "number", "the int model.pos changes"),
        ("len(module.toks) == 6", "length", "the length of model.toks changes"),
        ("len(module.d) != 6", "length", "the length of model.d changes"),
        ("not len(module.d)", "length", "the length of model.d changes"),
        (
            "tensor 'module._buffers['c']' size mismatch at index 1. expected 6, actual 7",
            "size",
            "axis 1 of the tensor model.c changes its size from call to call (6, then 7)",
        ),
        ("module.mode == 'aa'", "other", "the guard that failed is model.mode == 'aa'"),
        ("tensor 'kwargs['x']' dtype mismatch", "other", "the guard that failed is tensor 'kwargs['x']' dtype"),
        ("Unable to find recompilation reasons", "other", "the guard that failed is Unable to find"),
    ],
)
def test_guards_in_words(guard: str, kind: str, what: str) -> None:
    frames = 'User stack trace:\n  File "/a.py", line 3, in f\n    g(x)\n  File "/b c.py", line 5, in g\n    use(self)'
    found = cause(f"0/7: {guard}   # use(self)  # b c.py:5 in g (HINT: x)\n{frames}", {}, "module")
    assert found.kind == kind
    assert found.what.startswith(what)
    assert found.where == "/b c.py:5 in g: use(self)"
    assert cause(guard, {"module.c": "here"}).where == ("here" if kind == "size" else None)
