"""What every test runs under: no network, quiet threads, and a compiler without memory of the test before."""

from __future__ import annotations

import gc
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch is imported: spinning OpenMP threads make the steps of a test ten times longer on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Before transformers is: its models are built from configs, and a look-up by mistake is an error, not a download.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import hypothesis
import pytest

# A generated case may compile a graph: no deadline. The same cases each run, so that a failure is not a matter of luck;
# `pytest --hypothesis-profile=explore` draws new ones.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True)
hypothesis.settings.load_profile("repeatable")

ENDS = time.monotonic() + float(os.environ.get("MLA_TEST_SECONDS", "inf"))
"""When no further test is begun: a machine that is twice as slow reports what it could not run, and ends in time."""


def pytest_runtest_setup() -> None:
    if time.monotonic() > ENDS:
        pytest.skip(f"the {os.environ['MLA_TEST_SECONDS']} seconds of this run (MLA_TEST_SECONDS) are over")


@pytest.hookimpl(tryfirst=True)  # before ``-m`` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what ``slow.txt`` lists, and put first what shows a wrong rewrite, so that no machine is too slow for it."""
    here = Path(__file__).parent
    slow = set((here / "slow.txt").read_text().splitlines())
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")
    items.sort(key=lambda item: not (item.path.parent == here or here / "passes" in item.path.parents))


def pytest_collection_finish() -> None:
    # pytest 9.2 listens to all loggers that do not propagate. Where anybody listens to this one, torch writes down
    # every graph and tensor that it traces, with the stack.
    logging.getLogger("torch.__trace").propagate = True


def pytest_unconfigure() -> None:
    gc.unfreeze()  # for libraries that look for what they leaked at the end of the process


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Forget compiled code after each test: Dynamo keeps at most 8 entries for a function that all models share.

    And the reports, of which the last 64 are kept.
    """
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"]._dynamo.reset()
    if "mla_compile.backend" in sys.modules:
        sys.modules["mla_compile.backend"]._recent.clear()


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> None:
    """What is there before the tests of a file is not searched for garbage again, which took a quarter of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connecting to anything but a local socket file is an error."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            raise AssertionError(f"a test tried to connect to {address!r}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(scope="session")
def explained_tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small model in the shape of DeepSeek-V3, five layers of two kinds, as ``explain`` sees it."""
    from mla_compile.models.survey import survey
    from mla_compile.report.explained import explained
    from tests.support.explaining import TINY

    path = tmp_path_factory.mktemp("tiny") / "config.json"
    path.write_text(json.dumps(TINY))
    return explained(survey(str(path)).facts, "bf16", 2)


@pytest.fixture
def explained_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module ``explained_models`` of functions that return models."""
    from tests.support.explaining import FACTORY

    (tmp_path / "explained_models.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "explained_models", raising=False)
    return tmp_path
