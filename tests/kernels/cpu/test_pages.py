"""Calls over pages on a CPU against the reference in float64: the native kernel finds each row by the block table."""

from __future__ import annotations

import pytest
import torch

from mla_compile import ops
from mla_compile.kernels import reference
from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.cpu import decode as cpu
from tests.support.cpu_cases import TOLERANCE

pytestmark = pytest.mark.usefixtures("path")


def _call(dtype: torch.dtype, page: int, L: int, H: int, S: int, lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """A pool in a random order with NaN wherever no request has a token, and -1 where the table has no page."""
    g = torch.Generator().manual_seed(page + L)
    R, needed = 8, [-(-n // page) for n in lengths]
    order = torch.randperm(sum(needed) + 3, generator=g).int()
    table = torch.full((len(lengths), max([*needed, 1]) + 1), -1, dtype=torch.int32)
    pool = torch.full((len(order), page, L + R), torch.nan)
    for b, n in enumerate(lengths):
        pages, order = order[: needed[b]], order[needed[b] :]
        table[b, : needed[b]] = pages
        for t in range(n):
            pool[pages[t // page], t % page] = torch.randn(L + R, generator=g)
    query = torch.randn(len(lengths), S, H, L + R, generator=g).to(dtype)
    pool = pool.to(dtype)
    lens = torch.tensor(lengths, dtype=torch.int32)
    return {"query": query, "latent": pool[..., :L], "rope": pool[..., L:], "block_table": table, "seq_lens": lens}


SIZES = [(24, 4, 1, 0), (63, 16, 1, 0), (64, 16, 3, 0), (128, 40, 1, 70)]


@pytest.mark.parametrize("page", [1, 16, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.wholly
def test_rows_are_found_by_the_table(dtype: torch.dtype, page: int):
    for sizes in SIZES:
        found_by_the_table(dtype, page, *sizes)


def found_by_the_table(dtype: torch.dtype, page: int, L: int, H: int, S: int, window: int) -> None:
    given = _call(dtype, page, L, H, S, (37, 0, 300, 1, 129, 64))
    rope = given["rope"].contiguous()  # a pool of its own, with other strides
    how = {"scale": 0.2, "causal": S > 1, "window": window}
    tensors = (given["query"], given["latent"], rope, given["block_table"], given["seq_lens"])
    out, lse = ops.paged_decode_attention(*tensors, **how)
    exact = [x.double() if x.is_floating_point() else x for x in tensors]
    want, want_lse = reference.decode_attention(DecodeCall.paged(*exact, **how))
    rms, largest = TOLERANCE[dtype]
    shown = (L, H, S, window)
    assert torch.isfinite(out).all(), shown
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf), shown
    assert (out.double() - want).norm() <= rms * want.norm(), shown
    assert (out.double() - want).abs().max() <= largest * want.abs().max(), shown
    seen = want_lse != -torch.inf
    # On tiles float16 is the sum of two numbers, and the products of the smaller ones are left out.
    allowed = 1e-4 if dtype == torch.float16 else 1e-5
    assert ((lse - want_lse)[seen].abs() / (1 + want_lse[seen].abs())).max() <= allowed, shown


def test_a_request_alone_has_the_result_that_it_has_in_a_batch():
    given = _call(torch.float32, 16, 48, 8, 1, (200, 31, 77))
    args = [given[name] for name in ("query", "latent", "rope", "block_table", "seq_lens")]
    out, _ = ops.paged_decode_attention(*args, scale=0.3)
    for b in range(3):
        one = [args[0][b : b + 1], args[1], args[2], args[3][b : b + 1], args[4][b : b + 1]]
        alone, _ = ops.paged_decode_attention(*one, scale=0.3)
        torch.testing.assert_close(alone[0], out[b], rtol=1e-5, atol=1e-6)


def test_pages_of_float64_are_left_to_the_reference():
    given = _call(torch.float64, 16, 24, 4, 1, (20,))
    call = DecodeCall.paged(given["query"], given["latent"], given["rope"], given["block_table"], given["seq_lens"])
    assert not cpu.suits(call)
