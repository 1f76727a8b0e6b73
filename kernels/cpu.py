"""Decode attention on CPU, in torch ops: every cache row is read from memory once.

The visible part of the cache is walked in blocks that stay in cache. One block serves as keys and as values, in float32
(float64 for float64), with the softmax carried along (m: running maximum, l: running sum):

    s = q [c, r]^T + mask;  m' = max(m, max s);  p = exp(s - m');  l = l e^(m-m') + sum p;  acc = acc e^(m-m') + p c

Choices, each measured (2 cores with AVX-512, L = 512, R = 64; GFLOP/s at 128 / 16 heads and 8192 tokens):

* **float32 products through oneDNN** (``mkldnn::_linear_pointwise``, what Inductor calls): 380 / 230, against 160 / 95 of
  ``torch.mm``, whose MKL leaves AVX-512 unused on CPUs of other makers. Strided weights fall to a scalar reference loop there
  (seconds), so every weight is made contiguous here first. A new shape costs 0.3 ms of code generation, hence blocks whose
  length is a multiple of 64: the last one is padded with zero rows.
* **Half precision is converted to float32 block by block**, in cache, and multiplied there. The alternatives for bfloat16:
  ``torch.mm`` in bfloat16 runs at 830 / 400, but its scores are rounded to bfloat16: error 2.0e-3, 9.7e-3 and 2.0e-2 for scores of
  deviation 0.5, 2.4 and 12, where this path has 1.7e-3 at each and torch's fused attention on the expanded rows 1.9e-3. Scores
  rounded after subtracting their mean under the softmax: 2.7e-3 to 5.4e-3, no faster than two plain products. A second product for
  the rounding residual: accurate, and as slow as float32. ``mm(out_dtype=float32)`` does not exist on CPU. float16 products run
  at 3 to 40.
* **What no query sees is not read**: the part of the cache before the first and after the last visible key, per batch entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_compile.kernels.reference import additive_mask, compute_dtype

BLOCK = 4096  # tokens in one block: 8 MiB of float32 latent at L = 512
ROWS = 256  # query rows (s, h) carried through one walk over the cache: bounds the scores held at a time to [ROWS, BLOCK]
GRAIN = 64  # block lengths are multiples of this
COPY = 512  # up to here a ragged block is padded in a copy; a longer one is cut into an even part and a short padded rest
BATCHED = 1 << 15  # up to this many scores, all batch entries go through one batched product

ONEDNN = (
    torch.backends.mkldnn.is_available()
    and "AVX512" in torch.backends.cpu.get_cpu_capability()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


@dataclass(frozen=True)
class _Window:
    """Keys ``[lo, hi)`` of a batch entry hold every visible one; ``plain``: and the mask changes none of them."""

    lo: int
    hi: int
    plain: bool


@dataclass(frozen=True)
class _Job:
    """The part of a call that belongs to some batch entries (G of them): rows, mask and where to look."""

    q: Tensor  # [G,S,H,L+R], scaled, in the computing dtype
    latent: Tensor  # [G,T,L]
    rope: Tensor | None
    values: Tensor | None
    hide: Tensor | None  # bool, True: hidden, [G|1,S|1,H|1,T|1]
    bias: Tensor | None  # added to the scores, [G|1,S|1,H|1,T|1]
    causal: bool
    window: _Window


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
    """Same arguments and results as :func:`mla_compile.kernels.reference.decode_attention`.

    One difference, for the better: a key whose additive mask is finite but at most half the dtype's lowest value, from every
    query, counts as hidden too (its weight is exactly 0), unless some query has no other key.
    """
    if torch.is_autocast_enabled("cpu"):  # it would turn the float32 products below into bfloat16 ones
        with torch.autocast("cpu", enabled=False):
            return decode_attention(query, latent, rope, values, mask, scale=scale, causal=causal)
    B, S, H, _ = query.shape
    T = latent.shape[1]
    dtype = compute_dtype(latent)
    causal = causal and S > 1
    seen = None if mask is None else _seen(mask, causal, S, T)
    windows = [_Window(0, T, True)] if mask is None or seen is None else _windows(mask, seen, T)
    out, lse = _run(query, latent, rope, values, mask, windows, scale, causal, dtype)
    if seen is not None and not all(w.plain for w in windows) and bool(torch.isnan(out).any()):
        # Weight 0 times a NaN in a row between visible ones that no query sees. Rare: pay for clean copies only now.
        blank = ~seen.unsqueeze(2)  # [B|1,T,1]
        latent = latent.masked_fill(blank, 0.0)
        rope = None if rope is None else rope.masked_fill(blank, 0.0)
        values = None if values is None else values.masked_fill(blank, 0.0)
        out, lse = _run(query, latent, rope, values, mask, windows, scale, causal, dtype)
    return out, lse


def _seen(mask: Tensor, causal: bool, S: int, T: int) -> Tensor:
    """[B|1,T] bool: which keys some query of the batch entry sees. The mask is small beside the cache: it is read whole."""
    mask = mask.expand(-1, -1, S if causal else -1, T)
    below = torch.ones(S, T, dtype=torch.bool).tril(T - S) if causal else None
    if mask.dtype == torch.bool:
        visible = mask if below is None else mask & below
    else:
        visible = mask > torch.finfo(mask.dtype).min / 2
        visible = visible if below is None else visible & below
        if not bool(visible.any(dim=3).all()):  # a query with nothing but such keys weighs them all: none may be skipped
            visible = mask != -torch.inf
            visible = visible if below is None else visible & below
    return visible.any(dim=2).any(dim=1)


def _windows(mask: Tensor, seen: Tensor, T: int) -> list[_Window]:
    """One window for each batch entry of the mask."""
    found = []
    for b in range(mask.shape[0]):
        at = seen[b].nonzero()
        if at.numel() == 0:
            found.append(_Window(0, 0, False))
            continue
        lo, hi = int(at[0]), int(at[-1]) + 1
        inside = mask[b, :, :, lo:hi] if mask.shape[3] == T else mask[b]
        plain = bool(inside.all()) if mask.dtype == torch.bool else not bool(inside.any())
        found.append(_Window(lo, hi, plain))
    return found


def _run(
    query: Tensor,
    latent: Tensor,
    rope: Tensor | None,
    values: Tensor | None,
    mask: Tensor | None,
    windows: list[_Window],
    scale: float,
    causal: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Splits the call into jobs: one for each batch entry, or a single one where the whole call is small."""
    B, S, H, _ = query.shape
    T = latent.shape[1]
    width = (latent if values is None else values).shape[2]
    out = torch.empty(B, S, H, width, dtype=latent.dtype)
    lse = torch.empty(B, S, H, dtype=dtype)
    q = query.to(dtype) * scale
    hide = bias = None
    if mask is not None and not all(w.plain for w in windows):
        turned = mask.transpose(1, 2)  # [B|1,S|1,H|1,T|1], as the scores lie
        if mask.dtype == torch.bool:
            hide = ~turned
        else:
            bias = additive_mask(turned, dtype)
    step = B if B * S * H * T <= BATCHED else 1
    for b in range(0, B, step):
        group = slice(b, b + step)
        window = windows[b if len(windows) > 1 else 0]
        if step > 1 and len(windows) > 1:
            window = _Window(min(w.lo for w in windows), max(w.hi for w in windows), all(w.plain for w in windows))
            if any((w.lo, w.hi) != (window.lo, window.hi) for w in windows):
                window = _Window(window.lo, window.hi, False)
                if hide is None and bias is None and mask is not None:
                    hide = ~mask.transpose(1, 2) if mask.dtype == torch.bool else None
                    bias = None if mask.dtype == torch.bool else additive_mask(mask.transpose(1, 2), dtype)
        job = _Job(
            q[group],
            latent[group],
            None if rope is None else rope[group],
            None if values is None else values[group],
            None if hide is None or window.plain else hide[group if hide.shape[0] > 1 else slice(None)],
            None if bias is None or window.plain else bias[group if bias.shape[0] > 1 else slice(None)],
            causal,
            window,
        )
        stride = max(1, ROWS // H)
        for s0 in range(0, S, stride):
            _walk(job, s0, min(S, s0 + stride), out[group], lse[group])
    return out, lse
