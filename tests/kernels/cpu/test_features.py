"""What a call may have besides rows and a mask, on a CPU beside the reference in float64: float8, sinks, a soft cap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_compile.kernels import decode, reference
from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.cpu import decode as cpu
from tests.support.cpu_cases import TOLERANCE
from tests.support.lists import lists

FP8 = torch.float8_e4m3fn
pytestmark = pytest.mark.usefixtures("path")


def call_of(
    B: int = 2, S: int = 2, H: int = 5, T: int = 230, L: int = 48, R: int = 8, rows: torch.dtype = torch.float32,
    rope: torch.dtype | None = None, query: torch.dtype | None = None, scales: str = "", **how: Any,
) -> DecodeCall:  # fmt: skip
    """Random rows; those of float8 with one scale (``scales="one"``), or for each token one or (``"groups"``) three."""
    g = torch.Generator().manual_seed(T + H)
    kv_scale = None
    if rows == FP8:
        kv_scale = torch.tensor(0.7) if scales == "one" else torch.rand(B, T, generator=g) + 0.5
        if scales == "groups":
            kv_scale = (torch.rand(B, 3, T + 2, generator=g) + 0.5).transpose(1, 2)[:, :T]
    return DecodeCall(
        query=torch.randn(B, S, H, L + R, generator=g).to(query or (torch.float32 if rows == FP8 else rows)),
        latent=torch.randn(B, T, L, generator=g).to(rows),
        rope=torch.randn(B, T, R, generator=g).to(rope or rows) if R else None,
        kv_scale=kv_scale,
        **{"scale": 0.2, **how},
    )


def check(call: DecodeCall, shown: Any = None) -> None:
    """The call against the reference on the same numbers in float64; ``shown`` says which it is where that fails."""
    out, lse = decode.run(call)
    latent, rope = call.latent.double(), None if call.rope is None else call.rope.double()
    if call.kv_scale is not None:
        factors = call.kv_scale.double()[..., None].expand(
            *call.kv_scale.shape, call.latent.shape[2] // (call.groups or 1)
        )
        latent = latent * (factors.flatten(2) if call.groups else factors[..., :1])
        if call.rope is not None and call.rope.dtype == FP8:
            rope = rope * call.kv_scale.double()[..., None]
    wide = call._replace(query=call.query.double(), latent=latent, rope=rope, kv_scale=None)
    want, want_lse = reference.decode_attention(wide)
    assert out.dtype == call.query.dtype, shown
    assert torch.isfinite(out).all(), shown
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf), shown
    rms, largest = TOLERANCE[call.query.dtype]
    assert (out.double() - want).norm() <= rms * want.norm(), shown
    assert (out.double() - want).abs().max() <= largest * want.abs().max(), shown
    seen = want_lse != -torch.inf
    allowed = 1e-4 if call.latent.dtype == torch.float16 else 1e-5
    assert ((lse - want_lse)[seen].abs() / (1 + want_lse[seen].abs())).max() <= allowed, shown


MORE: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 40},
    "lengths": {"seq_lens": torch.tensor([0, 131], dtype=torch.int32), "causal": True},
    "a mask": {"mask": torch.rand(2, 1, 2, 230, generator=torch.Generator().manual_seed(1)) < 0.6},
    "an added mask": {"mask": torch.randn(1, 5, 1, 230, generator=torch.Generator().manual_seed(2))},
    "a list": {"indices": lists(2, 2, 230, 60)},
}


@pytest.mark.wholly
@pytest.mark.parametrize(
    ("rope", "query", "scales"),
    [
        (FP8, torch.float32, "one"),
        (FP8, torch.bfloat16, "each"),
        (torch.bfloat16, torch.bfloat16, "each"),
        (torch.bfloat16, torch.float32, "one"),
        (torch.float16, torch.float16, "each"),
        (torch.float32, torch.float32, "each"),
        (torch.bfloat16, torch.bfloat16, "groups"),
        (torch.float32, torch.float32, "groups"),
    ],
    ids=str,
)
def test_float8_rows(rope: torch.dtype, query: torch.dtype, scales: str):
    for name, more in MORE.items():
        check(call_of(rows=FP8, rope=rope, query=query, scales=scales, **more), name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, FP8], ids=str)
def test_sinks_and_a_soft_cap(dtype: torch.dtype):
    """Both come after the scores and before or beside what hides them."""
    sinks = torch.tensor([-50.0, -1.0, 0.0, 3.0, 200.0])
    for name, more in MORE.items():
        check(call_of(rows=dtype, sinks=sinks, **more), name)
        check(call_of(rows=dtype, softcap=0.3, **more), name)
        check(call_of(rows=dtype, softcap=50.0, sinks=sinks.bfloat16(), **more), name)


@pytest.mark.parametrize("scale", [1e-6, 0.2, 40.0])
def test_soft_caps_of_any_size(scale: float):
    for softcap in (1e-3, 1.0, 30.0, 1e4):
        check(call_of(softcap=softcap, scale=scale, H=16, T=700), softcap)


def test_every_number_of_float8():
    """A request of one key returns its row: all numbers there are, the smallest included; of NaN comes NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 256)
    numbers = codes.masked_fill(codes.view(FP8).float().isnan(), 0)

    def row(of: Tensor) -> Tensor:
        scale = torch.tensor([[0.5]])
        return decode.run(DecodeCall(torch.zeros(1, 1, 1, 256), of.view(FP8), kv_scale=scale, scale=1.0))[0].flatten()

    assert torch.equal(row(numbers), numbers.view(FP8).float().flatten() * 0.5)
    for code in (0x7F, 0xFF):
        assert row(numbers.masked_fill(codes == 7, code)).isnan().all()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_cache_of_several_tiles_and_pieces(threads: int):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        sinks = torch.linspace(-3, 3, 16)
        check(call_of(B=1, S=1, H=16, T=3000, L=256, R=64, rows=FP8, rope=torch.bfloat16, sinks=sinks, softcap=20.0))
    finally:
        torch.set_num_threads(before)


def test_hidden_rows_may_hold_anything():
    call = call_of(rows=FP8, rope=torch.float32, seq_lens=torch.tensor([17, 100], dtype=torch.int32), R=8)
    assert call.kv_scale is not None
    assert call.rope is not None
    for b, length in enumerate((17, 100)):
        call.latent.view(torch.uint8)[b, length:] = 0x7F  # NaN
        call.rope[b, length:] = torch.nan
        call.kv_scale[b, length:] = torch.nan
    out, lse = decode.run(call)
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_pages(dtype: torch.dtype):
    g = torch.Generator().manual_seed(0)
    whole = call_of(B=2, S=1, T=96, rows=dtype, rope=torch.bfloat16 if dtype == FP8 else None, sinks=torch.zeros(5))
    table = torch.randperm(12, generator=g).to(torch.int32).view(2, 6)

    def paged(rows: Tensor) -> Tensor:
        flat = rows.reshape(12, 16, *rows.shape[2:])
        pool = torch.empty_like(flat)
        pool.view(torch.uint8)[table.flatten().long()] = flat.view(torch.uint8)
        return pool

    lengths = torch.tensor([90, 37], dtype=torch.int32)
    call = whole._replace(seq_lens=lengths, softcap=5.0)
    assert call.rope is not None
    scales = None if call.kv_scale is None else paged(call.kv_scale[..., None])[..., 0]
    got = decode.run(
        call._replace(latent=paged(call.latent), rope=paged(call.rope), kv_scale=scales, block_table=table)
    )
    torch.testing.assert_close(got, decode.run(call))
    check(call)


def test_the_native_kernel_takes_all_of_them(path: str):
    call = call_of(rows=FP8, sinks=torch.zeros(5), softcap=1.0, indices=lists(2, 2, 230, 20))
    assert cpu.suits(call) is (path != "torch")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_are_key_and_value_with_sinks_and_a_list(dtype: torch.dtype):
    """DeepSeek-V4's: rows of 512 columns and no others, of a window beside a list of those that stand for several."""
    shape = {"B": 1, "S": 2, "H": 64, "L": 512, "R": 0, "rows": dtype, "scale": 512**-0.5}
    sinks = torch.linspace(-3, 3, 64)
    chosen = lists(1, 2, 700, 60)
    chosen[:, 0] = -1  # sees none: the sink takes all
    for T, more in ((131, {"causal": True, "window": 100}), (700, {"indices": chosen})):
        check(call_of(T=T, sinks=sinks, **shape, **more), more)
        parts = [call_of(T=T, **shape, **more) for T in (T, 3)]
        outs, sums = zip(*(decode.run(part) for part in parts), strict=True)
        together, _ = decode.merge(outs, sums, sinks=sinks)
        wide = [reference.decode_attention(p._replace(query=p.query.double(), latent=p.latent.double())) for p in parts]
        want, _ = decode.merge(*zip(*wide, strict=True), sinks=sinks.double())
        assert (together.double() - want).norm() <= TOLERANCE[dtype][0] * want.norm()
