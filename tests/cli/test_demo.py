"""The program itself, and ``mla-compile demo``."""

from __future__ import annotations

import functools
import io
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner, Result

import mla_compile
from mla_compile.cli import common
from mla_compile.cli.app import app
from mla_compile.core.measuring import Times
from mla_compile.errors import MlaCompileError
from mla_compile.report.report import Report
from mla_compile.workbench import demo
from mla_compile.workbench.demo import Agreement, DemoResult, DemoSettings, Timing


def _cli(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(app, list(arguments))


def _timing(context: int, spread: float = 0.0, **medians: float) -> Timing:
    return Timing(context, {n: Times(m, m, m - spread, m + spread, 9, m, m) for n, m in medians.items()})


def test_the_command_line_answers_bad_values():
    result = _cli("demo", "--dtype", "int8")
    assert result.exit_code == 2
    assert "expected one of float32, bfloat16, float16" in result.stderr


def test_version_and_help():
    assert _cli("--version").stdout.strip() == mla_compile.__version__
    assert "demo" in _cli("--help").stdout
    script = "import sys; sys.argv = ['mla-compile', '--version']; import mla_compile.__main__ as m; m.main(); "
    done = subprocess.run(
        [sys.executable, "-c", script + "print('torch' in sys.modules)"], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == [mla_compile.__version__, "False"]


@pytest.mark.parametrize("command", ["demo", "explain", "plan", "bench", "export", "run", "serve"])
def test_help_fits_a_terminal_of_80_columns_and_shows_what_is_typed(command: str):
    shown = (
        CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1", "TERMINAL_WIDTH": "80"})
        .invoke(app, [command, "--help"])
        .stdout
    )
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    names = [name for p in get_command(app).commands[command].params for name in (*p.opts, *p.secondary_opts)]
    assert not [name for name in names if name.startswith("--") and name not in shown]
    options = [line for line in shown.splitlines() if " --" in line and "MODEL" not in line]
    assert not [line for line in options if any(word in line for word in ("<str>", "<int>", "<float>"))]


def test_tokens_that_differ_fail_the_command(monkeypatch: pytest.MonkeyPatch):
    def run(settings: DemoSettings, progress: Callable[[str], None]) -> DemoResult:
        wrong = Agreement((1, 2), first_difference=1, tie=False, logits_error=0.3, tolerance=1e-4)
        return DemoResult(settings, Report(()), wrong, (_timing(512, eager=3.0, inductor=2.0, mla=1.0),))

    monkeypatch.setattr(demo, "run", run)
    result = _cli("demo")
    assert result.exit_code == 1
    assert "tokens differ from step 2 of 2, and rounding does not explain it" in result.stdout


def test_what_the_spread_hides_is_no_figure_and_no_digit_is_lost(monkeypatch: pytest.MonkeyPatch):
    """On a busy machine a longer context may take less time than a shorter one; a narrow terminal shows every digit."""
    agreed = Agreement((1,), None, tie=False, logits_error=0.0, tolerance=1e-4)
    timings = (
        _timing(512, 0.25, eager=5.0, inductor=4.0, mla=1234.5),
        _timing(2512, 0.25, eager=4.0, inductor=4.3, mla=1236.5),
    )
    monkeypatch.setattr(demo, "run", lambda settings, progress: DemoResult(settings, Report(()), agreed, timings))
    for columns in ("40", "100"):
        shown = CliRunner(env={"COLUMNS": columns, "NO_COLOR": "1"}).invoke(app, ["demo"]).stdout
        rows = [line.replace("│", " ").replace("┃", " ").split() for line in shown.splitlines()]
        assert ["512", "5.00", "4.00", "1234.50", "0.0x", "0.0x"] in rows
        assert ["per", "1,000", "more", "within", "the", "spread", "within", "the", "spread", "1.00"] in rows
    terminal = Console(file=io.StringIO(), width=30, force_terminal=True, color_system=None)
    monkeypatch.setattr(common, "out", terminal)
    CliRunner(env={"NO_COLOR": "1"}).invoke(app, ["demo"])
    assert "context: 512\neager: 5.00\nInductor: 4.00\nmla_compile: 1234.50\n" in terminal.file.getvalue()


def test_the_demo_absorbs_every_layer_and_keeps_the_tokens(monkeypatch: pytest.MonkeyPatch):
    """With graphs that run as they are, and the model in place of Inductor's: CI runs the command itself."""
    eager = functools.partial(mla_compile.optimize, codegen="eager", verify=False)  # the tokens are compared below
    monkeypatch.setattr(mla_compile, "optimize", eager)
    trace = torch.compile

    @functools.wraps(trace)
    def by_our_backend_alone(model: Any, **how: Any) -> Any:
        return trace(model, **how) if how else model

    monkeypatch.setattr(torch, "compile", by_our_backend_alone)
    real, made = demo.run, []

    def run_once(settings: DemoSettings, progress: Callable[[str], None]) -> DemoResult:
        made.append(real(settings, progress) if not made else made[0])
        return made[0]

    monkeypatch.setattr(demo, "run", run_once)
    result = _cli("demo", "--quick", "--contexts", "256")
    assert result.exit_code == 0, result.output
    assert "tokens: all 8 equal to the original's" in result.stdout
    assert "absorbed" in result.stdout
    result = _cli("demo", "--quick", "--contexts", "256", "--json")
    record = json.loads(result.stdout)
    assert record["report"]["counts"] == {"absorbed": 1, "kept": 0, "refused": 0, "not_mla": 0}
    row = 4 * (512 + 64)  # transformers keeps the latent, too, and makes K and V of it in every step
    assert record["bytes_per_cached_token"] == {
        "held": {"before": row, "after": row},
        "read": {"before": 4 * 16 * (128 + 64 + 128), "after": row},
    }
    assert record["agreement"]["ok"]
    (timing,) = record["timings"]
    assert timing["context"] == 256
    assert min(timing["ms"][name]["median"] for name in ("eager", "inductor", "mla")) > 0


def test_without_transformers_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MlaCompileError, match="pip install"):
        demo.build(DemoSettings())
    result = _cli("demo")
    assert result.exit_code == 2
    assert "transformers" in result.stderr
