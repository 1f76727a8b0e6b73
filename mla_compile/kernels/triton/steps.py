"""The launches of one decode attention call with Triton, as data: kernels, grids, arguments, compile-time constants.

:func:`steps` is pure and accepts meta tensors. The launch (kernels/launch.py), the compilation without a GPU
(benchmarks/gpu/offline.py) and the interpreter (tests/support/interpreter.py) all use it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mla_compile.errors import InputError
from mla_compile.kernels.call import TENSORS, DecodeCall
from mla_compile.kernels.devices import Device
from mla_compile.kernels.plan import MIN_SPLIT, Plan
from mla_compile.kernels.shared import PLANES, Buffers
from mla_compile.kernels.tiles import padded
from mla_compile.kernels.triton import lists
from mla_compile.kernels.triton.step import TYPES, Arguments, Step

# Block sizes of the small kernels, limited by the registers of the threads. Not tuned on a GPU yet.
WORD_BITS = 64  # the largest tile, in keys, for the mask's pre-pass: one bit of an int64 for each key
GROUP = 16  # tiles that one program of the mask's pre-pass scans: 4 or 8 keys for each of 128 threads
LIST_BLOCK = 1024  # tiles listed at a time: 8 for each of 128 threads
COMBINE_SPLITS = 8  # splits that the combine kernel holds at a time
COMBINE_COLUMNS = 256  # columns of such a split: 32 elements for each of 64 threads
_I32 = 1 << 31
_HALF = (torch.float16, torch.bfloat16)
_SHORT = {"seq_lens": "lengths", "block_table": "table"}
# The names by which ``Step.buffers`` refers to the tensors of a call.
BUFFERS = tuple(_SHORT.get(name, name) for name in DecodeCall._fields[:TENSORS])


def dot_dtype(call: DecodeCall) -> torch.dtype:
    """Return the dtype of both products: the cache's, or for an fp8 cache a dtype that represents fp8 exactly.

    With per-token or per-group scales, fp8 becomes bfloat16, because products with such a scale can have any magnitude.
    Otherwise, fp8 becomes the half-precision dtype of rope or query, or float16 if neither is in half precision.
    """
    if call.latent.dtype.itemsize > 1:
        return call.latent.dtype
    if call.kv_scale is not None and call.kv_scale.dim() > 0:
        return torch.bfloat16
    if call.rope is not None and call.rope.dtype in _HALF:
        return call.rope.dtype
    return call.query.dtype if call.query.dtype in _HALF else torch.float16


def scratch(call: DecodeCall, plan: Plan, device: Device) -> Buffers:
    """Return the shape and dtype of each buffer that the launch allocates, by name. Sizes come from shapes only."""
    z = call.sizes
    found: Buffers = {
        "out": ((z.B, z.S, z.H, z.V), call.query.dtype),
        "lse": ((z.B, z.S, z.H), torch.float32),
    }
    if plan.splits > 1:
        found["part"] = ((plan.splits, z.B, z.S * z.H, z.V), torch.float32)
        found["part_lse"] = ((plan.splits, z.B, z.S * z.H), torch.float32)
    if _staged(call, plan, device):
        found["staged"] = ((z.B, z.S * z.H, z.L + z.R), dot_dtype(call))
    found |= lists.scratch(call)
    return found if call.schedule is not None else found | prepared(call, plan, device)


def prepared(call: DecodeCall, plan: Plan, device: Device) -> Buffers:
    """Return the buffers that :func:`preparing` writes. Calls with the same mask, lengths and sizes can share them."""
    if call.mask is None or call.indices is not None:
        return {}
    return {"work": (list_shape(call, plan), torch.int64)}


def steps(call: DecodeCall, plan: Plan, device: Device, *, least: int | None = None) -> tuple[Step, ...]:
    """Return the launches of one call, in order: the mask's list of tiles (if needed), attention, combine (if needed).

    If a call has a schedule, the schedule contains the list. ``least`` is the minimum number of tokens of a split
    (default: MIN_SPLIT). The plan's chunk, if there is one, replaces ``least``.
    """
    import mla_compile.kernels.triton.combine_triton as combine_kernels
    import mla_compile.kernels.triton.decode_triton as decode_kernels

    found = [] if call.schedule is not None else list(preparing(call, plan, device))
    tokens = plan.chunk or (MIN_SPLIT if least is None else least)
    found.append(_attention(call, plan, device, decode_kernels.attend, max(1, tokens // plan.block_n)))
    if plan.splits > 1:
        found.append(combine_step(call, plan, combine_kernels.combine))
    return tuple(found)


def _staged(call: DecodeCall, plan: Plan, device: Device) -> bool:
    """Whether the converted query is written to scratch and loaded again, as products of warpgroups require."""
    return device.capability >= (9, 0) and plan.block_m >= 64 and call.query.dtype != dot_dtype(call)


def list_shape(call: DecodeCall, plan: Plan) -> tuple[int, int, int]:
    """Return the shape ``(planes, lists, tiles)`` of a mask's lists.

    There is one list, or one per request if mask or lengths may differ.
    """
    assert call.mask is not None
    z = call.sizes
    count = z.B if _stride(call.mask, 0) or call.seq_lens is not None else 1
    return PLANES, count, max(1, -(-z.T // plan.block_n))


def read_mask_bytes(mask: Tensor | None) -> int:
    """Return how many bytes of a mask the loop reads per query row and token; 0 if the list of tiles is sufficient."""
    if mask is None or not (mask.dtype.is_floating_point or _stride(mask, 1) or _stride(mask, 2)):
        return 0
    return mask.dtype.itemsize


def _stride(x: Tensor, axis: int) -> int:
    """Return the stride of an axis; 0 if the axis is broadcast."""
    return 0 if x.shape[axis] == 1 else x.stride(axis)


def mask_strides(mask: Tensor) -> dict[str, int]:
    """Return the strides of a mask's axes by name, 0 for broadcast axes."""
    return {f"mask_{letter}": _stride(mask, axis) for axis, letter in enumerate("bhst")}


def preparing(call: DecodeCall, plan: Plan, device: Device) -> tuple[Step, ...]:
    """Return the launches before attention. They list a mask's visible tiles of plan.block_n keys."""
    import mla_compile.kernels.triton.tiles_triton as kernels

    if not prepared(call, plan, device):
        return ()
    assert call.mask is not None
    if plan.block_n > WORD_BITS:
        raise InputError(
            f"plan: block_n is {plan.block_n}, expected at most {WORD_BITS} beside a mask; make it smaller"
        )
    z, mask = call.sizes, call.mask
    _, count, capacity = list_shape(call, plan)
    scan = Arguments()
    scan.pointer("mask", mask)
    scan.pointer("lengths", call.seq_lens)
    scan.scratch("work", "work", "*i64")
    scan.strides(mask_strides(mask))
    by_token = z.S > 1 and (bool(_stride(mask, 2)) or call.causal or call.window > 0)
    scan.scalars |= {
        "HM": z.H if _stride(mask, 1) else 1,
        "SM": z.S if by_token else 1,
        "S": z.S,
        "T": z.T,
        "window": call.window,
        "capacity": capacity,
    }
    scan.constants |= {
        "CAUSAL": call.causal and z.S > 1,
        "WINDOW": call.window > 0,
        "BLOCK_N": plan.block_n,
        "GROUP": GROUP,
        "HIDDEN": torch.finfo(mask.dtype).min / 2 if mask.dtype.is_floating_point else 0.0,
    }
    listing = Arguments()
    listing.scratch("work", "work", "*i64")
    listing.scalars["capacity"] = capacity
    listing.constants["BLOCK"] = LIST_BLOCK
    return (
        scan.step("scan_mask", kernels.scan_mask, (-(-capacity // GROUP), count, 1), {"num_warps": 4, "num_stages": 1}),
        listing.step("list_tiles", kernels.list_tiles, (count, 1, 1), {"num_warps": 4, "num_stages": 1}),
    )


def _rows(call: DecodeCall, into: Arguments, *, bits: bool) -> bool:
    """Add pointers and strides of the cached rows; return True if offsets inside a request or a page need 64 bits."""
    wide = False
    z = call.sizes
    for name, x in (("latent", call.latent), ("rope", call.rope), ("values", call.values)):
        into.pointer(name, x, bits=bits)
        if x is None:
            into.strides({f"{name}_{axis}": 0 for axis in "btc"})
            continue
        block, row, column = x.stride()
        far = x.shape[1] * row + x.shape[2] * column >= _I32
        wide |= far
        # Rows are usually dense, and a constant stride saves the loop a register per row.
        dense = () if far else (x.shape[2], z.L + z.R)
        into.strides({f"{name}_b": block, f"{name}_t": row, f"{name}_c": column}, dense)
    return wide


def _attention(call: DecodeCall, plan: Plan, device: Device, fn: object, least: int) -> Step:
    z, dot = call.sizes, dot_dtype(call)
    direct = plan.splits == 1
    bits = device.capability < (8, 9)
    to = Arguments()
    to.pointer("query", call.query)
    wide = _rows(call, to, bits=bits)
    to.scratch("out", "out" if direct else "part", TYPES[call.query.dtype] if direct else "*fp32")
    to.scratch("lse", "lse" if direct else "part_lse", "*fp32")
    to.scratch("staged", "staged", TYPES[dot], used=_staged(call, plan, device))
    to.pointer("table", call.block_table)
    to.pointer("lengths", call.seq_lens)
    mask, listed = call.mask, call.indices is not None
    by_row = mask is not None and not listed and bool(_stride(mask, 1) or _stride(mask, 2))
    if mask is None or listed:
        to.constants["work"] = None
        to.strides({"work_b": 0, "work_plane": 0})
    else:
        to.scratch("work", "work", "*i64")
        _, count, capacity = list_shape(call, plan)
        to.scalars |= {"work_b": capacity if count > 1 else 0, "work_plane": capacity * count}
        wide |= z.T * _stride(mask, 3) >= _I32
    # None if the lists in ``work`` are sufficient
    read_mask = mask if mask is not None and (listed or read_mask_bytes(mask)) else None
    to.pointer("mask", read_mask)
    to.strides({f"mask_{axis}": 0 for axis in "bhst"} if read_mask is None else mask_strides(read_mask))
    page, far = lists.arguments(call, to)
    wide |= far
    to.pointer("sinks", call.sinks if direct else None)
    to.pointer("kv_scale", call.kv_scale)
    scale_strides = (*(() if call.kv_scale is None else call.kv_scale.stride()), 0, 0, 0)
    to.strides({f"scale_{axis}": stride for axis, stride in zip("btg", scale_strides, strict=False)})
    to.strides({"table_b": 0 if call.block_table is None else call.block_table.stride(0)})
    to.strides({f"query_{axis}": call.query.stride(i) for i, axis in enumerate("bsh")})
    factor = call.scale / call.softcap if call.softcap > 0 else call.scale * math.log2(math.e)
    to.scalars |= {
        "scale": float(factor),
        "softcap": float(call.softcap * math.log2(math.e)),
        "S": z.S,
        "H": z.H,
        "T": z.T,
        "least": least,
        "window": call.window,
    }
    import triton.language as tl

    languages = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    to.constants |= {
        "L": z.L,
        "R": z.R,
        "V": z.V,
        "BLOCK_L": padded(z.L),
        "BLOCK_R": padded(z.R),
        "BLOCK_V": padded(z.V),
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "PAGE": page,
        "WIDE": wide,
        "DTYPE": languages[dot],
        # Not tf32x3: it keeps both halves of the split query in registers (3 to 13 KB of spills; FMA has none).
        "PRECISION": "ieee" if dot == torch.float32 else "tf32",
        "WARPGROUPS": device.capability == (9, 0) and plan.block_m >= 64 and plan.num_warps >= 4,  # wgmma
        "NORMALIZE": call.query.dtype == torch.float32 and dot == torch.float16,
        "CAUSAL": call.causal and z.S > 1,
        "WINDOW": call.window > 0,
        "SOFTCAP": call.softcap > 0,
        "MASK_ROWS": by_row,
        "TOKEN_SCALE": call.kv_scale is not None and call.kv_scale.dim() == 2,
        "GROUP": z.L // call.groups if call.groups else 0,
        "ROPE_SCALED": call.rope is not None and call.rope.dtype.itemsize == 1,
        "DIRECT": direct,
        "PDL": plan.pdl and not direct,
    }
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    grid = (plan.row_blocks(z.S * z.H), plan.splits, z.B)
    if listed:  # a block serves one query token; only the first axis is long enough for the tokens of a prompt
        grid = (plan.row_blocks(z.H) * z.B * z.S, plan.splits, 1)
    return to.step("attend", fn, grid, options)


def combine_step(call: DecodeCall, plan: Plan, fn: object) -> Step:
    """Return the launch that combines the splits of every request."""
    z = call.sizes
    to = Arguments()
    to.scratch("part", "part", "*fp32")
    to.scratch("part_lse", "part_lse", "*fp32")
    to.pointer("sinks", call.sinks)
    to.scratch("out", "out", TYPES[call.query.dtype])
    to.scratch("lse", "lse", "*fp32")
    columns = min(COMBINE_COLUMNS, padded(z.V))
    to.scalars |= {"H": z.H, "NS": plan.splits}
    to.constants |= {"V": z.V, "BLOCK_S": COMBINE_SPLITS, "BLOCK_V": columns, "PDL": plan.pdl}
    return to.step("combine", fn, (z.B * z.S * z.H, -(-z.V // columns), 1), combine_options(plan))


def combine_options(plan: Plan) -> dict[str, Any]:
    """Return the options of a launch that combines splits or partitions."""
    return {"num_warps": 2, "num_stages": 1, **({"launch_pdl": True} if plan.pdl else {})}
