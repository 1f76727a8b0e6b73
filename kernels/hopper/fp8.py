"""What a call over float8 rows launches with the Hopper kernel (kernels/hopper/fp8_gluon.py), as data and pure."""

from __future__ import annotations

from typing import Any

import torch

from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.hopper.step import GluonStep, numbers
from mla_compile.kernels.plan import Plan
from mla_compile.kernels.triton import lists
from mla_compile.kernels.triton import steps as portable
from mla_compile.kernels.triton.step import TYPES, Arguments

REGISTERS = 216  # per thread of a consumer; leaves 72 to the producer
_I32 = 1 << 31


def takes(call: DecodeCall) -> bool:
    """Whether rows are float8 and can be told to this kernel: places fit 32 bits.

    A scale is for rope, too: to multiply scores by one that rope in half precision does not have, its products would
    need registers of their own, and to multiply rows by it rounds them. Lists of keys stay with the portable kernel.
    """
    kinds = {x.dtype for x in (call.latent, call.rope) if x is not None}
    return kinds == {torch.float8_e4m3fn} and call.indices is None and call.latent.shape[:2].numel() < _I32


def attention(call: DecodeCall, plan: Plan, grid: tuple[int, int, int], ragged: bool, least: int) -> GluonStep:
    """The launch of attention, of a batch that is cut on the device (``ragged``) or into splits of ``least`` blocks."""
    import triton.language as tl

    import mla_compile.kernels.hopper.fp8_gluon as kernels

    z, scales = call.sizes, call.kv_scale
    whole, by_token = not ragged and plan.splits == 1, scales is not None and scales.dim() > 0
    to = Arguments()
    to.pointer("query", call.query)
    to.strides({f"query_{axis}": call.query.stride(i) for i, axis in enumerate("bsh")})
    for name, rows in (("latent", call.latent), ("rope", call.rope)):
        assert rows is not None
        to.pointer(name, rows)
        to.types[name] = "*i32"
        to.strides({f"{name}_b": rows.stride(0), f"{name}_t": rows.stride(1)})
    to.pointer("table", call.block_table)
    to.strides({"table_b": 0 if call.block_table is None else call.block_table.stride(0)})
    to.pointer("lengths", call.seq_lens)
    to.pointer("sinks", call.sinks)
    for name, used in (("kv_scale", not by_token), ("token_scale", by_token)):
        if scales is not None and used:
            to.pointer(name, scales)
            to.buffers[name] = "kv_scale"
        else:
            to.constants[name] = None
    scale_b, scale_t = scales.stride() if scales is not None and by_token else (0, 0)
    to.strides({"scale_b": scale_b, "scale_t": scale_t})
    for name, buffer, kind, used in (
        ("items", "items", "*i32", ragged), ("slots", "shift", "*i32", ragged),
        ("work", "work", "*i32", call.mask is not None),  # the halves of its int64
        ("o_part", "part", "*fp32", not whole), ("lse_part", "part_lse", "*fp32", not whole),
        ("out", "out", TYPES[call.query.dtype], ragged or whole), ("lse", "lse", "*fp32", ragged or whole),
    ):  # fmt: skip
        if used:
            to.scratch(name, buffer, kind)
        else:
            to.constants[name] = None
    told: dict[str, Any] = numbers(call)
    if call.mask is None:
        told |= {"work_b": 0, "plane": 0}
    else:
        _, count, entries = portable.list_shape(call, plan)
        told |= {"work_b": entries if count > 1 else 0, "plane": entries * count}
    told |= {"T": z.T, "B": z.B, "S": z.S, "H": z.H, "least": least}
    to.scalars |= {name: x for name, x in told.items() if x is not None}
    to.constants |= {name: None for name, x in told.items() if x is None}
    to.constants |= {
        "DTYPE": {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[portable.dot_dtype(call)],
        "PAGE": 0 if z.page == 0 or lists.in_one_piece(call) else z.page,
        "TABLE_PAGE": z.page,
        "CAUSAL": call.causal and z.S > 1,
        "PARTIAL": 2 if ragged else int(not whole),
        "REGS": REGISTERS,
    }
    made = to.step("mla_seesaw_fp8", kernels.mla_seesaw_fp8, grid, {"num_warps": 4})
    return GluonStep(**vars(made), boxes={})
