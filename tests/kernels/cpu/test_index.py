"""The scores of an indexer on a CPU, against the equation in float64, in every way to compute them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_compile import ops
from mla_compile.errors import InputError
from mla_compile.kernels import reference
from mla_compile.kernels.call import IndexCall
from mla_compile.kernels.cpu import index as cpu
from mla_compile.kernels.cpu import native

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Of the largest sum of the absolute products: what adding up rounds, however much of it cancels.
TOLERANCE = {torch.float64: 1e-14}


@dataclass(frozen=True)
class Case:
    """Sizes of one call, all different and no powers of two, and what its numbers are like."""

    B: int = 2
    S: int = 3
    J: int = 5
    T: int = 301
    D: int = 37
    scale: float = 0.3
    spread: float = 1.0  # of the weights
    query: torch.dtype | None = None  # beside half precision
    strided: bool = False

    def call(self, dtype: torch.dtype, seed: int = 0) -> IndexCall:
        g = torch.Generator().manual_seed(seed)

        def random(*shape: int, of: torch.dtype) -> Tensor:
            wide = torch.randn(*shape[:-1], shape[-1] + 3 * self.strided, generator=g, dtype=torch.float64).to(of)
            return wide[..., : shape[-1]]

        weights = torch.float64 if dtype == torch.float64 else torch.float32
        query, keys = random(self.B, self.S, self.J, self.D, of=self.query or dtype), (self.B, self.T, self.D)
        rows = random(*keys, of=dtype)
        if self.strided:  # every other row of a cache, by sequence last
            rows = rows.repeat_interleave(2, 1)[:, ::2].transpose(0, 1).contiguous().transpose(0, 1)
        return IndexCall(query, rows, random(self.B, self.S, self.J, of=weights) * self.spread, self.scale)


CASES: dict[str, Case] = {
    "odd sizes": Case(),
    "a decode step": Case(B=1, S=1, J=64, D=128, T=1000),
    "more heads than a walk takes": Case(B=1, S=2, J=130, T=97),
    "one head": Case(J=1),
    "one key": Case(T=1),
    "one feature": Case(D=1),
    "many queries": Case(B=1, S=150, T=150, J=3, D=8),
    "a negative scale": Case(scale=-0.7),
    "no scale": Case(scale=1.0),
    "large numbers": Case(scale=1e6, spread=1e5),
    "small numbers": Case(scale=1e-6, spread=1e-5),
    "strided": Case(strided=True),
    "wide rows": Case(D=640, J=17, T=70),
}


def close(got: Tensor, call: IndexCall) -> None:
    """Compares with the equation in float64."""
    q, k, w, scale = call
    wide = IndexCall(q.double(), k.double(), w.double(), scale)
    want = reference.index_scores(wide)
    largest = reference.index_scores(IndexCall(wide.query.abs(), wide.keys.abs(), wide.weights.abs(), abs(scale)))
    assert got.shape == want.shape
    assert got.is_contiguous()
    assert got.dtype == (torch.float64 if k.dtype == torch.float64 else torch.float32)
    tolerance = TOLERANCE.get(k.dtype, 1e-6)
    assert ((got - want).abs() <= tolerance * largest).all()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_against_the_equation(name: str, dtype: torch.dtype):
    call = CASES[name].call(dtype)
    close(ops.index_scores(*call), call)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_query_in_float32_beside_half_precision(dtype: torch.dtype):
    call = Case(query=torch.float32).call(dtype)
    close(ops.index_scores(*call), call)


@pytest.mark.usefixtures("path")
def test_weights_in_half_precision():
    call = Case().call(torch.float32)
    call = call._replace(weights=call.weights.to(torch.bfloat16))
    close(ops.index_scores(*call), call)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("sizes", [{"B": 0}, {"S": 0}, {"J": 0}, {"T": 0}, {"D": 0}], ids=str)
def test_nothing_to_compute(sizes: dict[str, Any]):
    call = replace(Case(), **sizes).call(torch.float32)
    got = ops.index_scores(*call)
    assert got.shape == (call.query.shape[0], call.query.shape[1], call.keys.shape[1])
    assert not got.any()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_that_are_none_reach_their_key_and_no_other(dtype: torch.dtype):
    """A product that is no number is none after the relu, which hides minus infinity; J and D are no multiples."""
    call = Case().call(dtype)
    call.keys[0, 7, 3] = torch.nan
    call.keys[1, 300, 36] = torch.inf
    got, want = ops.index_scores(*call), reference.index_scores(call)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    assert got[0, :, 7].isnan().all()
    assert not got[1, :, 300].isfinite().all()
    assert got[0].isnan().sum() == got.shape[1]


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.usefixtures("path")
def test_threads_change_no_number(threads: int):
    """Each score is a sum by one thread, in an order that its heads give."""
    before = torch.get_num_threads()
    try:
        for case in (Case(T=4000, J=33), Case(B=1, S=1, J=64, D=128, T=3001), Case(B=5, S=7, T=90, J=20)):
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
    call = Case().call(torch.float64)
    whole = ops.index_scores(*call)
    monkeypatch.setattr(cpu, "BLOCK", 100)
    torch.testing.assert_close(ops.index_scores(*call), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("path")
def test_autocast_rounds_nothing():
    call = Case().call(torch.float32)
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
        ops.index_scores(*change(Case().call(torch.float32)))


def test_no_memory_is_an_error_and_no_crash(monkeypatch: pytest.MonkeyPatch, library: native.Library):
    monkeypatch.setattr(native, "load", lambda: replace(library, index=lambda _: 1))
    with pytest.raises(MemoryError, match="index_scores"):
        ops.index_scores(*Case().call(torch.float32))
