"""Decode attention on CPU: the native kernel (native.py), or torch's operators if the native kernel cannot run.

Torch's operators are used for float64, and on machines without a C++ compiler. They process the visible rows in blocks
that stay in the processor's cache. Each block is used as keys and as values, in float32 (float64 for float64), with an
online softmax (m: running maximum, l: running sum):

    s = q [c, r]^T + mask;  m' = max(m, max s);  p = exp(s - m');  l = l e^(m-m') + sum p;  acc = acc e^(m-m') + p c

Half precision rows are converted to float32 block by block, because bfloat16 products would round the scores. With
bfloat16 products, the error of the result was 2.0e-3, 9.7e-3, 2.0e-2 if scores had a standard deviation of 0.5, 2.4,
12. With float32 products, the error is 1.7e-3. Rows before the first and after the last visible key of a batch entry
are not read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_compile.kernels import reference
from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.cpu import native
from mla_compile.kernels.reference import additive_mask, compute_dtype

BLOCK = 2048  # tokens in one block: 4 MiB of float32 latent at L = 512
ROWS = 256  # query rows (s, h) in one walk over the cache: 2 MiB of float32 scores per block


@dataclass(frozen=True)
class _Window:
    """A range ``[lo, hi)`` with all visible keys of a batch entry. ``plain``: the mask has no effect in the range."""

    lo: int
    hi: int
    plain: bool


@dataclass(frozen=True)
class _Job:
    """The part of a call that belongs to G batch entries: query, rows, mask and window."""

    q: Tensor  # [G,S,H,L+R], scaled, in the computing dtype
    latent: Tensor  # [G,T,L]
    rope: Tensor | None
    values: Tensor | None
    mask: Tensor | None  # permuted to [G|1,T|1,S|1,H|1]; None if the mask has no effect inside the window
    causal: bool
    window: _Window


def suits(call: DecodeCall) -> bool:
    """Whether this module can compute a call; the reference computes other calls."""
    if not call.query.is_cpu:
        return False
    if _native(call) is not None:
        return True
    extras = (call.block_table, call.indices, call.sinks, call.kv_scale)
    return not call.softcap and all(extra is None for extra in extras)


def _native(call: DecodeCall) -> native.Library | None:
    """Return the compiled kernels if they support the dtypes of the call's rows, else None."""
    rows = (call.query, call.latent, call.rope)
    library = None if compute_dtype(call.latent) == torch.float64 else native.load()
    return library if library is not None and native.takes(library, *rows) else None


def decode_attention(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Compute :func:`mla_compile.kernels.reference.decode_attention`, for calls that :func:`suits` accepts.

    There is one difference: a key is also hidden if, for every query, its additive mask is at most half the dtype's
    lowest value. The weight of such a key is exactly 0. This rule does not apply if a query sees no other key.
    """
    query, latent = call.query, call.latent
    dtype = compute_dtype(latent)
    if 0 in query.shape[:3]:
        out = query.new_empty(*query.shape[:3], call.summed.shape[2])
        return out, query.new_empty(query.shape[:3], dtype=dtype)
    library = _native(call)
    if library is not None:
        return native.decode_attention(library, call)
    with torch.autocast("cpu", enabled=False):  # autocast would turn the float32 products below into bfloat16 ones
        if call.window:
            return reference.decode_attention(call)
        return _decode_attention(call) if call.seq_lens is None else _of_each_length(call, call.seq_lens)


def _of_each_length(call: DecodeCall, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Compute each batch entry separately with its own keys, or all together if their lengths are equal."""
    B, T = call.query.shape[0], call.latent.shape[1]
    counts = lengths.clamp(0, T).tolist()
    groups = [slice(None)] if len(set(counts)) == 1 else [slice(b, b + 1) for b in range(B)]
    parts = []
    for group in groups:
        keys = slice(counts[group.start or 0])
        rope, values = (None if x is None else x[group, keys] for x in (call.rope, call.values))
        mask = call.mask
        if mask is not None:
            mask = mask if mask.shape[0] == 1 else mask[group]
            mask = mask if mask.shape[3] == 1 else mask[..., keys]
        own = call._replace(
            query=call.query[group], latent=call.latent[group, keys], rope=rope, values=values, mask=mask, seq_lens=None
        )
        parts.append(_decode_attention(own))
    out, lse = zip(*parts, strict=True)
    return torch.cat(out), torch.cat(lse)


def _decode_attention(call: DecodeCall) -> tuple[Tensor, Tensor]:
    mask, S, T = call.mask, call.query.shape[1], call.latent.shape[1]
    seen = None if mask is None else _seen(mask, S, T, causal=call.causal and S > 1)
    windows = [_Window(0, T, plain=True)] if mask is None or seen is None else _windows(mask, seen, T)
    out, lse = _run(call, windows)
    if seen is not None and not all(w.plain for w in windows) and bool(torch.isnan(out).any()):
        # A hidden row between visible rows may hold NaN, and 0 * NaN is NaN. This is rare, so the rows are copied and
        # cleaned only if the result has NaN.
        blank = ~seen.unsqueeze(2)  # [B|1,T,1]
        rope, values = (None if x is None else x.masked_fill(blank, 0.0) for x in (call.rope, call.values))
        clean = call._replace(latent=call.latent.masked_fill(blank, 0.0), rope=rope, values=values)
        out, lse = _run(clean, windows)
    return out, lse


def _seen(mask: Tensor, S: int, T: int, *, causal: bool) -> Tensor:
    """Return bool [B|1,T]: whether a query of the batch entry sees a key. Reading the cache costs far more."""
    mask = mask.expand(-1, -1, S if causal else -1, T)
    below = torch.ones(S, T, dtype=torch.bool).tril(T - S) if causal else None
    if mask.dtype == torch.bool:
        visible = mask if below is None else mask & below
    else:
        visible = mask > torch.finfo(mask.dtype).min / 2
        visible = visible if below is None else visible & below
        # If the mask is at or below this bound for all keys of a query, all keys have weight, so none may be skipped.
        if not bool(visible.any(dim=3).all()):
            visible = mask != -torch.inf
            visible = visible if below is None else visible & below
    return visible.any(dim=2).any(dim=1)


def _windows(mask: Tensor, seen: Tensor, T: int) -> list[_Window]:
    """Return one window for each batch entry of the mask."""
    found = []
    for b in range(mask.shape[0]):
        at = seen[b].nonzero()
        if at.numel() == 0:
            found.append(_Window(0, 0, plain=False))
            continue
        lo, hi = int(at[0]), int(at[-1]) + 1
        inside = mask[b, :, :, lo:hi] if mask.shape[3] == T else mask[b]
        plain = bool(inside.all()) if mask.dtype == torch.bool else not bool(inside.any())
        found.append(_Window(lo, hi, plain))
    return found


def _run(call: DecodeCall, windows: list[_Window]) -> tuple[Tensor, Tensor]:
    """Split the call into jobs: one job for all batch entries if they read the same keys, else one per batch entry."""
    B, S, H, _ = call.query.shape
    dtype = compute_dtype(call.latent)
    out = torch.empty(B, S, H, call.summed.shape[2], dtype=call.query.dtype)
    lse = torch.empty(B, S, H, dtype=dtype)
    q = call.query.to(dtype) * call.scale
    together = len(windows) == 1
    rows = max(1, ROWS // H)
    for b in range(0, B, B if together else 1):
        group = slice(None) if together else slice(b, b + 1)
        window = windows[0 if together else b]
        mask = None
        if call.mask is not None and not window.plain:
            mask = (call.mask if together else call.mask[group]).permute(0, 3, 2, 1)
        job = _Job(
            q=q[group],
            latent=call.latent[group],
            rope=None if call.rope is None else call.rope[group],
            values=None if call.values is None else call.values[group],
            mask=mask,
            causal=call.causal and S > 1,
            window=window,
        )
        for s0 in range(0, S, rows):
            queries = slice(s0, min(S, s0 + rows))
            _walk(job, queries, out[group, queries], lse[group, queries])
    return out, lse


def _walk(job: _Job, queries: slice, out: Tensor, lse: Tensor) -> None:
    """Walk the visible keys once for a slice of the queries; fill ``out`` [G,s,H,Lv] and ``lse`` [G,s,H].

    Scores are stored as [G,t,s*H], so that the rows of the cache are the left factor and are read in place.
    """
    G, s, H = lse.shape
    dtype, T = job.q.dtype, job.latent.shape[1]
    q = job.q[:, queries].reshape(G, s * H, -1)
    hi = min(job.window.hi, T - job.q.shape[1] + queries.stop) if job.causal else job.window.hi
    top: Tensor | None = None  # running maximum of the scores, [G,1,sH]
    total = accumulated = q  # running sum of the weights [G,1,sH], and of weights times values [G,sH,Lv]
    hidden = False
    for start in range(job.window.lo, hi, BLOCK):
        stop = min(hi, start + BLOCK)
        k = job.latent[:, start:stop].to(dtype)
        v = k if job.values is None else job.values[:, start:stop].to(dtype)
        weight = torch.bmm(k, q[..., : k.shape[2]].transpose(1, 2))
        if job.rope is not None:
            weight.baddbmm_(job.rope[:, start:stop].to(dtype), q[..., k.shape[2] :].transpose(1, 2))
        hidden |= _mask_scores(job, queries, start, stop, weight.view(G, stop - start, s, H))
        block_top = weight.amax(dim=1, keepdim=True)
        new_top = block_top if top is None else torch.maximum(top, block_top)
        # If a query has seen no key yet, its maximum is minus infinity. Subtract 0 instead.
        shift = new_top.masked_fill(new_top == -torch.inf, 0.0) if hidden else new_top
        weight.sub_(shift).exp_()
        block_total, block_sum = weight.sum(dim=1, keepdim=True), torch.bmm(weight.transpose(1, 2), v)
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


def _mask_scores(job: _Job, queries: slice, start: int, stop: int, score: Tensor) -> bool:
    """Apply mask and causality in place to ``score`` [G,t,s,H]; return True if a query may be left without a key."""
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
