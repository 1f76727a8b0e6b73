"""Generation, sampling and the command that does both: tokens compared with the same model in numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from mla_compile.cli.run import run
from mla_compile.errors import InputError, ModelFileError, OptionError
from mla_compile.onnx.generation import Generation, generate
from mla_compile.onnx.sampling import Sampler, Sampling
from mla_compile.onnx.session import Session
from tests.support import onnx_toy as toy

PROMPTS = [[3, 5, 7], [1, 2, 3, 4, 5, 6, 7], [9]]


@pytest.fixture(params=["portable", "inplace"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Session:
    return Session(toy.build(tmp_path / "model", request.param))


def test_rows_end_at_eos_or_at_their_own_limit(session: Session):
    full = [toy.greedy(prompt, 20) for prompt in PROMPTS]
    eos = full[1][4]
    expected = [toy.greedy(prompt, 20, eos=[eos]) for prompt in PROMPTS]
    assert len(expected[1]) <= 5
    assert generate(session, PROMPTS, max_new_tokens=20, eos_token_ids=[eos]) == expected
    assert generate(session, PROMPTS, max_new_tokens=[1, 20, 7]) == [full[0][:1], full[1], full[2][:7]]


def test_the_manifest_says_what_ends_a_row_unless_told(tmp_path: Path):
    full = toy.greedy([1, 2, 3], 12)
    session = Session(toy.build(tmp_path / "model", eos_token_ids=(full[3],)))
    assert generate(session, [[1, 2, 3]], max_new_tokens=12) == [full[: full.index(full[3]) + 1]]
    assert generate(session, [[1, 2, 3]], max_new_tokens=12, eos_token_ids=[]) == [full]


def test_a_row_that_has_ended_needs_no_positions(tmp_path: Path):
    """The longer prompt ends first; the shorter one goes on to the last position."""
    session = Session(toy.build(tmp_path / "model", max_position=16))
    long, short = list(range(16)), [1, 2]
    assert generate(session, [long, short], max_new_tokens=[1, 15]) == [toy.greedy(long, 1), toy.greedy(short, 15)]


def test_the_iterator_gives_tokens_as_they_come_and_the_callback_too(session: Session):
    full = [toy.greedy(prompt, 6) for prompt in PROMPTS]
    steps = Generation(session, PROMPTS, max_new_tokens=[6, 3, 6])
    assert next(steps) == [row[0] for row in full]
    assert next(steps) == [row[1] for row in full]
    steps.end(0)
    assert steps.ended(0)
    assert list(steps) == [[None, full[1][2], full[2][2]], *([None, None, token] for token in full[2][3:])]
    assert next(steps, None) is None
    seen = []
    rows = generate(session, PROMPTS, max_new_tokens=2, stream=lambda row, token: seen.append((row, token)))
    assert seen == [(row, rows[row][step]) for step in range(2) for row in range(3)]


@pytest.mark.parametrize(
    ("prompts", "options", "error", "says"),
    [
        ([], {}, InputError, "prompts is"),
        ("text", {}, InputError, "prompts is 'text'"),
        (["text"], {}, InputError, "prompt 0 is str, expected a list of token ids; tokenize it first"),
        ([np.array([1])], {}, InputError, "prompt 0 is ndarray, expected a list of token ids; convert it"),
        ([[1], []], {}, InputError, "prompt 1 is empty"),
        ([[1, 37]], {}, InputError, "prompt 0 holds 37, expected ids from 0 to 36"),
        ([[-1]], {}, InputError, "prompt 0 holds -1"),
        ([[1.0]], {}, InputError, "prompt 0 holds 1.0, expected whole numbers"),
        ([[True]], {}, InputError, "prompt 0 holds True"),
        ([[1] * 65], {}, InputError, "prompt 0 has 65 tokens, the model reads at most 64"),
        ([[1] * 60], {"max_new_tokens": 6}, OptionError, "needs 65 positions; the model has 64: .* at most 5"),
        ([[1]], {"max_new_tokens": 0}, OptionError, "max_new_tokens is 0, expected a whole number of at least 1"),
        ([[1]], {"max_new_tokens": 2.5}, OptionError, "max_new_tokens is 2.5"),
        ([[1]], {"max_new_tokens": [1, 2]}, OptionError, "max_new_tokens has 2 entries, expected one for each of 1"),
        ([[1]], {"eos_token_ids": [99]}, OptionError, "eos_token_ids holds 99"),
        ([[1]], {"sampling": [Sampling(), Sampling()]}, InputError, "sampling has 2 entries"),
    ],
)
def test_requests_that_cannot_be_met(tmp_path: Path, prompts: Any, options: dict, error: type, says: str):
    session = Session(toy.build(tmp_path / "model", max_position=64))
    with pytest.raises(error, match=says):
        Generation(session, prompts, **{"max_new_tokens": 4, **options})
    assert len(generate(session, [[1] * 60], max_new_tokens=5)[0]) == 5


def test_sampling_draws_what_the_probabilities_say():
    logits = np.log(np.array([0.5, 0.2, 0.2, 0.1], np.float32))
    sampler = Sampler(Sampling(temperature=1.0, seed=1), 1)
    counts = np.bincount([sampler.choose(logits, 0) for _ in range(20_000)], minlength=4)
    np.testing.assert_allclose(counts / 20_000, [0.5, 0.2, 0.2, 0.1], atol=0.015)
    hot = Sampler(Sampling(temperature=2.0, seed=1), 1)
    counts = np.bincount([hot.choose(logits, 0) for _ in range(20_000)], minlength=4)
    weights = np.sqrt([0.5, 0.2, 0.2, 0.1])
    np.testing.assert_allclose(counts / 20_000, weights / weights.sum(), atol=0.015)


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ({"temperature": 0.0}, {1}),
        ({"temperature": 1.0, "top_k": 1}, {1}),
        ({"temperature": 1.0, "top_k": 2}, {1, 0}),
        ({"temperature": 1.0, "top_k": 3}, {1, 0, 3}),  # of equal ones the first
        ({"temperature": 1.0, "top_k": 99}, {0, 1, 3, 4}),
        ({"temperature": 1.0, "top_p": 1e-9}, {1}),
        ({"temperature": 1.0, "top_p": 0.39}, {1}),
        ({"temperature": 1.0, "top_p": 0.41}, {1, 0}),  # the one that crosses p belongs to them
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.56}, {1}),  # of the two that are left, 4/7
        ({"temperature": 1.0, "top_p": 1.0}, {0, 1, 3, 4}),
        ({"temperature": 1e-6}, {1}),
        ({"temperature": 5e-324}, {1}),
    ],
)
def test_sampling_draws_from_the_most_probable(options: dict, drawn: set[int]):
    with np.errstate(divide="ignore"):
        logits = np.log(np.array([0.3, 0.4, 0.0, 0.15, 0.15], np.float32))
    sampler = Sampler(Sampling(seed=3, **options), 1)
    assert {sampler.choose(logits, 0) for _ in range(400)} == drawn


def test_seeds_repeat_rows_differ_and_company_does_not_matter(session: Session):
    sampling = Sampling(temperature=1.5, seed=11)
    first = generate(session, [[1, 2]] * 3, max_new_tokens=12, sampling=sampling)
    assert first == generate(session, [[1, 2]] * 3, max_new_tokens=12, sampling=sampling)
    assert len({tuple(row) for row in first}) == 3
    alone = generate(session, [[1, 2]], max_new_tokens=12, sampling=[sampling])
    among = generate(session, [[5], [1, 2]], max_new_tokens=12, sampling=[Sampling(), sampling])
    assert among[1] == alone[0]
    assert generate(session, [[1, 2]], max_new_tokens=12, sampling=Sampling(1.5)) != generate(
        session, [[1, 2]], max_new_tokens=12, sampling=Sampling(1.5)
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, expected 0"),
        ({"temperature": float("nan")}, "temperature is nan, expected a number"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_p": 0.0}, "top_p is 0.0, expected more than 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"seed": -3}, "seed is -3"),
        ({"seed": True}, "seed is True"),
    ],
)
def test_sampling_refuses_values_that_mean_nothing(options: dict, says: str):
    with pytest.raises(OptionError, match=says):
        Sampling(**options)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_an_error(bad: float):
    logits = np.full(5, bad if bad == -np.inf else 0, np.float32)
    logits[2] = bad
    with pytest.raises(ModelFileError, match="logits for row 0 hold"):
        Sampler(Sampling(), 1).choose(logits, 0)


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
