"""The ops of mla_compile: schemas, input checks, fake functions and the choice of a kernel by device.

``mla_compile::decode_attention(query, latent, rope, values, mask, *, scale, causal) -> (out, lse)``: attention of H
query heads over one shared row per token, ``[latent, rope]``; what is summed is the latent again, or ``values``.

=========  ==========================================================================================================
query      [B,S,H,L+R] columns 0..L meet the latent, L..L+R the rotary key; latent's dtype, or float32 beside
           half precision (an absorbed query can exceed float16, and rounds where the original's did not)
latent     [B,T,L] any strides: a view of a cache is passed as it is, never copied
rope       [B,T,R] or None (R = 0)
values     [B,T,Lv] or None: the latent rows
mask       bool (True: attend) or float (added to the scaled scores), 4-D, broadcastable to [B,H,S,T]
causal     query s sees keys t <= T-S+s, together with mask
out        [B,S,H,Lv] contiguous, query's dtype
lse        [B,S,H] natural log of the sum of exp(scores); float32, float64 for float64
=========  ==========================================================================================================

Kernels: CPU has its own (kernels/cpu.py); every other device runs the reference until a kernel for it is registered, in
``_register``, under that device's dispatch key. The schema is registered once per process, however often and under
whatever name this module is imported. Wrong arguments raise :class:`InputError`, and so does asking for a gradient.
"""

from __future__ import annotations

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


def _unless(ok: Any, message: str) -> None:
    """Raises InputError where ``ok`` is False. A symbolic ``ok`` becomes a runtime assertion, not a specialisation."""
    if isinstance(ok, bool):
        if not ok:
            raise InputError(f"{NAME}: {message}")
    else:
        torch._check_with(InputError, ok, lambda: f"{NAME}: {message}")


def check_inputs(
    query: Tensor, latent: Tensor, rope: Tensor | None, values: Tensor | None, mask: Tensor | None
) -> None:
    """Raises :class:`InputError` naming the letter that does not fit, what was got and what was expected.

    Runs on every call: messages are only built where a comparison is not plainly True.
    """
    if query.dim() != 4:
        _unless(False, f"query is {_shape(query)}, expected [B,S,H,L+R]; add or merge axes")
    if latent.dim() != 3:
        _unless(False, f"latent is {_shape(latent)}, expected [B,T,L]; squeeze the head axis of a cache")
    B, S, H, K = query.shape
    T, L = latent.shape[1], latent.shape[2]
    for name, rows in (("latent", latent), ("rope", rope), ("values", values)):
        if rows is None:
            continue
        if rows.dim() != 3:
            _unless(False, f"{name} is {_shape(rows)}, expected [B,T,width]; squeeze the head axis of a cache")
        if (same := rows.shape[0] == B) is not True:
            _unless(same, f"B of {name} is {rows.shape[0]}, expected {B} as in query; expand {name} over the batch")
        if (same := rows.shape[1] == T) is not True:
            _unless(same, f"T of {name} is {rows.shape[1]}, expected {T} as in latent; pass rows of the same tokens")
        if rows.dtype != latent.dtype:
            _unless(False, f"{name} is {rows.dtype}, expected {latent.dtype} as latent; cast one of them")
        if rows.device != query.device:
            _unless(False, f"{name} is on {rows.device}, expected {query.device} as query; move one of them")
    R = 0 if rope is None else rope.shape[2]
    if (same := K == L + R) is not True:
        _unless(same, f"query is {K} wide, expected L+R = {L}+{R}; its columns are [absorbed part, rotary part]")
    if latent.dtype not in _FLOATS:
        _unless(False, f"latent is {latent.dtype}, expected one of {_FLOATS}; dequantize it first")
    if query.dtype != latent.dtype and not (query.dtype == torch.float32 and latent.dtype in _HALF):
        expected = f"{latent.dtype} as latent" + (" (or float32)" if latent.dtype in _HALF else "")
        _unless(False, f"query is {query.dtype}, expected {expected}; cast it")
    if mask is None:
        return
    if mask.dtype != torch.bool and mask.dtype not in _FLOATS:
        _unless(False, f"mask is {mask.dtype}, expected bool (True: attend) or a float added to the scores; cast it")
    if mask.device != query.device:
        _unless(False, f"mask is on {mask.device}, expected {query.device} as query; move one of them")
    if mask.dim() != 4:
        _unless(False, f"mask is {_shape(mask)}, expected 4-D, broadcastable to [B,H,S,T]; add axes of size 1")
    for letter, got, want in zip("BHST", mask.shape, (B, H, S, T), strict=True):
        if (fits := got == want) is not True and got != 1:
            _unless(fits, f"{letter} of mask is {got}, expected {want} or 1 in {_shape(mask)}; slice or expand it")


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
    with torch.autocast(query.device.type, enabled=False):  # the reference chooses its own precision
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
    return query.new_empty(B, S, H, width), latent.new_empty(B, S, H, dtype=reference.compute_dtype(latent))


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
    """2BSHT(L+R) for the scores and 2BSHT*Lv for the sum. Hidden keys count, as in torch's own formulas."""
    B, S, H, K = query
    width = (latent if values is None else values)[2]
    return int(2 * B * S * H * latent[1] * (K + width))


def _register() -> torch.library.Library:
    library = torch.library.Library("mla_compile", "FRAGMENT")
    # flexible_layout: the kernels take any strides, so Inductor need not copy a strided cache before the call.
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
