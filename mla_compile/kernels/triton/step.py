"""One launch of a Triton kernel as data: its grid, arguments and compile-time constants. Accepts meta tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from triton import JITFunction

_I32 = 1 << 31
# Strides of tensors with one number per token. They may be multiples of 16 in only some decode steps, so the compiler
# must not assume divisibility.
_BY_TOKEN = frozenset({"scale_b"})
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


Source: TypeAlias = "tuple[JITFunction, dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any], dict[str, Any]]"
"""``(fn, signature, constexprs, attributes, options)``, as ``triton.compiler.ASTSource`` takes them."""


@dataclass(frozen=True)
class Step:
    """One launch. ``buffers`` maps arguments to buffer names, ``scalars`` to numbers, ``constants`` to constexprs."""

    name: str
    fn: JITFunction
    grid: tuple[int, int, int]
    buffers: dict[str, str]
    scalars: dict[str, int | float]
    constants: dict[str, Any]
    types: dict[str, str]  # types of the arguments that are buffers
    aligned: frozenset[str]  # arguments that are multiples of 16 (pointers in bytes, strides in elements)
    options: dict[str, Any]

    def __post_init__(self) -> None:
        # Let the compiler fuse products and sums. Triton 3.9 warns if this option is not set, because Triton 3.10 will
        # not fuse by default.
        object.__setattr__(self, "options", {"enable_fp_fusion": True, **self.options})

    def source(self) -> Source:
        """Return the input of Triton's compiler, as :data:`Source`."""
        signature: dict[str, str] = {}
        constants: dict[tuple[int], object] = {}
        attributes: dict[tuple[int], object] = {}
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

    def arguments(self, buffers: dict[str, object]) -> dict[str, object]:
        """Return every argument by name. Pointers are taken from ``buffers``."""
        given: dict[str, Any] = {**self.scalars, **self.constants}
        given.update((argument, buffers[name]) for argument, name in self.buffers.items())
        return given


class Arguments:
    """Collects the arguments of a step. An argument that is None becomes a constant, so its code is compiled away."""

    def __init__(self) -> None:
        self.buffers: dict[str, str] = {}
        self.scalars: dict[str, int | float] = {}
        self.constants: dict[str, object] = {}
        self.types: dict[str, str] = {}
        self.aligned: set[str] = set()

    def pointer(self, name: str, tensor: Tensor | None, buffer: str | None = None, *, bits: bool = False) -> None:
        """Add a tensor of the call, from ``buffer`` (default: ``name``). With ``bits``, float8 is passed as bytes."""
        if tensor is None:
            self.constants[name] = None
            return
        self.buffers[name] = buffer or name
        self.types[name] = "*u8" if bits and tensor.dtype.itemsize == 1 else TYPES[tensor.dtype]
        if tensor.data_ptr() % 16 == 0:
            self.aligned.add(name)

    def scratch(self, name: str, buffer: str, kind: str, *, used: bool = True) -> None:
        """Add a buffer that the launch allocates, aligned by torch's allocator; add None if it is not ``used``."""
        if not used:
            self.constants[name] = None
            return
        self.buffers[name] = buffer
        self.types[name] = kind
        self.aligned.add(name)

    def strides(self, given: dict[str, int], fixed: tuple[int, ...] = ()) -> None:
        """Add strides. The values 0 and 1 become constants. So does a stride between rows that is in ``fixed``."""
        for name, stride in given.items():
            if stride in (0, 1) or (name.endswith("_t") and stride in fixed):
                self.constants[name] = stride
            else:
                self.scalars[name] = stride
                if stride % 16 == 0 and name not in _BY_TOKEN:
                    self.aligned.add(name)

    def step(self, name: str, fn: JITFunction, grid: tuple[int, int, int], options: dict[str, Any]) -> Step:
        """Return the launch of ``fn`` with the collected arguments."""
        return Step(
            name, fn, grid, self.buffers, self.scalars, self.constants, self.types, frozenset(self.aligned), options
        )
