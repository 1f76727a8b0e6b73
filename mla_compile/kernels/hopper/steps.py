"""The launches of a decode attention call with the Hopper kernel (kernels/hopper/decode_gluon.py), as data.

This is the counterpart of kernels/triton/steps.py. Its functions are pure and accept meta tensors. The launch
(kernels/launch.py) and the compilation without a GPU (benchmarks/gpu/offline.py) both use them. :func:`suits` decides
which calls the Hopper kernel takes. Other calls run the portable kernel. lists.py adds what index lists need, and
fp8.py what float8 rows need.
"""

from __future__ import annotations

from functools import lru_cache
from inspect import signature

import torch
from torch import Tensor

from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.devices import Device
from mla_compile.kernels.hopper import fp8, lists
from mla_compile.kernels.hopper.step import Box, GluonStep, numbers, reach, tell, written
from mla_compile.kernels.plan import (
    GRID_LIMIT,
    HOPPER_BLOCK,
    HOPPER_PAGE,
    HOPPER_SMEM,
    HOPPER_WIDTHS,
    MIN_SPLIT,
    Plan,
)
from mla_compile.kernels.shared import Buffers
from mla_compile.kernels.triton import schedule
from mla_compile.kernels.triton import steps as portable
from mla_compile.kernels.triton.step import TYPES, Arguments, Step
from mla_compile.kernels.triton.steps import (
    COMBINE_COLUMNS,
    COMBINE_SPLITS,
    combine_options,
    combine_step,
    list_shape,
    read_mask_bytes,
)

LATENT, ROPE = HOPPER_WIDTHS
BLOCK = HOPPER_BLOCK
REGISTERS = 232  # per thread of a consumer; leaves 40 to the producer
HELD_REGISTERS = 240  # if the rotary query is held (16 registers); with 232, Triton 3.9 puts masks in local memory
STRIDE_LIMIT = 1 << 40  # bytes; cuTensorMapEncodeTiled takes only smaller strides
COORDINATE_LIMIT = 1 << 31  # TMA coordinates are int32
_HALF = (torch.float16, torch.bfloat16)


def suits(call: DecodeCall, device: Device) -> bool:
    """Whether the Hopper kernel takes this call: :func:`takes` is true, and TMA can address the rows."""
    rows = [x for x in (call.latent, call.rope) if x is not None]
    return takes(call, device) and call.query.stride(-1) == 1 and all(map(_addressable, rows))


def takes(call: DecodeCall, device: Device) -> bool:
    """Whether the Hopper kernel supports a call's dtypes, widths and features, which all layers of a model share.

    The kernel supports, for any H and S:

    * Rows of 512 + 64 or 512 columns in half precision, or of 512 + 64 columns in float8 (rope may be bfloat16). The
      latent must be the values.
    * Pages of a multiple of 16 rows. Listed rows and float8 rows are read one by one, so their pages may have any size.
    * A boolean mask that is the same for all query rows, because a list of tiles describes it completely. With index
      lists, the mask must be the same for all heads.
    * A query in the dtype of the products, or in any dtype if the products are in bfloat16. Before rounding to float16,
      a query would have to be scaled, which this kernel does not do.
    """
    z, rope = call.sizes, call.rope
    if call.values is not None:
        return False
    dtype, converted = call.latent.dtype, fp8.takes(call)
    if converted:
        dtype = portable.dot_dtype(call)
    if call.indices is not None:
        visible = lists.takes(call)
    else:
        visible = not read_mask_bytes(call.mask) and z.B <= GRID_LIMIT and (converted or z.page % HOPPER_PAGE == 0)
    return (
        visible
        and device.capability == (9, 0)
        and device.smem >= HOPPER_SMEM
        and z.L == LATENT
        and z.R in (ROPE, 0)
        and dtype in _HALF
        and (converted or ((rope is None or rope.dtype == dtype) and call.kv_scale is None))
        and (call.query.dtype == dtype or dtype == torch.bfloat16)
        and min(z.B, z.S, z.H, z.T) > 0
    )


def _addressable(rows: Tensor) -> bool:
    """Whether rows suit 16-byte loads and TMA: aligned strides, no broadcast axis, and coordinates that fit int32."""
    return (
        rows.stride(2) == 1
        and rows.data_ptr() % 16 == 0
        and rows.numel() > 0
        and max(rows.shape) < COORDINATE_LIMIT
        and all(s > 0 and s * rows.itemsize % 16 == 0 and s * rows.itemsize < STRIDE_LIMIT for s in _strides(rows)[:2])
    )


def _strides(rows: Tensor) -> tuple[int, int, int]:
    """Return the strides. If an axis has length 1, its stride is arbitrary, so the stride of dense rows is returned."""
    outer, row, column = rows.stride()
    if rows.shape[1] == 1:
        row = rows.shape[2]
    if rows.shape[0] == 1:
        outer = rows.shape[1] * row
    return outer, row, column


def scheduled(call: DecodeCall, plan: Plan) -> bool:
    """Whether the device partitions the work of a batch: the plan says so, and only lengths determine the work."""
    alone = call.seq_lens is not None and call.mask is None and call.indices is None
    return plan.scheduled and alone and schedule.suits(call.sizes.B)


def scratch(call: DecodeCall, plan: Plan, device: Device) -> Buffers:
    """Return the shape and dtype of each buffer that the launch allocates, as in kernels/triton/steps.py."""
    z, ragged = call.sizes, scheduled(call, plan)
    M = z.S * z.H
    found: Buffers = {
        "out": ((z.B, z.S, z.H, LATENT), call.query.dtype),
        "lse": ((z.B, z.S, z.H), torch.float32),
    }
    pieces: tuple[int, ...] = (plan.splits, z.B)
    if ragged:
        pieces = (max(1, schedule.slots(schedule.partitions(device.sms, M), z.B)),)
    if ragged or plan.splits > 1:
        found["part"] = ((*pieces, M, LATENT), torch.float32)
        found["part_lse"] = ((*pieces, M), torch.float32)
    if call.indices is not None:
        found |= lists.scratch(call)
    return found if call.schedule is not None else found | prepared(call, plan, device)


def prepared(call: DecodeCall, plan: Plan, device: Device) -> Buffers:
    """Return the buffers that :func:`preparing` writes, as in kernels/triton/steps.py."""
    if not scheduled(call, plan):
        return portable.prepared(call, plan, device)
    B, parts = call.sizes.B, schedule.partitions(device.sms, call.sizes.S * call.sizes.H)
    return {"items": ((parts + 1, 2), torch.int32)} | dict.fromkeys(("shift", "first", "count"), ((B,), torch.int32))


def preparing(call: DecodeCall, plan: Plan, device: Device) -> tuple[Step, ...]:
    """Return the launches before attention. They partition the batch, or list the mask's tiles."""
    return (_cut(call, device),) if scheduled(call, plan) else portable.preparing(call, plan, device)


def steps(call: DecodeCall, plan: Plan, device: Device, *, least: int | None = None) -> tuple[Step, ...]:
    """Return the launches in order: preparation (:func:`preparing`, if needed), attention, and combine (if needed).

    A call with a schedule is already prepared. ``least`` is the minimum number of tokens of a split (default:
    MIN_SPLIT). The plan's chunk, if there is one, replaces ``least``.
    """
    tokens = plan.chunk or (MIN_SPLIT if least is None else least)
    before = () if call.schedule is not None else preparing(call, plan, device)
    least = max(1, tokens // BLOCK)
    M, ragged, listed = call.sizes.S * call.sizes.H, scheduled(call, plan), call.indices is not None
    pieces = (schedule.partitions(device.sms, M), 1) if ragged else (plan.splits, call.sizes.B)
    grid = lists.grid(call, plan) if listed else (-(-M // BLOCK), *pieces)
    form = fp8.attention if fp8.takes(call) else lists.attention if listed else _attention
    attention = form(call, plan, grid, least, ragged=ragged)
    if ragged:
        return *before, attention, _combine_slots(call, plan)
    if plan.splits == 1:
        return *before, attention
    import mla_compile.kernels.triton.combine_triton as combine_kernels

    return *before, attention, combine_step(call, plan, combine_kernels.combine)


def shared_by(plan: Plan, row_blocks: int) -> int:
    """Return how many CTAs share a block's copies: ``plan.cluster`` if Triton and ``row_blocks`` allow it, else 1."""
    return plan.cluster if row_blocks % plan.cluster == 0 and (plan.cluster == 1 or clusters()) else 1


@lru_cache(maxsize=1)
def clusters() -> bool:
    """Whether this Triton supports mbarriers between the CTAs of a cluster (3.9 and newer do).

    Older versions compile the kernel without an error, but leave out the synchronisation between CTAs.
    """
    try:
        from triton.experimental.gluon.language.nvidia.hopper import mbarrier
    except ImportError:
        return False
    return "from_cta" in signature(mbarrier.expect).parameters


def _attention(call: DecodeCall, plan: Plan, grid: tuple[int, int, int], least: int, *, ragged: bool) -> GluonStep:
    import mla_compile.kernels.hopper.cluster_gluon as cluster
    import mla_compile.kernels.hopper.decode_gluon as kernels

    z = call.sizes
    rows = min(BLOCK, z.page & -z.page) if z.page else BLOCK
    ctas = shared_by(plan, grid[0])
    layout = cluster.rows_alike(3, ctas)
    whole = not ragged and plan.splits == 1
    # ``parts`` is the number of barriers per half of a stage. The remaining barrier is for rope.
    kind, parts = TYPES[call.latent.dtype][1:], (plan.barriers - 1) // 2
    to, boxes = Arguments(), dict[str, Box]()
    for name, tensor, width in (
        ("latent", call.latent, LATENT // 2 // parts if rows == BLOCK else 64),
        ("rope", call.rope, ROPE),
    ):
        if tensor is None:
            to.constants[name] = None
            continue
        T, R, C = tensor.shape
        boxes[name] = Box((T, R, C), _strides(tensor), (1, rows, width), tensor.dtype)
        to.buffers[name] = name
        to.types[name] = f"tensordesc<{kind}{list(boxes[name].block)},{layout!r}>"
    to.pointer("q", call.query, "query")
    to.pointer("table", call.block_table)
    to.pointer("seq_lens", call.seq_lens, "lengths")
    to.pointer("sinks", call.sinks)
    to.scratch("items", "items", "*i32", used=ragged)
    to.scratch("slots", "shift", "*i32", used=ragged)
    to.scratch("work", "work", "*i32", used=call.mask is not None)  # halves of int64 words
    written(call, to, parts=not whole, final=ragged or whole)
    strides = dict(zip(("stride_qb", "stride_qs", "stride_qh"), call.query.stride(), strict=False))
    to.aligned |= {name for name, stride in strides.items() if stride % 16 == 0}
    table_stride = 0 if call.block_table is None else call.block_table.stride(0)
    tell(to, {**numbers(call), **strides, "table_stride": table_stride})
    tell(to, {"T": z.T, "B": z.B, "S": z.S, "H": z.H, "least": least})
    if call.mask is None:
        to.constants |= {"work_b": 0, "plane": 0}
    else:
        _, lists, entries = list_shape(call, plan)
        to.scalars |= {"work_b": entries if lists > 1 else 0, "plane": entries * lists}
    to.constants |= {"PAGE": z.page, "BOX": rows, "CAUSAL": call.causal and z.S > 1}
    to.constants |= {"PARTIAL": 2 if ragged else int(not whole), "PARTS": parts, "HELD": plan.held}
    to.constants["REGS"] = HELD_REGISTERS if plan.held else REGISTERS
    options = {"num_warps": 4} | ({"num_ctas": ctas} if ctas > 1 else {})
    made = to.step("mla_seesaw", kernels.mla_seesaw, (grid[0] // ctas, *grid[1:]), options)
    return GluonStep(**vars(made), boxes=boxes)


def _cut(call: DecodeCall, device: Device) -> Step:
    import mla_compile.kernels.triton.schedule_triton as kernels

    z, to = call.sizes, Arguments()
    parts = schedule.partitions(device.sms, z.S * z.H)
    to.buffers["seq_lens"], to.types["seq_lens"] = "lengths", "*i32"
    for name in ("items", "shift", "first", "count"):
        to.scratch(name, name, "*i32")
    tell(to, {"B": z.B, "T": z.T, "partitions": parts, "reach": reach(call)})
    to.constants |= {"BLOCK_B": max(16, 1 << (z.B - 1).bit_length()), "PARTS": kernels.PARTS}
    to.constants |= {"BLOCK": BLOCK, "OVERHEAD": schedule.OVERHEAD}
    return to.step("cut", kernels.cut, (-(-(parts + 1) // kernels.PARTS), 1, 1), {"num_warps": 4, "num_stages": 1})


def _combine_slots(call: DecodeCall, plan: Plan) -> Step:
    import mla_compile.kernels.triton.schedule_triton as kernels

    z, to = call.sizes, Arguments()
    for name in ("part", "part_lse", "lse"):
        to.scratch(name, name, "*fp32")
    for name in ("first", "count"):
        to.scratch(name, name, "*i32")
    to.scratch("out", "out", TYPES[call.query.dtype])
    to.pointer("sinks", call.sinks)
    to.scalars |= {"M": z.S * z.H, "H": z.H}
    to.constants |= {"V": LATENT, "BLOCK_S": COMBINE_SPLITS, "BLOCK_V": COMBINE_COLUMNS, "PDL": plan.pdl}
    grid = (z.B * z.S * z.H, LATENT // COMBINE_COLUMNS, 1)
    return to.step("combine_slots", kernels.combine_slots, grid, combine_options(plan))
