"""What the arguments of decode attention have to satisfy. Reads shapes, dtypes and devices, never a value on a device.

Every failure is an :class:`InputError` that names the letter, what was got, what was expected and what to do. Sizes may
be symbolic: a comparison that is not decided becomes a runtime assertion, not a specialisation.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from mla_compile.errors import InputError

DENSE = "mla_compile::decode_attention"
PAGED = "mla_compile::paged_decode_attention"
FP8 = torch.float8_e4m3fn
HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32, torch.float64)
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def _unless(op: str, ok: Any, message: str) -> None:
    """Raises InputError where ``ok`` is False. A symbolic ``ok`` becomes a runtime assertion, not a specialisation."""
    if isinstance(ok, bool):
        if not ok:
            raise InputError(f"{op}: {message}")
    else:
        torch._check_with(InputError, ok, lambda: f"{op}: {message}")


def _shape(x: Tensor) -> str:
    return str(list(x.shape))


def check_dense(
    query: Tensor,
    latent: Tensor,
    rope: Tensor | None = None,
    values: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    seq_lens: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    softcap: float = 0.0,
    window: int = 0,
    num_splits: int = 0,
    deterministic: bool = False,
) -> None:
    """Raises :class:`InputError` where the arguments of :func:`kernels.decode.decode_attention` do not fit together.

    Runs on every call: messages are only built where a comparison is not plainly True.
    """
    op = DENSE
    if query.dim() != 4:
        _unless(op, False, f"query is {_shape(query)}, expected [B,S,H,L+R]; add or merge axes")
    if latent.dim() != 3:
        _unless(op, False, f"latent is {_shape(latent)}, expected [B,T,L]; squeeze the head axis of a cache")
    B, S, H, K = query.shape
    T, L = latent.shape[1], latent.shape[2]
    for name, rows in (("latent", latent), ("rope", rope), ("values", values)):
        if rows is None:
            continue
        if rows.dim() != 3:
            _unless(op, False, f"{name} is {_shape(rows)}, expected [B,T,width]; squeeze the head axis of a cache")
        if (same := rows.shape[0] == B) is not True:
            _unless(op, same, f"B of {name} is {rows.shape[0]}, expected {B} as in query; expand {name} over the batch")
        if (same := rows.shape[1] == T) is not True:
            _unless(
                op, same, f"T of {name} is {rows.shape[1]}, expected {T} as in latent; pass rows of the same tokens"
            )
    _check_rows(op, query, latent, rope, values, K, L)
    if seq_lens is not None or sinks is not None or kv_scale is not None:
        _check_extras(op, query, latent, (B, T), "[B,T]", seq_lens, sinks, kv_scale)
    elif latent.dtype == FP8:
        _fp8_scale(op)
    if softcap or window or num_splits:
        _check_numbers(op, softcap, window, num_splits, deterministic)
    if mask is None:
        return
    if mask.dtype != torch.bool and mask.dtype not in FLOATS:
        _unless(
            op, False, f"mask is {mask.dtype}, expected bool (True: attend) or a float added to the scores; cast it"
        )
    if mask.device != query.device:
        _unless(op, False, f"mask is on {mask.device}, expected {query.device} as query; move one of them")
    if mask.dim() != 4:
        _unless(op, False, f"mask is {_shape(mask)}, expected 4-D, broadcastable to [B,H,S,T]; add axes of size 1")
    for letter, got, want in zip("BHST", mask.shape, (B, H, S, T), strict=True):
        if (fits := got == want) is not True and got != 1:
            _unless(op, fits, f"{letter} of mask is {got}, expected {want} or 1 in {_shape(mask)}; slice or expand it")


def check_paged(
    query: Tensor,
    latent_pages: Tensor,
    rope_pages: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    softcap: float = 0.0,
    window: int = 0,
    num_splits: int = 0,
    deterministic: bool = False,
) -> None:
    """The same for :func:`kernels.decode.paged_decode_attention`.

    ``seq_lens`` beyond the table, and page numbers beyond the cache, are values: see :func:`check_values`.
    """
    op = PAGED
    if query.dim() != 4:
        _unless(op, False, f"query is {_shape(query)}, expected [B,S,H,L+R]; add or merge axes")
    for name, pages in (("latent_pages", latent_pages), ("rope_pages", rope_pages)):
        if pages is not None and pages.dim() != 3:
            _unless(op, False, f"{name} is {_shape(pages)}, expected [P,page,width]; squeeze the head axis of a cache")
    if rope_pages is not None and (same := rope_pages.shape[:2] == latent_pages.shape[:2]) is not True:
        _unless(
            op, same, f"rope_pages is {_shape(rope_pages)}, expected [P,page,R] as latent_pages {_shape(latent_pages)}"
        )
    B, _, _, K = query.shape
    page, L = latent_pages.shape[1], latent_pages.shape[2]
    if page not in PAGE_SIZES:
        _unless(op, False, f"page size is {page}, expected one of {PAGE_SIZES}; the block table has to match it")
    _check_rows(op, query, latent_pages, rope_pages, None, K, L)
    if block_table.dim() != 2 or block_table.dtype != torch.int32:
        got = f"{block_table.dtype} {_shape(block_table)}"
        _unless(op, False, f"block_table is {got}, expected int32 [B,maxpages]; cast or reshape it")
    if (same := block_table.shape[0] == B) is not True:
        _unless(op, same, f"B of block_table is {block_table.shape[0]}, expected {B} as in query")
    if block_table.stride(1) != 1 and block_table.shape[1] > 1:
        _unless(op, False, "block_table's rows are not contiguous; call .contiguous()")
    if block_table.device != query.device:
        _unless(
            op, False, f"block_table is on {block_table.device}, expected {query.device} as query; move one of them"
        )
    _check_extras(op, query, latent_pages, latent_pages.shape[:2], "[P,page]", seq_lens, sinks, kv_scale)
    if softcap or window or num_splits:
        _check_numbers(op, softcap, window, num_splits, deterministic)


def _check_rows(
    op: str, query: Tensor, latent: Tensor, rope: Tensor | None, values: Tensor | None, K: int, L: int
) -> None:
    """Widths, dtypes and devices of query and cached rows."""
    fp8 = latent.dtype == FP8
    for name, rows in (("latent", latent), ("rope", rope), ("values", values)):
        if rows is None:
            continue
        if rows.dtype != latent.dtype and not (fp8 and name == "rope" and rows.dtype in HALF):
            expected = f"{latent.dtype} as latent" + (" (or half precision)" if fp8 and name == "rope" else "")
            _unless(op, False, f"{name} is {rows.dtype}, expected {expected}; cast one of them")
        if rows.device != query.device:
            _unless(op, False, f"{name} is on {rows.device}, expected {query.device} as query; move one of them")
    R = 0 if rope is None else rope.shape[2]
    if (same := K == L + R) is not True:
        _unless(op, same, f"query is {K} wide, expected L+R = {L}+{R}; its columns are [absorbed part, rotary part]")
    if fp8:
        if values is not None:
            _unless(op, False, "values beside an fp8 latent are not supported; leave them out, or dequantize the cache")
        if query.dtype not in (*HALF, torch.float32):
            _unless(op, False, f"query is {query.dtype}, expected float32, bfloat16 or float16 beside an fp8 cache")
        if rope is not None and rope.dtype in HALF and query.dtype not in (rope.dtype, torch.float32):
            _unless(op, False, f"query is {query.dtype}, expected {rope.dtype} as rope (or float32); cast one of them")
        return
    if latent.dtype not in FLOATS:
        _unless(op, False, f"latent is {latent.dtype}, expected one of {(FP8, *FLOATS)}; dequantize it first")
    if query.dtype != latent.dtype and not (query.dtype == torch.float32 and latent.dtype in HALF):
        expected = f"{latent.dtype} as latent" + (" (or float32)" if latent.dtype in HALF else "")
        _unless(op, False, f"query is {query.dtype}, expected {expected}; cast it")


def _fp8_scale(op: str) -> NoReturn:
    raise InputError(f"{op}: latent is {FP8} and kv_scale is missing; pass a scale, torch.ones(()) where there is none")


def _check_extras(
    op: str,
    query: Tensor,
    latent: Tensor,
    tokens: Any,
    form: str,
    seq_lens: Tensor | None,
    sinks: Tensor | None,
    kv_scale: Tensor | None,
) -> None:
    """Lengths, sinks and scales: shapes, dtypes, devices."""
    B, _, H, _ = query.shape
    if seq_lens is not None:
        if seq_lens.dim() != 1 or seq_lens.dtype != torch.int32:
            _unless(op, False, f"seq_lens is {seq_lens.dtype} {_shape(seq_lens)}, expected int32 [B]; cast it")
        if (same := seq_lens.shape[0] == B) is not True:
            _unless(op, same, f"B of seq_lens is {seq_lens.shape[0]}, expected {B} as in query")
        if seq_lens.stride(0) != 1 and seq_lens.shape[0] > 1:
            _unless(op, False, "seq_lens is not contiguous; call .contiguous()")
    if sinks is not None:
        if sinks.dim() != 1 or sinks.dtype not in FLOATS[:3]:
            _unless(op, False, f"sinks is {sinks.dtype} {_shape(sinks)}, expected float32 [H]; cast it")
        if (same := sinks.shape[0] == H) is not True:
            _unless(op, same, f"H of sinks is {sinks.shape[0]}, expected {H} as in query")
        if sinks.stride(0) != 1 and sinks.shape[0] > 1:
            _unless(op, False, "sinks is not contiguous; call .contiguous()")
    if kv_scale is not None:
        if latent.dtype != FP8:
            _unless(op, False, f"kv_scale is for an fp8 cache, the latent is {latent.dtype}; leave it out")
        if kv_scale.dtype != torch.float32:
            _unless(op, False, f"kv_scale is {kv_scale.dtype}, expected float32; cast it")
        if kv_scale.dim() != 0 and (kv_scale.dim() != 2 or tuple(kv_scale.shape) != tuple(tokens)):
            _unless(op, False, f"kv_scale is {_shape(kv_scale)}, expected [] or {form} = {list(tokens)}; reshape it")
    elif latent.dtype == FP8:
        _fp8_scale(op)
    for name, x in (("seq_lens", seq_lens), ("sinks", sinks), ("kv_scale", kv_scale)):
        if x is not None and x.device != query.device:
            _unless(op, False, f"{name} is on {x.device}, expected {query.device} as query; move one of them")


def _check_numbers(op: str, softcap: float, window: int, num_splits: int, deterministic: bool) -> None:
    if softcap < 0:
        _unless(op, False, f"softcap is {softcap}, expected 0 (none) or more")
    if window < 0:
        _unless(op, False, f"window is {window}, expected 0 (none) or a number of tokens")
    if num_splits < 0:
        _unless(op, False, f"num_splits is {num_splits}, expected 0 (chosen by the plan) or more")
    if num_splits and deterministic:
        _unless(
            op, False, f"num_splits is {num_splits} beside deterministic, which cuts at fixed places; give one of them"
        )


def check_values(seq_lens: Tensor, block_table: Tensor, page: int, pages: int) -> None:
    """Lengths against the table, page numbers against the cache. Waits for the device where they are on one."""
    lengths, table = seq_lens.cpu(), block_table.cpu()
    room = table.shape[1] * page
    if bool((lengths < 0).any()) or bool((lengths > room).any()):
        worst = int(lengths.max()) if bool((lengths > room).any()) else int(lengths.min())
        raise InputError(
            f"{PAGED}: seq_lens holds {worst}, the block table has room for {room} = {table.shape[1]} pages of {page}; "
            "extend the table or shorten the request"
        )
    used = torch.arange(table.shape[1]) * page < lengths[:, None]
    wrong = used & ((table < 0) | (table >= pages))
    if bool(wrong.any()):
        b, i = (int(x) for x in wrong.nonzero()[0])
        raise InputError(
            f"{PAGED}: block_table[{b},{i}] is {int(table[b, i])}, expected a page of [0, {pages}); request {b} has "
            f"{int(lengths[b])} tokens, so entries below {-(-int(lengths[b]) // page)} are read"
        )


def check_gradient(op: str, *tensors: Tensor | None) -> None:
    """Refuses to compute where a gradient is asked for."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        refuse_gradient(op)


def refuse_gradient(op: str) -> NoReturn:
    """The one message about gradients."""
    raise InputError(
        f"{op} has no gradient: an input requires grad while gradients are enabled. "
        "Call it under torch.no_grad(), or train with the model's original attention."
    )
