"""``mla-compile export`` and ``mla-compile run``, and the example, as a user types them."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from mla_compile.cli.app import app
from tests.support import models

FACTORY = """
from tests.support import models
def make():
    return models.build("minicpm3", num_hidden_layers=1)
def other():
    return 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    return tmp_path


def call(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_export_and_run(here):
    """A model of a Python function, exported and run on the tokens it would generate itself."""
    done = call("export", "python:my_models:make", "model", "--profile", "inplace", "--no-prefill")
    assert done.exit_code == 0, done.output
    assert "greedy tokens equal" in done.stdout
    inputs = models.prompt(1, 9, 0)
    expected, _ = models.greedy(models.build("minicpm3", num_hidden_layers=1), inputs, 12)
    ids = ",".join(map(str, inputs["input_ids"][0].tolist()))
    ran = call("run", "model", "--prompt-ids", ids, "--max-new-tokens", "12", "--provider", "cpu")
    assert ran.exit_code == 0, ran.output
    assert [int(t) for t in ran.stdout.split()] == expected[0].tolist()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("export", "nowhere", "out"), "there is no such file"),
        (("export", "python:my_models", "out"), "expected python:MODULE:FUNCTION"),
        (("export", "python:my_models:missing", "out"), "cannot be found"),
        (("export", "python:my_models:other", "out"), "returned int, expected a causal language model"),
        (("export", "broken.json", "out"), "is a config without weights"),
        (("export", "broken.json", "out", "--random-weights", "1"), "cannot be read as JSON"),
        (("export", "empty", "out"), "does not load"),
        (("export", "python:my_models:make", "out", "--profile", "portabel"), "did you mean 'portable'"),
        (("export", "python:my_models:make", "broken.json/out"), "cannot be written"),
        (("run", "nowhere", "--prompt-ids", "1,2"), "is not a directory"),
    ],
)
def test_what_cannot_be_done_is_one_line(here, arguments, text):
    (here / "broken.json").write_text("{")
    (here / "empty").mkdir()
    done = call(*arguments)
    assert done.exit_code == 2, done.output
    assert text in done.output
    assert "Traceback" not in done.output
    assert not (here / "out").exists()
