"""Which lines of the product each test executes: for line coverage by room, and for choosing the tests of a mutant.

    pytest -p tests.support.executed --executed lines [pytest options]      (Python 3.12 or newer)
    python -m tests.support.executed before/lines after/lines               coverage by room, of one run or of two

The plugin writes ``lines.WORKER``, one entry for each test, with a bit for each line of each file. It watches the
functions of the product alone, by ``sys.monitoring``, and a line costs something once in each test. What other
processes execute does not count.
"""

# ruff: noqa: T201  it is a program
from __future__ import annotations

import ast
import functools
import gc
import os
import pickle
import sys
import time
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
Lines = dict[str, int]
"""By path from the root: bit n for line n."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--executed", default="lines", help="where the lines go: a path, to which .WORKER is added")


def pytest_configure(config: pytest.Config) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    path = Path(config.getoption("--executed")).resolve()
    config.pluginmanager.register(Watch(path.with_name(f"{path.name}.{worker}")), "executed-lines")


class Watch:
    """Lines by test, through the tool of ``sys.monitoring`` that coverage programs have."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines, self.watched = path, Lines(), set[types.CodeType]()
        self.modules: set[str] = set()
        self.tool = sys.monitoring.COVERAGE_ID

    def pytest_collection_finish(self) -> None:
        sys.monitoring.use_tool_id(self.tool, "executed")
        sys.monitoring.register_callback(self.tool, sys.monitoring.events.LINE, self._line)
        self.path.write_bytes(b"")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._watch_new()
        self.lines, start = Lines(), time.perf_counter()
        sys.monitoring.restart_events()
        yield
        self._watch_new()
        with self.path.open("ab") as file:
            pickle.dump((item.nodeid, time.perf_counter() - start, self.lines), file)

    def _line(self, code: types.CodeType, line: int) -> Any:
        name = _from_root(code.co_filename)
        self.lines[name] = self.lines.get(name, 0) | 1 << line
        return sys.monitoring.DISABLE

    def _watch_new(self) -> None:
        modules = {name for name in sys.modules if name.startswith("mla_compile")}
        if modules == self.modules:
            return
        self.modules = modules
        package = str(ROOT / "mla_compile") + os.sep
        for thing in gc.get_objects():
            if type(thing) is types.FunctionType and thing.__code__.co_filename.startswith(package):
                self._watch(thing.__code__)

    def _watch(self, code: types.CodeType) -> None:
        if code not in self.watched:
            self.watched.add(code)
            sys.monitoring.set_local_events(self.tool, code, sys.monitoring.events.LINE)
            for inner in code.co_consts:
                if isinstance(inner, types.CodeType):
                    self._watch(inner)


@functools.cache
def _from_root(path: str) -> str:
    return os.path.relpath(path, ROOT)


def read(path: str | Path) -> dict[str, tuple[float, Lines]]:
    """Seconds and lines of each test, as a run wrote them."""
    path, found = Path(path), {}
    for part in sorted(path.parent.glob(f"{path.name}.*")):
        with part.open("rb") as file:
            while file.peek(1):
                test, seconds, lines = pickle.load(file)
                found[test] = seconds, lines
    return found


def union(every: dict[str, tuple[float, Lines]]) -> Lines:
    """The lines that any of the tests executes."""
    whole: dict[str, int] = defaultdict(int)
    for _, lines in every.values():
        for name, bits in lines.items():
            whole[name] |= bits
    return dict(whole)


def statements(path: Path) -> int:
    """The lines at which statements within functions begin."""
    bits = 0
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(ast.Module(function.body, [])):
                documents = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                if isinstance(node, ast.stmt) and not documents and not isinstance(node, (ast.Global, ast.Nonlocal)):
                    bits |= 1 << node.lineno
    return bits


def by_room(lines: Lines) -> dict[str, tuple[int, int]]:
    """Executed lines, and lines there are, by room."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for path in sorted((ROOT / "mla_compile").rglob("*.py")):
        if not path.name.endswith(("_triton.py", "_gluon.py")):  # they run in other processes
            there = statements(path)
            done = (lines.get(str(path.relative_to(ROOT)), 0) & there).bit_count()
            room = str(path.parent.relative_to(ROOT))
            found[room] = (found[room][0] + done, found[room][1] + there.bit_count())
    return found


def main() -> None:
    tables = [by_room(union(read(path))) for path in sys.argv[1:]]
    for room in sorted(tables[0]):
        shares = [100 * done / max(there, 1) for done, there in (table[room] for table in tables)]
        print(f"{room:<28}{tables[0][room][1]:>7}" + "".join(f"{share:>8.1f} %" for share in shares))


if __name__ == "__main__":
    main()
