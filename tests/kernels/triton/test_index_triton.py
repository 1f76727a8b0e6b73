"""The scores of an indexer in Triton's interpreter, against the equation in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_compile.kernels import index, reference
from mla_compile.kernels.triton.index_steps import index_step
from tests.support import interpreter
from tests.support.fake_driver import FakeDriver
from tests.support.index_cases import CASES, IndexCase, close
from tests.support.tiers import full

Run = Callable[..., Any]
HALF = [torch.bfloat16, torch.float16]


DTYPES = [torch.float32, *HALF]
NAMES = [n for n, case in CASES.items() if case.T * case.S * case.J * case.D < 1e7]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if i == at % len(DTYPES) else full("family"))
        for at, name in enumerate(NAMES)
        for i, dtype in enumerate(DTYPES)
    ],
    ids=str,
)
def test_against_the_equation(name: str, dtype: torch.dtype, run: Run):
    """Of queries and keys no more than it takes to have several blocks: the interpreter is slow."""
    case = CASES[name]
    call = replace(case, T=min(case.T, 130), S=min(case.S, 4)).call(dtype)
    close(run(interpreter.index_scores, call), call)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_query_in_float32_beside_half_precision(dtype: torch.dtype, run: Run):
    call = IndexCase(query=torch.float32, T=70).call(dtype)
    close(run(interpreter.index_scores, call), call)


def test_numbers_that_are_none_reach_their_key_and_no_other(run: Run):
    call = IndexCase().call(torch.float32)
    call.keys[0, 7, 3] = torch.nan
    call.keys[1, 300, 36] = torch.inf
    got, want = run(interpreter.index_scores, call), reference.index_scores(call)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())


def test_a_launch_for_more_keys_than_there_are(run: Run):
    call = IndexCase(T=70).call(torch.float32)
    close(run(interpreter.index_scores, call, 200), call)


def test_a_cache_that_grows_is_one_kind_of_call(driver: FakeDriver):
    """The number of keys and the distance of two sequences are told in each launch."""
    index._bound.clear()
    whole = IndexCase(T=560).call(torch.bfloat16)
    for T in (513, 530, 560):
        call = whole._replace(keys=whole.keys[:, :T].contiguous())
        out = index.launched(call)
        assert (out.shape, out.dtype) == ((2, 3, T), torch.float32)
        grid, stream, arguments = driver.launched[-1]
        assert (grid, stream) == ((6, 9, 1), 7)
        assert (arguments["T"], arguments["keys_b"]) == (T, T * 37)
        assert [arguments[name] for name in ("query", "keys", "out")] == [
            x.data_ptr() for x in (call.query, call.keys, out)
        ]
    assert 1 <= len(index._bound) <= 2  # distances that are multiples of 16 are told to the compiler
    index._bound.clear()


def test_the_grid_covers_all_keys_of_all_queries():
    step = index_step(IndexCase(T=301).call(torch.bfloat16))
    assert step.grid == (6, 5, 1)
    assert step.scalars["T"] == 301
