"""``mla-compile run`` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from mla_compile.cli.run import run
from tests.support import onnx_toy as toy

app = typer.Typer()


app.command("run")(run)


app.callback()(lambda: None)


def _cli(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(app, ["run", *arguments])


def test_the_command_shows_ids_as_they_come(tmp_path: Path):
    model = str(toy.build(tmp_path / "model"))
    result = _cli(model, "--prompt-ids", "3,5,7", "--max-new-tokens", "6")
    assert result.exit_code == 0, result.output
    assert result.stdout == " ".join(map(str, toy.greedy([3, 5, 7], 6))) + "\n"
    assert "tokens/s" in result.stderr
    assert "no native library: the model has no attention node" in result.stderr


def test_the_command_with_a_batch_and_json(tmp_path: Path):
    rows = [toy.greedy([3, 5, 7], 6), toy.greedy([1], 6)]
    eos = rows[1][2]
    rows = [toy.greedy([3, 5, 7], 6, eos=[eos]), toy.greedy([1], 6, eos=[eos])]
    model = str(toy.build(tmp_path / "model", eos_token_ids=(eos,)))
    arguments = (
        *(model, "--prompt-ids", "3,5,7", "--prompt-ids", "1", "--max-new-tokens", "6", "--provider", "cpu"),
        *("--no-verify-files", "--library", "none"),
    )
    result = _cli(*arguments)
    assert result.exit_code == 0, result.output
    shown = [line.split() for line in result.stdout.splitlines()]
    for row, tokens in enumerate(rows):
        column = [line[row] for line in shown]
        assert column == [*map(str, tokens), *["-"] * (len(shown) - len(tokens))]
    record = json.loads(_cli(*arguments, "--json").stdout)
    assert record["tokens"] == rows
    assert record["providers"] == ["CPUExecutionProvider"]
    assert record["library"] is None


def test_the_command_answers_what_cannot_be_done_in_one_line(tmp_path: Path):
    model = toy.build(tmp_path / "model")
    for arguments, says in (
        ((str(tmp_path), "--prompt-ids", "1"), "mla_compile.json is missing"),
        ((str(model), "--prompt-ids", "99"), "prompt 0 holds 99"),
        ((str(model), "--prompt-ids", "1", "--temperature", "-1"), "temperature is -1.0"),
        ((str(model), "--prompt-ids", "1", "--provider", "gpu"), "provider 'gpu' is not in this onnxruntime"),
    ):
        result = _cli(*arguments)
        assert result.exit_code == 2
        assert isinstance(result.exception, SystemExit)
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
        assert says in line
        assert result.stderr.splitlines()[-1] == line
    assert _cli(str(model), "--prompt-ids", "one").exit_code == 2
