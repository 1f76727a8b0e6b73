"""Files that no program reads until somebody needs them: the citation, forms for issues, the Makefile, the pages."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import mla_compile

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "CITATION.cff").exists(), reason="not a checkout")
PAGES = sorted(
    p for folder in ("", "docs", "docs/decisions", "benchmarks", "benchmarks/gpu", "benchmarks/results", "examples",
                     "examples/configs")
    for p in (ROOT / folder).glob("*.md")
)  # fmt: skip
CODE = re.compile(r"^```.*?^```[ ]*$|^    .*?$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(#[^)\s]*)?\)")
PATH = re.compile(r"`((?:mla_compile|passes|kernels|tests|benchmarks|examples|docs|\.ci)/[\w./*-]*)`")


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)  # what the format requires
    assert cited["version"] == mla_compile.__version__


@pytest.mark.parametrize("name", ["wrong-result", "not-absorbed", "slow"])
def test_a_form_for_issues_asks_for_what_is_needed(name):
    """Fields as GitHub wants them, and commands that exist."""
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"input", "textarea"}
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    text = str(form)
    assert "mla-compile --version" in text
    from mla_compile.cli.app import app

    known = {command.callback.__name__ for command in app.registered_commands}
    assert set(re.findall(r"`mla-compile (\w+)", text)) <= known


def test_every_verb_of_the_makefile_can_be_said(tmp_path):
    """``make`` knows each verb it lists, and each script it calls is there."""
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    verbs = [line.split()[0] for line in listed.splitlines() if line.strip() and not line.startswith("make")]
    assert {"test", "lint", "types", "docs", "demo", "gpu-dry-run"} <= set(verbs)
    said = subprocess.run(["make", "-n", *verbs], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for script in re.findall(r"(?:\.ci|benchmarks)/[\w/.]+", said):
        assert (ROOT / script).exists(), script


def test_the_package_says_that_it_is_typed():
    assert (Path(mla_compile.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_names_files_that_exist(page):
    """Links and headings that lead somewhere, paths of files that have not moved."""
    text = CODE.sub("", page.read_text())
    for path, anchor in LINK.findall(text):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor[1:] in _anchors(target), f"{path}{anchor}"
    missing = [path for path in PATH.findall(text) if not list(ROOT.glob(path.rstrip("/")))]
    assert missing == []


RECORD = re.compile(
    r"# (\d{3}): .+\n\nStatus: (?:accepted|superseded by \d{3})\n\n"
    r"\*\*Decision\.\*\* .+?\n\n\*\*Why\.\*\* .+?(?:\n\n\*\*Would change it\.\*\* .+?)?\n",
    re.DOTALL,
)


def test_a_decision_is_a_short_record_with_a_number_of_its_own():
    records = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [path.name[:3] for path in records] == [f"{i + 1:03}" for i in range(len(records))]
    for path in records:
        text = path.read_text()
        found = RECORD.fullmatch(text)
        assert found is not None, path.name
        assert found[1] == path.name[:3]
        assert len(text.split()) <= 170, path.name


def test_the_documentation_is_at_most_35_000_words():
    """Tables of measurements are data, which benchmarks/results/README.md shows."""
    assert sum(len(page.read_text().split()) for page in (ROOT / "docs").rglob("*.md")) <= 35_000


def _anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    titles = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_has_the_commands_that_ci_runs():
    readme, script = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    for command in ('pip install ".[demo]" && mla-compile demo', 'pip install -e ".[test]" && pytest'):
        assert f"\n    {command}\n" in readme
        assert f"step '{command}'" in script
