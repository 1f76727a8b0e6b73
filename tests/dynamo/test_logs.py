"""What a library logs once does not break the graph of an optimized module; what it logs each time does, as before."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch

from mla_compile import optimize
from mla_compile.dynamo.logs import SETTING, SaidOnce
from tests.support.decode_state import OPTIONS
from tests.support.toy import Toy, decode_inputs


class _Logger(logging.Logger):
    @functools.lru_cache(None)  # noqa: B019  as libraries do it
    def once(self, message: str) -> None:
        self.warning(message)


logger = _Logger("tests.library")


class Logs(Toy):
    method = "once"

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> Any:
        rows = rows * 2
        getattr(logger, self.method)("no weights are returned")
        return super().forward(x, rows)


def graphs(module: torch.nn.Module) -> Any:
    fast = optimize(module.eval(), **OPTIONS)
    with torch.no_grad():
        torch.testing.assert_close(fast(*decode_inputs()), module(*decode_inputs()))
    return fast.forward.compiler.graphs, fast.mla_report.messages


def test_what_is_logged_once_is_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    before = getattr(torch._dynamo.config, SETTING)
    count, messages = graphs(Logs())
    assert count == 1
    (said,) = [m for m in messages if "what the logger tests.library logs once (once)" in m]
    assert [r.message for r in caplog.records if r.name == "mla_compile" and r.levelno == logging.WARNING] == [said]
    assert getattr(torch._dynamo.config, SETTING) is before


def test_what_is_logged_each_time_breaks_the_graph() -> None:
    class LogsAlways(Logs):
        method = "error"

    logger.setLevel(logging.CRITICAL)
    count, messages = graphs(LogsAlways())
    logger.setLevel(logging.NOTSET)
    assert count == 2
    assert not any("logs once" in m for m in messages)


def test_the_users_own_set_holds() -> None:
    met: list[tuple[str, str]] = []
    said = SaidOnce({print}, lambda *names: met.append(names))
    assert print in said
    assert logging.warning not in said
    assert logging.getLogger().warning not in said
    assert logger.once in said
    assert met == [("tests.library", "once")]
    assert list(said) == [print]
