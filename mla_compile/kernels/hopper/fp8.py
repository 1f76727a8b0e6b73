"""Pure functions that describe the launch of the Hopper kernel for float8 rows (kernels/hopper/fp8_gluon.py)."""

from __future__ import annotations

import torch

from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.hopper import lists
from mla_compile.kernels.hopper.step import GluonStep, begun, tell, written
from mla_compile.kernels.plan import Plan
from mla_compile.kernels.triton import lists as places
from mla_compile.kernels.triton import steps as portable

REGISTERS = 216  # per thread of a consumer; leaves 72 to the producer
# supported numbers of column groups with separate scales (0: none). Each piece of 64 columns must lie in one group.
GROUPS = (0, 1, 2, 4, 8)
_FP8 = torch.float8_e4m3fn
_I32 = 1 << 31


def takes(call: DecodeCall) -> bool:
    """Whether the kernel supports the rows: float8, with row numbers that fit 32 bits.

    Rope is either float8 with the latent's scale, or bfloat16 without a scale. With bfloat16 rope, latent rows are
    multiplied by their scales and rounded to bfloat16, which has the range of float32. Float16 has a smaller
    range, so rope in float16 is left to the portable kernel.
    """
    latent, rope = call.latent, call.rope
    if latent.dtype != _FP8 or rope is None or latent.shape[:2].numel() >= _I32:
        return False
    if rope.dtype == _FP8:
        return call.groups == 0
    return rope.dtype == torch.bfloat16 and call.groups in GROUPS


def attention(call: DecodeCall, plan: Plan, grid: tuple[int, int, int], least: int, *, ragged: bool) -> GluonStep:
    """Return the launch of attention. A split has >= ``least`` blocks. ``ragged``: the device partitions the batch."""
    import triton.language as tl

    import mla_compile.kernels.hopper.fp8_gluon as kernels

    z, scales, listed = call.sizes, call.kv_scale, call.indices is not None
    assert scales is not None
    assert call.rope is not None
    whole, groups = not ragged and plan.splits == 1, 0 if call.rope.dtype == _FP8 else max(1, call.groups)
    to = begun(call)
    to.types |= dict.fromkeys(("latent", "rope"), "*i32")
    by_row = scales.dim() > 0 or groups > 0  # else the call has one scale, which the consumers apply
    to.pointer("kv_scale", None if by_row else scales)
    to.pointer("token_scale", scales if by_row else None, "kv_scale")
    to.strides(dict(zip(("scale_b", "scale_t", "scale_g"), (*scales.stride(), 0, 0, 0), strict=False)))
    if listed:
        lists.told(call, to, "work")
    else:
        to.constants |= dict.fromkeys(("indices", "mask", "places"))
        to.constants |= dict.fromkeys(("mask_b", "mask_s", "mask_t", "indices_b", "indices_s", "entries"), 0)
        to.scratch("work", "work", "*i32", used=call.mask is not None)  # halves of int64 words
    to.scratch("items", "items", "*i32", used=ragged)
    to.scratch("slots", "shift", "*i32", used=ragged)
    written(call, to, parts=not whole, final=ragged or whole)
    to.pointer("sinks", call.sinks if ragged or whole else None)
    of_tiles = {"work_b": 0, "plane": 0}
    if call.mask is not None and not listed:
        _, count, entries = portable.list_shape(call, plan)
        of_tiles = {"work_b": entries if count > 1 else 0, "plane": entries * count}
    tell(to, {**of_tiles, "B": z.B, "least": least})
    to.constants |= {
        "DTYPE": {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[portable.dot_dtype(call)],
        "GROUPS": groups,
        "PAGE": 0 if z.page == 0 or places.in_one_piece(call) else z.page,
        "TABLE_PAGE": z.page,
        "CAUSAL": call.causal and z.S > 1,
        "PARTIAL": 2 if ragged else int(not whole),
        "REGS": REGISTERS,
        "HELD": plan.held,
    }
    name = "mla_seesaw_fp8_lists" if listed else "mla_seesaw_fp8"
    made = to.step(name, kernels.mla_seesaw_fp8, grid, {"num_warps": 4})
    return GluonStep(**vars(made), boxes={})
