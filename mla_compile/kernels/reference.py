"""The reference implementation of absorbed decode attention: plain torch, in float32 or float64.

Key ``t`` has a latent row ``c`` of width ``L`` and a rotary row ``r`` of width ``R``, shared by all heads. The results
``out`` and ``lse`` are

    score[b,h,s,t] = scale * ( sum_l query[b,s,h,l] c[b,t,l] + sum_r query[b,s,h,L+r] r[b,t,r] )
    score          = softcap * tanh(score / softcap)                                        if softcap > 0
    score          = score + mask[b,h,s,t]
    lse[b,s,h]     = log sum_t exp score[b,h,s,t]
    out[b,s,h,:]   = sum_t softmax_t(score[b,h,s,t]) v[b,t,:]           v = values, or c if values is None
    out[b,s,h,:]  *= exp(lse[b,s,h]) / (exp(lse[b,s,h]) + exp(sinks[h]))                    if sinks are given

Rows that are stored in fp8 are first multiplied by ``kv_scale``. If it is [B,T,G], each group of columns has its own
scale. ``lse`` does not include the sink.

Let ``len`` be ``seq_lens[b]``, or T if there is no ``seq_lens``. A key is hidden from a query if:

* the mask is False (if boolean) or minus infinity (if additive)
* ``t >= len``
* ``causal`` is set, and ``t > len - S + s``
* ``window > 0``, and ``t <= len - S + s - window``
* ``indices`` are given, and no ``indices[b,s,i]`` is ``t``

A query that sees no key gets ``out = 0`` and ``lse = -inf``. If a key is hidden from all
queries of its batch entry, the key's row does not affect the result. The row may even hold NaN, as in the unused part
of a cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_compile.kernels.call import DecodeCall, IndexCall, rows_at


def compute_dtype(latent: Tensor) -> torch.dtype:
    """Return the dtype of scores, softmax, accumulators and LSE: float64 for a float64 cache, else float32."""
    return torch.float64 if latent.dtype == torch.float64 else torch.float32


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast an additive mask to ``dtype``. Negative finite entries stay finite, even float64's lowest value."""
    if mask.dtype == dtype or torch.finfo(mask.dtype).max <= torch.finfo(dtype).max:
        return mask.to(dtype)
    return mask.clamp(min=torch.finfo(dtype).min).to(dtype).masked_fill(mask == -torch.inf, -torch.inf)


def decode_attention(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)`` of a call over a contiguous or paged cache of any strides. Shapes are not checked here."""
    if call.block_table is not None:
        call = _gathered(call, call.block_table)
    latent, mask = call.latent, call.mask
    dtype, device = compute_dtype(latent), call.query.device
    (B, S, H, _), T = call.query.shape, latent.shape[1]
    visible = _visible(B, S, T, call.seq_lens, call.window, device, causal=call.causal).expand(B, H, S, T)
    if call.indices is not None:
        visible = visible & _named(call.indices, T)
    bias = torch.zeros((), dtype=dtype, device=device)
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        bias = additive_mask(mask, dtype)
        visible = visible & (bias != -torch.inf)

    read = visible.any(dim=2).any(dim=1)[:, :, None]  # [B,T,1]: whether any query of the batch entry sees the key
    factor = torch.ones((), dtype=dtype, device=device)
    if call.kv_scale is not None:
        factor = call.kv_scale.to(dtype)
        factor = factor.repeat_interleave(latent.shape[2] // call.groups, -1) if call.groups else factor[..., None]
    c = (latent.to(dtype) * factor).masked_fill(~read, 0.0)
    keys = c
    if call.rope is not None:
        r = call.rope.to(dtype) * factor if call.rope.dtype.itemsize == 1 else call.rope.to(dtype)
        keys = torch.cat([c, r.masked_fill(~read, 0.0)], dim=-1)
    v = c if call.values is None else call.values.to(dtype).masked_fill(~read, 0.0)
    score = torch.einsum("bshk,btk->bhst", call.query.to(dtype), keys) * call.scale
    if call.softcap > 0:
        score = call.softcap * torch.tanh(score / call.softcap)
    score = (score + bias).masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(score, dim=-1)  # [B,H,S]; minus infinity if no key is visible
    nothing = lse == -torch.inf
    weight = torch.softmax(score, dim=-1).masked_fill(nothing[..., None], 0.0)
    out, lse = torch.einsum("bhst,btv->bshv", weight, v), lse.transpose(1, 2)
    if call.sinks is not None:
        out = out * sink_share(lse, call.sinks)[..., None]
    return out.to(call.query.dtype).contiguous(), lse.contiguous()


def index_scores(call: IndexCall) -> Tensor:
    """Return the scores [B,S,T] of :class:`mla_compile.kernels.call.IndexCall`; shapes are not checked here."""
    dtype = compute_dtype(call.keys)
    products = torch.einsum("bsjd,btd->bsjt", call.query.to(dtype), call.keys.to(dtype))
    return torch.einsum("bsj,bsjt->bst", call.weights.to(dtype), torch.relu(products * call.scale)).contiguous()


def sink_share(lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the factor by which a sink scales ``out``: ``exp(lse) / (exp(lse) + exp(sinks))``, [...,H].

    The factor is 0 if no key is visible. ``lse`` is [...,H], ``sinks`` [H].
    """
    return torch.sigmoid(lse - sinks.to(lse.dtype)).masked_fill(lse == -torch.inf, 0.0)


def _named(indices: Tensor, T: int) -> Tensor:
    """Return bool [B,1,S,T]: whether a query's entries in ``indices`` [B,S,k] name a key."""
    at = indices.long()
    # One extra column takes the entries that name no key.
    named = torch.zeros(*at.shape[:2], T + 1, dtype=torch.bool, device=at.device)
    return named.scatter(-1, at.masked_fill((at < 0) | (at > T), T), value=True)[:, None, :, :T]


def _gathered(call: DecodeCall, table: Tensor) -> DecodeCall:
    """Copy the pages to a contiguous cache [B,T,width], T = maxpages*page. Rows past a length are arbitrary."""
    assert call.seq_lens is not None
    latent, rope, kv_scale = call.latent, call.rope, call.kv_scale
    pages, page = latent.shape[:2]
    B, T = table.shape[0], table.shape[1] * page
    token = torch.arange(T, device=call.query.device)
    at = table.long()[:, token // page].masked_fill(token >= call.seq_lens[:, None], 0)  # [B,T]
    if pages == 0:  # indexing needs at least one page, although no key is visible
        latent = latent.new_zeros(1, page, latent.shape[2])
        rope = None if rope is None else rope.new_zeros(1, page, rope.shape[2])
        kv_scale = None if kv_scale is None else kv_scale.new_ones(())
    slot = (token % page).expand(B, T)
    return call._replace(
        latent=rows_at(latent, at, slot),
        rope=None if rope is None else rows_at(rope, at, slot),
        kv_scale=kv_scale[at, slot] if kv_scale is not None and kv_scale.dim() else kv_scale,
        block_table=None,
    )


def _visible(
    B: int, S: int, T: int, seq_lens: Tensor | None, window: int, device: torch.device, *, causal: bool
) -> Tensor:
    """Return bool [B,1,S,T]: whether length, causality and window let a query see a key."""
    length = torch.full((B,), T, device=device) if seq_lens is None else seq_lens.long().clamp(0, T)
    t = torch.arange(T, device=device)
    own = length[:, None, None, None] - S + torch.arange(S, device=device)[:, None]  # the query's own position
    visible = (t < length[:, None, None, None]).expand(B, 1, S, T)
    if causal:
        visible = visible & (t <= own)
    if window > 0:
        visible = visible & (t > own - window)
    return visible
