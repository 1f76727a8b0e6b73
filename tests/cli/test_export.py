"""``mla-compile export`` and ``mla-compile run``, and the example, as a user types them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mla_compile.cli.app import app
from mla_compile.onnx.exported import Exported, Verification
from mla_compile.report.report import Report
from tests.support import models
from tests.support.tiers import full

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


def test_what_is_typed_reaches_the_export_and_its_text_is_shown(here, monkeypatch):
    """The export itself: tests/onnx/."""
    asked = {}

    def export(model, directory, **how):
        asked.update(how, model=type(model).__name__, directory=directory)
        return Exported(directory, how["profile"], Report(()), Verification(0.0, 1e-4, tokens=9, equal_tokens=9))

    monkeypatch.setattr("mla_compile.cli.export.export_onnx", export)
    typed = ("--profile", "inplace", "--no-prefill", "--dtype", "float16", "--fold", "never", "--no-verify")
    done = call("export", "python:my_models:make", "model", *typed, "--sparse", "never")
    assert done.exit_code == 0, done.output
    del asked["progress"]
    assert asked == {
        "model": "MiniCPM3ForCausalLM", "directory": Path("model"), "profile": "inplace", "prefill": False,
        "dtype": "float16", "fold": "never", "sparse": "never", "verify": False, "overwrite": False,
    }  # fmt: skip
    assert "profile inplace\n" in done.stdout
    assert "greedy tokens equal" in done.stdout
    assert "written to model" in done.stdout


@full("command")
def test_export_and_run(here):
    """A model of a Python function, exported and run on the tokens it would generate itself."""
    done = call("export", "python:my_models:make", "model", "--profile", "inplace", "--no-prefill")
    assert done.exit_code == 0, done.output
    assert "greedy tokens equal" in done.stdout
    inputs = models.prompt(1, 9, 0)
    expected, _ = models.greedy(models.build("minicpm3", num_hidden_layers=1), inputs, 6)
    ids = ",".join(map(str, inputs["input_ids"][0].tolist()))
    ran = call("run", "model", "--prompt-ids", ids, "--max-new-tokens", "6", "--provider", "cpu")
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
