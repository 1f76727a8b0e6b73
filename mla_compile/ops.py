"""The ops of mla_compile: schemas, input checks, fake functions and the choice of a kernel by device.

``mla_compile::decode_attention(query, latent, rope, values, mask, *, scale, causal) -> (out, lse)``: attention of H query
heads over one shared row per token, ``[latent, rope]``, whose first L values are also what is summed (or ``values``).

=========  =================================================================================================
query      [B,S,H,L+R] columns 0..L meet the latent, L..L+R the rotary key; latent's dtype, or float32 beside
           half precision (an absorbed query can exceed float16)
latent     [B,T,L] any strides: a view of a cache is passed as it is, never copied
rope       [B,T,R] or None (R = 0)
values     [B,T,Lv] or None: the latent rows
mask       bool (True: attend) or float (added to the scaled scores), 4-D, broadcastable to [B,H,S,T]
causal     query s sees keys t <= T-S+s, together with mask
out        [B,S,H,Lv] contiguous, latent's dtype
lse        [B,S,H] natural log of the sum of exp(scores); float32, float64 for float64
=========  =================================================================================================

Kernels: CPU has its own (kernels/cpu.py), every other device runs the reference until a kernel for it is registered with
``torch.library.impl("mla_compile::decode_attention", "<device>")``. The schema is registered once per process, however often and
under whatever name this module is imported. Wrong arguments raise :class:`InputError`, and so does asking for a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mla_compile.errors import InputError
from mla_compile.kernels import cpu, reference

NAME = "mla_compile::decode_attention"
_SCHEMA = (
    "(Tensor query, Tensor latent, Tensor? rope=None, Tensor? values=None, Tensor? mask=None, *, "
    "float scale, bool causal=False) -> (Tensor out, Tensor lse)"
)
_HALF = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALF, torch.float32, torch.float64)


def _require(ok: Any, message: Callable[[], str]) -> None:
    """Raises InputError unless ``ok``. A symbolic ``ok`` becomes a runtime assertion instead of a specialisation."""
    if ok is True:
        return
    if ok is False:
        raise InputError(f"{NAME}: {message()}")
    torch._check_with(InputError, ok, lambda: f"{NAME}: {message()}")


def check_inputs(
    query: Tensor, latent: Tensor, rope: Tensor | None, values: Tensor | None, mask: Tensor | None
) -> None:
    """Raises :class:`InputError` naming the letter that does not fit, what was got and what was expected."""
    _require(
        query.dim() == 4,
        lambda: f"query must be [B,S,H,L+R], got {query.dim()} dimensions {_shape(query)}; add or merge axes",
    )
    B, S, H, K = query.shape
    rows: dict[str, Tensor] = {"latent": latent}
    if rope is not None:
        rows["rope"] = rope
    if values is not None:
        rows["values"] = values
    _require(
        latent.dim() == 3, lambda: f"latent must be [B,T,L], got {_shape(latent)}; squeeze the head axis of a cache"
    )
    T, L = latent.shape[1], latent.shape[2]
    for name, rows_BT in rows.items():
        _require(
            rows_BT.dim() == 3, lambda: f"{name} must be [B,T,width], got {_shape(rows_BT)}; squeeze the head axis"
        )
        _require(
            rows_BT.shape[0] == B,
            lambda: f"B of {name} is {rows_BT.shape[0]}, of query {B}; expand {name} over the batch",
        )
        _require(
            rows_BT.shape[1] == T,
            lambda: f"T of {name} is {rows_BT.shape[1]}, of latent {T}; pass rows of the same tokens",
        )
        _require(
            rows_BT.dtype == latent.dtype,
            lambda: f"{name} is {rows_BT.dtype}, latent is {latent.dtype}; cast one of them, all rows share a dtype",
        )
    R = rope.shape[2] if rope is not None else 0
    _require(
        K == L + R,
        lambda: f"query is {K} wide, expected L+R = {L}+{R} = {L + R}; its columns are [absorbed part, rotary part]",
    )
    _require(
        latent.dtype in _FLOATS, lambda: f"latent is {latent.dtype}, expected one of {_FLOATS}; dequantize it first"
    )
    _require(
        query.dtype == latent.dtype or (query.dtype == torch.float32 and latent.dtype in _HALF),
        lambda: (
            f"query is {query.dtype} beside {latent.dtype} rows, expected {latent.dtype} (or float32 beside half precision)"
        ),
    )
    for name, other in (*rows.items(), ("mask", mask)):
        _require(
            other is None or other.device == query.device,
            lambda: (
                f"{name} is on {other.device if other is not None else None}, query on {query.device}; move one of them"
            ),
        )
    if mask is None:
        return
    _require(
        mask.dtype == torch.bool or mask.dtype in _FLOATS,
        lambda: f"mask is {mask.dtype}, expected bool (True: attend) or a float added to the scores; cast it",
    )
    _require(
        mask.dim() == 4, lambda: f"mask must be 4-D, broadcastable to [B,H,S,T], got {_shape(mask)}; add axes of size 1"
    )
    for letter, got, want in zip("BHST", mask.shape, (B, H, S, T), strict=True):
        _require(
            (got == 1) | (got == want),
            lambda: f"{letter} of mask is {got}, expected {want} or 1 in {_shape(mask)}; slice or expand the mask",
        )


def _shape(x: Tensor) -> str:
    return str(list(x.shape))


def _on_cpu(
    query: Tensor,
    latent: Tensor,
    rope: Tensor | None = None,
    values: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    check_inputs(query, latent, rope, values, mask)
    return cpu.decode_attention(query, latent, rope, values, mask, scale=scale, causal=causal)


def _on_any_device(
    query: Tensor,
    latent: Tensor,
    rope: Tensor | None = None,
    values: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    check_inputs(query, latent, rope, values, mask)
    return reference.decode_attention(query, latent, rope, values, mask, scale=scale, causal=causal)


def _fake(
    query: Tensor,
    latent: Tensor,
    rope: Tensor | None = None,
    values: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    check_inputs(query, latent, rope, values, mask)
    B, S, H, _ = query.shape
    width = (latent if values is None else values).shape[2]
    return latent.new_empty(B, S, H, width), latent.new_empty(B, S, H, dtype=reference.compute_dtype(latent))


def _no_gradient(ctx: Any, *_: Any, **__: Any) -> None:
    raise InputError(
        f"{NAME} has no gradient: an input requires grad while gradients are enabled. "
        "Call it under torch.no_grad(), or train with the model's original attention."
    )


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
    """2BSHT(L+R) for the scores and 2BSHT*Lv for the sum. Masked and causal keys count, as in torch's own formulas."""
    B, S, H, K = query
    width = (latent if values is None else values)[2]
    return int(2 * B * S * H * latent[1] * (K + width))


def _register() -> torch.library.Library:
    library = torch.library.Library("mla_compile", "FRAGMENT")
    # flexible_layout: the kernels take any strides, so Inductor has no reason to copy a strided cache before the call.
    library.define(NAME.split("::")[1] + _SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    library.impl("decode_attention", _on_any_device, "CompositeExplicitAutograd")
    library.impl("decode_attention", _on_cpu, "CPU")
    torch.library.register_fake(NAME, _fake, lib=library)
    torch.library.register_autograd(NAME, _no_gradient, setup_context=_no_gradient, lib=library)
    register_flop_formula(torch.ops.mla_compile.decode_attention)(_flops)
    return library


if not hasattr(torch.ops.mla_compile, "decode_attention"):
    _LIBRARY = _register()

decode_attention = torch.ops.mla_compile.decode_attention.default
