"""Drives the CUDA side of a native library without a GPU, and runs what it launches in Triton's interpreter.

The library's machine code is notes ("hollow" kernels), the driver and ONNX Runtime around it are onnx_fakes.c.
Everything of one case happens in one process, which interprets (tests/support/interpreter.py): the library gets real
addresses of real tensors, its launches are compared with kernels/triton/steps.py, then they are run in order and the
result is compared with the reference in float64.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_compile.kernels import reference
from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.devices import PRESETS, Device
from mla_compile.kernels.launch import chosen_plan
from mla_compile.kernels.triton.step import Step
from mla_compile.kernels.triton.steps import steps
from mla_compile.onnx import build, cubins
from mla_compile.onnx.cubins import Cubin
from mla_compile.onnx.variants import DTYPES, TUNED, NodeWidths, Variant, variants
from tests.support.interpreter_cases import LSE_TOLERANCE, TOLERANCE

FAKES = Path(__file__).with_name("onnx_fakes.c")
ELEMENTS = {torch.float32: 1, torch.int64: 7, torch.bool: 9, torch.float16: 10, torch.bfloat16: 16}
INPUTS = ("query", "latent", "rope", "mask", "seq_lens", "sinks", "values")
ARCHS = ("sm_80", "sm_90", "sm_100")
SMALL = (
    NodeWidths(64, 16),
    NodeWidths(40, 8),
    NodeWidths(64, 0),
    NodeWidths(48, 16, 24),
    NodeWidths(48, 16, None, True, True),
)
SCRATCH = ("part", "part_lse", "work", "staged")
_POINTERS = {
    "*fp16": torch.float16,
    "*bf16": torch.bfloat16,
    "*fp32": torch.float32,
    "*i64": torch.int64,
    "*u8": torch.uint8,
}


class Value(ctypes.Structure):
    _fields_ = (
        ("present", ctypes.c_int32), ("type", ctypes.c_int32), ("rank", ctypes.c_int64),
        ("shape", ctypes.c_int64 * 4), ("data", ctypes.c_void_p),
    )  # fmt: skip

    @classmethod
    def of(cls, tensor: Tensor | None) -> Value:
        if tensor is None:
            return cls()
        shape = (ctypes.c_int64 * 4)(*tensor.shape)
        return cls(1, ELEMENTS[tensor.dtype], tensor.dim(), shape, tensor.data_ptr() or None)


class Node(ctypes.Structure):
    _fields_ = (
        ("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("causal", ctypes.c_int64), ("window", ctypes.c_int64),
        ("value_width", ctypes.c_int64), ("has_scale", ctypes.c_int32), ("inputs", ctypes.c_int32),
        ("outputs", ctypes.c_int32), ("static_shapes", ctypes.c_int32), ("input", Value * 7), ("output", Value * 2),
        ("stream", ctypes.c_uint64),
    )  # fmt: skip


class Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_int32), ("parameters", ctypes.c_int32), ("grid", ctypes.c_int32 * 3),
        ("block", ctypes.c_int32 * 3), ("shared", ctypes.c_int32), ("stream", ctypes.c_uint64),
        ("values", ctypes.c_uint64 * 64),
    )  # fmt: skip


class Machine(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "arch", "multiprocessors", "smem", "kilohertz", "bits", "capturing", "capture_status", "fail_launch",
            "loads", "launches", "wrong_context", "pushed", "allocated", "freed", "statuses", "initialised",
        )),
        ("launch", Launch * 64),
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call of the node."""

    B: int = 2
    S: int = 1
    H: int = 5
    C: int = 70
    T: int | None = None  # of a mask; None: C
    dims: NodeWidths = SMALL[0]
    dtype: torch.dtype = torch.float32
    query: torch.dtype | None = None
    mask: str | None = None  # kind and axes: "bool B11T", "float 1HST"
    lens: tuple[int, ...] | None = None
    sinks: bool = False
    causal: bool = False
    lse: bool = True
    arch: str = "sm_90"
    tolerance: float = 1.0  # times the usual one
    static_shapes: bool = True
    sms: int | None = None  # multiprocessors; few make the plan take one split

    @property
    def device(self) -> Device:
        preset = PRESETS[self.arch]
        return replace(preset, sms=self.sms or preset.sms, bandwidth=None)


@dataclass
class Made:
    tensors: dict[str, Tensor | None]
    out: Tensor
    lse: Tensor
    attributes: dict[str, Any] = field(default_factory=dict)


def hollow_library(folder: Path, dims: tuple[NodeWidths, ...], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library whose machine code says which kernel it stands for; nothing is compiled but C."""
    number = {str(variant): i for i, variant in enumerate(known(dims))}

    def note(variant: Variant, cache: Path | None) -> tuple[Cubin, bool]:
        warps = int(variant.described().options["num_warps"])
        shared = variant.tile.smem if variant.step == "attend" and variant.tile is not None else 0
        text = struct.pack("<8sii", b"HOLLOW", number[str(variant)], len(variant.arguments()) + 2)
        return Cubin(variant.step, shared, 32 * warps, 0, text), False

    monkeypatch.setattr(cubins, "cubin", note)
    return build.build_library(folder, archs=ARCHS, dims=dims, cache=folder)


@lru_cache(maxsize=4)
def known(dims: tuple[NodeWidths, ...]) -> list[Variant]:
    """The kernels of a hollow library, by their numbers."""
    return variants(ARCHS, tuple(DTYPES), dims)


def fakes(folder: Path) -> Path:
    """tests/support/onnx_fakes.c, compiled."""
    path = folder / "fakes.so"
    flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{build.SOURCES}"]
    subprocess.run(["cc", *flags, str(FAKES), "-o", str(path)], check=True)
    return path


class Driven:
    """A library between the fakes."""

    def __init__(self, library: Path, fake: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:  # read by the library when it first needs a driver
            patch.setenv("MLA_COMPILE_LIBCUDA", str(fake))
            self.library, self.fake = ctypes.CDLL(str(library)), ctypes.CDLL(str(fake))
            self.machine = Machine.in_dll(self.fake, "machine")
            self.fake.fake_run.restype = ctypes.c_char_p
            self.library.mla_compile_onnx_device(0)

    def register(self, version: int = 21) -> int:
        return int(self.fake.fake_register(self.library.RegisterCustomOps, version))

    def run(self, case: Case, made: Made, *, provider: str = "CUDAExecutionProvider", times: int = 1,
            capture: bool = False, stream: int = 0x5EED, **attributes: Any) -> str | None:  # fmt: skip
        """What went wrong, or None."""
        given = {"has_scale": 1, "inputs": 7, "outputs": 1 + case.lse, "static_shapes": case.static_shapes}
        node = Node(**{**given, **made.attributes, **attributes}, stream=stream)
        node.input[:] = [Value.of(made.tensors[name]) for name in INPUTS]
        node.output[:] = [Value.of(made.out), Value.of(made.lse if case.lse else None)]
        self.machine.launches = 0
        self.register()
        said = self.fake.fake_run(provider.encode(), ctypes.byref(node), times, int(capture))
        return None if said is None else str(said.decode())


def make(case: Case) -> Made:
    """Tensors of a case. Rows that no query may see hold NaN, results start as NaN."""
    g = torch.Generator().manual_seed(0)
    B, S, H, C, d = case.B, case.S, case.H, case.C, case.dims
    T = C if case.T is None else case.T

    def rows(width: int) -> Tensor:
        filled = torch.randn(B, C, width, generator=g).to(case.dtype)
        lens = case.lens or (T,) * B
        for b, length in enumerate(lens):
            filled[b, min(max(length, 0), T) :] = torch.nan
        return filled

    mask = None
    if case.mask is not None:
        kind, axes = case.mask.split()
        shape = [{"B": B, "H": H, "S": S, "T": T}.get(letter, 1) for letter in axes]
        seen = torch.rand(shape, generator=g) > 0.4
        seen[..., : T // 2] &= torch.rand(shape[:3], generator=g)[..., None] > 0.3  # whole tiles too
        mask = seen if kind == "bool" else torch.where(seen, torch.randn(shape, generator=g), -torch.inf).to(case.dtype)
    tensors = {
        "query": torch.randn(B, S, H, d.La + d.Lb, generator=g).to(case.query or case.dtype),
        "latent": rows(d.La),
        "rope": rows(d.Lb) if d.Lb else None,
        "mask": mask,
        "seq_lens": None if case.lens is None else torch.tensor(case.lens, dtype=torch.int64),
        "sinks": torch.randn(H, generator=g) if case.sinks else None,
        "values": None if d.Lv is None else rows(d.Lv),
    }
    attributes = {"scale": 0.2, "causal": int(case.causal)}
    attributes |= {"softcap": 3.0} if d.softcap else {}
    attributes |= {"window": 17} if d.window else {}
    out = torch.full((B, S, H, d.out), torch.nan, dtype=case.query or case.dtype)
    return Made(tensors, out, torch.full((B, S, H), torch.nan), attributes)


def exact(case: Case, made: Made) -> tuple[Tensor, Tensor]:
    """The reference in float64."""
    T = case.C if case.T is None else case.T
    given = {k: v.double() if v is not None and v.dtype.is_floating_point else v for k, v in made.tensors.items()}
    for name in ("latent", "rope", "values"):
        given[name] = None if given[name] is None else given[name][:, :T]
    assert made.tensors["query"] is not None
    given["query"] = made.tensors["query"].to(case.dtype).double()  # as the kernels round it
    attributes = {**made.attributes, "causal": case.causal}
    return reference.decode_attention(DecodeCall(**given, **attributes))


def _expected(case: Case, made: Made) -> tuple[tuple[Step, ...], int]:
    """What ``steps`` launches for the same call, with queries that have no order as heads of one token."""
    x, T = made.tensors, case.C if case.T is None else case.T
    assert x["query"] is not None
    assert x["latent"] is not None
    B, S, H, width = x["query"].shape
    window = made.attributes.get("window", 0)
    by_row = case.mask is not None and (case.mask.split()[1][1] == "H" or case.mask.split()[1][2] == "S")
    ordered = S > 1 and (case.causal or window > 0)
    query = x["query"] if ordered or by_row else x["query"].view(B, 1, S * H, width)
    cut = {name: None if x[name] is None else x[name][:, :T] for name in ("latent", "rope", "values")}  # type: ignore[index]
    call = DecodeCall(
        query, cut["latent"], cut["rope"], cut["values"], x["mask"], seq_lens=x["seq_lens"],
        scale=made.attributes["scale"], causal=case.causal, softcap=made.attributes.get("softcap", 0.0), window=window,
    )  # fmt: skip
    plan = chosen_plan(call, case.device, gluon=False)
    return steps(call, plan, case.device), plan.splits


def _number(kind: str, bits: int) -> int | float:
    if kind == "fp32":
        return float(struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0])
    return int(struct.unpack("<i" if kind == "i32" else "<q", struct.pack("<Q", bits)[: 4 if kind == "i32" else 8])[0])


def decoded(launch: Launch, variant: Variant) -> tuple[Step, dict[str, Any]]:
    """A launch's parameters by name, and the constants it was compiled with."""
    step = variant.described()
    fn, signature, _, _, _ = variant.source()
    names = [name for name in fn.arg_names if signature[name] != "constexpr"]
    assert launch.parameters == len(names) + 2
    assert list(launch.values[len(names) : launch.parameters]) == [0, 0]  # Triton's scratch: no address
    given: dict[str, Any] = {}
    for name, bits in zip(names, launch.values[: len(names)], strict=True):
        kind = signature[name]
        given[name] = (kind, bits) if kind.startswith("*") else _number(kind, bits)
    return step, given


def compare_launch(case: Case, step: Step, given: dict[str, Any], launch: Launch, want: Step, made: Made) -> None:
    """A launch of the library against the one that kernels/triton/steps.py describes."""
    assert step.name == want.name
    assert tuple(launch.grid) == want.grid
    assert tuple(launch.block) == (32 * want.options["num_warps"], 1, 1)
    assert step.options == want.options
    addresses = {name: t.data_ptr() for name, t in made.tensors.items() if t is not None}
    addresses |= {"out": made.out.data_ptr(), "lengths": addresses.get("seq_lens", 0)}
    addresses |= {"lse": made.lse.data_ptr()} if case.lse else {}
    for name, value in {**want.scalars, **want.constants}.items():
        if name in given and not isinstance(given[name], tuple):
            assert given[name] == pytest.approx(value, rel=1e-6), name
        elif name == "CAUSAL" and (given.get("S") == 1 or not value):
            continue  # one token sees all keys: compiled for a causal call or not is the same
        elif name in ("sinks", "lengths"):
            continue  # sinks are put in by the combine kernel; without seq_lens lengths are beyond any capacity
        else:
            assert step.constants[name] == value, name
    for name, buffer in want.buffers.items():
        kind, address = given[name]
        assert kind == want.types[name], name
        assert step.buffers[name] == buffer
        if buffer in addresses:
            assert address == addresses[buffer], name


def interpret(step: Step, given: dict[str, Any], grid: tuple[int, ...]) -> None:
    """Run a launch on the memory that its addresses name."""
    arguments = dict(step.constants)
    for name, value in given.items():
        if isinstance(value, tuple):
            kind, address = value
            memory = (ctypes.c_char * 16).from_address(address)
            arguments[name] = torch.frombuffer(memory, dtype=_POINTERS[kind], count=1)
        else:
            arguments[name] = value
    step.fn[grid](**arguments)


def check(library: Path, fake: Path, dims: tuple[NodeWidths, ...], case: Case) -> list[str]:
    """Run one case; returns the names of its launches."""
    driven, made = _driven(library, fake, case), make(case)
    before = (driven.machine.allocated, driven.machine.freed)
    problem = driven.run(case, made)
    assert problem is None, problem
    machine = driven.machine
    taken = machine.allocated - before[0]
    assert taken == machine.freed - before[1] <= 1
    assert machine.wrong_context == machine.pushed == 0  # ours while we use it, and what it was afterwards
    assert machine.statuses == 0  # every status was released
    want, splits = _expected(case, made)
    launches = list(machine.launch[: machine.launches])
    seen = []
    for launch in launches:
        variant = known(dims)[launch.kernel]
        assert variant.arch == case.arch
        assert launch.stream == 0x5EED
        step, given = decoded(launch, variant)
        by_name = {s.name: s for s in want}
        if step.name in by_name and not (step.name == "attend" and splits == 1 and not step.constants["DIRECT"]):
            compare_launch(case, step, given, launch, by_name[step.name], made)
        interpret(step, given, tuple(launch.grid))
        seen.append(step.name)
    if "combine" in seen:
        assert given["NS"] == splits
    out, lse = exact(case, made)
    worst, largest = TOLERANCE[case.dtype]
    error = (made.out.double() - out).abs()
    assert not made.out.isnan().any()
    assert error.pow(2).mean().sqrt() <= case.tolerance * worst * out.pow(2).mean().sqrt()
    assert error.max() <= case.tolerance * largest * out.abs().max()
    if case.lse:
        infinite = lse == -torch.inf
        assert torch.equal(made.lse == -torch.inf, infinite)
        difference = (made.lse.double() - lse).masked_fill(infinite, 0).abs() / (1 + lse.masked_fill(infinite, 0).abs())
        assert difference.max() <= case.tolerance * LSE_TOLERANCE[case.dtype]
    return seen


_opened: dict[str, Driven] = {}


def _driven(library: Path, fake: Path, case: Case) -> Driven:
    """A library for each kind of device: it looks at the device once in its life, so each gets copies of its own."""
    name = f"{case.arch}_{case.device.sms}"
    if name not in _opened:
        driven = copied(library, fake, library.parent / name)
        driven.machine.arch = int(case.arch.removeprefix("sm_"))
        driven.machine.smem, driven.machine.multiprocessors = case.device.smem, case.device.sms
        _opened[name] = driven
    return _opened[name]


def copied(library: Path, fake: Path, folder: Path) -> Driven:
    """The library and the fakes under names of their own, as if loaded by a new process."""
    folder.mkdir()
    copies = [folder / path.name for path in (library, fake)]
    for path, copy in zip((library, fake), copies, strict=True):
        copy.write_bytes(path.read_bytes())
    return Driven(*copies)


__all__ = ["ARCHS", "SMALL", "TUNED", "Case", "Driven", "check", "copied", "fakes", "hollow_library", "known", "make"]
