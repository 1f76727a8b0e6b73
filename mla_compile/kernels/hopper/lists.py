"""Pure functions that describe the launch of the Hopper kernel for index lists (kernels/hopper/list_gluon.py).

Except for :func:`attention`, everything here also applies to float8 rows (fp8.py).
"""

from __future__ import annotations

import torch

from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.hopper.step import GluonStep, begun, tell, written
from mla_compile.kernels.kinds import rounded
from mla_compile.kernels.plan import HOPPER_BLOCK as BLOCK
from mla_compile.kernels.plan import Plan
from mla_compile.kernels.shared import Buffers
from mla_compile.kernels.triton import lists as portable
from mla_compile.kernels.triton.step import Arguments
from mla_compile.kernels.triton.steps import mask_strides

REGISTERS = 224  # per thread of a consumer; leaves 56 to the producer. 216 does not spill either


def takes(call: DecodeCall) -> bool:
    """Whether listed rows can be read in place, and one bit per entry can represent the mask."""
    return portable.suits(call) and (call.mask is None or call.mask.dtype == torch.bool)


def scratch(call: DecodeCall) -> Buffers:
    """Return buffers for places and bits, in whole blocks, for the longest lists of this kind (kernels/kinds.py)."""
    assert call.indices is not None
    B, S, entries = call.indices.shape
    blocks = -(-rounded(entries) // BLOCK)
    return {"places": ((B, S, blocks, BLOCK), torch.int32), "words": ((B, S, blocks, 2), torch.int32)}


def grid(call: DecodeCall, plan: Plan) -> tuple[int, int, int]:
    """Return the grid. Each CTA serves heads of one query token, over one split of the token's list."""
    z = call.sizes
    return -(-z.H // BLOCK) * z.B * z.S, plan.splits, 1


def told(call: DecodeCall, to: Arguments, bits: str) -> None:
    """Add a call's index lists and mask, and the buffers for places and bits. ``bits`` names the argument for bits."""
    assert call.indices is not None
    to.pointer("indices", call.indices)
    portable.told(call.indices, to)
    to.pointer("mask", call.mask)
    strides = dict.fromkeys(("mask_b", "mask_s", "mask_t"), 0)
    if call.mask is not None:
        strides = {name: stride for name, stride in mask_strides(call.mask).items() if name in strides}
    to.strides(strides)
    to.scratch("places", "places", "*i32")
    to.scratch(bits, "words", "*i32")


def attention(call: DecodeCall, plan: Plan, grid: tuple[int, int, int], least: int, *, ragged: bool) -> GluonStep:
    """Return the launch of attention. A split has at least ``least`` blocks of a list. ``ragged`` is not used."""
    import mla_compile.kernels.hopper.list_gluon as kernels

    z, direct = call.sizes, plan.splits == 1
    to = begun(call)
    told(call, to, "words")
    written(call, to, parts=not direct, final=direct)
    to.pointer("sinks", call.sinks if direct else None)
    tell(to, {"tokens": z.B * z.S, "least": least})
    to.constants |= {
        "PAGE": 0 if z.page == 0 or portable.in_one_piece(call) else z.page,
        "LIST_PAGE": z.page,
        "CAUSAL": call.causal and z.S > 1,
        "PARTIAL": int(not direct),
        "REGS": REGISTERS,
        "HELD": plan.held,
    }
    made = to.step("mla_seesaw_lists", kernels.mla_seesaw_lists, grid, {"num_warps": 4})
    return GluonStep(**vars(made), boxes={})
