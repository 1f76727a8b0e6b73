"""The demo and its command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest
import torch
from typer.testing import CliRunner, Result

from mla_compile.cli.app import app
from mla_compile.errors import InputError, MlaCompileError
from mla_compile.report.report import Report
from mla_compile.workbench import demo
from mla_compile.workbench.demo import Agreement, Outcome, Settings, Timing


def _cli(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(app, list(arguments))


def _logits(tokens: list[int], gap: float = 1.0) -> torch.Tensor:
    """Logits [len(tokens), 8] whose best entry is the token, ``gap`` above token 7."""
    logits = torch.zeros(len(tokens), 8)
    logits[:, 7] = 5.0 - gap
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 5.0
    return logits


def test_equal_tokens_agree():
    result = demo.compare(
        (torch.tensor([1, 2, 3]), _logits([1, 2, 3])), (torch.tensor([1, 2, 3]), _logits([1, 2, 3])), 0.0
    )
    assert result.ok
    assert result.first_difference is None
    assert result.logits_error == 0.0


def test_equal_tokens_with_other_logits_do_not_agree():
    other = _logits([1, 2, 3])
    other[2] *= 1.01
    result = demo.compare((torch.tensor([1, 2, 3]), _logits([1, 2, 3])), (torch.tensor([1, 2, 3]), other), 1e-3)
    assert not result.ok
    assert result.logits_error == pytest.approx(0.01, rel=1e-4)


def test_a_different_token_is_a_difference():
    """The original prefers 2 by a whole unit; the other picks 7, with logits that differ by much less than that."""
    original, other = (torch.tensor([1, 2]), _logits([1, 2])), (torch.tensor([1, 7]), _logits([1, 2]) + 1e-4)
    result = demo.compare(original, other, 1e-3)
    assert result.first_difference == 1
    assert not result.tie
    assert not result.ok


def test_a_tie_within_rounding_is_excused_and_nothing_after_it_is_compared():
    original = (torch.tensor([1, 2, 3]), _logits([1, 2, 3], gap=1e-5))
    other = (torch.tensor([1, 7, 5]), _logits([1, 7, 5]) * torch.tensor([[1.0], [1.0], [-9.0]]))
    other[1][:2] = original[1][:2]
    other[1][1, 7] += 2e-5
    result = demo.compare(original, other, 1e-3)
    assert result.first_difference == 1
    assert result.tie
    assert result.ok


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"dtype": "int8"}, "dtype is 'int8', expected one of float32"),
        ({"layers": 0}, "layers is 0"),
        ({"contexts": ()}, "contexts is"),
        ({"contexts": (512, 0)}, "contexts is"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict, says: str):
    with pytest.raises(InputError, match=says):
        Settings(**wrong)


def test_without_transformers_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MlaCompileError, match="pip install"):
        demo.build(Settings())
    result = _cli("demo")
    assert result.exit_code == 2
    assert "transformers" in result.stderr


def test_the_command_line_answers_bad_values():
    result = _cli("demo", "--dtype", "int8")
    assert result.exit_code == 2
    assert "expected one of float32, bfloat16, float16" in result.stderr


def test_version_and_help():
    assert _cli("--version").stdout.strip() == demo.mla_compile.__version__
    assert "demo" in _cli("--help").stdout


def test_tokens_that_differ_fail_the_command(monkeypatch: pytest.MonkeyPatch):
    def run(settings: Settings, progress: Callable[[str], None]) -> Outcome:
        wrong = Agreement((1, 2), first_difference=1, tie=False, logits_error=0.3, tolerance=1e-4)
        return Outcome(settings, Report(()), wrong, (Timing(512, 3.0, 2.0, 1.0, 1),))

    monkeypatch.setattr(demo, "run", run)
    result = _cli("demo")
    assert result.exit_code == 1
    assert "tokens differ from step 2 of 2, and rounding does not explain it" in result.stdout


def test_the_demo_absorbs_every_layer_and_keeps_the_tokens(monkeypatch: pytest.MonkeyPatch):
    real, made = demo.run, []

    def run_once(settings: Settings, progress: Callable[[str], None]) -> Outcome:
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
    assert record["cache_bytes_per_token"] == {"expanded": 4 * 16 * (128 + 64 + 128), "latent": 4 * (512 + 64)}
    assert record["agreement"]["ok"]
    (timing,) = record["timings"]
    assert timing["context"] == 256
    assert min(timing["eager_ms"], timing["inductor_ms"], timing["mla_ms"]) > 0
