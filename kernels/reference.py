"""The truth: absorbed decode attention in plain torch, in float32 or float64. Never clever, never fast.

With ``n = t`` the key, ``L`` and ``R`` the widths of the latent row ``c`` and of the shared rotary row ``r``:

    score[b,h,s,t] = scale * ( sum_l query[b,s,h,l] c[b,t,l] + sum_r query[b,s,h,L+r] r[b,t,r] ) + mask[b,h,s,t]
    lse[b,s,h]     = log sum_t exp score[b,h,s,t]
    out[b,s,h,:]   = sum_t softmax_t(score[b,h,s,t]) v[b,t,:]           v = values, or c where values is None

A key is hidden from a query by a boolean mask that is False, by an additive mask of minus infinity, or by ``causal``
(``t > T - S + s``). A query that sees no key gets ``out = 0`` and ``lse = -inf``. A key that is hidden from every query
of its batch entry is not read: whatever its row holds (an unused part of a cache), NaN included, does not reach the
result.
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
) -> tuple[Tensor, Tensor]:
    """Returns ``out`` [B,S,H,Lv] in query's dtype and ``lse`` [B,S,H] in float32 (float64 for float64).

    query [B,S,H,L+R], latent [B,T,L], rope [B,T,R] or None (R = 0), values [B,T,Lv] or None (the latent rows),
    mask bool (True: attend) or float (added), broadcastable to [B,H,S,T]. Any strides. Shapes are not checked here.
    """
    dtype = compute_dtype(latent)
    (B, S, H, _), T = query.shape, latent.shape[1]
    keys = latent if rope is None else torch.cat([latent, rope], dim=-1)
    visible = torch.ones(B, H, S, T, dtype=torch.bool, device=query.device)
    bias = torch.zeros((), dtype=dtype, device=query.device)
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        bias = additive_mask(mask, dtype)
        visible = visible & (bias != -torch.inf)
    if causal:
        visible = visible & visible.new_ones(S, T).tril(T - S)

    read = visible.any(dim=2).any(dim=1)[:, :, None]  # [B,T,1]: seen by some query of this batch entry
    keys = keys.to(dtype).masked_fill(~read, 0.0)
    v = (latent if values is None else values).to(dtype).masked_fill(~read, 0.0)
    score = torch.einsum("bshk,btk->bhst", query.to(dtype), keys) * scale + bias
    score = score.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(score, dim=-1)  # [B,H,S]; minus infinity where nothing is visible
    weight = torch.softmax(score, dim=-1).masked_fill((lse == -torch.inf)[..., None], 0.0)
    out = torch.einsum("bhst,btv->bshv", weight, v)
    return out.to(query.dtype).contiguous(), lse.transpose(1, 2).contiguous()
