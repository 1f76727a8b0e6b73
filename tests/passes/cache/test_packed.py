"""Rows of a cache in float8: the bytes, the models and programs that keep them, the operator that reads them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import mla_compile
from mla_compile.errors import OptionError
from mla_compile.kernels.cpu import native
from mla_compile.passes.cache.packed import at_once, error_of, pack, packed_width, unpack
from mla_compile.passes.rewrite import packed_rows
from mla_compile.pipeline.target import this_machine
from mla_compile.runtime.latent import LatentTensor
from tests.support.latent_modules import LAYERS, B, Cache, D, H, L, Model, N, OneLayer, R, V
from tests.support.programs import seeded
from tests.support.tiers import also, full

pytestmark = pytest.mark.thorough

CALLS = (7, 1, 1, 2, 1)
CLOSE = 0.03


@pytest.fixture(autouse=True)
def _no_grad():
    torch.compiler.reset()
    with torch.no_grad():
        yield


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 6, 63, 64, 512])
def test_rows_come_back_within_a_step_of_float8(width, dtype):
    sizes = torch.tensor([1e-3, 1.0, 30.0, 1e4])[:, None]
    rows = (seeded(4, width, seed=1) * sizes).to(dtype)
    held = pack(rows, width, at_once)
    assert held.dtype == torch.uint8
    assert held.shape == (4, packed_width(width))
    assert width + 4 <= packed_width(width) <= width + 22
    assert packed_width(width) % 16 == 0, "a GPU could not load 16 bytes at a time"
    again = unpack(held, width, dtype, at_once)
    assert again.dtype == dtype
    for one, other in zip(again, rows, strict=True):  # each row with a scale of its own
        assert relative(one, other) < 0.05


def test_zeros_are_zeros_and_zero_bytes_too():
    assert torch.equal(unpack(pack(torch.zeros(3, 8), 8, at_once), 8, torch.float32, at_once), torch.zeros(3, 8))
    empty = torch.zeros(3, packed_width(8), dtype=torch.uint8)
    assert torch.equal(unpack(empty, 8, torch.float32, at_once), torch.zeros(3, 8))


def test_cut_and_transposed_bytes_are_the_same_rows():
    rows = seeded(2, 9, 6, seed=2).float()
    held = pack(rows, 6, at_once)
    whole = unpack(held, 6, torch.float32, at_once)
    part = held.transpose(0, 1)[3:7:2]
    assert torch.equal(unpack(part, 6, torch.float32, at_once), whole.transpose(0, 1)[3:7:2])


def test_the_error_that_is_reported():
    assert 0.02 < error_of(512) < 0.03
    assert error_of(1) < 1e-6  # one number is its own scale


def run(model, cache, calls=CALLS, batch=B):
    """The outputs of some calls, one after another."""
    found, start = [], 0
    for number, count in enumerate(calls):
        found.append(model(seeded(batch, count, D, seed=number).to(next(model.parameters()).dtype), cache, start))
        start += count
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    ("appends", "codegen"),
    [
        ("in_place", "eager"),
        *also("combination", ("copy", "eager")),
        *also("inductor", ("in_place", "inductor")),
    ],
)
def test_a_model_that_caches_heads(appends, codegen):
    model = Model(layers=1).float()
    fast = mla_compile.optimize(
        model, codegen=codegen, appends=appends, forms="absorbed", cache_dtype="fp8", strict=True, verify=True
    )
    mine, theirs = Cache(1), Cache(1)
    calls = CALLS if appends == "copy" else (7, 1, 1)
    expected, got = run(model, mine, calls), run(fast, theirs, calls)
    assert 1e-4 < relative(got, expected) < CLOSE
    assert {str(s.code) for s in fast.mla_report.sites} == {"absorbed"}
    assert any("float8" in message and "measured" in message for message in fast.mla_report.messages)
    for one, other in zip((*theirs.keys, *theirs.values), (*mine.keys, *mine.values), strict=True):
        assert isinstance(one, LatentTensor)
        assert relative(one, other) < CLOSE
        held = {(row.dtype, row.shape[-1]) for row in one._cell.rows}
        assert held <= {(torch.uint8, packed_width(L)), (torch.float32, R)}


@full("combination")
def test_what_callers_do_with_a_cache():
    """Copied, reordered for beams, cut back and continued: the bytes are rows like any others."""
    model = Model(layers=1).float()
    fast = mla_compile.optimize(model, codegen="eager", forms="absorbed", cache_dtype="fp8", strict=True)
    mine, theirs = Cache(1), Cache(1)
    run(model, mine, (11, 1)), run(fast, theirs, (11, 1))
    order = torch.tensor([1, 0])
    for cache in (mine, theirs):
        for held in (cache.keys, cache.values):
            held[0] = copy.deepcopy(held[0]).index_select(0, order)[:, :, :9]
    x = seeded(B, 1, D, seed=9).float()
    assert relative(fast(x, theirs, 9), model(x, mine, 9)) < CLOSE
    assert all(isinstance(t, LatentTensor) and t._cell.full is None for t in (*theirs.keys, *theirs.values))


def test_a_model_without_such_a_cache_is_told():
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Model().float().layers[0]

        def forward(self, x):
            return self.layer(x, Cache(), 0)

    fast = mla_compile.optimize(Plain(), codegen="eager", forms="absorbed", cache_dtype="fp8")
    fast(seeded(B, 5, D).float())
    assert any("changes nothing here" in message for message in fast.mla_report.messages)


def test_unknown_dtypes_are_refused():
    with pytest.raises(OptionError, match="expected one of model, fp8"):
        mla_compile.optimize(Model(), cache_dtype="int8")


def test_a_program_and_a_cache_that_is_converted_for_it():
    model = OneLayer().float()
    past = (seeded(B, H, 7, N + R, seed=20).float(), seeded(B, H, 7, V, seed=21).float())
    tokens = torch.export.Dim("T", min=1)
    given = (seeded(B, 1, D).float(), past)
    exported = torch.export.export(model, given, dynamic_shapes=(None, ({2: tokens}, {2: tokens})), strict=False)
    program = mla_compile.optimize(exported, cache="latent", cache_dtype="fp8", forms="absorbed")
    _, filled = model(seeded(B, 9, D, seed=3).float())
    rows, error = mla_compile.migrate_cache(program, filled)
    assert 1e-4 < error < CLOSE
    assert {(r.dtype, r.shape[-1]) for of in rows for r in of} == {(torch.uint8, packed_width(L)), (torch.float32, R)}
    run = program.module()
    for step in range(3):
        x = seeded(B, 1, D, seed=30 + step).float()
        expected, filled = model(x, filled)
        got, rows = run(x, rows)
        assert relative(got, expected) < CLOSE
    # Weights that did not make a cache are found all the same.
    with pytest.raises(mla_compile.InputError, match="was not made by the weights"):
        mla_compile.migrate_cache(program, past)


@full("combination")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_operator_reads_float8_as_it_is(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Where a kernel does, a GPU's or a CPU's; elsewhere it is handed a copy in the model's dtype."""
    read_packed, found = packed_rows.read_packed, []

    def counted(*args: Any) -> int:
        found.append(read_packed(*args))
        return found[-1]

    monkeypatch.setattr("mla_compile.passes.rewrite.packed_rows.read_packed", counted)
    model = Model().to(dtype)
    options = {"codegen": "eager", "forms": "absorbed", "cache_dtype": "fp8", "strict": True}
    results = {}
    for kernels in (True, False):
        torch.compiler.reset()
        found.clear()
        monkeypatch.setattr("mla_compile.pipeline.target._reads_float8", lambda _, kernels=kernels: kernels)
        results[kernels] = run(mla_compile.optimize(model, **options), Cache())
        assert (LAYERS in found) is kernels
    exact = run(copy.deepcopy(model).double(), Cache())
    assert relative(results[True], exact) < 1.2 * relative(results[False], exact)


def test_a_cpu_reads_float8_where_its_kernel_was_built(monkeypatch: pytest.MonkeyPatch):
    reads = this_machine().reads_float8
    assert reads(torch.device("cpu")) is (native.load() is not None)
    monkeypatch.setattr(native, "load", lambda: None)
    assert not reads(torch.device("cpu"))
    assert reads(torch.device("cuda"))
    assert not reads(torch.device("meta"))
