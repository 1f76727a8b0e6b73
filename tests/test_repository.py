"""Files that no program reads until somebody needs them: the citation, forms for issues, the verbs of the Makefile."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import mla_compile

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "CITATION.cff").exists(), reason="not a checkout")


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
