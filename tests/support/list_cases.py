"""Calls with lists of keys that are more than a :class:`Case`, inside the interpreting process."""

from __future__ import annotations

from dataclasses import replace

import torch

from mla_compile.kernels import reference
from mla_compile.kernels.call import DecodeCall
from tests.support import interpreter
from tests.support.interpreter_cases import Case, compare, make, planned
from tests.support.lists import lists


def tokens_alone(case: Case) -> None:
    """Each query token by itself gives the bits that it gives among the others."""
    call = make(case).call
    assert call.indices is not None
    out, lse = interpreter.run(call, planned(case))
    for s in range(case.S):
        one = slice(s, s + 1)
        own = call._replace(query=call.query[:, one], indices=call.indices[:, one])
        own_out, own_lse = interpreter.run(own, planned(case))
        assert torch.equal(own_out, out[:, one])
        assert torch.equal(own_lse, lse[:, one])


def scattered_pages(distance: str) -> None:
    """Pages with room between them, or whose rows' distance is not that of the latent's and the rotary key's pages."""
    g = torch.Generator().manual_seed(0)
    pool = torch.full((9, 20, 56), torch.nan)
    latent, rope = pool[:, :16, :32], pool[:, :16, 32:40]
    if distance == "tokens":
        rope = torch.full((9, 8, 16), torch.nan).transpose(1, 2)
    latent.copy_(torch.randn(latent.shape, generator=g))
    rope.copy_(torch.randn(rope.shape, generator=g))
    table = torch.randperm(9, generator=g)[:8].int().view(2, 4)
    lens = torch.tensor([60, 37], dtype=torch.int32)
    query = torch.randn(2, 2, 5, 40, generator=g)
    call = DecodeCall.paged(query, latent, rope, table, lens, indices=lists(2, 2, 64, 50), scale=0.3, causal=True)
    case = Case(dtype=torch.float32, splits=2)
    want, want_lse = reference.decode_attention(call._replace(query=query.double(), latent=latent.double()))
    out, lse = interpreter.run(call, planned(case), least=0)
    compare(out, lse, want, want_lse, torch.float32, case)


def nan_in_a_named_row(page: int) -> bool:
    """Whether a NaN shows in exactly the query tokens that name its row."""
    case = Case(k=20, S=3, page=page, lens=(96, 96))
    call = make(case).call
    assert call.indices is not None
    key = int(call.indices[0, 0][call.indices[0, 0] >= 0][0])
    at = (0, key)
    if call.block_table is not None:
        at = (int(call.block_table[0, key // page]), key % page)
    call.latent[at][0] = torch.nan
    named = (call.indices == key).any(-1)
    named[1] = False
    out, lse = interpreter.run(call, planned(replace(case, splits=2)))
    seen = out.isnan().any(-1).any(-1)
    return bool(torch.equal(seen, named)) and bool(torch.equal(lse.isnan().all(-1), named))
