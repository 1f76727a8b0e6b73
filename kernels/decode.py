"""Absorbed decode attention for people who build their own server: plain functions over tensors.

:func:`decode_attention` reads a contiguous (or strided) cache, :func:`paged_decode_attention` one of pages. On a GPU
from sm_80 on they run the Triton kernels (on Hopper the Gluon one where it fits), elsewhere a CPU kernel or the
reference. Both return ``(out, lse)``: ``lse`` is the natural logarithm of the sum of the exponentials of the scores, so
that partial results over disjoint keys can be merged.

They never wait for the device, allocate by shapes only and launch on the current stream: a call can be captured in a
CUDA graph after one call of the same shapes outside of it. Wrong arguments raise :class:`InputError` before any launch.
Inside ``torch.compile`` they become the ops ``mla_compile::decode_attention`` and
``mla_compile::paged_decode_attention``.

The equations, and what each argument does to a score, are in :mod:`mla_compile.kernels.reference`.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from mla_compile.errors import InputError
from mla_compile.kernels import checks, reference
from mla_compile.kernels.cpu import decode as cpu
from mla_compile.kernels.plan import NoPlanError, Plan
from mla_compile.kernels.triton import launch

__all__ = ["Plan", "decode_attention", "paged_decode_attention"]


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
    num_splits: int = 0,
    deterministic: bool = False,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of H query heads over one shared row ``[latent, rope]`` per token, which is summed as ``latent``.

    =============  ==================================================================================================
    query          [B,S,H,L+R] absorbed queries; the cache's dtype, or float32 beside half precision or fp8
    latent         [B,T,L] or [B,1,T,L], any strides (never copied): float16, bfloat16, float32, float64, float8_e4m3fn
    rope           [B,T,R] or [B,1,T,R] or None (R = 0); latent's dtype, beside fp8 also half precision
    values         [B,T,Lv] or [B,1,T,Lv] or None: the latent rows
    mask           bool (True: attend) or float (added), broadcastable to [B,H,S,T] with all four axes there
    scale          the scores' factor: 1/sqrt(N+R) of the model before absorption, not 1/sqrt(L+R)
    causal         query s sees keys t <= len - S + s, len = seq_lens[b] or T
    seq_lens       int32 [B]: keys from there on are hidden; beyond T they count as T
    sinks          float [H]: a score without a value, in the softmax's denominator only
    softcap        > 0: score = softcap * tanh(score / softcap), before the mask
    window         > 0: query s sees only keys t > len - S + s - window
    kv_scale       float32 [] or [B,T]: what fp8 rows are multiplied by (rope only where it is fp8 too)
    num_splits     parts that each request's keys are divided into; 0: the plan's choice
    deterministic  a request's result does not depend on the rest of its batch: parts are cut at fixed places
    plan           a :class:`Plan` of your own (CUDA only)
    =============  ==================================================================================================

    Returns ``out`` [B,S,H,Lv] (Lv = L without ``values``) contiguous in query's dtype, and ``lse`` [B,S,H] float32
    (float64 for float64). A query that sees no key gets 0 and minus infinity. NaN in rows that no query sees stays out.

    Raises :class:`InputError`: shapes, dtypes or devices that do not fit, an input that requires a gradient, a plan
    that does not fit the device.
    """
    latent = _without_head(latent)
    rope, values = (None if x is None else _without_head(x) for x in (rope, values))
    if torch.compiler.is_compiling():
        _no_plan_in_graph(plan)
        out: tuple[Tensor, Tensor] = torch.ops.mla_compile.decode_attention(
            query, latent, rope, values, mask, scale=scale, causal=causal, seq_lens=seq_lens, sinks=sinks,
            softcap=softcap, window=window, kv_scale=kv_scale, num_splits=num_splits, deterministic=deterministic,
        )  # fmt: skip
        return out
    checks.check_gradient(checks.DENSE, query, latent, rope, values, mask, sinks)
    return run_dense(
        query, latent, rope, values, mask, scale=scale, causal=causal, seq_lens=seq_lens, sinks=sinks, softcap=softcap,
        window=window, kv_scale=kv_scale, num_splits=num_splits, deterministic=deterministic, plan=plan,
    )  # fmt: skip


def paged_decode_attention(
    query: Tensor,
    kv_pages: Tensor | tuple[Tensor, Tensor | None],
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    latent_width: int | None = None,
    causal: bool = False,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    window: int = 0,
    kv_scale: Tensor | None = None,
    num_splits: int = 0,
    deterministic: bool = False,
    plan: Plan | None = None,
    check: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same over a paged cache: token t of request b is row ``t % page`` of page ``block_table[b, t // page]``.

    ============  ===================================================================================================
    kv_pages      [P,page,L+R] or [P,page,1,L+R] with ``latent_width`` = L (as FlashMLA and vLLM have it), or a tuple
                  ``(latent_pages [P,page,L], rope_pages [P,page,R] or None)``; pages of a power of two up to 256 rows
    block_table   int32 [B,maxpages]; entries at or past ceil(seq_lens[b] / page) are never read (-1 is customary)
    seq_lens      int32 [B], at most maxpages * page; 0 is allowed
    kv_scale      float32 [] or [P,page]
    check         also compare the *values* of seq_lens and block_table with the sizes, waiting for the device. Without
                  it only those on the CPU are looked at; on a GPU a length beyond the table counts as its end, and a
                  page number outside the cache reads memory that is not the cache's
    ============  ===================================================================================================

    The other arguments, the results and the errors are those of :func:`decode_attention`.
    """
    latent_pages, rope_pages = _pages(kv_pages, latent_width)
    if torch.compiler.is_compiling():
        _no_plan_in_graph(plan)
        out: tuple[Tensor, Tensor] = torch.ops.mla_compile.paged_decode_attention(
            query, latent_pages, rope_pages, block_table, seq_lens, scale=scale, causal=causal, sinks=sinks,
            softcap=softcap, window=window, kv_scale=kv_scale, num_splits=num_splits, deterministic=deterministic,
        )  # fmt: skip
        return out
    checks.check_gradient(checks.PAGED, query, latent_pages, rope_pages, sinks)
    return run_paged(
        query, latent_pages, rope_pages, block_table, seq_lens, scale=scale, causal=causal, sinks=sinks,
        softcap=softcap, window=window, kv_scale=kv_scale, num_splits=num_splits, deterministic=deterministic,
        plan=plan, check=check,
    )  # fmt: skip


def run_dense(
    query: Tensor,
    latent: Tensor,
    rope: Tensor | None,
    values: Tensor | None,
    mask: Tensor | None,
    *,
    scale: float,
    causal: bool = False,
    seq_lens: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    window: int = 0,
    kv_scale: Tensor | None = None,
    num_splits: int = 0,
    deterministic: bool = False,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`decode_attention` for three-dimensional rows, on the kernel of query's device. What the op calls."""

    def check() -> None:
        checks.check_dense(
            query, latent, rope, values, mask, seq_lens=seq_lens, sinks=sinks, kv_scale=kv_scale, softcap=softcap,
            window=window, num_splits=num_splits, deterministic=deterministic,
        )  # fmt: skip

    if launch.suits(query, latent):
        if mask is not None and mask.dtype == torch.float64:
            mask = reference.additive_mask(mask, torch.float32)
        given = launch.Call(
            query, latent, rope, values, mask, None, seq_lens, sinks, kv_scale, scale, causal, softcap, window
        )
        with contextlib.suppress(NoPlanError):  # rows too wide for this device: said once, by the launch
            return launch.launch(given, check, num_splits=num_splits, deterministic=deterministic, chosen=plan)
    check()
    if (
        query.device.type == "cpu"
        and seq_lens is None
        and sinks is None
        and not (softcap or window or kv_scale is not None)
    ):
        return cpu.decode_attention(query, latent, rope, values, mask, scale=scale, causal=causal)
    with torch.autocast(query.device.type, enabled=False):  # the reference chooses its own precision
        return reference.decode_attention(
            query, latent, rope, values, mask, scale=scale, causal=causal, seq_lens=seq_lens, sinks=sinks,
            softcap=softcap, window=window, kv_scale=kv_scale,
        )  # fmt: skip


def run_paged(
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
    num_splits: int = 0,
    deterministic: bool = False,
    plan: Plan | None = None,
    check: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`paged_decode_attention` for pages of three axes, on the kernel of query's device. What the op calls."""

    def check_call() -> None:
        checks.check_paged(
            query, latent_pages, rope_pages, block_table, seq_lens, sinks=sinks, kv_scale=kv_scale, softcap=softcap,
            window=window, num_splits=num_splits, deterministic=deterministic,
        )  # fmt: skip

    fast = launch.suits(query, latent_pages) and block_table.numel() > 0
    if check or not fast:
        check_call()
    if check or (seq_lens.device.type == "cpu" and block_table.device.type == "cpu"):
        checks.check_values(seq_lens, block_table, latent_pages.shape[1], latent_pages.shape[0])
    if fast:
        given = launch.Call(
            query, latent_pages, rope_pages, None, None, block_table, seq_lens, sinks, kv_scale, scale, causal, softcap,
            window,
        )  # fmt: skip
        with contextlib.suppress(NoPlanError):
            return launch.launch(given, check_call, num_splits=num_splits, deterministic=deterministic, chosen=plan)
    with torch.autocast(query.device.type, enabled=False):
        return reference.paged_decode_attention(
            query, latent_pages, rope_pages, block_table, seq_lens, scale=scale, causal=causal, sinks=sinks,
            softcap=softcap, window=window, kv_scale=kv_scale,
        )  # fmt: skip


def _without_head(rows: Tensor) -> Tensor:
    """[B,T,width] of [B,1,T,width]; other forms are left to the checks."""
    return rows.squeeze(1) if rows.dim() == 4 and rows.shape[1] == 1 else rows


def _pages(kv_pages: Tensor | tuple[Tensor, Tensor | None], L: int | None) -> tuple[Tensor, Tensor | None]:
    """``(latent_pages, rope_pages)``, three-dimensional views."""
    if not isinstance(kv_pages, Tensor):
        if L is not None and kv_pages[0].shape[-1] != L:
            raise InputError(
                f"{checks.PAGED}: latent_width is {L}, latent_pages are {kv_pages[0].shape[-1]} wide; leave it out"
            )
        first, second = (None if x is None else _three(x) for x in kv_pages)
        assert first is not None
        return first, second
    pages = _three(kv_pages)
    if L is None or not 0 < L <= pages.shape[-1]:
        raise InputError(
            f"{checks.PAGED}: latent_width is {L}, expected the L of kv_pages' L+R = {pages.shape[-1]} columns; "
            "pass it, or the tuple (latent_pages, rope_pages)"
        )
    return pages[..., :L], pages[..., L:] if pages.shape[-1] > L else None


def _three(pages: Tensor) -> Tensor:
    return pages.squeeze(2) if pages.dim() == 4 and pages.shape[2] == 1 else pages


def _no_plan_in_graph(plan: Plan | None) -> None:
    if plan is not None:
        raise InputError("plan: a compiled graph cannot hold a plan; pass num_splits, or call outside torch.compile")
