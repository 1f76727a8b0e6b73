"""What is refused, with its message: through the functions, and through the ops where they are traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_compile import ops
from mla_compile.errors import InputError
from mla_compile.kernels import decode
from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.checks import check
from tests.support.paged_calls import PAGE, B, H, L, R, pages

FP8 = torch.float8_e4m3fn


def ints(*shape: int, dtype: torch.dtype = torch.int32, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


BAD_PAGED: list[tuple[dict[str, Any], str]] = [
    ({"query": torch.zeros(B, H, L + R)}, r"query is \[3, 4, 32\], expected \[B,S,H,L\+R\]"),
    ({"kv_pages": torch.zeros(9, PAGE, 2, L + R)}, r"expected \[P,page,width\]"),
    ({"kv_pages": torch.zeros(9, 24, L + R)}, "page size is 24, expected one of"),
    ({"kv_pages": torch.zeros(9, PAGE, 30)}, r"query is 32 wide, expected L\+R = 24\+6"),
    ({"latent_width": None}, r"latent_width is None, expected the L of kv_pages' L\+R = 32"),
    ({"latent_width": 40}, "latent_width is 40"),
    ({"kv_pages": (torch.zeros(9, PAGE, L), torch.zeros(8, PAGE, R)), "latent_width": None}, "rope_pages is"),
    ({"kv_pages": (torch.zeros(9, PAGE, L), None), "latent_width": 25}, "latent_pages are 24 wide"),
    ({"kv_pages": torch.zeros(9, PAGE, L + R, dtype=torch.float64)}, "query is torch.float32, expected torch.float64"),
    ({"kv_pages": torch.zeros(9, PAGE, L + R, device="meta")}, "latent is on meta, expected cpu"),
    ({"block_table": ints(B, 4, dtype=torch.int64)}, r"block_table is torch.int64 .* expected int32 \[B,maxpages\]"),
    ({"block_table": ints(2, 4)}, "B of block_table is 2, expected 3"),
    ({"block_table": ints(4, B).t()}, "not contiguous"),
    ({"seq_lens": ints(B, dtype=torch.int64)}, r"seq_lens is torch.int64 .* expected int32 \[B\]"),
    ({"seq_lens": ints(2)}, "B of seq_lens is 2, expected 3"),
    ({"seq_lens": torch.tensor([37, 0, 65], dtype=torch.int32)}, "seq_lens holds 65, the block table has room for 64"),
    ({"seq_lens": torch.tensor([37, -1, 50], dtype=torch.int32)}, "seq_lens holds -1"),
    (
        {"seq_lens": torch.tensor([49, 0, 50], dtype=torch.int32)},
        r"block_table\[0,3\] is -1, expected a page of \[0, 9\)",
    ),
    ({"block_table": ints(B, 4) * 9}, r"block_table\[0,0\] is 9"),
    ({"sinks": torch.zeros(5)}, "H of sinks is 5, expected 4"),
    ({"kv_scale": torch.ones(())}, "kv_scale is for an fp8 cache"),
    ({"softcap": -1.0}, "softcap is -1.0"),
    ({"window": -2}, "window is -2"),
    ({"num_splits": -1}, "num_splits is -1"),
    ({"num_splits": 2, "deterministic": True}, "give one of them"),
]


@pytest.mark.parametrize(("change", "message"), BAD_PAGED, ids=[m for _, m in BAD_PAGED])
def test_bad_paged_input(change: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        decode.paged_decode_attention(**{**pages(), "latent_width": L, "scale": 0.3, **change})


@pytest.mark.parametrize("bits", range(9))
def test_pages_have_1_to_256_rows(bits: int):
    rows = torch.empty(2, 1 << bits, L + R, device="meta")
    query, table = rows.new_empty(1, 1, H, L + R), ints(1, 2, device="meta")
    check(DecodeCall(query, rows[..., :L], rows[..., L:], block_table=table, seq_lens=table[0, :1], scale=1.0))


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


GOOD: dict[str, Tensor] = {"query": tensor(2, 3, 4, 24), "latent": tensor(2, 9, 16), "rope": tensor(2, 9, 8)}
MASK = torch.ones(1, 1, 1, 9, dtype=torch.bool)


BAD_DENSE = [
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
    ({"schedule": ints(0)}, r"schedule is torch.int32 \[0\], expected int64 \[n\]; pass what .*decode_schedule"),
    ({"schedule": ints(0, device="meta", dtype=torch.int64)}, "schedule is on meta, expected cpu"),
    ({"schedule": ints(3, dtype=torch.int64)}, "schedule has 3 elements, expected 0"),
    ({"schedule": ints(0, dtype=torch.int64), "mask": MASK}, "schedule has 0 elements, expected 12"),
    ({"schedule": ints(24, dtype=torch.int64)[::2], "mask": MASK}, "schedule is not contiguous"),
]


@pytest.mark.parametrize(("change", "message"), BAD_DENSE, ids=[m for _, m in BAD_DENSE])
def test_bad_dense_input(change: dict[str, Tensor | None], message: str):
    given = {**GOOD, **change}
    if given["latent"].dtype == torch.int64:
        given["query"] = tensor(2, 3, 4, 16, dtype=torch.int64)
    with pytest.raises(InputError, match=message):
        ops.decode_attention(**given, scale=1.0)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(InputError, match=message):
        ops.decode_attention(**given, scale=1.0)


FP8_ROWS = {**GOOD, "latent": tensor(2, 9, 16).to(FP8), "rope": tensor(2, 9, 8).to(FP8)}


BAD_EXTRAS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (GOOD, {"seq_lens": ints(2, 1)}, r"seq_lens is torch.int32 \[2, 1\], expected int32 \[B\]"),
    (GOOD, {"seq_lens": ints(3)}, "B of seq_lens is 3, expected 2"),
    (GOOD, {"seq_lens": torch.ones(2, dtype=torch.int32, device="meta")}, "seq_lens is on meta, expected cpu"),
    (GOOD, {"sinks": torch.zeros(4, dtype=torch.float64)}, "sinks is torch.float64"),
    (FP8_ROWS, {}, "kv_scale is missing; pass a scale"),
    (FP8_ROWS, {"kv_scale": torch.ones((), dtype=torch.float64)}, "kv_scale is torch.float64, expected float32"),
    (FP8_ROWS, {"kv_scale": torch.ones(2)}, r"kv_scale is \[2\], expected \[\], \[B,T\]"),
    (FP8_ROWS, {"kv_scale": torch.ones(2, 8, 4)}, r"expected \[\], \[B,T\] or \[B,T,G\] with \[B,T\] = \[2, 9\]"),
    (FP8_ROWS, {"kv_scale": torch.ones(2, 9, 3)}, "G of kv_scale is 3 beside L = 16"),
    (FP8_ROWS, {"kv_scale": torch.ones(2, 9, 0)}, "G of kv_scale is 0 beside L = 16"),
    (FP8_ROWS, {"kv_scale": torch.ones(2, 9, 4)}, "beside scales of groups, which are the latent's"),
    (FP8_ROWS, {"kv_scale": torch.ones(()), "values": torch.zeros(2, 9, 5).to(FP8)}, "not supported"),
    (FP8_ROWS, {"kv_scale": torch.ones(()), "query": torch.zeros(2, 3, 4, 24).double()}, "beside an fp8 cache"),
    (FP8_ROWS, {"kv_scale": torch.ones(()), "rope": torch.zeros(2, 9, 8).double()}, "rope is torch.float64"),
    (
        FP8_ROWS,
        {"kv_scale": torch.ones(()), "rope": torch.zeros(2, 9, 8).half(), "query": torch.zeros(2, 3, 4, 24).bfloat16()},
        "expected torch.float16 as rope",
    ),
]


@pytest.mark.parametrize(("given", "change", "message"), BAD_EXTRAS, ids=[m for *_, m in BAD_EXTRAS])
def test_bad_extras(given: dict[str, Tensor], change: dict[str, Any], message: str):
    for function in (decode.decode_attention, ops.decode_attention):
        with pytest.raises(InputError, match=message):
            function(**{**given, **change}, scale=0.3)
