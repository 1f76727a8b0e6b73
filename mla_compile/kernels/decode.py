"""Absorbed decode attention for custom servers: plain functions over tensors.

:func:`decode_attention` reads a contiguous (or strided) cache, :func:`paged_decode_attention` a paged cache. On a GPU
from sm_80 on, both run the Triton kernels, or the Gluon kernel for Hopper if it supports the call. On other devices,
both run a CPU kernel or the reference. Both return ``(out, lse)``, where ``lse`` is the natural logarithm of the sum of
the exponentials of the scores. With ``lse``, :func:`merge` can merge results over disjoint keys.

On a GPU, both functions launch on the current stream and do not wait for the device (except with ``check``). To capture
a call in a CUDA graph, run a call with the same shapes outside the capture first. Wrong arguments raise
:class:`InputError` before any launch. Inside ``torch.compile``, the functions become the operators
``mla_compile::decode_attention`` and ``mla_compile::paged_decode_attention``.

:class:`mla_compile.kernels.call.DecodeCall` describes the arguments, with shapes and dtypes. The equations of
:mod:`mla_compile.kernels.reference` define the effect of each argument on a score.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mla_compile.errors import InputError
from mla_compile.kernels import checks, chosen, launch, reference, shared
from mla_compile.kernels.call import PAGED, TENSORS, DecodeCall
from mla_compile.kernels.cpu import decode as cpu
from mla_compile.kernels.known import forms, remember
from mla_compile.kernels.merge import merge
from mla_compile.kernels.plan import Plan

__all__ = ["Plan", "decode_attention", "merge", "paged_decode_attention"]

_checked: dict[object, str] = {}  # kinds of calls whose arguments fit together, and the called operator


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
    indices: Tensor | None = None,
    topk_length: Tensor | None = None,
    num_splits: int = 0,
    deterministic: bool = False,
    plan: Plan | None = None,
    schedule: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of H query heads over a cache of one row per token, shared by all heads.

    :class:`mla_compile.kernels.call.DecodeCall` describes the arguments. In addition, ``latent``, ``rope`` and
    ``values`` may have a head axis, [B,1,T,width]. ``plan`` is a :class:`Plan` of your own (CUDA only). Do
    not pass ``schedule`` with it, because schedules are made for the planner's plan. ``topk_length``, int32 [B] or
    [B,S], is the number of leading entries of ``indices`` that are used (0 to k; other numbers are clamped).

    Returns ``out`` [B,S,H,Lv] (Lv = L without ``values``), contiguous, in query's dtype, and ``lse`` [B,S,H], float32
    (float64 for a float64 cache). A query that sees no key gets 0 and minus infinity. Rows that no query sees may hold
    NaN.

    Raises :class:`InputError` if shapes, dtypes or devices do not fit, if an input requires a gradient, or if the plan
    does not fit the device.
    """
    latent = _without_head(latent)
    if rope is not None:
        rope = _without_head(rope)
    if values is not None:
        values = _without_head(values)
    indices = _first(indices, topk_length)
    call = DecodeCall(
        query, latent, rope, values, mask, seq_lens, sinks, kv_scale, indices, schedule, None, scale, causal, softcap,
        window, num_splits, deterministic,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        return _in_graph(torch.ops.mla_compile.decode_attention, call, plan)
    checks.check_gradient(call)
    return run(call, plan)


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
    indices: Tensor | None = None,
    topk_length: Tensor | None = None,
    num_splits: int = 0,
    deterministic: bool = False,
    plan: Plan | None = None,
    check: bool = False,
    schedule: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention over a paged cache: token t of request b is row ``t % page`` of ``block_table[b, t // page]``.

    ``kv_pages`` has one of three forms:

    * [P,page,L+R] or [P,page,1,L+R], with ``latent_width`` = L (as in FlashMLA and vLLM).
    * A tuple ``(latent_pages [P,page,L], rope_pages [P,page,R] or None)``.
    * Bytes (uint8 or float8_e4m3fn) in FlashMLA's packing for DeepSeek-V3.2, with ``latent_width`` = L and no
      ``kv_scale``. A row holds L values in e4m3, then G float32 scales, one for every L/G values, then R values in
      bfloat16. G follows from the width of a row: L + 4 G + 2 R bytes (656 bytes for L = 512, G = 4, R = 64).

    :class:`mla_compile.kernels.call.DecodeCall` describes the other arguments. Results and errors are those of
    :func:`decode_attention`.

    ``check`` compares the *values* of seq_lens and block_table with the sizes. This waits for the device. Without
    ``check``, only values on the CPU are compared. On a GPU, a length beyond the table is then clamped, and a
    page number outside the cache reads foreign memory.
    """
    if kv_scale is None and isinstance(kv_pages, Tensor) and kv_pages.dtype.itemsize == 1 and query.dim() == 4:
        latent_pages, rope_pages, kv_scale = _unpacked(kv_pages, latent_width, query.shape[-1])
    else:
        latent_pages, rope_pages = _pages(kv_pages, latent_width)
    indices = _first(indices, topk_length)
    call = DecodeCall(
        query, latent_pages, rope_pages, None, None, seq_lens, sinks, kv_scale, indices, schedule, block_table, scale,
        causal, softcap, window, num_splits, deterministic,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        return _in_graph(torch.ops.mla_compile.paged_decode_attention, call, plan)
    checks.check_gradient(call)
    return run(call, plan, check_values=check)


def run(call: DecodeCall, plan: Plan | None = None, *, check_values: bool = False) -> tuple[Tensor, Tensor]:
    """Check a call and run it with the kernel for its device. The callers have already refused gradients."""
    launched = launch.suits(call)
    if check_values or not launched:  # the launch itself checks, once per kind of call
        kind = (forms(*call[:TENSORS]), call[TENSORS:])
        if kind not in _checked:
            checks.check(call)
            remember(_checked, kind, call.op)
    if call.block_table is not None and (check_values or checks.values_on_cpu(call)):
        checks.check_values(call)
    if launched:
        done = launch.launch(call, plan)
        if done is not None:
            return done
    if cpu.suits(call):
        return cpu.decode_attention(call)
    if call.indices is not None:
        return chosen.decode_attention(call, partial(run, plan=plan))
    with torch.autocast(call.query.device.type, enabled=False):  # the reference chooses its own precision
        return reference.decode_attention(call)


def schedule(call: DecodeCall) -> Tensor:
    """Return a call's schedule, int64 [:func:`shared.elements`]: data that is prepared before attention on a GPU.

    Several calls can share the schedule. If no GPU kernel takes the call, the schedule is zeros. Raises
    :class:`InputError` as the call itself would.
    """
    if launch.suits(call):
        return launch.schedule(call)
    checks.check(call)
    return call.query.new_zeros(shared.elements(call), dtype=torch.int64)


def _in_graph(op: Callable[..., tuple[Tensor, Tensor]], call: DecodeCall, plan: Plan | None) -> tuple[Tensor, Tensor]:
    """Call the operator, inside ``torch.compile``."""
    if plan is not None:
        raise InputError("plan: a compiled graph cannot hold a plan; pass num_splits, or call outside torch.compile")
    tensors: tuple[Tensor | None, ...] = (call.values, call.mask, call.seq_lens)
    if call.block_table is not None:
        tensors = (call.block_table, call.seq_lens)
    return op(
        call.query, call.latent, call.rope, *tensors, call.sinks, call.kv_scale, call.indices, call.schedule,
        scale=call.scale, causal=call.causal, softcap=call.softcap, window=call.window, num_splits=call.num_splits,
        deterministic=call.deterministic,
    )  # fmt: skip


def _first(indices: Tensor | None, topk_length: Tensor | None) -> Tensor | None:
    """Replace the entries of ``indices`` from ``topk_length`` on by -1, which names no key."""
    if topk_length is None:
        return indices
    if indices is None:
        raise InputError("topk_length: got no indices, whose first entries it counts; pass both or neither")
    shape, dtype = list(topk_length.shape), topk_length.dtype
    if indices.dim() != 3 or dtype != torch.int32 or shape not in ([indices.shape[0]], list(indices.shape[:2])):
        expected = f"int32 [B] or [B,S] of indices [B,S,k], which are {list(indices.shape)}"
        raise InputError(f"topk_length is {dtype} {shape}, expected {expected}; cast, expand or slice it")
    if topk_length.device != indices.device:
        raise InputError(f"topk_length is on {topk_length.device}, expected {indices.device} as indices; move it")
    place = torch.arange(indices.shape[2], device=indices.device)
    return torch.where(place < topk_length.reshape(indices.shape[0], -1, 1), indices, -1)


def _without_head(rows: Tensor) -> Tensor:
    """Remove the head axis of [B,1,T,width]; other shapes are left to the checks."""
    return rows.squeeze(1) if rows.dim() == 4 and rows.shape[1] == 1 else rows


def _pages(kv_pages: Tensor | tuple[Tensor, Tensor | None], L: int | None) -> tuple[Tensor, Tensor | None]:
    """Return ``(latent_pages, rope_pages)`` as three-dimensional views."""
    if not isinstance(kv_pages, Tensor):
        if L is not None and kv_pages[0].shape[-1] != L:
            width = kv_pages[0].shape[-1]
            raise InputError(f"{PAGED}: latent_width is {L}, latent_pages are {width} wide; leave it out")
        first, second = (None if x is None else _three(x) for x in kv_pages)
        assert first is not None
        return first, second
    pages = _three(kv_pages)
    if L is None or not 0 < L <= pages.shape[-1]:
        raise InputError(
            f"{PAGED}: latent_width is {L}, expected the L of kv_pages' L+R = {pages.shape[-1]} columns; "
            "pass it, or the tuple (latent_pages, rope_pages)"
        )
    return pages[..., :L], pages[..., L:] if pages.shape[-1] > L else None


def _unpacked(kv_pages: Tensor, L: int | None, K: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return ``(latent_pages, rope_pages, kv_scale)`` as views of packed rows, for a query of K = L + R columns.

    Rows of K bytes hold no scales. kv_scale is then None, and the checks report that the scale is missing.
    """
    pages = _three(kv_pages)
    width = pages.shape[-1]
    if width == K or L is None or not 0 < L <= K:
        return *_pages(pages, L), None
    scales, rope = L, width - 2 * (K - L)
    offset = 0 if torch.compiler.is_compiling() else pages.storage_offset()  # a graph cannot read the storage offset
    aligned = all(n % 4 == 0 for n in (L, offset, *pages.stride()[:-1]))
    if pages.stride(-1) != 1 or rope <= scales or (rope - scales) % 4 or not aligned:
        raise InputError(
            f"{PAGED}: kv_pages has rows of {width} bytes with strides {pages.stride()} and no kv_scale, expected rows "
            f"of L + 4 G + 2 R = {L} + 4 G + {2 * (K - L)} bytes, dense and multiples of 4 bytes apart: values, "
            "float32 scales, rope in bfloat16; pass kv_scale beside rows of values alone"
        )
    held = pages.view(torch.uint8)
    rope_pages = held[..., rope:].view(torch.bfloat16) if K > L else None
    return held[..., :scales].view(checks.FP8), rope_pages, held[..., scales:rope].view(torch.float32)


def _three(pages: Tensor) -> Tensor:
    """Remove the head axis of [P,page,1,width]; other shapes are left to the checks."""
    return pages.squeeze(2) if pages.dim() == 4 and pages.shape[2] == 1 else pages
