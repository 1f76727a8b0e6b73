"""Sparse attention for kernels that cannot read the selected rows in place: these rows are copied first.

Each query becomes a separate request over the k rows that its ``indices`` name. The request's mask combines the call's
length, causality, window and mask at these rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mla_compile.kernels.call import DecodeCall, rows_at


def decode_attention(call: DecodeCall, run: Callable[[DecodeCall], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)`` of a call with indices; ``run`` computes a call without indices."""
    B, S, H, _ = call.query.shape
    out, lse = run(gathered(call))
    return out.view(B, S, H, -1), lse.view(B, S, H)


def gathered(call: DecodeCall) -> DecodeCall:
    """Copy the selected rows. Return a call of B*S requests, each with one query and k keys."""
    assert call.indices is not None
    (B, S, H, K), T = call.query.shape, call.sizes.T
    k = call.indices.shape[2]
    query = call.query.reshape(B * S, 1, H, K)
    if T == 0:  # there is no key to name
        k = 0
    at = call.indices[..., :k].long()
    seen = _within(call, at)
    at = at.masked_fill(~seen, 0)
    rows = _places(call, at)
    return DecodeCall(
        query=query,
        latent=rows_at(call.latent, *rows),
        rope=None if call.rope is None else rows_at(call.rope, *rows),
        values=None if call.values is None else rows_at(call.values, *rows),
        mask=_mask(call, at, seen),
        sinks=call.sinks,
        kv_scale=call.kv_scale if call.kv_scale is None or call.kv_scale.dim() == 0 else rows_at(call.kv_scale, *rows),
        scale=call.scale,
        softcap=call.softcap,
        num_splits=call.num_splits,
        deterministic=call.deterministic,
    )


def _within(call: DecodeCall, at: Tensor) -> Tensor:
    """Return bool [B,S,k]: whether length, causality and window let the query see an entry's key."""
    (B, S, _, _), T = call.query.shape, call.sizes.T
    length = torch.full((B,), T, device=at.device) if call.seq_lens is None else call.seq_lens.long().clamp(0, T)
    length = length[:, None, None]
    own = length - S + torch.arange(S, device=at.device)[:, None]
    seen = (at >= 0) & (at < length)
    if call.causal:
        seen = seen & (at <= own)
    if call.window > 0:
        seen = seen & (at > own - call.window)
    return seen


def _places(call: DecodeCall, at: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of tokens ``at`` [B,S,k] into the cache's first two axes, as two tensors [B*S,k]."""
    B, S, k = at.shape
    batch = torch.arange(B, device=at.device)[:, None, None].expand(B, S, k)
    if call.block_table is None:
        return batch.reshape(B * S, k), at.reshape(B * S, k)
    page = call.latent.shape[1]
    return call.block_table.long()[batch, at // page].reshape(B * S, k), (at % page).reshape(B * S, k)


def _mask(call: DecodeCall, at: Tensor, seen: Tensor) -> Tensor:
    """Return the call's mask at the keys ``at``, [B*S,H|1,1,k]; keys that are not ``seen`` are hidden."""
    B, S, k = at.shape
    if call.mask is None:
        return seen.reshape(B * S, 1, 1, k)
    heads = call.mask.shape[1]
    mask = call.mask.expand(B, heads, S, call.latent.shape[1]).gather(3, at[:, None].expand(B, heads, S, k))
    mask = mask.transpose(1, 2).reshape(B * S, heads, 1, k)
    hidden = ~seen.reshape(B * S, 1, 1, k)
    return mask.masked_fill(hidden, False if mask.dtype == torch.bool else -torch.inf)
