"""Commands of the documentation and the examples, typed as they stand there, and what they print holds."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from mla_compile.cli.app import app
from tests.support.commands import ROOT, RUN, STATUS
from tests.support.explaining import trace_once
from tests.support.tiers import full

PROGRAMS = {
    "python": [sys.executable],
    "mla-compile": [sys.executable, "-m", "mla_compile"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
}
NEEDS = {"onnx_generate": "onnxruntime", "lora": "peft"}
SAME = "the same as the original's: True"
SMALLER = {
    "python examples/train_tiny.py": "--steps=12 --context=20 --windows=3",
    # Through Inductor: tests/distributed/test_context.py, and the same command without a shared cache.
    "torchrun --nproc-per-node 2 examples/torchrun_generate.py --share-cache": "--codegen=eager",
}
"""What is added to a command that would take minutes otherwise."""

WHOLE = "mla-compile demo"
"""What .ci/run types itself, and what differs from ``demo --quick`` in sizes alone."""

HERE = [one for one in RUN if one.startswith("mla-compile ") and not one.startswith("mla-compile demo")]
"""What needs no process of its own: tests/cli/ starts the program, and a process is as long on its way as at work."""


def _runs(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    program, *arguments = shlex.split(f"{command} {SMALLER.get(command, '')}")
    (folder / "examples").symlink_to(ROOT / "examples")
    return subprocess.run(
        [*PROGRAMS[program], *arguments], cwd=folder, capture_output=True, text=True, timeout=1800, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "NO_COLOR": "1"},
    )  # fmt: skip


@full("command")
@pytest.mark.wholly
@pytest.mark.parametrize("command", [one for one in RUN if one not in (WHOLE, *HERE)])
def test_a_command_does_what_the_page_says(command, tmp_path):
    for name, library in NEEDS.items():
        if name in command and util.find_spec(library) is None:
            pytest.skip(f"needs {library}")
    if command.startswith("torchrun") and not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch has no gloo here")
    if "compile_backend" in command and not _is_installed():
        pytest.skip("torch finds the backend by name through the installed package's entry point")
    done = _runs(command, tmp_path)
    assert done.returncode == STATUS.get(command, 0), done.stderr[-4000:]
    assert RUN[command] in done.stdout
    assert ": False" not in done.stdout
    if command in PRINTED:
        PRINTED[command](done.stdout, done.stderr)


@full("command")
def test_commands_that_only_look_at_a_model_say_what_the_page_says(tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    trace_once(monkeypatch)  # three of them ask about one model
    for command in HERE:
        done = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(app, shlex.split(command)[1:])
        assert done.exit_code == STATUS.get(command, 0), done.output
        assert RUN[command] in done.stdout
    assert (tmp_path / "deepseek-v3.html").stat().st_size > 10_000


def _of_ranks(out: str) -> list[str]:
    return re.split(r"^rank . of 2: ", out, flags=re.MULTILINE)[1:]


def _hf_generate(out: str, _: str) -> None:
    assert out.count(SAME) == 2
    assert "4 absorbed" in out  # two layers in a step of each kind of cache


def _torchrun_generate(out: str, _: str) -> None:
    first, second = _of_ranks(out)
    for one in (first, second):
        assert "the same as one process's: True" in one
        assert one.count("absorbed (chained)") == 1
    assert first.splitlines()[0] == second.splitlines()[0]


def _torchrun_data_parallel(out: str, _: str) -> None:
    first, second = _of_ranks(out)
    for one in (first, second):
        assert "the same as one process's: True" in one
        assert " 2 absorbed" in one
        assert "reduce_scatter_tensor" in one
    lengths = [{len(tokens) for tokens in ast.literal_eval(one.splitlines()[0])} for one in (first, second)]
    assert lengths == [{16}, {7}], "the second ends sooner, and goes on for the first"


def _compile_backend(out: str, said: str) -> None:
    assert out.count(SAME) == 2
    assert [line.count(" 2 absorbed") for line in said.splitlines() if "attention sites" in line] == [1, 1]


def _from_scratch(out: str, _: str) -> None:
    difference = re.search(r"largest difference: (\S+)", out)
    assert difference is not None
    assert float(difference[1]) < 1e-5


def _aoti_package(out: str, _: str) -> None:
    assert "1 absorbed" in out


def _lora(out: str, _: str) -> None:
    lines = dict(re.findall(r"(.*): (\[.*\]), the same as the original's: True", out))
    assert list(lines) == ["without adapters", "attached, still zero", "trained", "merged"]
    assert lines["without adapters"] == lines["attached, still zero"] != lines["trained"] == lines["merged"]
    assert " 0 absorbed" not in out


def _speculative(out: str, _: str) -> None:
    calls = [(int(n), form, int(count)) for n, form, count in re.findall(r"calls of (\d+) tokens, (\w+): (\d+)", out)]
    assert calls[0] == (17, "expanded", 1)  # the prompt and the first guesses
    assert {form for _, form, _ in calls[1:]} == {"absorbed"}
    assert calls[1][0] == 6
    accepted, guessed = map(int, re.findall(r"(\d+) of (\d+) guesses accepted", out)[0])
    assert 0 < accepted < guessed
    assert accepted + sum(count for _, _, count in calls) == 48


def _train_tiny(out: str, _: str) -> None:
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert [row[:2] for row in rows] == [
        [dtype, form]
        for dtype in ("float32", "bfloat16")
        for form in ("as trained", "optimized, fold=never", "optimized, fold=always")
    ]
    assert {row[2] for row in rows} == {"", "3 of 3"}
    assert 1 < float(rows[0][3]) < 200, "256 without training"
    assert all(abs(float(row[4])) < (1e-6 if row[0] == "float32" else 1e-2) for row in rows)


PRINTED: dict[str, Callable[[str, str], None]] = {
    "python examples/aoti_package.py": _aoti_package,
    "python examples/compile_backend.py": _compile_backend,
    "python examples/from_scratch.py": _from_scratch,
    "python examples/hf_generate.py": _hf_generate,
    "python examples/lora.py": _lora,
    "python examples/speculative.py": _speculative,
    "python examples/train_tiny.py": _train_tiny,
    "torchrun --nproc-per-node 2 examples/torchrun_data_parallel.py": _torchrun_data_parallel,
    "torchrun --nproc-per-node 2 examples/torchrun_generate.py": _torchrun_generate,
}
"""What else the output of a command shows, given with what it says on stderr."""


def _is_installed() -> bool:
    try:
        metadata.distribution("mla-compile")
    except metadata.PackageNotFoundError:
        return False
    return True
