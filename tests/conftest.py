"""What every test runs under: no network, quiet threads, and a compiler without memory of the test before."""

from __future__ import annotations

import gc
import json
import logging
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch is imported: spinning OpenMP threads make the steps of a test ten times longer on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's, which spin too
# Before transformers is: its models are built from configs, and a look-up by mistake is an error, not a download.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
# Dynamo searches for garbage after each graph that it compiles; here, that is done once for each file.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

import hypothesis
import pytest

from tests.support import tiers

# A generated case may compile a graph: no deadline. The same cases each run, so that a failure is not a matter of luck;
# `HYPOTHESIS_PROFILE=explore pytest` draws new ones.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

ENDS = time.monotonic() + float(os.environ.get("MLA_TEST_SECONDS", "inf"))
"""When a run has taken too long, which is a failure; ``--durations`` lists what was slow."""


gc.disable()  # until the tests are collected: nearly all objects stay, and searching them took a quarter of that time


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", default="1/1", metavar="K/N", help="run the K-th of N parts of what is selected")


@pytest.hookimpl(tryfirst=True)  # before xdist looks at its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Use all cores for the whole suite or a tier of it, where nothing else is asked for on the command line."""
    whole = config.args_source is not pytest.Config.ArgsSource.ARGS
    option, worker = config.option, hasattr(config, "workerinput")
    if worker or not whole or not config.pluginmanager.hasplugin("xdist"):
        return
    chosen = option.numprocesses is not None or option.dist != "no" or option.tx
    if not chosen and not option.usepdb and not option.collectonly and option.capture != "no":
        option.numprocesses, option.dist = os.cpu_count() or 1, "worksteal"


@pytest.hookimpl(tryfirst=True)  # before ``-m`` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is quick, take a share, and put first what shows a wrong rewrite."""
    here = Path(__file__).parent
    tiers.sort(items, [item.path.relative_to(here).parts[0] for item in items])
    left = [item for item in items if not tiers.in_share(item.nodeid, config.getoption("--share"))]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]
    items.sort(key=lambda item: not (item.path.parent == here or here / "passes" in item.path.parents))


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """End a run whose time is over: nothing is left out in silence on a slow machine."""
    if time.monotonic() > ENDS:
        seconds = os.environ["MLA_TEST_SECONDS"]
        item.session.shouldfail = f"the {seconds} seconds of this run (MLA_TEST_SECONDS) are over"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was skipped and why, a line for each reason."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(r.longrepr[2]).removeprefix("Skipped: ") for r in reports if isinstance(r.longrepr, tuple))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


def pytest_collection_finish() -> None:
    gc.enable()
    gc.set_threshold(1_000_000, 20, 20)  # most tests are over before a search finds anything
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
        # For a line of its log, Dynamo empties the processor's caches and measures how long each graph's guards take.
        sys.modules["torch"]._dynamo.guards.profile_guard_manager = lambda *_: 0.0
        sys.modules["torch"]._dynamo.reset()
        # Each trace looks through all operators that the process has dispatched, and would be slower from test to test.
        sys.modules["torch"]._ops.reset_cached_ops()
    if "mla_compile.backend" in sys.modules:
        sys.modules["mla_compile.backend"]._recent.clear()


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> None:
    """What is there before the tests of a file is not searched for garbage again, which took a quarter of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def native_kernel() -> None:
    """The CPU kernel, without which the test is skipped; it is not built while tests are collected."""
    from mla_compile.kernels.cpu import native

    if native.load() is None:
        pytest.skip("no kernel here runs the operator")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connecting to anything but this machine is an error."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] != "127.0.0.1":
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
