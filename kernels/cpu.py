"""Decode attention on CPU, in torch ops: every cache row is read from memory once.

The visible part of the cache is walked in blocks that stay in cache. One block serves as keys and as values, in float32
(float64 for float64), with the softmax carried along (m: running maximum, l: running sum):

    s = q [c, r]^T + mask;  m' = max(m, max s);  p = exp(s - m');  l = l e^(m-m') + sum p;  acc = acc e^(m-m') + p c

Choices, each measured (2 cores with AVX-512, L = 512, R = 64; GFLOP/s for 128 and 16 heads over 8192 tokens):

* **float32 products through oneDNN** (``mkldnn::_linear_pointwise``, which Inductor calls): 380 and 230, where
  ``torch.mm`` has 160 and 95 because MKL leaves AVX-512 unused on some makers' CPUs. As right factor oneDNN wants
  contiguous rows (strided ones fall into a scalar loop: seconds), as left factor it takes any. A new shape costs
  0.3 ms of code generation, hence blocks whose length is a multiple of 64, the last one padded with zero rows.
* **Scores in chains of 128 terms.** oneDNN adds all L products one after the other: with large scores the error was
  1.4 to 2.7 times that of the original attention; cut in chains it is 0.8 to 1.3 times, as with MKL.
* **Half precision is converted to float32 block by block**, in cache, and multiplied there. ``torch.mm`` in bfloat16
  has 830 and 400 GFLOP/s but rounds its scores: error 2.0e-3, 9.7e-3, 2.0e-2 for scores of deviation 0.5, 2.4, 12,
  against 1.7e-3 here and 1.9e-3 of torch's fused attention. Rounding after subtracting the mean score: 2.6e-3 to
  5.4e-3. A second product for the rounding residual: accurate, and about as slow as float32. Products of bfloat16 with
  a float32 result do not exist for CPU tensors, and float16 ones run at 3 to 40 GFLOP/s.
* **What no query sees is not read**: the cache before the first and after the last visible key, per batch entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_compile.kernels.reference import additive_mask, compute_dtype

BLOCK = 2048  # tokens in one block: 4 MiB of float32 latent at L = 512
ROWS = 256  # query rows (s, h) carried through one walk over the cache: bounds the scores held at a time
CHAIN = 128  # score terms that oneDNN may add up one after the other
GRAIN = 64  # block lengths are multiples of this
COPY = 512  # up to here a ragged block is padded in a copy; a longer one is cut into an even part and a short rest
SETUP = 1 << 23  # multiply-adds from which oneDNN's product beats torch.bmm
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
    mask: Tensor | None  # as given, but [G|1,T|1,S|1,H|1]; None where it changes nothing inside the window
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

    One difference: a key whose additive mask is finite but at most half the dtype's lowest value, for every query,
    counts as hidden too (its weight is exactly 0), unless some query has no other key.
    """
    if torch.is_autocast_enabled("cpu"):  # it would turn the float32 products below into bfloat16 ones
        with torch.autocast("cpu", enabled=False):
            return decode_attention(query, latent, rope, values, mask, scale=scale, causal=causal)
    S, T = query.shape[1], latent.shape[1]
    dtype = compute_dtype(latent)
    causal = causal and S > 1
    if mask is None and not causal and S * query.shape[2] * latent[0].numel() < SETUP:
        return _small(query, latent, rope, values, scale, dtype)
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


def _small(
    query: Tensor, latent: Tensor, rope: Tensor | None, values: Tensor | None, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A call without a mask that is over before blocks pay off: as few torch calls as give ``out`` and ``lse``."""
    B, S, H, K = query.shape
    L = latent.shape[2]
    q = (query.to(dtype) * scale).reshape(B, S * H, K)
    k = latent.to(dtype)
    score = torch.bmm(q[..., :L], k.transpose(1, 2))
    if rope is not None:
        score.baddbmm_(q[..., L:], rope.to(dtype).transpose(1, 2))
    weight = torch.softmax(score, dim=-1)
    out = torch.bmm(weight, k if values is None else values.to(dtype)).view(B, S, H, -1)
    lse = score.amax(dim=-1).sub_(weight.amax(dim=-1).log_())  # the largest weight is exp(largest score - lse)
    return out.to(query.dtype), lse.view(B, S, H)


def _seen(mask: Tensor, causal: bool, S: int, T: int) -> Tensor:
    """[B|1,T] bool: the keys that some query of the batch entry sees. The mask is small beside the cache."""
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
    out = torch.empty(B, S, H, width, dtype=query.dtype)
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
            mask=None
            if mask is None or window.plain
            else (mask[group] if len(windows) > 1 else mask).permute(0, 3, 2, 1),
            causal=causal,
            window=window,
        )
        for s0 in range(0, S, rows):
            queries = slice(s0, min(S, s0 + rows))
            _walk(job, queries, out[group, queries], lse[group, queries])
    return out, lse


def _walk(job: _Job, queries: slice, out: Tensor, lse: Tensor) -> None:
    """One walk over the visible keys with some of the queries; fills ``out`` [G,s,H,Lv] and ``lse`` [G,s,H].

    Scores lie as [G,t,s*H]: the rows of the cache are then the left factor, which oneDNN takes with any row stride.
    """
    G, s, H = lse.shape
    dtype, T = job.q.dtype, job.latent.shape[1]
    q = job.q[:, queries].reshape(G, s * H, -1)
    hi = min(job.window.hi, T - job.q.shape[1] + queries.stop) if job.causal else job.window.hi
    top: Tensor | None = None  # running maximum of the scores, [G,1,sH]
    total = accumulated = q  # running sum of the weights [G,1,sH], and of weights times values [G,sH,Lv]
    hidden = False
    for start, stop in _blocks(job.window.lo, hi, job.latent.dtype == dtype):
        length = stop - start
        padded = length if length < GRAIN else -(-length // GRAIN) * GRAIN
        k = _block(job.latent, start, stop, padded, dtype)
        r = None if job.rope is None else _block(job.rope, start, stop, padded, dtype)
        v = k if job.values is None else _block(job.values, start, stop, padded, dtype)
        weight = _scores(k, r, q)
        if padded > length:
            weight[:, length:] = -torch.inf
        hidden |= _mask_scores(job, queries, start, stop, weight[:, :length].view(G, length, s, H))
        block_top = weight.amax(dim=1, keepdim=True)
        new_top = block_top if top is None else torch.maximum(top, block_top)
        # A query that has seen no key yet has a maximum of minus infinity: subtract 0 there instead.
        shift = new_top.masked_fill(new_top == -torch.inf, 0.0) if hidden else new_top
        weight.sub_(shift).exp_()
        block_total, block_sum = weight.sum(dim=1, keepdim=True), _weigh(weight, v)
        if top is None:
            total, accumulated = block_total, block_sum
        else:
            decay = top.sub_(shift).exp_()
            total = total.mul_(decay).add_(block_total)
            accumulated = accumulated.mul_(decay.transpose(1, 2)).add_(block_sum)
        top = new_top
    if top is None:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    torch.add(top.view(G, s, H), total.log().view(G, s, H), out=lse)
    divisor = total.masked_fill_(total == 0, 1.0) if hidden else total
    torch.div(accumulated.view(G, s, H, -1), divisor.view(G, s, H, 1), out=out)


def _blocks(lo: int, hi: int, direct: bool) -> list[tuple[int, int]]:
    """The blocks of ``[lo, hi)``. Where they are used in place (``direct``), a long ragged last one is cut in two."""
    starts = list(range(lo, hi, BLOCK))
    blocks = [(start, min(hi, start + BLOCK)) for start in starts]
    if blocks and direct:
        start, stop = blocks[-1]
        ragged = (stop - start) % GRAIN
        if ragged and stop - start > COPY:
            blocks[-1:] = [(start, stop - ragged), (stop - ragged, stop)]
    return blocks


def _block(rows: Tensor, start: int, stop: int, padded: int, dtype: torch.dtype) -> Tensor:
    """Rows ``[start, stop)`` as a contiguous [G,padded,width] in ``dtype``, without a copy where they are that."""
    part = rows[:, start:stop]
    if padded == stop - start:
        return part.to(dtype).contiguous()
    copy = rows.new_empty(rows.shape[0], padded, rows.shape[2], dtype=dtype)
    copy[:, : stop - start] = part
    copy[:, stop - start :] = 0.0
    return copy


def _mask_scores(job: _Job, queries: slice, start: int, stop: int, score: Tensor) -> bool:
    """Applies mask and causality in place to ``score`` [G,t,s,H]. True where a query may be left without a key."""
    hidden = False
    if job.mask is not None:
        mask = job.mask
        mask = mask if mask.shape[1] == 1 else mask[:, start:stop]
        mask = mask if mask.shape[2] == 1 else mask[:, :, queries]
        if mask.dtype == torch.bool:
            score.masked_fill_(~mask, -torch.inf)
        else:
            score.add_(additive_mask(mask, score.dtype))
        hidden = True
    if job.causal:
        diagonal = job.latent.shape[1] - job.q.shape[1]  # query s sees keys up to diagonal + s
        if stop - 1 > diagonal + queries.start:
            keys = torch.arange(start, stop)[:, None]
            last = torch.arange(queries.start, queries.stop) + diagonal
            score.masked_fill_((keys > last)[:, :, None], -torch.inf)
            hidden = True
    return hidden


def _single(rows: Tensor, columns: Tensor) -> bool:
    """Whether oneDNN's product is the right one: float32, one batch entry, enough work to repay its setup."""
    return (
        ONEDNN
        and rows.dtype == torch.float32
        and rows.shape[0] == 1
        and rows.shape[1] >= GRAIN
        and rows.shape[1] * rows.shape[2] * columns.shape[-1] >= SETUP
    )


def _scores(k: Tensor, r: Tensor | None, q: Tensor) -> Tensor:
    """[G,t,M]: rows k [G,t,L] and r [G,t,R] against queries q [G,M,L+R], summed in chains of at most CHAIN products."""
    L = k.shape[2]
    if not _single(k, q[..., 0]):
        score = torch.bmm(k, q[..., :L].transpose(1, 2))
        return score if r is None else score.baddbmm_(r, q[..., L:].transpose(1, 2))
    parts = [(k[0, :, at : at + CHAIN], q[0, :, at : min(L, at + CHAIN)]) for at in range(0, L, CHAIN)]
    if r is not None:
        parts.append((r[0], q[0, :, L:]))
    total: Tensor | None = None
    for rows, columns in parts:
        weights = columns.contiguous()
        if total is None:
            total = torch.ops.mkldnn._linear_pointwise.default(rows, weights, None, "none", [], "")
        else:
            total = torch.ops.mkldnn._linear_pointwise.binary(rows, total, weights, None, "add")
    assert total is not None
    return total.unsqueeze(0)


def _weigh(weight: Tensor, v: Tensor) -> Tensor:
    """[G,M,Lv]: weights [G,t,M] times values [G,t,Lv]."""
    if not _single(v, weight[:, 0]):
        return torch.bmm(weight.transpose(1, 2), v)
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(weight[0].t(), v[0].t(), None, "none", [], "")
    return product.unsqueeze(0)
