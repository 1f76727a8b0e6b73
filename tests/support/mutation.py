"""Mutation testing: which changes of the product do the tests not notice?

    pip install cosmic-ray
    pytest -n 2 -p tests.support.executed --executed lines                  (Python 3.12 or newer)
    python -m tests.support.mutation lines mutants.jsonl --modules mla_compile/passes/cache/recipe.py
    python -m tests.support.mutation lines mutants.jsonl --sample 400 --seed 1 -- -m "full or not full"

``lines`` says which tests execute a line. A test that it does not know, for example of another tier, counts as
executing what the known tests of its function execute, or else those of its file. Each mutant (the operators are
cosmic-ray's) gets a fork of this process, in which the module's functions are given the mutant's code. The tests that
execute the changed line run there, those of its own room and the quickest first, until one fails or the seconds for a
mutant are over. ``--sample`` draws mutants from random modules, at most ten of each. Mutants come in a random order and
are appended to the log, so that a run may be cut short and continued. ``--part 1/2`` takes every second one, for two
processes with a log each. ``--again OTHER`` takes the mutants that survived according to another log: for new tests, or
for the tests of another checkout or tier. What follows ``--`` are options of pytest.
"""

# ruff: noqa: T201  it is a program
from __future__ import annotations

import argparse
import ast
import functools
import importlib
import itertools
import json
import os
import random
import signal
import sys
import time
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.executed import Lines, read, union

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


def mutants(source: str, draw: random.Random | None = None) -> Iterator[tuple[str, int, str]]:
    """Operator, line and source of every mutant; in a random order where there is a ``draw``."""
    import parso
    from cosmic_ray.operators.provider import OperatorProvider

    original = meaning(source)
    provider = {
        **{name: OperatorProvider()[name] for name in OPERATORS},
        "Membership": Membership,
        "Quantifier": Quantifier,
    }
    tree = parso.parse(source)
    places = [(name, k) for name in provider for k in range(count(provider[name](), tree))]
    if draw is not None:
        draw.shuffle(places)
    for name, occurrence in places:
        tree = parso.parse(source)
        try:
            line = apply(provider[name](), tree, occurrence)
            changed = meaning(tree.get_code()) != original
        except (SyntaxError, AttributeError):  # the latter from ExceptionReplacer, for a dotted name in a tuple
            continue
        if changed:
            yield name, line, tree.get_code()


def count(operator: Any, tree: Any) -> int:
    """The places that an operator can change."""
    return sum(len(list(operator.mutation_positions(node))) for node in nodes(tree))


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


def functions(value: Any) -> list[types.FunctionType]:
    """The functions behind a name: of methods, properties, and under decorators that keep what they wrap."""
    if isinstance(value, (staticmethod, classmethod)):
        return functions(value.__func__)
    if isinstance(value, property):
        return [f for part in (value.fget, value.fset) if part is not None for f in functions(part)]
    if isinstance(value, functools.cached_property):
        return functions(value.func)
    wrapped = getattr(value, "__wrapped__", None)
    if wrapped is not None:
        return functions(wrapped)
    return [value] if isinstance(value, types.FunctionType) else []


def patch(old: Any, new: Any) -> None:
    """Gives the functions of a module or class the code of another."""
    home = getattr(old, "__module__", old.__name__)
    for name, value in vars(new).items():
        own = vars(old).get(name)
        for ours, theirs in zip(functions(own), functions(value), strict=False):
            if theirs.__module__ == home and len(ours.__code__.co_freevars) == len(theirs.__code__.co_freevars):
                ours.__code__, ours.__defaults__ = theirs.__code__, theirs.__defaults__
                ours.__kwdefaults__ = theirs.__kwdefaults__
        if hasattr(own, "cache_clear"):
            own.cache_clear()
        if isinstance(value, type) and isinstance(own, type) and value.__module__ == old.__name__:
            patch(own, value)
        elif isinstance(old, types.ModuleType) and isinstance(own, (int, float, str, list, tuple, frozenset, dict)):
            setattr(old, name, value)


def _found(outcome: str) -> bool:
    """Whether tests noticed a mutant."""
    return outcome.startswith("tests")


def _groups(test: str) -> tuple[str, str]:
    """The function and the file of a test."""
    return test.split("[")[0], test.split("::")[0]


def _change(entry: dict[str, Any]) -> tuple[str, str, int, str]:
    return entry["file"], entry["operator"], entry["line"], entry["after"]


def sample(executed: Lines, count: int, seed: int) -> list[tuple[Path, str, int, str]]:
    """Mutants of random modules that some test executes: a module is as likely as it has lines."""
    draw = random.Random(seed)
    weights = {name: bits.bit_count() for name, bits in executed.items() if bits and (ROOT / name).exists()}
    found: list[tuple[Path, str, int, str]] = []
    while len(found) < count and weights:
        (name,) = draw.choices(list(weights), list(weights.values()))
        del weights[name]
        found += [(ROOT / name, *mutant) for mutant in itertools.islice(mutants((ROOT / name).read_text(), draw), 10)]
    return found[:count]


class Mutation:
    """A pytest plugin that runs the collected tests over mutants."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.log = given, Path(given.log).resolve()
        self.executed = read(given.lines)
        self.failed = ""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Guess what tests without recorded lines execute."""
        alike: dict[str, dict[str, tuple[float, Lines]]] = defaultdict(dict)
        for test, found in self.executed.items():
            for group in _groups(test):
                alike[group][test] = found
        lines = {group: union(tests) for group, tests in alike.items()}
        for item in session.items:
            if item.nodeid not in self.executed:
                group = next((g for g in _groups(item.nodeid) if g in alike), None)
                if group is not None:
                    self.executed[item.nodeid] = max(t for t, _ in alike[group].values()), lines[group]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report.nodeid

    def _run(self, item: pytest.Item, following: pytest.Item | None) -> None:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def _chosen(self) -> list[tuple[Path, str, int, str]]:
        if self.given.sample:
            found = sample(union(self.executed), self.given.sample, self.given.seed)
        else:
            paths = [ROOT / name for name in self.given.modules.split(",")]
            found = [(path, *mutant) for path in paths for mutant in mutants(path.read_text())]
        random.Random(self.given.seed).shuffle(found)
        part, parts = map(int, self.given.part.split("/"))
        return found[part - 1 :: parts]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        first = next(iter(session.items), None)
        if first is not None:
            self._run(first, None)  # imports what is imported on first use
        done = {_change(json.loads(e)) for e in self.log.read_text().splitlines()} if self.log.exists() else set()
        wanted = None
        if self.given.again:
            before = map(json.loads, Path(self.given.again).read_text().splitlines())
            wanted = {_change(e) for e in before if not _found(e["outcome"])}
        chosen = self._chosen()
        print(f"{len(chosen)} mutants, {len(items)} tests", flush=True)
        for path, name, line, changed in chosen:
            source = path.read_text()
            before, after = source.splitlines(), changed.splitlines()
            # cosmic-ray's position is that of the whole expression, which may begin above the change
            line = next((i + 1 for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), line)
            entry = {"file": str(path.relative_to(ROOT)), "line": line, "operator": name}
            entry |= {"before": before[line - 1].strip(), "after": after[line - 1].strip()}
            if "@dataclass" in before[line - 1] or _change(entry) in done:
                continue
            if wanted is not None and _change(entry) not in wanted:
                continue
            tests = self._tests(entry["file"], line, items, source)
            outcome = self._one(tests, path, changed) if tests else "not executed"
            with self.log.open("a") as log:
                log.write(json.dumps({**entry, "outcome": outcome}) + "\n")
            if not _found(outcome):
                print(f"{outcome}: {entry['file']}:{line} {name}: {entry['before']} -> {entry['after']}", flush=True)
        return True

    def _tests(self, file: str, line: int, items: dict[str, pytest.Item], source: str) -> list[pytest.Item]:
        """Those that execute a line, those of the module's room first."""
        inside = in_function(source, line)
        rooms = [part for part in Path(file).parts[:-1] if part != "mla_compile"]

        def executes(lines: Lines) -> bool:  # a default is executed at import, and takes part in calls
            bits = lines.get(file, 0)
            return bool(bits >> line & 1 if inside else bits)

        found = [(test, seconds) for test, (seconds, lines) in self.executed.items() if executes(lines)]
        found = [(test, seconds) for test, seconds in found if test in items]
        found.sort(key=lambda one: (sum(room in one[0].split("::")[0] for room in rooms) == 0) * 3 + one[1])
        return [items[test] for test, _ in found]

    def _one(self, items: list[pytest.Item], path: Path, source: str) -> str:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1), os.dup2(null, 2)
            ends = time.process_time() + self.given.seconds
            try:
                self._mutate(path, source)
                for count, item in enumerate(items):
                    if time.process_time() > ends:
                        os.write(writing, f"survived {count} of {len(items)} tests".encode())
                        break
                    signal.setitimer(signal.ITIMER_PROF, 10 + 4 * self.executed[item.nodeid][0])
                    self._run(item, None)
                    if self.failed:
                        os.write(writing, f"tests: {self.failed}".encode())
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
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        module = importlib.import_module(name)
        mutant = types.ModuleType(module.__name__)
        mutant.__file__, mutant.__package__ = str(path), module.__package__
        exec(compile(source, str(path), "exec"), vars(mutant))  # noqa: S102  that is the point
        patch(module, mutant)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("lines"), parser.add_argument("log")
    parser.add_argument("--modules", default=""), parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0), parser.add_argument("--part", default="1/1")
    parser.add_argument("--seconds", type=float, default=120.0), parser.add_argument("--again", default="")
    ours, of_pytest = sys.argv[1:], []
    if "--" in ours:
        ours, of_pytest = ours[: ours.index("--")], ours[ours.index("--") + 1 :]
    plugin = Mutation(parser.parse_args(ours))
    code = pytest.main(["-p", "no:cacheprovider", "-p", "no:xdist", "-s", *of_pytest], plugins=[plugin])
    sys.exit(f"pytest ended with {code!r}, {plugin.failed}" if code else 0)


if __name__ == "__main__":
    main()
