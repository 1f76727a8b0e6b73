"""What the tests and the package import is what `pip install ".[test]"` brings, whatever a developer has beside it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
OWN = {"benchmarks", "common", "examples", "mla_compile", "tests"}  # benchmarks/common.py is found beside its script


def _brought(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> None:
    """Add to `seen` what the installed distribution `name` with `extras` requires, and what that requires."""
    name = canonicalize_name(name)
    if (name, extras) in seen:
        return
    seen.add((name, extras))
    try:
        required = metadata.requires(name) or []
    except metadata.PackageNotFoundError:  # a requirement of another platform
        return
    for requirement in map(Requirement, required):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            _brought(requirement.name, frozenset(requirement.extras), seen)


def _at_import(body: list[ast.stmt]) -> Iterator[str]:
    """The modules that are imported with the file: what a function or a `try` imports may be missing."""
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module.partition(".")[0]


@pytest.mark.parametrize("room", ["mla_compile", "tests"])
def test_what_is_imported_is_required(room):
    try:
        metadata.distribution("mla-compile")
    except metadata.PackageNotFoundError:
        pytest.skip("the checkout is not installed")
    seen: set[tuple[str, frozenset[str]]] = set()
    _brought("mla-compile", frozenset({"test"}), seen)
    brought, distributions = {name for name, _ in seen}, metadata.packages_distributions()
    missing = {}
    for path in sorted((ROOT / room).rglob("*.py")):
        for module in _at_import(ast.parse(path.read_text()).body):
            names = {canonicalize_name(name) for name in distributions.get(module, [module])}
            if not (module in sys.stdlib_module_names or module in OWN or names & brought):
                missing[module] = str(path.relative_to(ROOT))
    assert not missing
