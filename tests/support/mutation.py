"""Mutation testing: which changes of a module do its tests not notice?

    pip install cosmic-ray
    python -m tests.support.mutation passes/cache/recipe.py,passes/cache/find.py mutants.jsonl
    tests/passes/cache/test_recipe.py [pytest options]

Every test runs once, traced: that gives the lines of ``passes/`` that it executes. Then each mutant of the module (the
operators are cosmic-ray's) gets a fork of this very process, in which the module's functions are given the mutant's
code; the tests that execute the changed line run there, the quickest first, until one fails. What was traced with
:mod:`tests.support.programs` is traced once. Mutants come in a random order and are appended to the log, so that a run
may be cut short and taken up again. ``MUTANTS=first:last`` takes a part, ``LINE=number`` the mutants of one line,
``AGAIN=1`` those that the log says have survived, wherever their lines are by now: for new tests, or for more tests.
"""

# ruff: noqa: T201  it is a program
from __future__ import annotations

import ast
import importlib
import json
import os
import random
import signal
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Of cosmic-ray's many replacements those that say something of their own; RemoveDecorator would unmake the dataclasses.
OPERATORS: list[str] = """
    AddNot ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr ReplaceOrWithAnd ReplaceBreakWithContinue
    ReplaceContinueWithBreak ExceptionReplacer NumberReplacer ZeroIterationForLoop ReplaceUnaryOperator_Delete_Not
    ReplaceUnaryOperator_Delete_USub ReplaceComparisonOperator_Eq_NotEq ReplaceComparisonOperator_NotEq_Eq
    ReplaceComparisonOperator_Is_IsNot ReplaceComparisonOperator_IsNot_Is ReplaceComparisonOperator_Lt_LtE
    ReplaceComparisonOperator_LtE_Lt ReplaceComparisonOperator_Gt_GtE ReplaceComparisonOperator_GtE_Gt
    ReplaceComparisonOperator_LtE_Eq ReplaceComparisonOperator_GtE_Eq ReplaceBinaryOperator_Add_Sub
    ReplaceBinaryOperator_Sub_Add ReplaceBinaryOperator_Mul_Add ReplaceBinaryOperator_Div_Mul
    ReplaceBinaryOperator_FloorDiv_Mul ReplaceBinaryOperator_Mod_Mul ReplaceBinaryOperator_BitOr_BitAnd
    ReplaceBinaryOperator_BitAnd_BitOr
""".split()  # noqa: SIM905  one a line is a page


def meaning(source: str) -> str:
    """What of a source runs: without annotations, which are never evaluated here."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(0)
    return ast.dump(tree)


def mutants(source: str) -> Iterator[tuple[str, int, str]]:
    """Operator, line and source of every mutant."""
    import parso
    from cosmic_ray.operators.provider import OperatorProvider

    original = meaning(source)
    provider = {
        **{name: OperatorProvider()[name] for name in OPERATORS},
        "Membership": Membership,
        "Quantifier": Quantifier,
    }
    for name in provider:
        count = sum(len(list(provider[name]().mutation_positions(n))) for n in nodes(parso.parse(source)))
        for occurrence in range(count):
            tree = parso.parse(source)
            line = apply(provider[name](), tree, occurrence)
            try:
                changed = meaning(tree.get_code()) != original
            except SyntaxError:
                continue
            if changed:
                yield name, line, tree.get_code()


class Membership:
    """``in`` for ``not in`` and the other way round: cosmic-ray leaves both alone."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if getattr(node, "type", "") == "comparison":
            yield from ((c.start_pos, c.end_pos) for c in node.children[1::2] if "in" in c.get_code().split())

    def mutate(self, node: Any, index: int) -> Any:
        import parso

        at = [k for k in range(1, len(node.children), 2) if "in" in node.children[k].get_code().split()][index]
        new = " in" if "not" in node.children[at].get_code() else " not in"
        node.children[at] = parso.python.tree.Keyword(new, node.children[at].start_pos)
        return node


class Quantifier:
    """``any`` for ``all`` and the other way round."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if getattr(node, "type", "") == "name" and node.value in ("any", "all"):
            yield (node.start_pos, node.end_pos)

    def mutate(self, node: Any, index: int) -> Any:
        node.value = {"any": "all", "all": "any"}[node.value]
        return node


def in_function(source: str, line: int) -> bool:
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    return any(f.body[0].lineno <= line <= (f.end_lineno or line) for f in functions)


def nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in getattr(node, "children", ()):
        yield from nodes(child)


def apply(operator: Any, tree: Any, occurrence: int) -> int:
    """Changes one place of the tree; returns its line."""
    for node in list(nodes(tree)):
        for index, (start, _) in enumerate(operator.mutation_positions(node)):
            if occurrence == 0:
                parent = node.parent
                new = operator.mutate(node, index)
                if new is not node:
                    parent.children[next(i for i, c in enumerate(parent.children) if c is node)] = new
                return int(start[0])
            occurrence -= 1
    raise AssertionError("no such occurrence")


def patch(old: Any, new: Any) -> None:
    """Gives the functions of a module or class the code of another."""
    for name, value in vars(new).items():
        own = vars(old).get(name)
        if isinstance(value, (staticmethod, classmethod)):
            value, own = value.__func__, own.__func__
        if isinstance(value, property):
            value, own = value.fget, own.fget
        if isinstance(value, types.FunctionType) and value.__module__ == getattr(old, "__module__", old.__name__):
            own.__code__, own.__defaults__, own.__kwdefaults__ = (
                value.__code__,
                value.__defaults__,
                value.__kwdefaults__,
            )
        elif isinstance(value, type) and value.__module__ == old.__name__:
            patch(own, value)
        elif isinstance(old, types.ModuleType) and isinstance(own, (int, float, str, list, tuple, frozenset, dict)):
            setattr(old, name, value)


def _found(outcome: str) -> bool:
    """Whether tests noticed a mutant."""
    return outcome.startswith("tests")


def _change(entry: dict[str, Any]) -> tuple[str, str, str]:
    return entry["operator"], entry["before"], entry["after"]


class Mutation:
    """A pytest plugin that runs the collected tests once, and then again and again over the mutants."""

    def __init__(self, paths: list[Path], log: Path) -> None:
        self.paths, self.log = paths, log
        self.failed = ""
        self.lines: dict[str, set[tuple[str, int]]] = {}
        self.seconds: dict[str, float] = {}
        self.traced: dict[tuple[str, int], Any] = {}  # by test and number of the call in it
        self.item, self.calls = "", 0

    def pytest_collection_modifyitems(self) -> None:
        self._trace_once()

    def _trace_once(self) -> None:
        programs = importlib.import_module("tests.support.programs")
        for name in ("trace", "export"):
            self._once(getattr(programs, name), name)

    def _once(self, original: Any, name: str) -> None:
        def traced(*args: Any, **options: Any) -> Any:
            key = self.item, self.calls
            self.calls += 1
            if key not in self.traced:
                self.traced[key] = original(*args, **options)
            return self.traced[key]

        for module in list(sys.modules.values()):
            if vars(module).get(name) is original:
                setattr(module, name, traced)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report.nodeid

    def _run(self, item: pytest.Item, following: pytest.Item | None) -> None:
        self.item, self.calls = item.nodeid, 0
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        folder = str(ROOT / "passes") + os.sep
        for i, item in enumerate(session.items):
            found = self.lines[item.nodeid] = set()

            def local(frame: Any, event: str, arg: Any, found: Any = found) -> Any:
                found.add((frame.f_code.co_filename, frame.f_lineno))
                return local

            def tracer(frame: Any, event: str, arg: Any) -> Any:
                return local if frame.f_code.co_filename.startswith(folder) else None

            start = time.process_time()
            sys.settrace(tracer)
            self._run(item, session.items[i + 1] if i + 1 < len(session.items) else None)
            sys.settrace(None)
            self.seconds[item.nodeid] = time.process_time() - start
            if self.failed:
                sys.exit(f"{self.failed} fails without any mutant")
        covered: dict[str, list[int]] = {}
        for name, line in sorted(set().union(*self.lines.values())):
            covered.setdefault(os.path.relpath(name, ROOT), []).append(line)
        self.log.with_suffix(".lines").write_text(json.dumps(covered))
        self._all_mutants(session)
        return True

    def _all_mutants(self, session: pytest.Session) -> None:
        found = [(path, *mutant) for path in self.paths for mutant in mutants(path.read_text())]
        random.Random(0).shuffle(found)
        first, last = (int(x) if x else None for x in os.environ.get("MUTANTS", ":").split(":"))
        only = os.environ.get("LINE")
        done = self.log.read_text() if self.log.exists() else ""
        last_time = {_change(e): e["outcome"] for e in map(json.loads, done.splitlines())}
        again = {c for c, o in last_time.items() if not _found(o)} if os.environ.get("AGAIN") else None
        print(f"{len(found)} mutants, {len(session.items)} tests", flush=True)
        for path, name, line, changed in found[first:last]:
            source = path.read_text()
            before, after = source.splitlines(), changed.splitlines()
            # cosmic-ray's position is that of the whole expression, which may begin above the change
            line = next((i + 1 for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), line)
            entry = {"file": path.name, "line": line, "operator": name}
            entry |= {"before": before[line - 1].strip(), "after": after[line - 1].strip()}
            if (only and int(only) != line) or "@dataclass" in before[line - 1]:
                continue
            if json.dumps(entry)[:-1] in done if again is None else _change(entry) not in again:
                continue
            items = [i for i in session.items if (str(path), line) in self.lines[i.nodeid]]
            if not items and not in_function(source, line):  # a default: it takes part in calls
                items = session.items
            items = sorted(items, key=lambda i: self.seconds[i.nodeid])
            outcome = self._one(items, path, changed) if items else "not executed"
            with self.log.open("a") as log:
                log.write(json.dumps({**entry, "outcome": outcome}) + "\n")
            if not _found(outcome):
                print(f"{outcome}: {path.name}:{line} {name}: {entry['before']} -> {entry['after']}", flush=True)

    def _one(self, items: list[pytest.Item], path: Path, source: str) -> str:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1), os.dup2(null, 2)
            try:
                self._mutate(path, source)
                for item in items:
                    signal.setitimer(signal.ITIMER_PROF, 3 + 4 * self.seconds[item.nodeid])
                    self._run(item, None)
                    if self.failed:
                        os.write(writing, self.failed.encode())
                        break
                else:
                    os.write(writing, f"survived {len(items)} tests".encode())
            except BaseException as e:  # noqa: BLE001  whatever a mutant does, it is noticed
                os.write(writing, f"tests break: {e!r}"[:200].encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            said = pipe.read()
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            return "tests run too long" if os.WTERMSIG(status) == signal.SIGPROF else "tests crash"
        return said or "tests end"

    def _mutate(self, path: Path, source: str) -> None:
        module = sys.modules[f"mla_compile.passes.{path.stem}"]
        mutant = types.ModuleType(module.__name__)
        mutant.__file__ = str(path)
        exec(compile(source, str(path), "exec"), vars(mutant))  # noqa: S102  that is the point
        patch(module, mutant)


def main() -> None:
    paths, log, *rest = sys.argv[1:]
    plugin = Mutation([ROOT / p for p in paths.split(",")], Path(log).resolve())
    code = pytest.main(["-p", "no:cacheprovider", "-s", *rest], plugins=[plugin])
    sys.exit(f"pytest ended with {code!r}, {plugin.failed}" if code else 0)


if __name__ == "__main__":
    main()
