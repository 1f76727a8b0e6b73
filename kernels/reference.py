"""The truth: absorbed decode attention in plain torch, in float32 or float64. Never clever, never fast.

With ``t`` the key, ``L`` and ``R`` the widths of the latent row ``c`` and of the shared rotary row ``r``:

    score[b,h,s,t] = scale * ( sum_l query[b,s,h,l] c[b,t,l] + sum_r query[b,s,h,L+r] r[b,t,r] )
    score          = softcap * tanh(score / softcap)                                        where softcap > 0
    score          = score + mask[b,h,s,t]
    lse[b,s,h]     = log sum_t exp score[b,h,s,t]
    out[b,s,h,:]   = sum_t softmax_t(score[b,h,s,t]) v[b,t,:]           v = values, or c where values is None
    out[b,s,h,:]  *= exp(lse[b,s,h]) / (exp(lse[b,s,h]) + exp(sinks[h]))                    where sinks are given

``c`` (and ``r`` where it is fp8) is the stored row times ``kv_scale``. The sink is not in ``lse``.

With ``len = seq_lens[b]``, or T: a key is hidden from a query by a boolean mask that is False, by an additive mask of
minus infinity, by ``t >= len``, by ``causal`` (``t > len - S + s``), or by ``window > 0`` (``t <= len - S + s -
window``). A query that sees no key gets ``out = 0`` and ``lse = -inf``. A key that is hidden from every query of its
batch entry is not read: whatever its row holds (an unused part of a cache, the tail of a page), NaN included, does not
reach the result.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(latent: Tensor) -> torch.dtype:
    """The dtype of scores, softmax, accumulators and LSE: float64 for float64, float32 for everything else."""
    return torch.float64 if latent.dtype == torch.float64 else torch.float32


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating mask in ``dtype``. Finite entries stay finite, float64's lowest value in float32 included."""
    if mask.dtype == dtype or torch.finfo(mask.dtype).max <= torch.finfo(dtype).max:
        return mask.to(dtype)
    return mask.clamp(min=torch.finfo(dtype).min).to(dtype).masked_fill(mask == -torch.inf, -torch.inf)


def decode_attention(
    query: Tensor,
    latent: Tensor,
    rope: Tensor | None = None,
    values: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    seq_lens: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    window: int = 0,
    kv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns ``out`` [B,S,H,Lv] in query's dtype and ``lse`` [B,S,H] in float32 (float64 for float64).

    query [B,S,H,L+R], latent [B,T,L], rope [B,T,R] or None (R = 0), values [B,T,Lv] or None (the latent rows),
    mask bool (True: attend) or float (added), broadcastable to [B,H,S,T], seq_lens int [B] or None (T), sinks [H],
    kv_scale [] or [B,T]. Any strides. Shapes are not checked here.
    """
    dtype = compute_dtype(latent)
    (B, S, H, _), T = query.shape, latent.shape[1]
    visible = _visible(B, S, T, seq_lens, causal, window, query.device).expand(B, H, S, T)
    bias = torch.zeros((), dtype=dtype, device=query.device)
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        bias = additive_mask(mask, dtype)
        visible = visible & (bias != -torch.inf)

    read = visible.any(dim=2).any(dim=1)[:, :, None]  # [B,T,1]: seen by some query of this batch entry
    factor = torch.ones((), dtype=dtype, device=query.device) if kv_scale is None else kv_scale.to(dtype)[..., None]
    c = (latent.to(dtype) * factor).masked_fill(~read, 0.0)
    keys = c
    if rope is not None:
        r = rope.to(dtype) * factor if rope.dtype.itemsize == 1 else rope.to(dtype)
        keys = torch.cat([c, r.masked_fill(~read, 0.0)], dim=-1)
    v = c if values is None else values.to(dtype).masked_fill(~read, 0.0)
    score = torch.einsum("bshk,btk->bhst", query.to(dtype), keys) * scale
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
    score = (score + bias).masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(score, dim=-1)  # [B,H,S]; minus infinity where nothing is visible
    nothing = lse == -torch.inf
    weight = torch.softmax(score, dim=-1).masked_fill(nothing[..., None], 0.0)
    if sinks is not None:
        share = torch.sigmoid(lse - sinks.to(dtype)[:, None]).masked_fill(nothing, 0.0)
        weight = weight * share[..., None]
    out = torch.einsum("bhst,btv->bshv", weight, v)
    return out.to(query.dtype).contiguous(), lse.transpose(1, 2).contiguous()


def paged_decode_attention(
    query: Tensor,
    latent_pages: Tensor,
    rope_pages: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    causal: bool = False,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    window: int = 0,
    kv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same over a paged cache: token t of request b is row ``t % page`` of page ``block_table[b, t // page]``.

    latent_pages [P,page,L], rope_pages [P,page,R] or None, block_table int [B,maxpages], seq_lens int [B], kv_scale []
    or [P,page]. Entries of the table at or past ``ceil(seq_lens[b] / page)`` may be anything.
    """
    pages, page = latent_pages.shape[:2]
    B, T = block_table.shape[0], block_table.shape[1] * page
    token = torch.arange(T, device=query.device)
    at = block_table.long()[:, token // page].masked_fill(token >= seq_lens[:, None], 0)  # [B,T]
    if pages == 0:  # nothing to look up, and nothing is visible
        latent_pages = latent_pages.new_zeros(1, page, latent_pages.shape[2])
        rope_pages = None if rope_pages is None else rope_pages.new_zeros(1, page, rope_pages.shape[2])
        kv_scale = None if kv_scale is None else kv_scale.new_ones(())
    slot = (token % page).expand(B, T)
    return decode_attention(
        query,
        _rows(latent_pages, at, slot),
        None if rope_pages is None else _rows(rope_pages, at, slot),
        scale=scale,
        causal=causal,
        seq_lens=seq_lens,
        sinks=sinks,
        softcap=softcap,
        window=window,
        kv_scale=kv_scale[at, slot] if kv_scale is not None and kv_scale.dim() == 2 else kv_scale,
    )


def _rows(pages: Tensor, at: Tensor, slot: Tensor) -> Tensor:
    """[B,T,width]; float8 is moved as bytes, which every device can index."""
    if pages.dtype.itemsize == 1:
        return pages.view(torch.uint8)[at, slot].view(pages.dtype)
    return pages[at, slot]


def _visible(
    B: int, S: int, T: int, seq_lens: Tensor | None, causal: bool, window: int, device: torch.device
) -> Tensor:
    """[B,1,S,T] bool: what lengths, causality and the window leave."""
    length = torch.full((B,), T, device=device) if seq_lens is None else seq_lens.long().clamp(0, T)
    t = torch.arange(T, device=device)
    own = length[:, None, None, None] - S + torch.arange(S, device=device)[:, None]  # [B,1,S,1]: the query's own place
    visible = (t < length[:, None, None, None]).expand(B, 1, S, T)
    if causal:
        visible = visible & (t <= own)
    if window > 0:
        visible = visible & (t > own - window)
    return visible
