"""Every command with what a stranger gives it: one line that says what is wrong, an exit code, never a traceback."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from torch._inductor import config as inductor_config
from typer.testing import CliRunner

import mla_compile
from mla_compile.cli.app import app
from mla_compile.cli.common import EXIT_CODES
from mla_compile.models.survey import Survey
from mla_compile.report.report import Report
from mla_compile.workbench import bench
from tests.support import facts, onnx_toy
from tests.support.tiers import also

GROUPED = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
COMMANDS = {
    "demo": (),
    "explain": ("config.json",),
    "plan": ("config.json",),
    "bench": ("config.json",),
    "export": ("config.json", "out", "--random-weights", "1"),
    "run": ("model", "--prompt-ids", "1,2"),
}
WITH_A_SOURCE = [name for name in COMMANDS if name != "demo"]
SOURCES = {
    "nowhere": None,
    "empty file": b"",
    "broken": b'{"a": ',
    "binary": bytes(range(128, 256)) * 40,
    "list": b"[1]",
    "deep": b"[" * 200_000,
    "no fields": b"{}",
    "nan": json.dumps(GROUPED | {"hidden_size": float("nan")}).encode(),
    "huge": json.dumps(GROUPED | {"num_hidden_layers": 10**12}).encode(),
    "no depth": json.dumps(GROUPED | {"num_hidden_layers": "three", "vocab_size": "many"}).encode(),
    "text": json.dumps(GROUPED | {"num_attention_heads": "four"}).encode(),
}
TOO_LARGE, FINE = "1000000000000", {"1000000000000", "0"}
# Options with a number, and the values out of BAD that are fine there.
BAD = ("-1", "0", TOO_LARGE, "9" * 5000, "nan", "many", "")
NUMBERS = {
    ("demo", "--layers"): set(),
    ("demo", "--contexts"): set(),
    ("plan", "--context"): set(),
    ("plan", "--users"): set(),
    ("plan", "--tp"): set(),
    ("plan", "--dcp"): set(),
    ("plan", "--reserve"): {"0"},
    ("bench", "--contexts"): set(),
    ("bench", "--batch"): set(),
    ("bench", "--layers"): set(),
    ("bench", "--rounds"): set(),
    ("bench", "--seconds"): set(),
    ("bench", "--threads"): set(),
    ("export", "--random-weights"): FINE,
    ("run", "--max-new-tokens"): set(),
    ("run", "--temperature"): {*FINE, "9" * 5000},
    ("run", "--top-k"): FINE,
    ("run", "--top-p"): set(),
    ("run", "--seed"): FINE,
    ("run", "--prompt-ids"): {"0"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return onnx_toy.build(tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture
def here(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("config.json").write_text(json.dumps(GROUPED))
    Path("model").symlink_to(model)
    return tmp_path


def refused(arguments, code=2) -> str:
    """Run a command that ends with one line on stderr and nothing on stdout; the line."""
    done = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, list(arguments))
    assert done.exit_code == code, (arguments, done.output, done.exception)
    assert isinstance(done.exception, SystemExit), done.exception
    assert not done.stdout
    assert "Traceback" not in done.stderr
    assert not Path("out").exists()
    said = [line for line in done.stderr.splitlines() if line.startswith(("error:", "Usage:"))]
    assert len(said) == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("command", ["explain", "bench", "export", "run", *also("combination", "plan")])
def test_a_source_that_is_none(here, command, kind):
    source = "given.json"
    if SOURCES[kind] is not None:
        Path(source).write_bytes(SOURCES[kind])
    said = refused([command, source, *COMMANDS[command][1:]])
    assert source in said or kind in ("nan", "huge", "text", "no depth")


@pytest.mark.parametrize("command", WITH_A_SOURCE)
def test_a_directory_instead_of_a_file_and_the_other_way_round(here, command):
    Path("directory").mkdir()
    assert "directory" in refused([command, "directory", *COMMANDS[command][1:]])


@pytest.mark.parametrize(("command", "option"), NUMBERS)
def test_absurd_numbers(here, command, option):
    for value in BAD:
        if value not in NUMBERS[command, option]:
            said = refused([command, *COMMANDS[command], f"{option}={value}"])
            assert option.strip("-").partition("-")[0] in said


@pytest.mark.parametrize("command", ["bench", "export"])
def test_a_model_of_another_family_is_an_answer(here, monkeypatch, command):
    """Without the survey, which the tests of ``explain`` run. A graph that is not written is not translated to ONNX."""
    surveyed = Survey(facts.GROUPED, Report(()))
    monkeypatch.setattr(bench, "survey_config", lambda config, dtype: surveyed)
    monkeypatch.delattr("mla_compile.onnx.convert._to_onnx")
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [command, *COMMANDS[command]])
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit)
    said = " ".join(done.output.split())
    assert {
        "bench": "is GQA, not Multi-head Latent Attention: there is no latent to absorb and nothing to compare",
        "export": "no attention of this model can be decoded in absorbed form, so there is nothing to export: not_mla",
    }[command] in said
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("command", "library", "extra"),
    [
        ("demo", "transformers", "demo"),
        ("explain", "transformers", "demo"),
        ("plan", "transformers", "demo"),
        ("bench", "transformers", "demo"),
        ("export", "transformers", "demo"),
        ("export", "onnx", "onnx"),
        ("export", "onnxscript", "onnx"),
        ("run", "onnxruntime", "onnx"),
        ("plan", "matplotlib", "plot"),
        ("bench", "matplotlib", "plot"),
    ],
)
def test_a_missing_extra_is_named(here, monkeypatch, command, library, extra):
    monkeypatch.setitem(sys.modules, library, None)
    plot = ("--plot", "out.svg") if extra == "plot" else ()
    assert f'pip install "mla-compile[{extra}]"' in refused([command, *COMMANDS[command], *plot])


def test_a_missing_package_that_all_commands_need_is_named(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "mla_compile.cli.app", raising=False)
    monkeypatch.delitem(sys.modules, "mla_compile.cli.common", raising=False)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.table", None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("mla_compile", run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: rich is not installed: pip install mla-compile\n"


def test_a_module_or_a_function_that_fails_is_named(here, monkeypatch):
    Path("their_models.py").write_text("def fails():\n    raise KeyError('weights')\n")
    Path("their_broken.py").write_text("def fails(:\n")
    for name in ("their_models", "their_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for command in ("explain", "plan", "export"):
        rest = COMMANDS[command][1:]
        assert "raised KeyError: 'weights'" in refused([command, "python:their_models:fails", *rest])
        assert "cannot be imported: SyntaxError" in refused([command, "python:their_broken:fails", *rest])


def test_no_memory_and_an_interruption_end_a_command(here, monkeypatch):
    assert "layers is 0, expected at least 1" in refused(["demo", "--layers", "0", "--quick"])
    monkeypatch.setattr("mla_compile.workbench.demo.available_bytes", lambda: 1e9)
    assert "GiB of memory are free; ask for fewer" in refused(["demo", "--layers", "100"])
    for error, code, text in (
        (MemoryError("a lot"), 2, "not enough memory: a lot"),
        (KeyboardInterrupt(), 130, "inter"),
    ):

        def fails(*_, error=error):
            raise error

        monkeypatch.setattr("mla_compile.workbench.demo.run", fails)
        assert text in refused(["demo"], code)


def test_what_compares_with_inductor_needs_its_compiler(here, monkeypatch):
    monkeypatch.setattr(
        "mla_compile.cli.bench.subject",
        lambda config, notes, settings: bench.Subject(config, facts.V3, settings, notes),
    )
    with inductor_config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        assert "install g++, or name one in CXX" in refused(["demo"])
        assert "install g++, or name one in CXX" in refused(["bench", "--dims", "H=2 L=24 R=8 N=12 V=10 D=32"])


def test_output_that_cannot_be_written(here, monkeypatch):
    """A full disk is told; a reader who has enough, such as head, is none of our business."""
    monkeypatch.setattr("mla_compile.cli.plan.survey", lambda *_: Survey(facts.GROUPED, Report(())))
    for error, code, text in (
        (OSError(28, "No space left on device"), 2, "error: No space left on device"),
        (BrokenPipeError(32, "Broken pipe"), 1, ""),
    ):

        def fails(*_, error=error):
            raise error

        monkeypatch.setattr("mla_compile.cli.plan.print_json", fails)
        done = CliRunner().invoke(app, ["plan", "config.json", "--json"])
        assert done.exit_code == code
        assert isinstance(done.exception, SystemExit)
        assert done.stderr.strip() == text


def test_json_of_an_export_and_of_a_run(here, monkeypatch):
    """The two whose results are files or a stream otherwise."""
    ran = CliRunner().invoke(app, ["run", *COMMANDS["run"], "--json", "--max-new-tokens", "3"])
    assert ran.exit_code == 0, ran.output
    assert len(json.loads(ran.stdout)["tokens"][0]) == 3

    class Exported:
        directory = Path("out")

        def to_dict(self):
            return {"profile": "portable"}

    monkeypatch.setattr("mla_compile.cli.export.load", lambda *_, **__: None)
    monkeypatch.setattr("mla_compile.cli.export.export_onnx", lambda *_, **__: Exported())
    done = CliRunner().invoke(app, ["export", *COMMANDS["export"], "--json"])
    assert json.loads(done.stdout) == {"profile": "portable"}


def test_every_command_has_json_and_says_its_exit_codes():
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    assert " ".join(EXIT_CODES.split()[:6]) in " ".join(runner.invoke(app, ["--help"]).stdout.split())
    for command in COMMANDS:
        said = runner.invoke(app, [command, "--help"]).stdout
        assert "--json" in said
        assert "Exits with 0" in said


def test_as_a_module(monkeypatch, capsys):
    """``python -m mla_compile`` is the command."""
    monkeypatch.setattr(sys, "argv", ["mla_compile", "--version"])
    runpy.run_module("mla_compile", run_name="__main__")
    assert capsys.readouterr().out.strip() == mla_compile.__version__


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_and_nothing_is_installed(here, monkeypatch, shell):
    before = sorted(here.rglob("*"))
    monkeypatch.setenv("_MLA_COMPILE_COMPLETE", f"source_{shell}")
    done = CliRunner().invoke(app, [], prog_name="mla-compile")
    assert done.exit_code == 0, done.output
    assert "_MLA_COMPILE_COMPLETE" in done.stdout
    assert {"bash": "complete -o", "zsh": "#compdef mla-compile", "fish": "complete --command"}[shell] in done.stdout
    assert sorted(here.rglob("*")) == before
    monkeypatch.setenv("_MLA_COMPILE_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", "mla-compile b")
    monkeypatch.setenv("COMP_CWORD", "1")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "mla-compile b")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    assert "bench" in CliRunner().invoke(app, [], prog_name="mla-compile").stdout
