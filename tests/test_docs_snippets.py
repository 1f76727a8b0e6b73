"""The snippets of the documentation do what the text beside them says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mla_compile
from mla_compile.codes import CODES, Code, section
from mla_compile.passes.linear.rules import RULES
from mla_compile.pipeline import rewrites
from tests.support.tiers import full

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TEXT = (DOCS / "refusals.md").read_text()
HEAD, *REST = re.split(r"^## (\w+)$", TEXT, flags=re.MULTILINE)
SECTIONS = dict(zip(REST[::2], REST[1::2], strict=True))
NO_SITE_ENDS_THERE = {"training", "too_many_sources"}  # as their text says
SHARED: dict[str, object] = {}  # a section uses what those before it define, as a reader would


def execute(source: str) -> set[str]:
    """Every code in the report that the snippet makes."""
    exec(compile(source, "docs/refusals.md", "exec"), SHARED)  # noqa: S102
    sites = SHARED["report"].sites  # type: ignore[attr-defined]
    return {str(site.code) for site in sites} | {str(part.code) for site in sites for part in site.kept}


def test_every_code_has_a_section():
    assert list(SECTIONS) == [str(code) for code in CODES]
    assert section(Code.NONLINEAR) == "docs/refusals.md#nonlinear"


# One test: sections share names, and most of the time would go into starting Dynamo once per test process.
@full("command")  # each code has its tests in passes/
@pytest.mark.filterwarnings("ignore:gradients are enabled")
@pytest.mark.filterwarnings("ignore:a graph with attention is compiled in its original form")
def test_refusals(capsys, monkeypatch):
    # A snippet replaces a pass and puts it back; if it fails in between, other tests would run the wrong one.
    monkeypatch.setattr(rewrites, "absorb_site", rewrites.absorb_site)
    SHARED.clear()
    (first,) = BLOCK.findall(HEAD)
    assert execute(first) == {"absorbed"}
    for code, text in SECTIONS.items():
        if code == "absorbed":
            continue
        shown, *fixed = BLOCK.findall(text)
        found = execute(shown)
        if code in NO_SITE_ENDS_THERE:
            assert code not in found, f"{code} has a site now: say so in docs/refusals.md"
        else:
            assert code in found, f"{code}: {found}"
        for snippet in fixed:
            assert execute(snippet) == {"absorbed"}, code


def test_a_rule_for_an_operator():
    page = BLOCK.findall((DOCS / "extending.md").read_text())
    before = dict(RULES)
    try:
        exec(compile("\n".join(page), "docs/extending.md", "exec"), {})  # noqa: S102
    finally:
        RULES.clear()
        RULES.update(before)


def test_the_quickstart(capsys):
    page = (DOCS / "quickstart.md").read_text()
    given, use = BLOCK.findall(page)
    eager = use.replace("optimize(model)", 'optimize(model, codegen="eager")')  # Inductor has tests enough
    assert eager != use
    found: dict[str, object] = {}
    exec(compile(given + eager, "docs/quickstart.md", "exec"), found)  # noqa: S102
    assert found["report"].absorbed == 1  # type: ignore[attr-defined]
    assert "absorbed" in capsys.readouterr().out


def test_every_public_name_is_in_the_reference():
    page = (DOCS / "api.md").read_text()
    missing = [
        n for n in mla_compile.__all__ if f"::: mla_compile.{n}\n" not in page and f"`mla_compile.{n}`" not in page
    ]
    assert missing == []
