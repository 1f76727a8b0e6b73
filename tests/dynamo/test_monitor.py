"""When Dynamo gives up on code of ours, the user is told once, with the cause and what helps."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import pytest
import torch

from mla_compile import MlaCompileWarning, optimize
from mla_compile.backend import mla
from tests.support import unsettled
from tests.support.compiling import compiler
from tests.support.decode_state import OPTIONS, absorbed_runs
from tests.support.tiers import also
from tests.support.toy import Toy, decode_inputs
from tests.support.unsettled import (
    GrowingBuffer,
    IntPosition,
    Layers,
    ListOfTokens,
    ListOutOfSight,
)


def test_hitting_the_recompile_limit_is_a_warning() -> None:
    class Varying(Toy):
        def forward(self, x: torch.Tensor, rows: torch.Tensor, flag: str) -> Any:  # a new graph for every string
            return super().forward(x * {"0": 1.0, "1": 2.0, "2": 3.0}[flag], rows)

    step = torch.compile(Varying().eval(), backend=compiler())
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        step(*decode_inputs(), "0")
        step(*decode_inputs(), "1")
        with pytest.warns(MlaCompileWarning, match="runs it uncompiled"):
            step(*decode_inputs(), "2")


class Numbered(Toy):
    """A layer that knows its number, as those of most models do: no other layer can run what is compiled for it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x * (1.0, 2.0, 3.0, 4.0, 5.0)[self.number], rows)


def test_layers_compiled_one_by_one_have_the_limit_to_themselves(runs: list[int]) -> None:
    torch._dynamo.reset()
    models = [Numbered(number).eval() for number in range(2)]
    layers = [torch.compile(model, backend=mla, options=OPTIONS) for model in models]
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=3), warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in (4, 6, 7):  # two variants of each
            for layer, model in zip(layers, models, strict=True):
                inputs = decode_inputs(batch)
                torch.testing.assert_close(layer(*inputs), model(*inputs))


def test_layers_that_share_code_are_the_cause_where_they_are() -> None:
    """No layer has too many variants, all of them together have, and which one it is cannot be guarded."""

    def call(box: list[Any], *inputs: torch.Tensor) -> Any:
        return box[0](*inputs)

    torch._dynamo.reset()
    fast = torch.compile(call, backend=compiler())
    layers = [Numbered(number).eval() for number in range(3)]
    said = r"The cause: 2 layers .* share this code.*optimize\(model\).*isolate_recompiles=True.*recompile_limit"
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        for layer in layers[:2]:
            fast([layer], *decode_inputs())
        with pytest.warns(MlaCompileWarning, match=said):
            fast([layers[2]], *decode_inputs())


def test_the_limit_of_code_that_is_not_ours_is_not_reported() -> None:
    step = torch.compile(lambda x, flag: x * {"0": 1.0, "1": 2.0, "2": 3.0}[flag], backend="eager")
    with torch._dynamo.config.patch(recompile_limit=1), warnings.catch_warnings():
        warnings.simplefilter("error")
        for flag in "012":
            step(torch.ones(1), flag)


def test_code_without_attention_is_given_up_with_what_it_calls(runs: list[int]) -> None:
    class Outer(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.words = f"{getattr(self, 'words', '')}x"
            return super().forward(x + len(self.words))

    model = Outer(GrowingBuffer, 1, breaks=True).eval()
    fast = torch.compile(copy.deepcopy(model), backend=mla, options=OPTIONS)
    with (
        torch._dynamo.config.patch(recompile_limit=3),
        pytest.warns(MlaCompileWarning, match=r"forward' .* that it calls may .*self\.words =="),
    ):
        assert absorbed_runs(fast, model, runs, count=3) == [1, 1, 1, 1]


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
        assert absorbed_runs(fast, model, runs, count=5) == [1] * 6


@pytest.mark.parametrize(
    ("make", "options", "what", "advice"),
    [
        (GrowingBuffer, None, "axis 1 of the tensor self.rows changes its size", "call mla_compile.optimize"),
        (IntPosition, {"dynamic": True}, "the int model.position changes", "leave out the option dynamic"),
    ],
    ids=["buffer", "dynamic"],
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


@pytest.mark.parametrize("door", ["optimize", *also("combination", "backend")])
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
