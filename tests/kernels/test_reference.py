"""The reference against a loop over query rows and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_compile.kernels import reference
from mla_compile.kernels.call import DecodeCall

L, R = 24, 8


def by_hand(query: Tensor, rows: Tensor, scale: float, window: int, softcap: float, sinks: Tensor) -> Tensor:
    """[S,H,L] of one causal request, one query row and one key at a time, with the sink as a key without a value."""
    T = rows.shape[0]
    out = torch.zeros(query.shape[0], query.shape[1], L, dtype=torch.float64)
    for s in range(query.shape[0]):
        own = T - query.shape[0] + s
        for h in range(query.shape[1]):
            seen = [t for t in range(T) if own - window < t <= own]
            score = torch.stack([scale * query[s, h] @ rows[t] for t in seen])
            score = torch.cat([softcap * torch.tanh(score / softcap), sinks[h : h + 1]])
            weight = torch.softmax(score, dim=0)[:-1]
            out[s, h] = sum(w * rows[t, :L] for w, t in zip(weight, seen, strict=True))
    return out


def test_reference_by_hand():
    g = torch.Generator().manual_seed(1)
    query, rows = torch.randn(2, 3, L + R, generator=g).double(), torch.randn(11, L + R, generator=g).double()
    sinks = torch.randn(3, generator=g).double()
    room = torch.cat([rows, torch.full((5, L + R), torch.nan).double()])[None]
    call = DecodeCall(
        query[None], room[..., :L], room[..., L:], scale=0.4, causal=True, window=6, softcap=1.5, sinks=sinks,
        seq_lens=torch.tensor([11], dtype=torch.int32),
    )  # fmt: skip
    got, lse = reference.decode_attention(call)
    torch.testing.assert_close(got[0], by_hand(query, rows, 0.4, 6, 1.5, sinks))
    without, same = reference.decode_attention(call._replace(sinks=None))
    assert torch.equal(lse, same), "the sink is not in lse"
    torch.testing.assert_close(got, without * torch.sigmoid(lse - sinks)[..., None])
