"""Calls with a list of keys for each query, on a CPU, against the reference, which makes a mask of the list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_compile import ops
from mla_compile.errors import InputError
from mla_compile.kernels import chosen, decode, reference
from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.decode import decode_attention, paged_decode_attention
from tests.support.cpu_cases import TOLERANCE, Case
from tests.support.lists import lists

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def masks(kind: str, B: int, S: int, H: int, T: int, dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(3)
    if kind == "heads":
        return torch.rand(1, H, 1, T, generator=g) < 0.7
    if kind == "added":
        hidden = torch.rand(B, H, S, T, generator=g) < 0.3
        return torch.randn(B, H, S, T, generator=g).masked_fill(hidden, -torch.inf).to(dtype)
    if kind == "low":  # finite, and meant to hide
        return torch.zeros(B, 1, S, T).masked_fill(torch.rand(B, 1, S, T, generator=g) < 0.8, -3e38).to(dtype)
    return torch.rand(B, 1, S, T, generator=g) < 0.7


def same(call: DecodeCall, got: tuple[Tensor, Tensor]) -> None:
    """Compares with the reference in float64; a row without a key is 0, and nothing is NaN."""
    wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in call]
    (out, lse), (want, want_lse) = got, reference.decode_attention(DecodeCall(*wide))
    rms, largest = TOLERANCE[call.latent.dtype]
    assert torch.isfinite(out).all()
    blind = want_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, blind)
    error = out.double() - want
    assert error.norm() <= rms * want.norm()
    assert error.abs().max() <= largest * want.abs().max()
    # On tiles float16 is the sum of two numbers, and the products of the smaller ones are left out.
    allowed = 1e-4 if call.latent.dtype == torch.float16 else 1e-5
    assert (
        (lse - want_lse).masked_fill(blind, 0.0).abs() / (1 + want_lse.abs()).masked_fill(blind, 1.0)
    ).max() <= allowed


def both(call: DecodeCall) -> None:
    """The kernel of this machine, and rows gathered first."""
    how = {name: getattr(call, name) for name in ("scale", "causal", "softcap", "window")}
    if call.block_table is None:
        same(call, ops.decode_attention(*call[:9], **how))
    else:
        pages = (call.query, call.latent, call.rope, call.block_table, call.seq_lens, call.sinks, call.kv_scale)
        same(call, ops.paged_decode_attention(*pages, call.indices, **how))
    same(call, chosen.decode_attention(call, decode.run))


CASES: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "one query": ({}, 30, None),
    "several queries": ({"B": 2, "S": 3}, 30, None),
    "causal": ({"B": 2, "S": 5, "causal": True}, 40, None),
    "a window": ({"B": 2, "S": 5, "causal": True, "window": 30}, 60, None),
    "lengths": ({"B": 3, "S": 2, "lengths": (0, 50, 111), "causal": True}, 60, None),
    "values": ({"B": 2, "Lv": 33}, 30, None),
    "no rope": ({"R": 0}, 30, None),
    "a mask": ({"B": 2, "S": 2}, 50, "any"),
    "a mask of heads": ({"B": 2, "S": 2}, 50, "heads"),
    "an added mask": ({"B": 2, "S": 2}, 50, "added"),
    "low masks": ({"B": 2, "S": 2}, 50, "low"),
    "more heads than a walk takes": ({"S": 2, "H": 130, "L": 24}, 70, None),
    "one key": ({"B": 2, "S": 2}, 1, None),
    "none": ({"B": 2, "S": 2}, 0, None),
    "all keys": ({"S": 2}, 111, None),
    "widths that are no multiples": ({"L": 37, "R": 5, "Lv": 21, "B": 2}, 40, None),
    "a long list": ({"T": 900, "H": 16, "L": 64}, 700, None),
    "strided rows": ({"B": 2, "strided": True}, 30, None),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_against_the_reference(name: str, dtype: torch.dtype):
    sizes, k, mask = CASES[name]
    case = Case(**sizes, dtype=dtype)
    given = case.tensors()
    how = {"scale": case.scale, "causal": case.causal, "window": case.window}
    extra = None if mask is None else masks(mask, case.B, case.S, case.H, case.T, dtype)
    both(DecodeCall(**given, mask=extra, indices=lists(case.B, case.S, case.T, k), **how))


@pytest.mark.parametrize("threads", [1, 3])
def test_pages(threads: int):
    g = torch.Generator().manual_seed(0)
    pool = torch.randn(12, 16, 40, generator=g)
    table = torch.randperm(12, generator=g).int().view(2, 6)
    lengths = torch.tensor([90, 37], dtype=torch.int32)
    query, index = torch.randn(2, 2, 8, 40, generator=g), lists(2, 2, 96, 50)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tensors = (query, pool[..., :32], pool[..., 32:], table, lengths, None, None, index)
        both(DecodeCall.paged(*tensors, scale=0.3, causal=True))
        out, _ = paged_decode_attention(query, pool, table, lengths, scale=0.3, latent_width=32, indices=index)
        same(DecodeCall.paged(*tensors, scale=0.3), (out, ops.paged_decode_attention(*tensors, scale=0.3)[1]))
    finally:
        torch.set_num_threads(before)


def test_rows_that_are_not_named_are_not_read():
    given = Case(B=2, S=2).tensors()
    index = lists(2, 2, 111, 20)
    named = torch.zeros(2, 112, dtype=torch.bool).scatter(
        1, index.clamp(-1, 111).where(index >= 0, 111).flatten(1).long(), True
    )
    for rows in (given["latent"], given["rope"]):
        assert rows is not None
        rows[~named[:, :111]] = torch.nan
    both(DecodeCall(**given, indices=index, scale=0.2))


def test_sinks_and_a_soft_cap():
    """In the native kernel, and with rows gathered for the reference where there is none."""
    given = Case(B=2, S=2, H=3).tensors() | {"sinks": torch.tensor([0.5, -1.0, 2.0])}
    both(DecodeCall(**given, indices=lists(2, 2, 111, 20), scale=0.2, softcap=3.0))


def test_float8_rows():
    given = Case(B=2, L=32).tensors()
    latent, rope = given["latent"], given["rope"]
    assert latent is not None
    packed = latent.to(torch.float8_e4m3fn)
    scales = torch.rand(2, 111) + 0.5
    index = lists(2, 1, 111, 20)
    out, _ = decode_attention(given["query"], packed, rope, scale=0.2, kv_scale=scales, indices=index)
    wide = packed.float() * scales[..., None]
    want, _ = reference.decode_attention(DecodeCall(given["query"], wide, rope, indices=index, scale=0.2))
    assert torch.allclose(out, want, atol=1e-5)


def test_a_call_of_one_query_is_its_part_of_a_batch():
    """Bit by bit: a row's result depends on nothing of the others."""
    given, index = Case(B=3, S=2, T=300).tensors(), lists(3, 2, 300, 100)
    out, lse = ops.decode_attention(**given, indices=index, scale=0.2)
    for b in range(3):
        alone = {name: None if x is None else x[b : b + 1] for name, x in given.items()}
        mine = ops.decode_attention(**alone, indices=index[b : b + 1], scale=0.2)
        assert torch.equal(mine[0][0], out[b])
        assert torch.equal(mine[1][0], lse[b])


def test_flops_are_those_of_the_list():
    from torch.utils.flop_counter import FlopCounterMode

    given = Case(B=2, S=3).tensors()
    with FlopCounterMode(display=False) as counted:
        ops.decode_attention(**given, indices=lists(2, 3, 111, 20), scale=0.2)
    assert counted.get_total_flops() == 2 * 2 * 3 * 4 * 20 * (48 + 8 + 48)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.zeros(1, 1, 4), "expected int32"),
        (torch.zeros(1, 4, dtype=torch.int32), "expected int32"),
        (torch.zeros(2, 1, 4, dtype=torch.int32), "B of indices is 2, expected 1"),
        (torch.zeros(1, 3, 4, dtype=torch.int32), "S of indices is 3, expected 1"),
        (torch.zeros(1, 1, 4, dtype=torch.int32, device="meta"), "indices is on meta"),
    ],
)
def test_wrong_lists(index: Tensor, message: str):
    with pytest.raises(InputError, match=message):
        ops.decode_attention(**Case().tensors(), indices=index, scale=0.2)


def first(index: Tensor, lengths: Tensor) -> Tensor:
    """The lists with -1 from each query's length on, written entry by entry."""
    index = index.clone()
    for b in range(index.shape[0]):
        for s in range(index.shape[1]):
            n = int(lengths[b] if lengths.dim() == 1 else lengths[b, s])
            index[b, s, max(n, 0) :] = -1
    return index


@pytest.mark.parametrize(
    "lengths", [[7, 20], [0, -3], [99, 1], [[1, 2, 3], [20, 0, 50]]], ids=["requests", "none", "more", "queries"]
)
def test_the_first_entries_of_a_list(lengths: list[Any]):
    given, index = Case(B=2, S=3).tensors(), lists(2, 3, 111, 20)
    length = torch.tensor(lengths, dtype=torch.int32)
    call = DecodeCall(**given, indices=first(index, length), scale=0.2, causal=True)
    rows = (given["query"], given["latent"], given["rope"])
    how = {"scale": 0.2, "causal": True, "indices": index, "topk_length": length}
    same(call, decode_attention(*rows, **how))
    pool, table = torch.cat(rows[1:], -1).view(111 * 2, 1, -1), torch.arange(222, dtype=torch.int32).view(2, 111)
    full = torch.tensor([111, 111], dtype=torch.int32)
    same(call, paged_decode_attention(rows[0], pool, table, full, latent_width=rows[1].shape[2], **how))
    compiled = torch.compile(lambda n: decode_attention(*rows, **{**how, "topk_length": n}), backend="aot_eager")
    same(call, compiled(length))


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (torch.zeros(1), r"topk_length is torch.float32 \[1\], expected int32 \[B\] or \[B,S\]"),
        (torch.zeros(2, dtype=torch.int32), r"topk_length is torch.int32 \[2\]"),
        (torch.zeros(1, 1, 4, dtype=torch.int32), "topk_length is"),
        (torch.zeros(1, dtype=torch.int32, device="meta"), "topk_length is on meta"),
    ],
)
def test_wrong_lengths_of_lists(length: Tensor, message: str):
    given = Case().tensors()
    rows = (given["query"], given["latent"], given["rope"])
    index = torch.zeros(1, 1, 4, dtype=torch.int32)
    with pytest.raises(InputError, match=message):
        decode_attention(*rows, scale=0.2, indices=index, topk_length=length)
    with pytest.raises(InputError, match="topk_length: got no indices"):
        decode_attention(*rows, scale=0.2, topk_length=torch.zeros(1, dtype=torch.int32))


def test_in_a_compiled_graph():
    given, index = Case(B=2, S=2).tensors(), lists(2, 2, 111, 20)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def fn(index: Tensor) -> Tensor:
        rows = (given["query"], given["latent"], given["rope"])
        return decode_attention(*rows, scale=0.2, indices=index.int())[0]

    same(
        DecodeCall(**given, indices=index, scale=0.2),
        (fn(index.long()), ops.decode_attention(**given, indices=index, scale=0.2)[1]),
    )
