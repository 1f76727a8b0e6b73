"""Every command of the README, the documentation and the examples has a test, or a reason why it has none."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.commands import ELSEWHERE, EXAMPLES, NOT_RUN, ROOT, RUN, commands_of, is_pytest, pages

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="not a checkout")


def test_every_command_has_a_test_or_a_reason():
    typed = {one: page.name for page in pages() for one in commands_of(page) if not is_pytest(one)}
    tables = [*RUN, *ELSEWHERE, *NOT_RUN]
    assert len(tables) == len(set(tables))
    assert {one: page for one, page in typed.items() if one not in tables} == {}, "new: see tests/support/commands.py"
    assert [one for one in tables if one not in typed and one != "mla-compile --version"] == [], "in no page any more"


def test_every_example_is_run():
    run = {
        re.sub(r".*examples/(\w+)\.py.*", r"\1", one)
        for one in (*RUN, *ELSEWHERE)
        if "examples/" in one and ".py" in one
    }
    assert run == {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert run > set(EXAMPLES)


@pytest.mark.parametrize("where", sorted(set(ELSEWHERE.values())))
def test_a_test_that_is_named_exists(where):
    path, name = where.split("::")
    tests = [one.name for one in ast.parse((ROOT / path).read_text()).body if isinstance(one, ast.FunctionDef)]
    assert name in tests


def test_what_runs_tests_names_what_exists():
    """Files, and variables that a test reads."""
    read = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    typed = {one for page in pages() for one in commands_of(page) if is_pytest(one)}
    assert len(typed) > 10
    for command in typed:
        for path in re.findall(r"tests/[\w/.]+", command):
            assert (ROOT / path).exists(), command
        for variable in re.findall(r"([A-Z_]+)=", command):
            assert f'"{variable}"' in read, command


def test_a_command_is_found_wherever_it_is_typed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Type `mla-compile demo --quick`, or `mla-compile explain` with a name:\n\n"
        "    pip install x && mla-compile plan a.json    # a comment\n    torchrun a.py [--share]\n\n    x = 1\n"
    )
    assert commands_of(page) == {
        "mla-compile demo --quick", "mla-compile plan a.json", "torchrun a.py", "torchrun a.py --share",
    }  # fmt: skip
