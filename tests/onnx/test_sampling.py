"""Sampling: greedy, drawn, seeded, and refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mla_compile.errors import ModelFileError, OptionError
from mla_compile.onnx.generation import generate
from mla_compile.onnx.sampling import Sampler, Sampling
from mla_compile.onnx.session import Session
from tests.support import onnx_toy as toy


@pytest.fixture(params=["portable", "inplace"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Session:
    return Session(toy.build(tmp_path / "model", request.param))


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
