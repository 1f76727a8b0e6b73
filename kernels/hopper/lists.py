"""What a call with lists of keys launches with the Hopper kernel (kernels/hopper/list_gluon.py), as data and pure."""

from __future__ import annotations

import torch

from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.hopper.step import GluonStep, numbers
from mla_compile.kernels.kinds import rounded
from mla_compile.kernels.plan import HOPPER_BLOCK as BLOCK
from mla_compile.kernels.plan import Plan
from mla_compile.kernels.shared import Buffers
from mla_compile.kernels.triton import lists as portable
from mla_compile.kernels.triton.step import TYPES, Arguments
from mla_compile.kernels.triton.steps import mask_strides

REGISTERS = 224  # per thread of a consumer; leaves 56 to the producer. With 216 nothing is spilled either


def takes(call: DecodeCall) -> bool:
    """Whether a call's lists and mask are such that 64 bits say what is visible of a block of a list."""
    return portable.suits(call) and (call.mask is None or call.mask.dtype == torch.bool)


def scratch(call: DecodeCall) -> Buffers:
    """Places and bits of whole blocks. A kind of call serves lists that are a little longer (kernels/kinds.py)."""
    assert call.indices is not None
    B, S, entries = call.indices.shape
    blocks = -(-rounded(entries) // BLOCK)
    return {"places": ((B, S, blocks, BLOCK), torch.int32), "words": ((B, S, blocks, 2), torch.int32)}


def attention(call: DecodeCall, plan: Plan, least: int) -> GluonStep:
    """The launch of attention; a split has at least ``least`` blocks of its list."""
    import mla_compile.kernels.hopper.list_gluon as kernels

    assert call.indices is not None
    z, direct = call.sizes, plan.splits == 1
    to = Arguments()
    to.pointer("query", call.query)
    to.strides({f"query_{axis}": call.query.stride(i) for i, axis in enumerate("bsh")})
    for name, rows in (("latent", call.latent), ("rope", call.rope)):
        assert rows is not None
        to.pointer(name, rows)
        to.strides({f"{name}_b": rows.stride(0), f"{name}_t": rows.stride(1)})
    to.pointer("indices", call.indices)
    portable.told(call.indices, to)
    to.pointer("table", call.block_table)
    to.strides({"table_b": 0 if call.block_table is None else call.block_table.stride(0)})
    to.pointer("lengths", call.seq_lens)
    to.pointer("mask", call.mask)
    strides = dict.fromkeys(("mask_b", "mask_s", "mask_t"), 0)
    if call.mask is not None:
        strides = {name: stride for name, stride in mask_strides(call.mask).items() if name in strides}
    to.strides(strides)
    for name in ("places", "words"):
        to.scratch(name, name, "*i32")
    to.pointer("sinks", call.sinks if direct else None)
    final, part = ("out", "lse"), ("o_part", "lse_part")
    to.constants |= dict.fromkeys(part if direct else final)
    to.scratch(
        "out" if direct else "o_part", "out" if direct else "part", TYPES[call.query.dtype] if direct else "*fp32"
    )
    told = numbers(call)
    to.scalars |= {name: x for name, x in told.items() if x is not None}
    to.constants |= {name: None for name, x in told.items() if x is None}
    to.scratch("lse" if direct else "lse_part", "lse" if direct else "part_lse", "*fp32")
    to.scalars |= {
        "T": z.T, "tokens": z.B * z.S, "S": z.S, "H": z.H, "least": least,
    }  # fmt: skip
    to.constants |= {
        "PAGE": 0 if z.page == 0 or portable.in_one_piece(call) else z.page,
        "LIST_PAGE": z.page,
        "CAUSAL": call.causal and z.S > 1,
        "PARTIAL": int(not direct),
        "REGS": REGISTERS,
    }
    grid = (-(-z.H // BLOCK) * z.B * z.S, plan.splits, 1)
    made = to.step("mla_seesaw_lists", kernels.mla_seesaw_lists, grid, {"num_warps": 4})
    return GluonStep(**vars(made), boxes={})
