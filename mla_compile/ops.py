"""The ops of mla_compile: schemas, fake functions, FLOP formulas and the choice of a kernel by device.

``mla_compile::decode_attention(query, latent, rope, values, mask, *, scale, causal, ...) -> (out, lse)``: attention of
H query heads over one shared row per token, ``[latent, rope]``; what is summed is the latent again, or ``values``.
``mla_compile::paged_decode_attention(query, latent_pages, rope_pages, block_table, seq_lens, *, ...)``: the same over
pages.

============  ==========================================================================================================
query         [B,S,H,L+R] columns 0..L meet the latent, L..L+R the rotary key; latent's dtype, or float32 beside
              half precision or fp8 (an absorbed query can exceed float16, and rounds where the original's did not)
latent        [B,T,L] any strides: a view of a cache is passed as it is, never copied; latent_pages [P,page,L]
rope          [B,T,R] or None (R = 0); rope_pages [P,page,R]
values        [B,T,Lv] or None: the latent rows
mask          bool (True: attend) or float (added to the scaled scores), 4-D, broadcastable to [B,H,S,T]
block_table   int32 [B,maxpages]: token t of request b lies in row t % page of page block_table[b, t // page]
seq_lens      int32 [B]: keys from there on are hidden; dense: None means T
causal        query s sees keys t <= len-S+s, together with mask; len is seq_lens[b] or T
sinks, softcap, window, kv_scale, num_splits, deterministic: see kernels/decode.py
out           [B,S,H,Lv] contiguous, query's dtype
lse           [B,S,H] natural log of the sum of exp(scores), sinks left out; float32, float64 for float64
============  ==========================================================================================================

Kernels: CPU has its own (kernels/cpu/decode.py), CUDA the Triton ones (kernels/triton/launch.py; the reference where
Triton is missing); every other device runs the reference until a kernel for it is registered, in ``_register``, under
that device's dispatch key. Schemas are registered once per process, however often and under whatever name this module
is imported. Wrong arguments raise :class:`InputError`, and so does asking for a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mla_compile.kernels import checks, decode, reference

NAME = checks.DENSE
PAGED = checks.PAGED
# Tensors stand before the star: torch.library.register_autograd takes no others.
_NUMBERS = (
    "*, float scale, bool causal=False, float softcap=0.0, int window=0, int num_splits=0, bool deterministic=False)"
    " -> (Tensor out, Tensor lse)"
)
_SCHEMA = (
    "(Tensor query, Tensor latent, Tensor? rope=None, Tensor? values=None, Tensor? mask=None, Tensor? seq_lens=None, "
    "Tensor? sinks=None, Tensor? kv_scale=None, " + _NUMBERS
)
_PAGED_SCHEMA = (
    "(Tensor query, Tensor latent_pages, Tensor? rope_pages, Tensor block_table, Tensor seq_lens, Tensor? sinks=None, "
    "Tensor? kv_scale=None, " + _NUMBERS
)


def _dense(
    query: Tensor,
    latent: Tensor,
    rope: Tensor | None = None,
    values: Tensor | None = None,
    mask: Tensor | None = None,
    seq_lens: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    return decode.run_dense(query, latent, rope, values, mask, seq_lens=seq_lens, sinks=sinks, kv_scale=kv_scale, **how)


def _paged(
    query: Tensor,
    latent_pages: Tensor,
    rope_pages: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    return decode.run_paged(
        query, latent_pages, rope_pages, block_table, seq_lens, sinks=sinks, kv_scale=kv_scale, **how
    )


def _dense_fake(
    query: Tensor,
    latent: Tensor,
    rope: Tensor | None = None,
    values: Tensor | None = None,
    mask: Tensor | None = None,
    seq_lens: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    checks.check_dense(query, latent, rope, values, mask, seq_lens=seq_lens, sinks=sinks, kv_scale=kv_scale, **how)
    return _results(query, latent, (latent if values is None else values).shape[2])


def _paged_fake(
    query: Tensor,
    latent_pages: Tensor,
    rope_pages: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    checks.check_paged(query, latent_pages, rope_pages, block_table, seq_lens, sinks=sinks, kv_scale=kv_scale, **how)
    return _results(query, latent_pages, latent_pages.shape[2])


def _results(query: Tensor, latent: Tensor, width: Any) -> tuple[Tensor, Tensor]:
    B, S, H, _ = query.shape
    return query.new_empty(B, S, H, width), query.new_empty(B, S, H, dtype=reference.compute_dtype(latent))


def _no_gradient(ctx: Any, *_: Any, **__: Any) -> None:
    checks.refuse_gradient(NAME)


def _no_paged_gradient(ctx: Any, *_: Any, **__: Any) -> None:
    checks.refuse_gradient(PAGED)


def _flops(
    query: Any,
    latent: Any,
    rope: Any = None,
    values: Any = None,
    mask: Any = None,
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    """2BSHT(L+R) for the scores and 2BSHT*Lv for the sum. Hidden keys count, as in torch's own formulas."""
    B, S, H, K = query
    width = (latent if values is None else values)[2]
    return int(2 * B * S * H * latent[1] * (K + width))


def _paged_flops(
    query: Any, latent_pages: Any, rope_pages: Any, block_table: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """The same with T = maxpages * page, the table's room: the lengths are values, which a formula does not see."""
    B, S, H, K = query
    return int(2 * B * S * H * block_table[1] * latent_pages[1] * (K + latent_pages[2]))


def _register() -> torch.library.Library:
    library = torch.library.Library("mla_compile", "FRAGMENT")
    for name, schema, run, fake, no_gradient, flops in (
        (NAME, _SCHEMA, _dense, _dense_fake, _no_gradient, _flops),
        (PAGED, _PAGED_SCHEMA, _paged, _paged_fake, _no_paged_gradient, _paged_flops),
    ):
        # flexible_layout: the kernels take any strides, so Inductor need not copy a strided cache before the call.
        short = name.split("::")[1]
        library.define(short + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
        for key in ("CompositeExplicitAutograd", "CPU", "CUDA"):
            library.impl(short, run, key)
        torch.library.register_fake(name, fake, lib=library)
        torch.library.register_autograd(name, no_gradient, setup_context=no_gradient, lib=library)
        register_flop_formula(getattr(torch.ops.mla_compile, short))(flops)
    return library


if not hasattr(torch.ops.mla_compile, "paged_decode_attention"):
    _LIBRARY = _register()

decode_attention = torch.ops.mla_compile.decode_attention.default
paged_decode_attention = torch.ops.mla_compile.paged_decode_attention.default
