"""Dynamo's settings are ours while a module of ours runs, and the user's everywhere else."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mla_compile import optimize
from mla_compile.dynamo import settings
from mla_compile.dynamo.recompiles import SYMBOLIC
from tests.support.decode_state import OPTIONS, seen_settings
from tests.support.unsettled import (
    IntPosition,
    steps,
)


def test_other_compilations_have_the_users_settings() -> None:
    fast = optimize(IntPosition().eval(), **OPTIONS)

    class Counter(nn.Module):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x * self.count

    other = Counter()
    graphs: list[torch.fx.GraphModule] = []
    step = torch.compile(other, backend=lambda gm, _: graphs.append(gm) or gm)
    with torch.no_grad():
        for x in steps(2):
            fast(x)
            step(x)
    assert len(graphs) == 3


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
        state, config = settings._Nesting(), SimpleNamespace(**seen_settings())
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
