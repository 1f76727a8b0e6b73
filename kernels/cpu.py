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

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_compile.kernels.reference import additive_mask, compute_dtype

BLOCK = 4096  # tokens in one block: 8 MiB of float32 latent at L = 512
ROWS = (
    256  # query rows (s, h) carried through one walk over the cache: bounds the scores held at a time to [ROWS, BLOCK]
)
GRAIN = 64  # block lengths are multiples of this
COPY = (
    512  # up to here a ragged block is padded in a copy; a longer one is cut into an even part and a short padded rest
)
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
    mask: Tensor | None  # as given, but [G|1,S|1,H|1,T|1]; None where it changes nothing inside the window
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
        if not bool(
            visible.any(dim=3).all()
        ):  # a query with nothing but such keys weighs them all: none may be skipped
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
    rows = max(1, ROWS // H)
    step = B if B * S * H * T <= BATCHED and all(w == windows[0] for w in windows) else 1
    for b in range(0, B, step):
        group = slice(b, b + step)
        window = windows[b if len(windows) > 1 else 0]
        job = _Job(
            q=q[group],
            latent=latent[group],
            rope=None if rope is None else rope[group],
            values=None if values is None else values[group],
            mask=None if mask is None or window.plain else (mask[group] if len(windows) > 1 else mask).transpose(1, 2),
            causal=causal,
            window=window,
        )
        for s0 in range(0, S, rows):
            queries = slice(s0, min(S, s0 + rows))
            _walk(job, queries, out[group, queries], lse[group, queries])
    return out, lse


def _walk(job: _Job, queries: slice, out: Tensor, lse: Tensor) -> None:
    """One walk over the visible keys with some of the queries; fills ``out`` [G,s,H,Lv] and ``lse`` [G,s,H]."""
    G, s, H = lse.shape
    latent, dtype = job.latent, job.q.dtype
    T, L = latent.shape[1], latent.shape[2]
    q = job.q[:, queries].reshape(G, s * H, -1)
    q_latent, q_rope = q[..., :L].contiguous(), q[..., L:].contiguous()
    lo, hi = job.window.lo, job.window.hi
    if job.causal:
        hi = min(hi, T - job.q.shape[1] + queries.stop)
    top: Tensor | None = None  # running maximum of the scores, [G,sH,1]
    total = accumulated = torch.empty(0)
    for start, stop in _blocks(lo, hi, latent.dtype == dtype and latent.is_contiguous()):
        length = stop - start
        padded = length if length < GRAIN else -(-length // GRAIN) * GRAIN
        k = _block(latent, start, stop, padded, dtype)
        score = _product(q_latent, k)
        if job.rope is not None:
            score = _add_product(score, q_rope, _block(job.rope, start, stop, padded, dtype))
        if padded > length:
            score[..., length:] = -torch.inf
        hidden = _mask_scores(job, queries, start, stop, score.view(G, s, H, padded)[..., :length])
        block_top = score.amax(dim=-1, keepdim=True)
        new_top = block_top if top is None else torch.maximum(top, block_top)
        # A query that has seen no key yet has a maximum of minus infinity: subtract 0 there instead.
        shift = new_top.masked_fill(new_top == -torch.inf, 0.0) if hidden or top is not None else new_top
        weight = score.sub_(shift).exp_()
        v = k if job.values is None else _block(job.values, start, stop, padded, dtype)
        if top is None:
            total, accumulated = weight.sum(dim=-1, keepdim=True), _product(weight, v.transpose(1, 2))
        else:
            decay = top.sub_(shift).exp_()
            total = total.mul_(decay).add_(weight.sum(dim=-1, keepdim=True))
            accumulated = accumulated.mul_(decay).add_(_product(weight, v.transpose(1, 2)))
        top = new_top
    if top is None:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    lse.copy_((top + total.log()).view(G, s, H))
    out.copy_(accumulated.div_(total.masked_fill(total == 0, 1.0)).view(G, s, H, -1))


def _blocks(lo: int, hi: int, direct: bool) -> list[tuple[int, int]]:
    """The blocks of ``[lo, hi)``. Where whole blocks are used in place (``direct``), a long ragged last one is cut in two."""
    starts = list(range(lo, hi, BLOCK))
    blocks = [(start, min(hi, start + BLOCK)) for start in starts]
    if blocks and direct:
        start, stop = blocks[-1]
        ragged = (stop - start) % GRAIN
        if ragged and stop - start > COPY:
            blocks[-1:] = [(start, stop - ragged), (stop - ragged, stop)]
    return blocks


def _block(rows: Tensor, start: int, stop: int, padded: int, dtype: torch.dtype) -> Tensor:
    """Rows ``[start, stop)`` as a contiguous [G,padded,width] in ``dtype``: the rows themselves where they already are that."""
    part = rows[:, start:stop]
    if padded == stop - start:
        return part.to(dtype).contiguous()
    copy = rows.new_empty(rows.shape[0], padded, rows.shape[2], dtype=dtype)
    copy[:, : stop - start] = part
    copy[:, stop - start :] = 0.0
    return copy


def _mask_scores(job: _Job, queries: slice, start: int, stop: int, score: Tensor) -> bool:
    """Applies mask and causality in place to ``score`` [G,s,H,t]; True where a query may be left with no visible key."""
    hidden = False
    if job.mask is not None:
        mask = job.mask
        mask = mask if mask.shape[1] == 1 else mask[:, queries]
        mask = mask if mask.shape[3] == 1 else mask[..., start:stop]
        if mask.dtype == torch.bool:
            score.masked_fill_(~mask, -torch.inf)
        else:
            score.add_(additive_mask(mask, score.dtype))
        hidden = True
    if job.causal:
        diagonal = job.latent.shape[1] - job.q.shape[1]  # query s sees keys up to diagonal + s
        if stop - 1 > diagonal + queries.start:
            keys = torch.arange(start, stop)
            last = torch.arange(queries.start, queries.stop) + diagonal
            score.masked_fill_((keys > last[:, None])[:, None, :], -torch.inf)
            hidden = True
    return hidden


def _one_product(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN's single product is the right one: float32, one batch entry, not tiny."""
    return ONEDNN and a.dtype == torch.float32 and b.shape[0] == 1 and min(b.shape[1:]) >= GRAIN


def _product(a: Tensor, b: Tensor) -> Tensor:
    """[G,M,K] times the transpose of [G,N,K]."""
    if _one_product(a, b):
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(a[0], b[0], None, "none", [], "")
        return product.unsqueeze(0)
    return torch.bmm(a, b.transpose(1, 2))


def _add_product(score: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``score`` plus a product, in one pass over it; may overwrite ``score``."""
    if _one_product(a, b):
        total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(a[0], score[0], b[0], None, "add")
        return total.unsqueeze(0)
    return score.baddbmm_(a, b.transpose(1, 2))
