"""The scores of an indexer on a CPU, against the equation in float64, in every way to compute them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_compile import ops
from mla_compile.errors import InputError
from mla_compile.kernels import reference
from mla_compile.kernels.cpu import index as cpu
from mla_compile.kernels.cpu import native
from tests.support.index_cases import CASES, IndexCase, close

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("name", CASES)
def test_against_the_equation(name: str):
    for dtype in DTYPES:
        call = CASES[name].call(dtype)
        close(ops.index_scores(*call), call)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_query_in_float32_beside_half_precision(dtype: torch.dtype):
    call = IndexCase(query=torch.float32).call(dtype)
    close(ops.index_scores(*call), call)


@pytest.mark.usefixtures("path")
def test_weights_in_half_precision():
    call = IndexCase().call(torch.float32)
    call = call._replace(weights=call.weights.to(torch.bfloat16))
    close(ops.index_scores(*call), call)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("sizes", [{"B": 0}, {"S": 0}, {"J": 0}, {"T": 0}, {"D": 0}], ids=str)
def test_nothing_to_compute(sizes: dict[str, Any]):
    call = replace(IndexCase(), **sizes).call(torch.float32)
    got = ops.index_scores(*call)
    assert got.shape == (call.query.shape[0], call.query.shape[1], call.keys.shape[1])
    assert not got.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_that_are_none_reach_their_key_and_no_other(path: str, dtype: torch.dtype):
    """A product that is no number is none after the relu, which hides minus infinity; J and D are no multiples."""
    call = IndexCase().call(dtype)
    call.keys[0, 7, 3] = torch.nan
    call.keys[1, 300, 36] = torch.inf
    got, want = ops.index_scores(*call), reference.index_scores(call)
    assert got[0, :, 7].isnan().all()
    assert not got[1, :, 300].isfinite().all()
    if path == "tiles" and dtype == torch.float32:  # infinity less its first plane is no number
        want[1, :, 300] = got[1, :, 300]
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.usefixtures("path")
def test_threads_change_no_number(threads: int):
    """Each score is a sum by one thread, in an order that its heads give."""
    before = torch.get_num_threads()
    try:
        step = IndexCase(B=1, S=1, J=64, D=128, T=3001)
        for case in (IndexCase(T=4000, J=33), step, IndexCase(B=5, S=7, T=90, J=20)):
            call = case.call(torch.float32)
            torch.set_num_threads(1)
            alone = ops.index_scores(*call)
            torch.set_num_threads(threads)
            close(ops.index_scores(*call), call)
            torch.testing.assert_close(ops.index_scores(*call), alone, rtol=1e-5, atol=1e-4)
    finally:
        torch.set_num_threads(before)


def test_blocks_of_keys_do_not_show(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "load", lambda: None)
    call = IndexCase().call(torch.float64)
    whole = ops.index_scores(*call)
    monkeypatch.setattr(cpu, "BLOCK", 100)
    torch.testing.assert_close(ops.index_scores(*call), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("path")
def test_autocast_rounds_nothing():
    call = IndexCase().call(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        close(ops.index_scores(*call), call)


WRONG = {
    "a query of three axes": (lambda c: c._replace(query=c.query[0]), r"query is \[3, 5, 37\], expected \[B,S,J,D\]"),
    "keys of heads": (lambda c: c._replace(keys=c.keys[:, None]), r"keys is \[2, 1, 301, 37\], expected \[B,T,D\]"),
    "another batch": (lambda c: c._replace(keys=c.keys[:1]), "B of keys is 1, expected 2"),
    "another width": (lambda c: c._replace(keys=c.keys[..., 1:]), "D of keys is 36, expected 37"),
    "other heads": (lambda c: c._replace(weights=c.weights[..., 1:]), "J of weights is 4, expected 5"),
    "other queries": (lambda c: c._replace(weights=c.weights[:, 1:]), "S of weights is 2, expected 3"),
    "a half query": (lambda c: c._replace(query=c.query.half()), r"query is torch.float16, expected torch.float32"),
    "whole numbers": (lambda c: c._replace(keys=c.keys.int()), "keys is torch.int32"),
    "wide weights": (lambda c: c._replace(weights=c.weights.double()), "weights is torch.float64"),
    "another device": (lambda c: c._replace(weights=c.weights.to("meta")), "weights is on meta, expected cpu"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_told(name: str):
    change, message = WRONG[name]
    with pytest.raises(InputError, match=f"mla_compile::index_scores: {message}"):
        ops.index_scores(*change(IndexCase().call(torch.float32)))


def test_no_memory_is_an_error_and_no_crash(monkeypatch: pytest.MonkeyPatch, library: native.Library):
    monkeypatch.setattr(native, "load", lambda: replace(library, index=lambda _: 1))
    with pytest.raises(MemoryError, match="index_scores"):
        ops.index_scores(*IndexCase().call(torch.float32))
