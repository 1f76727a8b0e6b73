"""The public functions of kernels/decode.py, on CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_compile import ops
from mla_compile.errors import InputError
from mla_compile.kernels import decode
from tests.support.paged_calls import FEATURES, LENS, PAGE, B, L, R, pages

FP8 = torch.float8_e4m3fn


def gathered(x: dict[str, Tensor]) -> Tensor:
    """[B,T,L+R]: each request's rows in order, by a loop over tokens; zeros past its length."""
    rows = torch.zeros(B, 4 * PAGE, L + R, dtype=x["kv_pages"].dtype)
    for b, length in enumerate(LENS):
        for t in range(length):
            rows[b, t] = x["kv_pages"][x["block_table"][b, t // PAGE], t % PAGE]
    return rows


@pytest.mark.parametrize("how", FEATURES, ids=lambda how: ",".join(how) or "plain")
def test_paged_is_contiguous_of_the_gathered_rows(how: dict[str, Any]):
    x = pages()
    out, lse = decode.paged_decode_attention(**x, latent_width=L, scale=0.3, **how)
    rows = gathered(x)
    want, want_lse = decode.decode_attention(
        x["query"], rows[..., :L], rows[..., L:], scale=0.3, seq_lens=x["seq_lens"], **how
    )
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    assert not out[1].any()
    assert (lse[1] == -torch.inf).all()


def test_forms_of_a_paged_cache_agree():
    x = pages()
    want = decode.paged_decode_attention(**x, latent_width=L, scale=0.3)[0]
    cache = x.pop("kv_pages")
    for given in (cache[:, :, None], (cache[..., :L], cache[..., L:])):
        width = {} if isinstance(given, tuple) else {"latent_width": L}
        got = decode.paged_decode_attention(x["query"], given, x["block_table"], x["seq_lens"], scale=0.3, **width)[0]
        assert torch.equal(got, want)
    got = decode.paged_decode_attention(
        x["query"][..., :L], (cache[..., :L], None), x["block_table"], x["seq_lens"], scale=0.3
    )[0]
    assert got.shape == want.shape


def test_a_head_axis_is_taken_off():
    query, rows = torch.randn(2, 1, 4, 32), torch.randn(2, 1, 9, 32)
    want = decode.decode_attention(query, rows[:, 0, :, :24], rows[:, 0, :, 24:], scale=0.3)[0]
    assert torch.equal(decode.decode_attention(query, rows[..., :24], rows[..., 24:], scale=0.3)[0], want)


@pytest.mark.parametrize("form", ["tensor", "token"])
@pytest.mark.parametrize("paged", [False, True])
def test_fp8_rows_are_multiplied_by_their_scale(form: str, paged: bool):
    x = pages()
    cache = x["kv_pages"].nan_to_num(0.0).to(FP8)
    scale = torch.tensor(0.3) if form == "tensor" else torch.rand(cache.shape[:2])
    exact = cache.float() * (scale if form == "tensor" else scale[..., None])
    table, lens = x["block_table"], x["seq_lens"]
    if paged:
        got = decode.paged_decode_attention(x["query"], cache, table, lens, latent_width=L, kv_scale=scale, scale=0.3)
        want = decode.paged_decode_attention(x["query"], exact, table, lens, latent_width=L, scale=0.3)
    else:
        q = x["query"][:1].expand(9, -1, -1, -1)
        got = decode.decode_attention(q, cache[..., :L], cache[..., L:], kv_scale=scale, scale=0.3)
        want = decode.decode_attention(q, exact[..., :L], exact[..., L:], scale=0.3)
    torch.testing.assert_close(got, want)


def flashmla_rows(rows: Tensor, G: int) -> tuple[Tensor, Tensor]:
    """Rows [...,L+R] as FlashMLA packs them, and what they stand for."""
    groups = rows[..., :L].unflatten(-1, (G, -1))
    scales = groups.abs().amax(-1) / 448
    values, rope = (groups / scales[..., None]).to(FP8), rows[..., L:].bfloat16()
    held = [x.contiguous().view(torch.uint8) for x in (values.flatten(-2), scales, rope)]
    stands = torch.cat([(values.float() * scales[..., None]).flatten(-2), rope.float()], -1)
    return torch.cat(held, -1), stands


@pytest.mark.parametrize("head_axis", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, FP8], ids=str)
def test_rows_as_flashmla_packs_them(dtype: torch.dtype, head_axis: bool):
    x = pages()
    held, stands = flashmla_rows(x["kv_pages"], 3)
    assert held.shape[-1] == L + 4 * 3 + 2 * R
    held = torch.nn.functional.pad(held, (0, 4))[..., :-4].view(dtype)  # room beside the rows
    given = {**x, "kv_pages": held[:, :, None] if head_axis else held}
    got = decode.paged_decode_attention(**given, latent_width=L, scale=0.3, causal=True)
    want = decode.paged_decode_attention(**{**x, "kv_pages": stands}, latent_width=L, scale=0.3, causal=True)
    torch.testing.assert_close(got, want)
    compiled = torch.compile(decode.paged_decode_attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**given, latent_width=L, scale=0.3, causal=True), got)


def test_packed_rows_that_do_not_fit():
    x = pages()
    held, _ = flashmla_rows(x["kv_pages"], 3)
    for cache, width, why in (
        (held[..., :-1], L, "of 51 bytes"),  # scales that are no multiple of 4 bytes
        (held[..., : L + 2 * R], L, "of 40 bytes"),  # no scale
        (torch.nn.functional.pad(held, (0, 1))[..., :-1], L, r"multiples of 4 bytes apart"),
        (held[..., ::2], L, "dense"),
        (held.view(FP8)[..., : L + R], L, "kv_scale is missing"),
        (held, None, "latent_width is None"),
        (held[..., :48], L, "G of kv_scale is 2"),
    ):
        with pytest.raises(InputError, match=why):
            decode.paged_decode_attention(**{**x, "kv_pages": cache}, latent_width=width, scale=0.3)


def test_gradients_are_refused():
    x = pages()
    x["query"].requires_grad_()
    for call in (
        lambda: decode.paged_decode_attention(**x, latent_width=L, scale=0.3),
        lambda: decode.decode_attention(
            torch.zeros(2, 3, 4, 24, requires_grad=True), torch.zeros(2, 9, 16), torch.zeros(2, 9, 8), scale=1.0
        ),
        lambda: ops.paged_decode_attention(
            x["query"], x["kv_pages"][..., :L], x["kv_pages"][..., L:], x["block_table"], x["seq_lens"], scale=0.3
        ),
    ):
        with pytest.raises(InputError, match="has no gradient"):
            call()
    with torch.no_grad():
        decode.paged_decode_attention(**x, latent_width=L, scale=0.3)


def test_the_functions_take_a_schedule():
    x = pages()
    cache = x["kv_pages"]
    given = {name: x[name] for name in ("query", "block_table", "seq_lens")}
    schedule = ops.decode_schedule(**given, latent=cache[..., :L], rope=cache[..., L:], scale=0.3)
    want = decode.paged_decode_attention(**x, latent_width=L, scale=0.3)
    got = decode.paged_decode_attention(**x, latent_width=L, scale=0.3, schedule=schedule)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    rows = gathered(x)
    dense = {"scale": 0.3, "seq_lens": x["seq_lens"]}
    with pytest.raises(InputError, match=r"schedule has .* elements, expected 0"):
        decode.decode_attention(x["query"], rows[..., :L], rows[..., L:], schedule=schedule, **dense)


@torch.no_grad()
def test_compiled_calls_become_the_ops():
    x = pages()
    counts: list[list[str]] = []

    def backend(gm: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        counts.append([str(n.target) for n in gm.graph.nodes if "decode_attention" in str(n.target)])
        return gm.forward

    def paged(query: Tensor, cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        how = {"scale": 0.3, "causal": True}
        schedule = ops.decode_schedule(query, cache[..., :L], cache[..., L:], seq_lens=lens, block_table=table, **how)
        return decode.paged_decode_attention(query, cache, table, lens, latent_width=L, schedule=schedule, **how)[0]

    def dense(query: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        how = {"scale": 0.3, "window": 4, "num_splits": 2}
        schedule = ops.decode_schedule(query, rows[:, 0, :, :L], rows[:, 0, :, L:], mask=mask, **how)
        return decode.decode_attention(query, rows[..., :L], rows[..., L:], mask=mask, schedule=schedule, **how)[0]

    given = (x["query"], x["kv_pages"], x["block_table"], x["seq_lens"])
    torch.testing.assert_close(torch.compile(paged, fullgraph=True, backend=backend)(*given), paged(*given))
    rows = torch.randn(B, 1, 9, L + R)
    mask = torch.rand(B, 1, 1, 9) < 0.7
    got = torch.compile(dense, fullgraph=True, backend=backend)(x["query"], rows, mask)
    torch.testing.assert_close(got, dense(x["query"], rows, mask))
    assert counts == [["mla_compile.paged_decode_attention"], ["mla_compile.decode_attention"]]
