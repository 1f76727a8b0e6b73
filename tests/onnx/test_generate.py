"""Generation: tokens compared with those of the same model in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mla_compile.errors import InputError, OptionError
from mla_compile.onnx.generation import Generation, generate
from mla_compile.onnx.sampling import Sampling
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
