"""Threads at every door that traces, all at once, each with a model of its own: they wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mla_compile
from tests.doors.test_robust_threads import EAGER, at_once
from tests.support import models
from tests.support.serving import alone, prompts, tokens
from tests.support.tiers import also
from tests.support.toy import Toy, decode_inputs

UNCHECKED = {"codegen": "eager", "verify": False}


def same(fast: Callable[..., Any], model: Toy) -> None:
    inputs = decode_inputs()
    torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)


def optimized_program(seed: int) -> Callable[[], None]:
    model = Toy(seed).eval()
    program = torch.export.export(model, decode_inputs())
    return lambda: same(mla_compile.optimize(program, verify=False).module(), model)


def optimized_module(seed: int) -> Callable[[], None]:
    model = Toy(seed).eval()
    return lambda: same(mla_compile.optimize(model, decode_inputs(), **EAGER), model)


def compiled(seed: int) -> Callable[[], None]:
    model = Toy(seed).eval()
    return lambda: same(torch.compile(model, backend="mla", options=EAGER, dynamic=False), model)


def explained(seed: int) -> Callable[[], None]:
    model = Toy(seed).eval()

    def work() -> None:
        assert mla_compile.explain(model, *decode_inputs(), forms="absorbed").absorbed == 1

    return work


def exported(seed: int, folder: Path) -> Callable[[], None]:
    model = Toy(seed).eval()

    def work() -> None:
        inputs = decode_inputs()
        made = mla_compile.export_onnx(model, folder / str(seed), example_inputs=inputs, prefill=False, verify=False)
        assert made.report.absorbed == 1

    return work


def served(seed: int) -> Callable[[], None]:
    model = models.build("deepseek_v3", seed=seed, num_hidden_layers=1, tie_word_embeddings=False)
    ids = prompts((5,))

    def work() -> None:
        with torch.enable_grad():  # generate_batch() sets it off and on again
            fast = mla_compile.continuous_batching(model, **UNCHECKED)
        assert tokens(fast, ids, 2) == [alone(model, one, 2) for one in ids]

    return work


def generating(fast: Any, model: Any, seed: int) -> Callable[[], None]:
    ids = prompts((4, 3), seed=seed)

    def work() -> None:
        assert tokens(fast, ids, 3) == [alone(model, one, 3) for one in ids]

    return work


@pytest.mark.parametrize(("times", "serving"), [(1, False), *also("combination", (2, True))])
def test_threads_at_every_door_that_traces(times: int, serving: bool, tmp_path: Path) -> None:
    doors = [optimized_program, optimized_module, compiled, explained]
    work: list[Callable[[], None]] = [exported(3, tmp_path)]
    if serving:
        model = models.build("deepseek_v3", num_hidden_layers=1, tie_word_embeddings=False)
        fast = mla_compile.continuous_batching(model, **UNCHECKED)  # whose first steps are made below
        doors.append(served)
        work += [generating(fast, model, 6 + k) for k in range(times)]
    at_once([*work, *(door(seed) for seed in range(times) for door in doors)])
