"""mla_compile::decode_attention: the CPU kernel against the float64 reference, and the op's place in torch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mla_compile import ops
from mla_compile.errors import InputError
from mla_compile.kernels import cpu, reference

# Relative RMS error and maximum error over the largest value, by latent's dtype: rounding of the result, little more.
TOLERANCE = {
    torch.float64: (1e-14, 1e-13),
    torch.float32: (3e-6, 2e-5),
    torch.bfloat16: (2.5e-3, 5e-3),
    torch.float16: (4e-4, 8e-4),
}
LOW = torch.finfo(torch.float32).min


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


@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_shapes(case: Case, strided: bool):
    check(Case(**{**case.__dict__, "strided": strided}))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("T", [100, 2200])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_dtypes(dtype: torch.dtype, T: int, size: float):
    check(Case(dtype=dtype, T=T, H=16, L=256, R=32, size=size, strided=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_query_with_half_rows_keeps_its_precision(dtype: torch.dtype):
    check(Case(dtype=dtype, query_dtype=torch.float32, T=700, H=16, L=256, size=10.0))


def test_float32_query_may_exceed_float16():
    check(Case(dtype=torch.float16, query_dtype=torch.float32, size=1e6, scale=1e-6))


@pytest.mark.parametrize("scale", [1e-9, 0.2, 50.0])
def test_large_scales(scale: float):
    check(Case(dtype=torch.float64, T=2100, H=16, scale=scale))


MASKS = ["bool", "additive", "infinite", "lowest"]


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_additive_mask_of_half_precision(dtype: torch.dtype):
    low = torch.finfo(dtype).min
    mask = torch.zeros(2, 1, 1, 111, dtype=dtype).masked_fill(~keys_before(111, 60, 100), low)
    check(Case(B=2, dtype=dtype), mask)


def test_float64_lowest_value_stays_finite_in_float32():
    mask = torch.full((1, 1, 1, 111), torch.finfo(torch.float64).min, dtype=torch.float64)
    out, lse = ops.decode_attention(**Case().tensors(), mask=mask, scale=0.2)
    assert torch.isfinite(lse).all()
    mean = Case().tensors()["latent"].mean(dim=1)
    torch.testing.assert_close(out[0, 0, 0], mean[0], rtol=1e-4, atol=1e-5)


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


def test_unused_tail_with_a_finite_mask_does_not_reach_the_result():
    case = Case(T=500, H=16)
    sees = keys_before(case.T, 77)
    clean, dirty = case.tensors(), case.tensors()
    dirty["latent"][0, 77:] = torch.nan  # type: ignore[index]
    mask = torch.zeros(sees.shape).masked_fill(~sees, LOW)
    want = ops.decode_attention(**clean, mask=mask, scale=0.2)[0]
    assert torch.equal(ops.decode_attention(**dirty, mask=mask, scale=0.2)[0], want)


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


def test_nan_in_a_visible_row_is_not_hidden():
    tensors = Case().tensors()
    tensors["latent"][0, 3, 0] = torch.nan  # type: ignore[index]
    out, lse = ops.decode_attention(**tensors, mask=keys_before(111, 50), scale=0.2)
    assert torch.isnan(out).any()
    assert torch.isnan(lse).all()


def test_masked_tail_is_not_computed(monkeypatch: pytest.MonkeyPatch):
    walked: list[tuple[int, int]] = []
    blocks = cpu._blocks

    def recorded(lo: int, hi: int, direct: bool) -> list[tuple[int, int]]:
        walked.append((lo, hi))
        return blocks(lo, hi, direct)

    monkeypatch.setattr(cpu, "_blocks", recorded)
    case = Case(B=2, T=9000, H=16)
    check(case, keys_before(case.T, 100, 3000))
    check(case, torch.zeros(2, 1, 1, case.T).masked_fill(~keys_before(case.T, 100, 3000), LOW))
    assert walked == [(0, 100), (0, 3000)] * 2


def test_query_with_only_lowest_masked_keys_weighs_them_all():
    sees = torch.ones(1, 1, 3, 111, dtype=torch.bool)
    sees[:, :, 0] = False
    sees[..., 90:] = False
    check(Case(S=3), torch.zeros(sees.shape).masked_fill(~sees, LOW))
    # Causality can take the only keys that the mask left: queries 0 and 1 see lowest-masked keys alone.
    sees = torch.zeros(1, 1, 1, 111, dtype=torch.bool)
    sees[..., 110] = True
    check(Case(S=3, causal=True), torch.zeros(sees.shape).masked_fill(~sees, LOW))


def test_autocast_does_not_lower_the_precision():
    case = Case(T=700, H=16, L=256)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(case)


def test_without_onednn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu, "ONEDNN", False)
    check(Case(T=2300, H=16, L=256), keys_before(2300, 2299))


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
