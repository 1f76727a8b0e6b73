"""mla_compile::decode_attention: the CPU kernels against the float64 reference, and the op's place in torch."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mla_compile import ops
from mla_compile.errors import InputError
from mla_compile.kernels import reference
from mla_compile.kernels.cpu import decode as cpu
from mla_compile.kernels.cpu import native as cpu_native

# Relative RMS error and maximum error over the largest value, by latent's dtype: rounding of the result, little more.
TOLERANCE = {
    torch.float64: (1e-14, 1e-13),
    torch.float32: (3e-6, 2e-5),
    torch.bfloat16: (2.5e-3, 5e-3),
    torch.float16: (4e-4, 8e-4),
}
LOW = torch.finfo(torch.float32).min


PATHS = ["tiles", "vectors", "torch"]  # the native kernel with and without AMX, and torch's operators


def native() -> cpu_native.Library:
    """The native kernel; skips the test where there is no compiler for it, and fails where there is one."""
    library = cpu_native.load()
    if library is None:
        compilers = (os.environ.get("CXX"), "g++", "clang++")
        if os.environ.get("MLA_COMPILE_NATIVE") == "0" or not any(c and shutil.which(c) for c in compilers):
            pytest.skip("no native kernel here: no C++ compiler, or switched off")
        pytest.fail("there is a C++ compiler, and the native kernel was not built; the log has the reason")
    return library


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Sends every call of the op through one of the ways to compute it."""
    library = None if request.param == "torch" else native()
    if library is not None and request.param == "tiles" and not library.amx:
        pytest.skip("this machine has no AMX")
    used = None if library is None else replace(library, amx=2 if request.param == "tiles" else 0)
    monkeypatch.setattr(cpu_native, "load", lambda: used)
    return request.param


on_each_path = pytest.mark.usefixtures("path")


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    B: int = 1
    S: int = 1
    H: int = 4
    T: int = 111
    L: int = 48
    R: int = 8
    Lv: int | None = None
    dtype: torch.dtype = torch.float32
    query_dtype: torch.dtype | None = None
    strided: bool = False
    size: float = 1.0
    scale: float = 0.2
    causal: bool = False

    def tensors(self, seed: int = 0) -> dict[str, Tensor | None]:
        """query, latent, rope, values; with ``strided`` the rows are views of one larger cache [B,1,T+5,L+R+3]."""
        g = torch.Generator().manual_seed(seed)
        rows = torch.randn(self.B, 1, self.T + 5, self.L + self.R + 3, generator=g).to(self.dtype)
        rows = rows[:, 0, : self.T, : self.L + self.R]
        latent, rope = rows[..., : self.L], rows[..., self.L :]
        query = self.size * torch.randn(self.B, self.S, self.H, self.L + self.R, generator=g)
        values = None if self.Lv is None else torch.randn(self.B, self.T, self.Lv, generator=g).to(self.dtype)
        if not self.strided:
            latent, rope = latent.contiguous(), rope.contiguous()
        return {
            "query": query.to(self.query_dtype or self.dtype),
            "latent": latent,
            "rope": rope if self.R else None,
            "values": values,
        }


def check(case: Case, mask: Tensor | None = None, tensors: dict[str, Tensor | None] | None = None) -> Tensor:
    """Runs the op and the float64 reference on the same values; shapes, infinities and dtypes first, then size."""
    given = case.tensors() if tensors is None else tensors
    how: dict[str, Any] = {"scale": case.scale, "causal": case.causal}
    out, lse = ops.decode_attention(**given, mask=mask, **how)
    exact = {name: None if x is None else x.double() for name, x in given.items()}
    wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
    want_out, want_lse = reference.decode_attention(**exact, mask=wide, **how)
    assert out.shape == (case.B, case.S, case.H, case.Lv or case.L)
    assert lse.shape == (case.B, case.S, case.H)
    assert out.dtype == (case.query_dtype or case.dtype)
    assert lse.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert torch.isfinite(out).all()
    blind = want_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, blind)
    rms, largest = TOLERANCE[case.dtype]
    if case.dtype in (torch.float32, torch.float64):  # the softmax turns a score's absolute error into a relative one
        growth = max(1.0, case.size * case.scale / 0.2)
        rms, largest = rms * growth, largest * growth
    error = out.double() - want_out
    assert error.norm() <= rms * want_out.norm()
    assert error.abs().max() <= largest * want_out.abs().max()
    lse_error = ((lse - want_lse) / (1 + want_lse.abs())).masked_fill(blind, 0.0)
    assert lse_error.abs().max() <= (1e-13 if case.dtype == torch.float64 else 1e-5)
    return out


def keys_before(T: int, *counts: int) -> Tensor:
    """[B,1,1,T] bool: batch entry b sees its first counts[b] keys."""
    return torch.stack([torch.arange(T) < n for n in counts])[:, None, None]


SHAPES = [
    Case(T=1, L=1, R=1, H=1),
    Case(T=63, H=1),
    Case(T=64, L=63, R=0),
    Case(B=3, T=111, H=16),
    Case(B=2, T=1111, L=130, R=64, H=16),
    Case(T=2500, H=16, L=256),
    Case(T=5000, H=40, L=72, R=32),
    Case(Lv=24, T=700, H=16, L=192),
    Case(Lv=96, T=9, R=0),
    Case(S=5, T=111, causal=True),
    Case(S=7, T=7, causal=True, H=1),
    Case(S=9, T=4, causal=True),
    Case(S=40, T=2300, H=16, causal=True, B=2),
    Case(S=1, T=30, causal=True),
]


@on_each_path
@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_shapes(case: Case, strided: bool):
    check(Case(**{**case.__dict__, "strided": strided}))


@on_each_path
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("T", [100, 2200])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_dtypes(dtype: torch.dtype, T: int, size: float):
    check(Case(dtype=dtype, T=T, H=16, L=256, R=32, size=size, strided=True))


@on_each_path
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_query_with_half_rows_keeps_its_precision(dtype: torch.dtype):
    check(Case(dtype=dtype, query_dtype=torch.float32, T=700, H=16, L=256, size=10.0))


@on_each_path
def test_float32_query_may_exceed_float16():
    check(Case(dtype=torch.float16, query_dtype=torch.float32, size=1e6, scale=1e-6))


@pytest.mark.parametrize("scale", [1e-9, 0.2, 50.0])
def test_large_scales(scale: float):
    check(Case(dtype=torch.float64, T=2100, H=16, scale=scale))


MASKS = ["bool", "additive", "infinite", "lowest"]


@on_each_path
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", ["1111", "111T", "B11T", "1H1T", "11ST", "B1ST", "BHST", "BHS1"])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_of_every_form(kind: str, shape: str, causal: bool):
    case = Case(B=2, S=5, H=3, T=111, causal=causal, strided=True)
    g = torch.Generator().manual_seed(1)
    sizes = [getattr(case, letter) if letter.isalpha() else 1 for letter in shape]
    sees = torch.rand(sizes, generator=g) < 0.6
    masks = {
        "bool": sees,
        "additive": torch.randn(sizes, generator=g),
        "infinite": torch.randn(sizes, generator=g).masked_fill(~sees, -torch.inf),
        "lowest": torch.zeros(sizes).masked_fill(~sees, LOW),
    }
    check(case, masks[kind])


@on_each_path
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_additive_mask_of_half_precision(dtype: torch.dtype):
    low = torch.finfo(dtype).min
    mask = torch.zeros(2, 1, 1, 111, dtype=dtype).masked_fill(~keys_before(111, 60, 100), low)
    check(Case(B=2, dtype=dtype), mask)


@on_each_path
def test_float64_lowest_value_stays_finite_in_float32():
    mask = torch.full((1, 1, 1, 111), torch.finfo(torch.float64).min, dtype=torch.float64)
    out, lse = ops.decode_attention(**Case().tensors(), mask=mask, scale=0.2)
    assert torch.isfinite(lse).all()
    mean = Case().tensors()["latent"].mean(dim=1)
    torch.testing.assert_close(out[0, 0, 0], mean[0], rtol=1e-4, atol=1e-5)


@on_each_path
@pytest.mark.parametrize("fill", [torch.nan, torch.inf])
@pytest.mark.parametrize("form", ["bool", "infinite"])
@pytest.mark.parametrize("counts", [(70, 1000), (1, 2300), (64, 0)])
def test_unused_tail_does_not_reach_the_result(fill: float, form: str, counts: tuple[int, int]):
    case = Case(B=2, T=2300, H=16, strided=True)
    sees = keys_before(case.T, *counts)
    tensors = case.tensors()
    for name in ("latent", "rope"):
        tensors[name][~sees[:, 0, 0]] = fill  # type: ignore[index]
    mask = sees if form == "bool" else torch.zeros(sees.shape).masked_fill(~sees, -torch.inf)
    out = check(case, mask, tensors)
    if 0 in counts:
        assert not out[1].any()


@on_each_path
def test_unused_tail_with_a_finite_mask_does_not_reach_the_result():
    case = Case(T=500, H=16)
    sees = keys_before(case.T, 77)
    clean, dirty = case.tensors(), case.tensors()
    dirty["latent"][0, 77:] = torch.nan  # type: ignore[index]
    mask = torch.zeros(sees.shape).masked_fill(~sees, LOW)
    want = ops.decode_attention(**clean, mask=mask, scale=0.2)[0]
    assert torch.equal(ops.decode_attention(**dirty, mask=mask, scale=0.2)[0], want)


@on_each_path
@pytest.mark.parametrize("values", [None, 24])
def test_row_between_visible_ones_that_no_query_sees_is_not_read(values: int | None):
    case = Case(B=2, T=300, Lv=values)
    tensors = case.tensors()
    sees = torch.rand(2, 1, 1, case.T, generator=torch.Generator().manual_seed(2)) < 0.5
    for x in (tensors["latent"], tensors["rope"], tensors["values"]):
        if x is not None:
            x[~sees[:, 0, 0]] = torch.nan
    check(case, sees, tensors)
    check(case, torch.zeros(sees.shape).masked_fill(~sees, -torch.inf), tensors)


@on_each_path
def test_nan_in_a_visible_row_is_not_hidden():
    tensors = Case().tensors()
    tensors["latent"][0, 3, 0] = torch.nan  # type: ignore[index]
    out, lse = ops.decode_attention(**tensors, mask=keys_before(111, 50), scale=0.2)
    assert torch.isnan(out).any()
    assert torch.isnan(lse).all()


@pytest.mark.parametrize("low", [False, True])
def test_masked_tail_is_not_computed(low: bool):
    sees = keys_before(9000, 100, 3000)
    mask = torch.zeros(sees.shape).masked_fill(~sees, LOW) if low else sees
    windows = cpu._windows(mask, cpu._seen(mask, False, 1, 9000), 9000)
    assert [(w.lo, w.hi) for w in windows] == [(0, 100), (0, 3000)]


@on_each_path
def test_query_with_only_lowest_masked_keys_weighs_them_all():
    sees = torch.ones(1, 1, 3, 111, dtype=torch.bool)
    sees[:, :, 0] = False
    sees[..., 90:] = False
    check(Case(S=3), torch.zeros(sees.shape).masked_fill(~sees, LOW))
    # Causality can take the only keys that the mask left: queries 0 and 1 see lowest-masked keys alone.
    sees = torch.zeros(1, 1, 1, 111, dtype=torch.bool)
    sees[..., 110] = True
    check(Case(S=3, causal=True), torch.zeros(sees.shape).masked_fill(~sees, LOW))


@on_each_path
def test_autocast_does_not_lower_the_precision():
    case = Case(T=700, H=16, L=256)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(case)


@on_each_path
@pytest.mark.parametrize(
    "case",
    [
        Case(B=3, T=700, H=5, L=77, R=13, Lv=19),
        Case(T=3001, H=20, L=96, R=32),
        Case(T=130, S=9, H=33, L=65, R=7, causal=True, strided=True),
        Case(B=5, T=900, H=16, L=64, R=32, dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_any_number_of_threads(case: Case, threads: int):
    first = check(case, keys_before(case.T, *[case.T - 100 * b for b in range(case.B)]))
    again = check(case, keys_before(case.T, *[case.T - 100 * b for b in range(case.B)]))
    assert torch.equal(first, again)


@on_each_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 31, 33, 63, 100])
@pytest.mark.parametrize("heads", [1, 17, 48])
def test_awkward_widths(dtype: torch.dtype, width: int, heads: int):
    check(Case(B=2, T=66, H=heads, L=width, R=width // 2, dtype=dtype, strided=True, size=3.0))


@on_each_path
def test_rows_of_any_stride():
    case = Case(B=2, T=150, H=3)
    given = case.tensors()
    given["latent"] = given["latent"].transpose(1, 2).contiguous().transpose(1, 2)  # type: ignore[union-attr]
    given["rope"] = given["rope"][:1].expand(2, -1, -1)  # type: ignore[index]
    given["query"] = given["query"].transpose(1, 2).contiguous().transpose(1, 2)  # type: ignore[union-attr]
    check(case, None, given)


@on_each_path
@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": 0}, {"S": 0}])
def test_nothing_to_attend_to(sizes: dict[str, int]):
    case = Case(**sizes)
    out, lse = ops.decode_attention(**case.tensors(), scale=0.2)
    assert out.shape == (case.B, case.S, case.H, case.L)
    assert not out.any()
    assert bool((lse == -torch.inf).all())


@on_each_path
@pytest.mark.parametrize("size", [1.0, 8.0, 30.0])
def test_scores_are_as_precise_as_float32_allows(size: float, path: str):
    """Half precision would show here: scores of deviation up to 150, whose rounding moves the whole weight."""
    case = Case(T=1500, H=16, L=512, R=64, size=size)
    given = case.tensors()
    lse = ops.decode_attention(**given, scale=0.2)[1].double()
    exact = {name: None if x is None else x.double() for name, x in given.items()}
    want = reference.decode_attention(**exact, scale=0.2)[1]
    assert ((lse - want).abs() / want.abs()).max() <= 1e-6


def test_the_paths_agree_on_a_cache_of_several_tiles():
    case = Case(T=5000, H=40, L=256, R=32)
    library = native()
    given = case.tensors().values()
    results = [
        cpu_native.decode_attention(replace(library, amx=amx), *given, None, 0.2, False)[0]
        for amx in (0, 2 * library.amx)
    ]
    assert (results[0] - results[-1]).norm() <= 1e-5 * results[0].norm()


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the test make the attempt to build that a process makes once."""
    cpu_native._load_once.cache_clear()
    yield
    monkeypatch.undo()
    cpu_native._load_once.cache_clear()


@pytest.mark.usefixtures("untried")
def test_a_failed_build_is_told_once_and_changes_no_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken() -> None:
        raise RuntimeError("no compiler here\nand many more lines")

    monkeypatch.setattr(cpu_native, "_build", broken)
    with caplog.at_level(logging.INFO):
        check(Case())
        check(Case(T=300, H=16))
    (record,) = [r for r in caplog.records if r.name == cpu_native.__name__]
    assert record.getMessage().endswith("(RuntimeError: no compiler here)")


@pytest.mark.usefixtures("untried")
def test_a_compiler_that_fails_is_a_failed_build(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    broken = tmp_path / "broken.cpp"
    broken.write_text("#error broken on purpose\n")
    monkeypatch.setattr(cpu_native, "SOURCE", broken)
    check(Case())
    (record,) = [r for r in caplog.records if r.name == cpu_native.__name__]
    assert "broken on purpose" in record.getMessage()
    assert cpu_native.load() is None


@pytest.mark.usefixtures("untried")
def test_the_native_kernel_can_be_switched_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLA_COMPILE_NATIVE", "0")
    monkeypatch.setattr(cpu_native, "_build", lambda: pytest.fail("tried to build"))
    check(Case())


def test_the_native_source_is_one_text():
    assert '#include "' not in cpu_native.source()


@dataclass
class Sample:
    case: Case
    mask: Tensor | None = None
    names: list[str] = field(default_factory=lambda: ["query", "latent", "rope", "values"])

    def arguments(self) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
        tensors = self.case.tensors()
        return (*(tensors[n] for n in self.names), self.mask), {"scale": 0.3, "causal": self.case.causal}


SAMPLES = [
    Sample(Case(T=9)),
    Sample(Case(B=2, S=3, T=9, R=0, strided=True)),
    Sample(Case(T=9, Lv=5, dtype=torch.bfloat16, query_dtype=torch.float32)),
    Sample(Case(B=2, S=3, T=9, causal=True, strided=True), torch.rand(2, 1, 3, 9) < 0.7),
    Sample(Case(B=2, T=130, H=2, dtype=torch.float64), torch.randn(2, 2, 1, 1)),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: str(s.case))
def test_opcheck(sample: Sample):
    args, kwargs = sample.arguments()
    assert set(torch.library.opcheck(ops.decode_attention, args, kwargs).values()) == {"SUCCESS"}


def test_fake_tensors_keep_dtype_and_symbolic_sizes():
    with torch._subclasses.FakeTensorMode():
        query, latent = torch.empty(2, 1, 4, 20), torch.empty(2, 7, 16, dtype=torch.bfloat16)
        rope, values = torch.empty(2, 7, 4, dtype=torch.bfloat16), torch.empty(2, 7, 5, dtype=torch.bfloat16)
        out, lse = ops.decode_attention(query, latent, rope, values, scale=1.0)
    assert (out.shape, out.dtype) == ((2, 1, 4, 5), torch.float32)
    assert (lse.shape, lse.dtype) == ((2, 1, 4), torch.float32)


@pytest.mark.parametrize("dynamic", [False, True])
@torch.no_grad()
def test_inductor_passes_a_strided_cache_without_copying_it(dynamic: bool, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[int, tuple[int, ...]]] = []
    kernel = cpu.decode_attention

    def recorded(query: Tensor, latent: Tensor, rope: Tensor | None, *rest: Any, **how: Any) -> tuple[Tensor, Tensor]:
        assert rope is not None
        seen.extend([(latent.data_ptr(), latent.stride()), (rope.data_ptr(), rope.stride())])
        return kernel(query, latent, rope, *rest, **how)

    monkeypatch.setattr(cpu, "decode_attention", recorded)

    def step(query: Tensor, cache: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
        cache[:, :, 3] = rows  # written in place, as a static cache is
        out, _ = ops.decode_attention(query * 2, cache[:, 0, : keys.shape[2], :16], keys[:, 0], scale=0.3)
        return out + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for T in (9, 12):
        query, cache, rows = torch.randn(2, 1, 4, 24), torch.randn(2, 1, 20, 24), torch.randn(2, 1, 24)
        keys = torch.randn(2, 1, 20, 8)[:, :, :T]
        want = step(query, cache.clone(), keys, rows)
        seen.clear()
        torch.testing.assert_close(compiled(query, cache, keys, rows), want)
        assert seen == [(cache.data_ptr(), (480, 24, 1)), (keys.data_ptr(), (160, 8, 1))]


@torch.no_grad()
def test_export_with_dynamic_tokens():
    class Attend(torch.nn.Module):
        def forward(self, query: Tensor, latent: Tensor, mask: Tensor) -> Tensor:
            return ops.decode_attention(query, latent, None, None, mask, scale=0.3)[0]

    T = torch.export.Dim("T")
    inputs = (torch.randn(1, 1, 4, 16), torch.randn(1, 9, 16), torch.ones(1, 1, 1, 9, dtype=torch.bool))
    program = torch.export.export(Attend(), inputs, dynamic_shapes=({}, {1: T}, {3: T}))
    query, latent, mask = torch.randn(1, 1, 4, 16), torch.randn(1, 33, 16), torch.ones(1, 1, 1, 33, dtype=torch.bool)
    torch.testing.assert_close(program.module()(query, latent, mask), Attend()(query, latent, mask))


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_refused(compiled: bool):
    query, latent = torch.randn(1, 1, 4, 16, requires_grad=True), torch.randn(1, 9, 16)

    def call(query: Tensor, latent: Tensor) -> Tensor:
        return ops.decode_attention(query, latent, scale=0.3)[0]

    run = torch.compile(call, backend="aot_eager") if compiled else call
    with pytest.raises(Exception, match="has no gradient"):
        run(query, latent)
    with torch.no_grad():
        assert not run(query, latent).requires_grad


def test_gradient_error_is_of_our_family():
    with pytest.raises(InputError, match=r"torch\.no_grad"):
        ops.decode_attention(torch.randn(1, 1, 4, 16, requires_grad=True), torch.randn(1, 9, 16), scale=0.3)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


GOOD: dict[str, Tensor] = {"query": tensor(2, 3, 4, 24), "latent": tensor(2, 9, 16), "rope": tensor(2, 9, 8)}
BAD = [
    ({"query": tensor(2, 3, 24)}, r"query is \[2, 3, 24\], expected \[B,S,H,L\+R\]"),
    ({"latent": tensor(2, 1, 9, 16)}, r"expected \[B,T,L\]; squeeze the head axis"),
    ({"rope": tensor(2, 1, 9, 8)}, r"rope is .* expected \[B,T,width\]"),
    ({"latent": tensor(1, 9, 16)}, "B of latent is 1, expected 2"),
    ({"rope": tensor(2, 8, 8)}, "T of rope is 8, expected 9"),
    ({"rope": tensor(2, 9, 7)}, r"query is 24 wide, expected L\+R = 16\+7"),
    ({"values": tensor(2, 9, 5, dtype=torch.float64)}, "values is torch.float64, expected torch.float32"),
    ({"query": tensor(2, 3, 4, 24, dtype=torch.bfloat16)}, "query is torch.bfloat16, expected torch.float32"),
    ({"latent": tensor(2, 9, 16, dtype=torch.int64), "rope": None}, "dequantize"),
    ({"mask": tensor(3, 9)}, "expected 4-D"),
    ({"mask": tensor(2, 1, 3, 8)}, "T of mask is 8, expected 9 or 1"),
    ({"mask": tensor(1, 2, 1, 9)}, "H of mask is 2, expected 4 or 1"),
    ({"mask": tensor(1, 1, 1, 9, dtype=torch.int32)}, "mask is torch.int32, expected bool"),
    ({"mask": torch.zeros(1, 1, 1, 9, device="meta")}, "mask is on meta, expected cpu"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_input(change: dict[str, Tensor | None], message: str):
    given = {**GOOD, **change}
    if given["latent"].dtype == torch.int64:
        given["query"] = tensor(2, 3, 4, 16, dtype=torch.int64)
    with pytest.raises(InputError, match=message):
        ops.decode_attention(**given, scale=1.0)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(InputError, match=message):
        ops.decode_attention(**given, scale=1.0)


def test_flops():
    with FlopCounterMode(display=False) as counter:
        ops.decode_attention(**GOOD, scale=1.0)
        ops.decode_attention(
            GOOD["query"], **{k: GOOD[k] for k in ("latent", "rope")}, values=tensor(2, 9, 5), scale=1.0
        )
    assert counter.get_total_flops() == 2 * 2 * 3 * 4 * 9 * (24 + 16) + 2 * 2 * 3 * 4 * 9 * (24 + 5)


def test_a_second_import_is_harmless():
    before = torch.ops.mla_compile.decode_attention.default
    importlib.reload(ops)
    spec = importlib.util.spec_from_file_location("another_name_for_ops", ops.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.decode_attention is before
    check(Case())
