"""Where the seconds of the tests go: by file, by fixture, and by what was at work.

    pytest -n 2 -p tests.support.times --times times.json [pytest options]

The work of the library and of torch is counted by phase (:data:`PHASES`). Seconds of a phase that another phase calls
belong to the inner one alone. All seconds are wall time, except where "cpu" is said. Processes that a test starts
(Triton's interpreter, ranks, commands) count as the time that the test waits for them.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PHASES: dict[str, tuple[str, ...]] = {
    "capture": (
        "mla_compile.capture.capture:from_dynamo",
        "mla_compile.capture.capture:from_graph_module",
        "mla_compile.capture.capture:from_exported",
    ),
    "export": ("torch.export:export", "torch.fx.experimental.proxy_tensor:make_fx"),
    "passes": ("mla_compile.pipeline:run",),
    "verify": ("mla_compile.passes.verify.comparison:Checks.check",),
    "Dynamo": ("torch._dynamo.convert_frame:_compile",),
    "Inductor": ("torch._inductor.compile_fx:compile_fx",),
    "C++ of the kernels": ("mla_compile.kernels.cpu.native:_build",),
    "Triton's interpreter": ("tests.support.interpreter:_interpret", "concurrent.futures:Future.result"),
    "simulator": ("tests.support.gluon_machine:Machine.launch",),
    "ONNX": ("mla_compile.onnx.export:export_onnx", "onnxruntime:InferenceSession.__init__"),
    "ranks": ("tests.support.ranks:Ranks.__init__", "tests.support.ranks:Ranks.run"),
    "commands": ("subprocess:run",),
    "models built": ("tests.support.models:build",),
    "compiler reset": ("torch._dynamo:reset",),
    "garbage": ("gc:collect",),
}
"""What is at work, and the functions (module:name) that are it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", default="times.json", help="the file that is written")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Times(config), "times-of-tests")


class Clock:
    """Seconds by phase; an inner phase's are taken off the outer one's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._inner = [0.0]
        self._wrapped: set[str] = set()

    def wrapped(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                spent = time.perf_counter() - start
                self.seconds[phase] += spent - self._inner.pop()
                self.calls[phase] += 1
                self._inner[-1] += spent

        return timed

    def watch(self) -> None:
        """Wrap what has been imported; a name that another module imported is wrapped there, too."""
        for phase, names in PHASES.items():
            for name in names:
                module, _, path = name.partition(":")
                if name in self._wrapped or module not in sys.modules:
                    continue
                self._wrapped.add(name)
                *owners, last = path.split(".")
                owner = importlib.import_module(module)
                for part in owners:
                    owner = getattr(owner, part)
                function = getattr(owner, last)
                timed = self.wrapped(phase, function)
                setattr(owner, last, timed)
                for other in list(sys.modules.values()):
                    if not owners and getattr(other, "__dict__", {}).get(last) is function:
                        setattr(other, last, timed)


class Times:
    """One process's part; that of an xdist worker travels to the process that started it."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.worker = hasattr(config, "workerinput")
        self.clock = Clock()
        self.own: dict[str, Any] = {"tests": {}, "fixtures": {}}
        self.parts: list[dict[str, Any]] = []
        self.outcomes: dict[str, int] = defaultdict(int)
        self.start = time.perf_counter()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.own["collection"] = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        self.clock.watch()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.clock.watch()
        wall, cpu = time.perf_counter(), time.process_time()
        before = dict(self.clock.seconds)
        yield
        found = {k: v - before.get(k, 0) for k, v in self.clock.seconds.items() if v - before.get(k, 0) > 0.005}
        self.own["tests"][item.nodeid] = [time.perf_counter() - wall, time.process_time() - cpu, found]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        start = time.perf_counter()
        yield
        row = self.own["fixtures"].setdefault(f"{fixturedef.argname} ({fixturedef.baseid})", [0, 0.0])
        row[0] += 1
        row[1] += time.perf_counter() - start

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self.worker and (report.when == "call" or report.outcome != "passed"):
            self.outcomes[report.outcome] += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.parts += [node.workeroutput["times"]] if "times" in getattr(node, "workeroutput", {}) else []

    def pytest_sessionfinish(self) -> None:
        self.own["process"] = {"cpu": time.process_time(), "wall": time.perf_counter() - self.start}
        self.own["calls"] = dict(self.clock.calls)
        if self.worker:
            self.config.workeroutput["times"] = self.own  # type: ignore[attr-defined]
            return
        parts = self.parts or [self.own]
        text = json.dumps(self._summary(parts), indent=1)
        path = Path(self.config.getoption("--times"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def _summary(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        tests = {name: row for part in parts for name, row in part["tests"].items()}
        files: dict[str, list[float]] = {}
        phases: dict[str, float] = defaultdict(float)
        calls: dict[str, int] = defaultdict(int)
        fixtures: dict[str, list[float]] = {}
        for name, (wall, cpu, found) in tests.items():
            row = files.setdefault(name.partition("::")[0], [0, 0.0, 0.0])
            row[0], row[1], row[2] = row[0] + 1, row[1] + wall, row[2] + cpu
            for phase, seconds in found.items():
                phases[phase] += seconds
        phases["the rest"] = sum(wall for wall, _, _ in tests.values()) - sum(phases.values())
        for part in parts:
            for name, (count, seconds) in part["fixtures"].items():
                row = fixtures.setdefault(name, [0, 0.0])
                row[0], row[1] = row[0] + count, row[1] + seconds
            for phase, count in part["calls"].items():
                calls[phase] += count
        return {
            "cases": len(tests),
            "outcomes": self.outcomes,
            "wall": time.perf_counter() - self.start,
            "processes": [{**part["process"], "collection": part["collection"]} for part in parts],
            "phases": {p: [calls.get(p, 0), round(s, 1)] for p, s in _largest(phases)},
            "fixtures": {f: [n, round(s, 1)] for f, (n, s) in _slowest(fixtures) if s > 1},
            "files": {f: [n, round(w, 2), round(c, 2)] for f, (n, w, c) in _slowest(files)},
            "slowest": {n: round(s, 1) for n, s in _largest({n: w for n, (w, _, _) in tests.items()})[:100]},
            "tests": {n: [round(w, 3), round(c, 3)] for n, (w, c, _) in sorted(tests.items())},
        }


def _slowest(rows: dict[str, list[float]]) -> list[tuple[str, list[float]]]:
    return sorted(rows.items(), key=lambda item: -item[1][1])


def _largest(seconds: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])
