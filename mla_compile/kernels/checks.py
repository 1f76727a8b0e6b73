"""Checks of the arguments of decode attention calls and of indexer calls.

:func:`check` and :func:`check_index` read shapes, dtypes and devices, never a value, so they never wait for a device.
Every failure is an :class:`InputError` that names the letter, the given value, the expected value, and the remedy.
Sizes may be symbolic: a comparison that cannot be decided becomes a runtime assertion, not a specialisation.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from mla_compile.errors import InputError
from mla_compile.kernels import shared
from mla_compile.kernels.call import PAGED, SCHEDULE, DecodeCall, IndexCall

FP8 = torch.float8_e4m3fn
HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32, torch.float64)
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def check(call: DecodeCall) -> None:
    """Raise :class:`InputError` if the arguments do not fit together.

    This runs on every CPU call, so messages are built only if a comparison may fail. :func:`check_values` checks the
    values of lengths and page numbers.
    """
    if call.query.dim() != 4:
        raise _refusal(call, f"query is {_shape(call.query)}, expected [B,S,H,L+R]; add or merge axes")
    if call.block_table is None:
        _check_dense_rows(call)
    else:
        _check_pages(call)
    _check_widths_and_dtypes(call)
    if call.block_table is not None:
        _check_block_table(call, call.block_table)
    if call.seq_lens is not None or call.sinks is not None or call.kv_scale is not None:
        _check_extras(call)
    elif call.latent.dtype == FP8:
        _no_scale(call)
    if call.softcap or call.window or call.num_splits:
        _check_numbers(call)
    if call.mask is not None:
        _check_mask(call, call.mask)
    if call.indices is not None:
        _check_indices(call, call.indices)
    if call.schedule is not None:
        _check_schedule(call, call.schedule)


def check_index(call: IndexCall) -> None:
    """Raise :class:`InputError` if the arguments of an indexer call do not fit together."""
    query, keys, weights, _ = call
    forms = {"query": (query, "BSJD"), "keys": (keys, "BTD"), "weights": (weights, "BSJ")}
    for name, (x, letters) in forms.items():
        if x.dim() != len(letters):
            raise _refusal(call, f"{name} is {_shape(x)}, expected [{','.join(letters)}]; add or merge axes")
        if x.device != query.device:
            raise _refusal(call, f"{name} is on {x.device}, expected {query.device} as query; move one of them")
        if x.dtype not in FLOATS:
            raise _refusal(call, f"{name} is {x.dtype}, expected one of {FLOATS}; dequantize or cast it")
        for letter, got in zip(letters, x.shape, strict=True):
            want = got if letter == "T" else query.shape["BSJD".index(letter)]
            if (same := got == want) is not True:
                _need(call, same, f"{letter} of {name} is {got}, expected {want} as in query; expand or slice it")
    if query.dtype != keys.dtype and not (query.dtype == torch.float32 and keys.dtype in HALF):
        expected = f"{keys.dtype} as keys" + (" (or float32)" if keys.dtype in HALF else "")
        raise _refusal(call, f"query is {query.dtype}, expected {expected}; cast one of them")
    if weights.dtype == torch.float64 and keys.dtype != torch.float64:
        raise _refusal(call, f"weights is {weights.dtype} beside {keys.dtype} keys, expected float32; cast it")


def _need(call: DecodeCall | IndexCall, ok: Any, message: str) -> None:
    """Raise InputError if ``ok`` is False. A symbolic ``ok`` becomes a runtime assertion, not a specialisation."""
    if isinstance(ok, bool):
        if not ok:
            raise _refusal(call, message)
    else:
        torch._check_with(InputError, ok, lambda: f"{call.op}: {message}")


def _refusal(call: DecodeCall | IndexCall, message: str) -> InputError:
    return InputError(f"{call.op}: {message}")


def _shape(x: Tensor) -> str:
    return str(list(x.shape))


def _check_dense_rows(call: DecodeCall) -> None:
    latent, B = call.latent, call.query.size(0)
    if latent.dim() != 3:
        raise _refusal(call, f"latent is {_shape(latent)}, expected [B,T,L]; squeeze the head axis of a cache")
    T = latent.size(1)
    for name, rows in (("latent", latent), ("rope", call.rope), ("values", call.values)):
        if rows is None:
            continue
        if rows.dim() != 3:
            raise _refusal(call, f"{name} is {_shape(rows)}, expected [B,T,width]; squeeze the head axis of a cache")
        if (same := rows.size(0) == B) is not True:
            _need(call, same, f"B of {name} is {rows.size(0)}, expected {B} as in query; expand {name} over the batch")
        if (same := rows.size(1) == T) is not True:
            _need(call, same, f"T of {name} is {rows.size(1)}, expected {T} as in latent; pass rows of the same tokens")


def _check_pages(call: DecodeCall) -> None:
    latent, rope = call.latent, call.rope
    for name, pages in (("latent_pages", latent), ("rope_pages", rope)):
        if pages is not None and pages.dim() != 3:
            raise _refusal(
                call, f"{name} is {_shape(pages)}, expected [P,page,width]; squeeze the head axis of a cache"
            )
    if rope is not None and (same := rope.shape[:2] == latent.shape[:2]) is not True:
        _need(call, same, f"rope_pages is {_shape(rope)}, expected [P,page,R] as latent_pages {_shape(latent)}")
    page = latent.shape[1]
    if page not in PAGE_SIZES:
        raise _refusal(call, f"page size is {page}, expected one of {PAGE_SIZES}; the block table has to match it")


def _check_block_table(call: DecodeCall, table: Tensor) -> None:
    query, B = call.query, call.query.shape[0]
    if table.dim() != 2 or table.dtype != torch.int32:
        raise _refusal(
            call,
            f"block_table is {table.dtype} {_shape(table)}, expected int32 [B,maxpages]; cast or reshape it",
        )
    if (same := table.shape[0] == B) is not True:
        _need(call, same, f"B of block_table is {table.shape[0]}, expected {B} as in query")
    if table.stride(1) != 1 and table.shape[1] > 1:
        raise _refusal(call, "block_table's rows are not contiguous; call .contiguous()")
    if table.device != query.device:
        raise _refusal(call, f"block_table is on {table.device}, expected {query.device} as query; move one of them")


def _check_widths_and_dtypes(call: DecodeCall) -> None:
    """Check widths, dtypes and devices of the query and the cached rows."""
    query, latent, rope = call.query, call.latent, call.rope
    device, dtype = query.device, latent.dtype
    fp8 = dtype == FP8
    for name, rows in (("latent", latent), ("rope", rope), ("values", call.values)):
        if rows is None:
            continue
        # Float32 rope with an fp8 latent is only for CPUs, where float32 models run.
        beside = (*HALF, torch.float32) if rows.is_cpu else HALF
        if rows.dtype != dtype and not (fp8 and name == "rope" and rows.dtype in beside):
            expected = f"{dtype} as latent" + (" (or half precision)" if fp8 and name == "rope" else "")
            raise _refusal(call, f"{name} is {rows.dtype}, expected {expected}; cast one of them")
        if rows.device != device:
            raise _refusal(call, f"{name} is on {rows.device}, expected {device} as query; move one of them")
    K, L, R = query.size(3), latent.size(2), 0 if rope is None else rope.size(2)
    if (same := K == L + R) is not True:
        _need(call, same, f"query is {K} wide, expected L+R = {L}+{R}; its columns are [absorbed part, rotary part]")
    if fp8:
        if call.values is not None:
            raise _refusal(
                call, "values beside an fp8 latent are not supported; leave them out, or dequantize the cache"
            )
        if query.dtype not in (*HALF, torch.float32):
            raise _refusal(call, f"query is {query.dtype}, expected float32, bfloat16 or float16 beside an fp8 cache")
        if rope is not None and rope.dtype in FLOATS and query.dtype not in (rope.dtype, torch.float32):
            raise _refusal(
                call, f"query is {query.dtype}, expected {rope.dtype} as rope (or float32); cast one of them"
            )
        return
    if dtype not in FLOATS:
        raise _refusal(call, f"latent is {dtype}, expected one of {(FP8, *FLOATS)}; dequantize it first")
    if query.dtype != dtype and not (query.dtype == torch.float32 and dtype in HALF):
        expected = f"{dtype} as latent" + (" (or float32)" if dtype in HALF else "")
        raise _refusal(call, f"query is {query.dtype}, expected {expected}; cast it")


def _no_scale(call: DecodeCall) -> None:
    raise _refusal(call, f"latent is {FP8} and kv_scale is missing; pass a scale, torch.ones(()) where there is none")


def _check_extras(call: DecodeCall) -> None:
    """Check shapes, dtypes and devices of lengths, sinks and scales."""
    query, latent = call.query, call.latent
    seq_lens, sinks, kv_scale = call.seq_lens, call.sinks, call.kv_scale
    B, _, H, _ = query.shape
    if seq_lens is not None:
        if seq_lens.dim() != 1 or seq_lens.dtype != torch.int32:
            raise _refusal(call, f"seq_lens is {seq_lens.dtype} {_shape(seq_lens)}, expected int32 [B]; cast it")
        if (same := seq_lens.shape[0] == B) is not True:
            _need(call, same, f"B of seq_lens is {seq_lens.shape[0]}, expected {B} as in query")
        if seq_lens.stride(0) != 1 and seq_lens.shape[0] > 1:
            raise _refusal(call, "seq_lens is not contiguous; call .contiguous()")
    if sinks is not None:
        if sinks.dim() != 1 or sinks.dtype not in FLOATS[:3]:
            raise _refusal(call, f"sinks is {sinks.dtype} {_shape(sinks)}, expected float32 [H]; cast it")
        if (same := sinks.shape[0] == H) is not True:
            _need(call, same, f"H of sinks is {sinks.shape[0]}, expected {H} as in query")
        if sinks.stride(0) != 1 and sinks.shape[0] > 1:
            raise _refusal(call, "sinks is not contiguous; call .contiguous()")
    if kv_scale is not None:
        if latent.dtype != FP8:
            raise _refusal(call, f"kv_scale is for an fp8 cache, the latent is {latent.dtype}; leave it out")
        if kv_scale.dtype != torch.float32:
            raise _refusal(call, f"kv_scale is {kv_scale.dtype}, expected float32; cast it")
        _check_scales(call, kv_scale)
    elif latent.dtype == FP8:
        _no_scale(call)
    for name, x in (("seq_lens", seq_lens), ("sinks", sinks), ("kv_scale", kv_scale)):
        if x is not None and x.device != query.device:
            raise _refusal(call, f"{name} is on {x.device}, expected {query.device} as query; move one of them")


def _check_scales(call: DecodeCall, kv_scale: Tensor) -> None:
    tokens = call.latent.shape[:2]  # each cached row has one scale, or G scales
    if kv_scale.dim() != 0 and (kv_scale.dim() not in (2, 3) or tuple(kv_scale.shape[:2]) != tuple(tokens)):
        row = "B,T" if call.block_table is None else "P,page"
        expected = f"[], [{row}] or [{row},G] with [{row}] = {list(tokens)}"
        raise _refusal(call, f"kv_scale is {_shape(kv_scale)}, expected {expected}; reshape it")
    if kv_scale.dim() == 3:
        # widths are never symbolic, and bit_count needs an int
        L, G = int(call.latent.shape[2]), int(kv_scale.shape[2])
        if not 0 < G <= L or L % G or (L // G).bit_count() != 1:
            fits = "a part of L that leaves groups of a power of two columns"
            raise _refusal(call, f"G of kv_scale is {G} beside L = {L}, expected {fits}; repeat or merge scales")
        if call.rope is not None and call.rope.dtype == FP8:
            raise _refusal(
                call, f"rope is {FP8} beside scales of groups, which are the latent's; pass it in half precision"
            )


def _check_numbers(call: DecodeCall) -> None:
    if call.softcap < 0:
        raise _refusal(call, f"softcap is {call.softcap}, expected 0 (none) or more")
    if call.window < 0:
        raise _refusal(call, f"window is {call.window}, expected 0 (none) or a number of tokens")
    if call.num_splits < 0:
        raise _refusal(call, f"num_splits is {call.num_splits}, expected 0 (chosen by the plan) or more")
    if call.num_splits and call.deterministic:
        raise _refusal(
            call,
            f"num_splits is {call.num_splits} beside deterministic, which cuts at fixed places; give one of them",
        )


def _check_mask(call: DecodeCall, mask: Tensor) -> None:
    (B, S, H, _), T = call.query.shape, call.latent.shape[1]
    if mask.dtype != torch.bool and mask.dtype not in FLOATS:
        raise _refusal(
            call, f"mask is {mask.dtype}, expected bool (True: attend) or a float added to the scores; cast it"
        )
    if mask.device != call.query.device:
        raise _refusal(call, f"mask is on {mask.device}, expected {call.query.device} as query; move one of them")
    if mask.dim() != 4:
        raise _refusal(call, f"mask is {_shape(mask)}, expected 4-D, broadcastable to [B,H,S,T]; add axes of size 1")
    for letter, got, want in zip("BHST", mask.shape, (B, H, S, T), strict=True):
        if (fits := got == want) is not True and got != 1:
            _need(call, fits, f"{letter} of mask is {got}, expected {want} or 1 in {_shape(mask)}; slice or expand it")


def _check_indices(call: DecodeCall, indices: Tensor) -> None:
    (B, S, _, _) = call.query.shape
    if indices.dim() != 3 or indices.dtype != torch.int32:
        raise _refusal(
            call, f"indices is {indices.dtype} {_shape(indices)}, expected int32 [B,S,k]; cast or reshape it"
        )
    if indices.device != call.query.device:
        raise _refusal(call, f"indices is on {indices.device}, expected {call.query.device} as query; move one of them")
    for letter, got, want in zip("BS", indices.shape, (B, S), strict=False):
        if (same := got == want) is not True:
            _need(call, same, f"{letter} of indices is {got}, expected {want} as in query; expand or slice it")


def _check_schedule(call: DecodeCall, schedule: Tensor) -> None:
    advice = f"pass what {SCHEDULE} returned for a call of these sizes"
    if schedule.dim() != 1 or schedule.dtype != torch.int64:
        raise _refusal(call, f"schedule is {schedule.dtype} {_shape(schedule)}, expected int64 [n]; {advice}")
    if schedule.device != call.query.device:
        raise _refusal(call, f"schedule is on {schedule.device}, expected {call.query.device} as query; {advice}")
    got, want = schedule.shape[0], shared.elements(call)
    if (same := got == want) is not True:
        _need(call, same, f"schedule has {got} elements, expected {want}; {advice}")
    if schedule.stride(0) != 1 and got > 1:
        raise _refusal(call, "schedule is not contiguous; call .contiguous()")


def values_on_cpu(call: DecodeCall) -> bool:
    """Whether :func:`check_values` can read the values without waiting for a device."""
    return all(x is None or x.is_cpu for x in (call.seq_lens, call.block_table))


def check_values(call: DecodeCall) -> None:
    """Check the lengths against the block table, and the table's page numbers against the cache.

    If the values are on a GPU, this waits for the GPU.
    """
    assert call.seq_lens is not None
    assert call.block_table is not None
    pages, page = call.latent.shape[:2]
    lengths, table = call.seq_lens.cpu(), call.block_table.cpu()
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


def check_gradient(call: DecodeCall) -> None:
    """Raise :class:`InputError` if an input requires a gradient while gradients are enabled."""
    if torch.is_grad_enabled():
        for x in (call.query, call.latent, call.rope, call.values, call.mask, call.sinks):
            if x is not None and x.requires_grad:
                refuse_gradient(call.op)


def refuse_gradient(op: str) -> NoReturn:
    """Raise the error about gradients."""
    raise InputError(
        f"{op} has no gradient: an input requires grad while gradients are enabled. "
        "Call it under torch.no_grad(), or train with the model's original attention."
    )
