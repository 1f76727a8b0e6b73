"""What one decode attention call launches with Triton, as data: kernels, grids, arguments, compile-time constants.

:func:`steps` is pure. The launch (kernels/launch.py), the compilation without a GPU (benchmarks/gpu/offline.py) and the
interpreter (tests/support/interpreter.py) all take its answer, so they cannot differ. Meta tensors will do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_compile.errors import InputError
from mla_compile.kernels.call import TENSORS, DecodeCall
from mla_compile.kernels.devices import Device
from mla_compile.kernels.plan import MIN_SPLIT, Plan
from mla_compile.kernels.shared import PLANES, Buffers
from mla_compile.kernels.tiles import padded

# Sizes of the small kernels' blocks, by what the threads hold in registers. Not tuned on a GPU yet.
WORD_BITS = 64  # keys of a tile that the mask's pre-pass can tell apart: the bits of an int64
GROUP = 16  # tiles that one program of the mask's pre-pass scans: 4 or 8 keys for each of its 128 threads
LIST_BLOCK = 1024  # tiles listed at a time: 8 for each of 128 threads
COMBINE_SPLITS = 8  # splits that the combine kernel holds at a time,
COMBINE_COLUMNS = 256  # and columns of each: 32 elements for each of 64 threads
_I32 = 1 << 31
_HALF = (torch.float16, torch.bfloat16)
_SHORT = {"seq_lens": "lengths", "block_table": "table"}
BUFFERS = tuple(_SHORT.get(name, name) for name in DecodeCall._fields[:TENSORS])  # what steps call a call's tensors
TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclass(frozen=True)
class Step:
    """One launch. ``buffers`` maps arguments to buffer names, ``scalars`` to numbers, ``constants`` to constexprs."""

    name: str
    fn: Any  # triton.JITFunction
    grid: tuple[int, int, int]
    buffers: dict[str, str]
    scalars: dict[str, int | float]
    constants: dict[str, Any]
    types: dict[str, str]  # of the buffers that are arguments
    aligned: frozenset[str]  # arguments that are multiples of 16 (bytes of a pointer, elements of a stride)
    options: dict[str, Any]

    def __post_init__(self) -> None:
        # Products and sums of registers are fused. Triton 3.9 warns where that is left open: 3.10 will not.
        object.__setattr__(self, "options", {"enable_fp_fusion": True, **self.options})

    def source(self) -> tuple[Any, dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any], dict[str, Any]]:
        """``(fn, signature, constexprs, attributes, options)``, as ``triton.compiler.ASTSource`` takes them."""
        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], Any] = {}
        for i, name in enumerate(self.fn.arg_names):
            if name in self.buffers:
                signature[name] = self.types[name]
            elif name in self.scalars:
                value = self.scalars[name]
                signature[name] = "fp32" if isinstance(value, float) else ("i32" if -_I32 <= value < _I32 else "i64")
            else:
                signature[name] = "constexpr"
                constants[(i,)] = self.constants[name]
            if name in self.aligned:
                attributes[(i,)] = [["tt.divisibility", 16]]
        return self.fn, signature, constants, attributes, self.options

    def arguments(self, buffers: dict[str, Any]) -> dict[str, Any]:
        """Every argument by name, pointers from ``buffers``."""
        given: dict[str, Any] = {**self.scalars, **self.constants}
        given.update((argument, buffers[name]) for argument, name in self.buffers.items())
        return given


class Arguments:
    """Collects the arguments of a step: what is None or 0 wide becomes a constant that compiles to nothing."""

    def __init__(self) -> None:
        self.buffers: dict[str, str] = {}
        self.scalars: dict[str, int | float] = {}
        self.constants: dict[str, Any] = {}
        self.types: dict[str, str] = {}
        self.aligned: set[str] = set()

    def pointer(self, name: str, tensor: Tensor | None, *, bits: bool = False) -> None:
        """A tensor of the call; ``bits``: float8 is passed as bytes."""
        if tensor is None:
            self.constants[name] = None
            return
        self.buffers[name] = name
        self.types[name] = "*u8" if bits and tensor.dtype.itemsize == 1 else TYPES[tensor.dtype]
        if tensor.data_ptr() % 16 == 0:
            self.aligned.add(name)

    def scratch(self, name: str, buffer: str, kind: str) -> None:
        """A buffer of ours, which torch's allocator aligns."""
        self.buffers[name] = buffer
        self.types[name] = kind
        self.aligned.add(name)

    def strides(self, given: dict[str, int], fixed: tuple[int, ...] = ()) -> None:
        """Strides: 0 and 1 are constants, and so is a row's stride that is one of ``fixed``."""
        for name, stride in given.items():
            if stride in (0, 1) or (name.endswith("_t") and stride in fixed):
                self.constants[name] = stride
            else:
                self.scalars[name] = stride
                if stride % 16 == 0:
                    self.aligned.add(name)

    def step(self, name: str, fn: Any, grid: tuple[int, int, int], options: dict[str, Any]) -> Step:
        """The launch of ``fn`` with what was collected."""
        return Step(
            name, fn, grid, self.buffers, self.scalars, self.constants, self.types, frozenset(self.aligned), options
        )


def dot_dtype(call: DecodeCall) -> torch.dtype:
    """The dtype that both products are computed in: the cache's, and for an fp8 cache one that holds it exactly.

    Weights times a token's own scale can be any size, so those are bfloat16; else what rope or query is.
    """
    if call.latent.dtype.itemsize > 1:
        return call.latent.dtype
    if call.kv_scale is not None and call.kv_scale.dim() > 0:
        return torch.bfloat16
    if call.rope is not None and call.rope.dtype in _HALF:
        return call.rope.dtype
    return call.query.dtype if call.query.dtype in _HALF else torch.float16


def scratch(call: DecodeCall, plan: Plan, device: Device) -> Buffers:
    """Shape and dtype of each buffer that the launch allocates, by name; sizes come from shapes only."""
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
    return found if call.schedule is not None else found | prepared(call, plan, device)


def prepared(call: DecodeCall, plan: Plan, device: Device) -> Buffers:
    """The buffers that :func:`preparing` writes: what calls of the same mask, lengths and sizes can share."""
    return {} if call.mask is None else {"work": (list_shape(call, plan), torch.int64)}


def steps(call: DecodeCall, plan: Plan, device: Device, *, least: int | None = None) -> tuple[Step, ...]:
    """The launches of one call, in order: the mask's list of tiles, attention, combine (each where it is needed).

    A call with a schedule has its list there. ``least`` is the tokens that a split has at least (default: the plan's
    chunk, else MIN_SPLIT).
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
    """Whether a converted query goes through scratch: for the products of warpgroups."""
    return device.capability >= (9, 0) and plan.block_m >= 64 and call.query.dtype != dot_dtype(call)


def list_shape(call: DecodeCall, plan: Plan) -> tuple[int, int, int]:
    """``(planes, lists, tiles)`` of a mask's lists; one list where all requests have the same mask and length."""
    assert call.mask is not None
    z = call.sizes
    lists = z.B if _stride(call.mask, 0) or call.seq_lens is not None else 1
    return PLANES, lists, max(1, -(-z.T // plan.block_n))


def read_mask_bytes(mask: Tensor | None) -> int:
    """Bytes of a mask that the loop reads for each query row and token; 0 where its list of tiles says it all."""
    if mask is None or not (mask.dtype.is_floating_point or _stride(mask, 1) or _stride(mask, 2)):
        return 0
    return mask.dtype.itemsize


def _stride(x: Tensor, axis: int) -> int:
    """The stride of an axis; 0 where the axis is broadcast."""
    return 0 if x.shape[axis] == 1 else x.stride(axis)


def _mask_strides(mask: Tensor) -> dict[str, int]:
    return {f"mask_{letter}": _stride(mask, axis) for axis, letter in enumerate("bhst")}


def preparing(call: DecodeCall, plan: Plan, device: Device) -> tuple[Step, ...]:
    """The launches before attention, which make a mask's lists of tiles of plan.block_n keys."""
    import mla_compile.kernels.triton.tiles_triton as kernels

    if call.mask is None:
        return ()
    if plan.block_n > WORD_BITS:
        raise InputError(
            f"plan: block_n is {plan.block_n}, expected at most {WORD_BITS} beside a mask; make it smaller"
        )
    z, mask = call.sizes, call.mask
    _, lists, capacity = list_shape(call, plan)
    scan = Arguments()
    scan.pointer("mask", mask)
    scan.pointer("lengths", call.seq_lens)
    scan.scratch("work", "work", "*i64")
    scan.strides(_mask_strides(mask))
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
        scan.step("scan_mask", kernels.scan_mask, (-(-capacity // GROUP), lists, 1), {"num_warps": 4, "num_stages": 1}),
        listing.step("list_tiles", kernels.list_tiles, (lists, 1, 1), {"num_warps": 4, "num_stages": 1}),
    )


def _rows(call: DecodeCall, into: Arguments, bits: bool) -> bool:
    """Pointers and strides of the cached rows. True where offsets inside a request or a page need 64 bits."""
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
        # Dense rows are the rule, and a stride that the compiler knows saves the loop a register for each row.
        dense = () if far else (x.shape[2], z.L + z.R)
        into.strides({f"{name}_b": block, f"{name}_t": row, f"{name}_c": column}, dense)
    return wide


def _attention(call: DecodeCall, plan: Plan, device: Device, fn: Any, least: int) -> Step:
    z, dot = call.sizes, dot_dtype(call)
    direct = plan.splits == 1
    bits = device.capability < (8, 9)
    to = Arguments()
    to.pointer("query", call.query)
    wide = _rows(call, to, bits)
    to.scratch("out", "out" if direct else "part", TYPES[call.query.dtype] if direct else "*fp32")
    to.scratch("lse", "lse" if direct else "part_lse", "*fp32")
    if _staged(call, plan, device):
        to.scratch("staged", "staged", TYPES[dot])
    else:
        to.pointer("staged", None)
    to.pointer("table", call.block_table)
    to.pointer("lengths", call.seq_lens)
    mask = call.mask
    by_row = mask is not None and bool(_stride(mask, 1) or _stride(mask, 2))
    if mask is None:
        to.constants["work"] = None
        to.strides({"work_b": 0, "work_plane": 0})
    else:
        to.scratch("work", "work", "*i64")
        _, lists, capacity = list_shape(call, plan)
        to.scalars |= {"work_b": capacity if lists > 1 else 0, "work_plane": capacity * lists}
        wide |= z.T * _stride(mask, 3) >= _I32
    read_mask = mask if mask is not None and (by_row or mask.dtype.is_floating_point) else None  # else: all in work
    to.pointer("mask", read_mask)
    to.strides({f"mask_{axis}": 0 for axis in "bhst"} if read_mask is None else _mask_strides(read_mask))
    to.pointer("sinks", call.sinks if direct else None)
    to.pointer("kv_scale", call.kv_scale)
    by_token = call.kv_scale is not None and call.kv_scale.dim() > 0
    scale_b, scale_t = call.kv_scale.stride() if call.kv_scale is not None and by_token else (0, 0)
    to.strides({"scale_b": scale_b, "scale_t": scale_t})
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
        "PAGE": z.page,
        "WIDE": wide,
        "DTYPE": languages[dot],
        # tf32x3 keeps both halves of the split query in registers: 3 to 13 KB of spills, where FMA has none.
        "PRECISION": "ieee" if dot == torch.float32 else "tf32",
        "NORMALIZE": call.query.dtype == torch.float32 and dot == torch.float16,
        "CAUSAL": call.causal and z.S > 1,
        "WINDOW": call.window > 0,
        "SOFTCAP": call.softcap > 0,
        "MASK_ROWS": by_row,
        "TOKEN_SCALE": by_token,
        "ROPE_SCALED": call.rope is not None and call.rope.dtype.itemsize == 1,
        "DIRECT": direct,
        "PDL": plan.pdl and not direct,
    }
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    return to.step("attend", fn, (plan.row_blocks(z.S * z.H), plan.splits, z.B), options)


def combine_step(call: DecodeCall, plan: Plan, fn: Any) -> Step:
    """The launch that combines the splits of every request."""
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
    options: dict[str, Any] = {"num_warps": 2, "num_stages": 1}
    if plan.pdl:
        options["launch_pdl"] = True
    return to.step("combine", fn, (z.B * z.S * z.H, -(-z.V // columns), 1), options)
