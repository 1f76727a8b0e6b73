"""Generated attentions whose projections are quantized: weights in packed formats, rows rounded in every call.

A :class:`Quantized` says how: the format of the weights, and what multiplies by them. :class:`QuantizedMLA` is the
generated module with such projections. In float64 they are plain products with the dequantized weight: the truth.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.generated_module import GeneratedMLA
from tests.support.generator import Case, drawn

FP8 = torch.float8_e4m3fn
FORMATS = ("int8_channels", "int8_groups", "int4_groups", "float8_blocks", "lookup")
CHANNELS_ONLY = ("int_mm", "int8pack", "scaled_mm")  # products that take one scale for each output
ROUND_ROWS = ("int_mm", "scaled_mm", "fake")
PROJECTIONS = ("q", "kv_a", "kv_b", "o")
NAMES = {"q": ("q_down", "q"), "kv_a": ("kv_a",), "kv_b": ("k", "v", "kv"), "o": ("o",)}


@dataclass(frozen=True)
class Quantized:
    """One attention and how its projections are quantized.

    Attributes:
        weight: one of ``FORMATS``.
        group: how many columns share a scale; the last group is cut where it does not divide them.
        symmetric: without zero points.
        order: ``none``; ``scales`` (a group's columns lie anywhere, as in GPTQ) or ``rows`` (those of the input are
            brought into the order of the columns).
        product: ``dense`` multiplies by the dequantized weight, ``after`` has the scales behind the product, ``fake``
            rounds the rows first; the others are operators.
        top, largest, down, guard, clamp, rows: how the scale of rows is written.
        layers: which projections.
        dequantize: the option.
    """

    case: Case
    weight: str = "int8_channels"
    group: int = 16
    symmetric: bool = True
    order: str = "none"
    product: str = "dense"
    early: bool = True
    largest: str = "amax"
    down: str = "div"
    guard: str = "clamp"
    clamp: bool = True
    rows: str = "token"
    layers: tuple[str, ...] = PROJECTIONS
    dequantize: Literal["auto", "once", "step"] = "auto"

    @property
    def rounds_rows(self) -> bool:
        """Whether the up-projection rounds its rows."""
        return self.product in ROUND_ROWS and "kv_b" in self.layers

    def __repr__(self) -> str:
        """Only what differs from the defaults, so that a failing case can be read and pasted."""
        shown = (f for f in fields(self) if f.name == "case" or getattr(self, f.name) != f.default)
        return f"Quantized({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"


# Weights [out, in]: what is stored, and what it stands for.


def _pairs(digits: Tensor) -> Tensor:
    """Numbers 0..15, two to a byte."""
    digits = F.pad(digits, (0, digits.shape[-1] % 2)).to(torch.uint8)
    return digits[..., ::2] | (digits[..., 1::2] << 4)


def _digits(packed: Tensor, width: int) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)[..., :width]


@dataclass
class Stored:
    """Buffers of a format, and the weight that they stand for in a dtype."""

    buffers: dict[str, Tensor]
    read: Callable[[nn.Module, torch.dtype], Tensor] = field(repr=False)


def stored(weight: Tensor, how: Quantized) -> Stored:
    """``weight`` [out, in], float64, in the format that ``how`` says."""
    if how.weight == "float8_blocks":
        return _float8_blocks(weight, how.group)
    if how.weight == "lookup":
        return _lookup(weight, how.group)
    bits = 4 if how.weight == "int4_groups" else 8
    width = weight.shape[1]
    group = width if how.weight == "int8_channels" else min(how.group, width)
    count = -(-width // group)
    of = torch.arange(width) // group
    if how.order == "scales":
        of = of[torch.randperm(width, generator=torch.Generator().manual_seed(how.case.seed))]
    top = 2 ** (bits - 1) - 1
    members = (of == torch.arange(count)[:, None])[:, None]  # [groups, 1, in]
    high = torch.where(members, weight, -torch.inf).amax(-1).T.clamp(min=1e-9)
    low = torch.where(members, weight, torch.inf).amin(-1).T.clamp(max=-1e-9)
    if how.symmetric:
        scale, zero = torch.maximum(high, -low) / top, torch.zeros_like(high)
    else:
        scale = (high - low) / (2 * top + 1)
        zero = -(low / scale).round() - (top + 1)
    scale = scale.float()
    digits = (weight / scale[:, of] + zero[:, of]).round().clamp(-top - 1, top)
    buffers = {"scale": scale}
    if how.order == "scales":
        buffers["of"] = of
    if bits == 4:
        buffers |= {"packed": _pairs(digits + 8)} | ({} if how.symmetric else {"zeros": _pairs(zero + 8)})
    else:
        buffers |= {"packed": digits.to(torch.int8)} | ({} if how.symmetric else {"zeros": zero.to(torch.int8)})

    def spread(own: Tensor, layer: nn.Module) -> Tensor:
        if how.order == "scales":
            return own[:, layer.of]
        return own if count == 1 else own.repeat_interleave(group, 1)[:, :width]

    def read(layer: nn.Module, dtype: torch.dtype) -> Tensor:
        kind = torch.int8 if bits == 8 else torch.int16
        digits = layer.packed if bits == 8 else _digits(layer.packed, width).to(torch.int8) - 8
        if not how.symmetric:
            zeros = layer.zeros if bits == 8 else _digits(layer.zeros, count).to(torch.int8) - 8
            digits = digits.to(torch.int16) - spread(zeros, layer).to(kind)
        return digits.to(dtype) * spread(layer.scale, layer).to(dtype)

    return Stored(buffers, read)


def _float8_blocks(weight: Tensor, block: int) -> Stored:
    rows, columns = weight.shape
    tiles = F.pad(weight, (0, -columns % block, 0, -rows % block)).unflatten(1, (-1, block)).unflatten(0, (-1, block))
    scale = (tiles.abs().amax((1, 3)).clamp(min=1e-12) / 448).float()
    packed = (tiles / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]

    def read(layer: nn.Module, dtype: torch.dtype) -> Tensor:
        scales = layer.scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]
        return layer.packed.to(dtype) * scales.to(dtype)

    return Stored({"packed": packed.to(FP8), "scale": scale}, read)


def _lookup(weight: Tensor, block: int) -> Stored:
    """Two indices of 16 numbers to a byte, a scale for each ``block`` numbers in the order of memory (NF4)."""
    table = torch.linspace(-1, 1, 16, dtype=torch.float64).sign() * torch.linspace(-1, 1, 16).double().abs() ** 1.5
    flat = F.pad(weight.flatten(), (0, -weight.numel() % (2 * block))).unflatten(0, (-1, block))
    scale = flat.abs().amax(1, keepdim=True).clamp(min=1e-9).float()
    nearest = ((flat / scale)[..., None] - table).abs().argmin(-1)

    def read(layer: nn.Module, dtype: torch.dtype) -> Tensor:
        numbers = layer.table[_digits(layer.packed, 2 * layer.packed.shape[-1]).int()].unflatten(0, (-1, block))
        return (numbers * layer.scale).flatten()[: weight.numel()].view(weight.shape).to(dtype)

    return Stored({"packed": _pairs(nearest.flatten()), "scale": scale, "table": table.float()}, read)


# Products.


class QuantizedProjection(nn.Module):
    """One projection. ``exact``: a plain product with the dequantized weight, whatever the format."""

    def __init__(self, weight: Tensor, how: Quantized) -> None:
        super().__init__()
        self.how = how
        self.exact = False
        self.order = None
        if how.order == "rows":
            order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(how.case.seed))
            self.register_buffer("columns", order)
            weight = weight[:, order]
        self.read: Callable[[nn.Module, torch.dtype], Tensor]
        if how.product == "scaled_mm":
            scale = (weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 448).float()
            form = Stored(
                {"packed": (weight / scale).to(FP8), "scale": scale}, lambda m, t: m.packed.to(t) * m.scale.to(t)
            )
        else:
            form = stored(weight, how)
        for name, tensor in form.buffers.items():
            self.register_buffer(name, tensor)
        self.read = form.read

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in] -> [..., out]."""
        x = x[..., self.columns] if self.how.order == "rows" else x
        if self.exact:
            return F.linear(x, self.read(self, x.dtype), bias)
        y = getattr(self, f"_{self.how.product}")(x)
        return y if bias is None else y + bias

    def _dense(self, x: Tensor) -> Tensor:
        if self.how.early:
            return F.linear(x, self.read(self, x.dtype))
        return x @ self.read(self, torch.float32).to(x.dtype).t()

    def _after(self, x: Tensor) -> Tensor:
        return F.linear(x, self.packed.to(x.dtype)) * self.scale[:, 0].to(x.dtype)

    def _int8pack(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return torch._weight_int8pack_mm(flat, self.packed, self.scale[:, 0].to(x.dtype)).view(*x.shape[:-1], -1)

    def _int_mm(self, x: Tensor) -> Tensor:
        digits, scale = self._rounded(x, 127)
        total = torch._int_mm(digits.to(torch.int8).reshape(-1, x.shape[-1]), self.packed.t())
        total = total.float().view(*x.shape[:-1], -1)
        if self.how.early:
            return (total * scale * self.scale[:, 0]).to(x.dtype)
        return (total * (scale.float() * self.scale[:, 0])).to(x.dtype)

    def _fake(self, x: Tensor) -> Tensor:
        if self.how.rows == "groups":
            digits, scale = self._rounded(x.unflatten(-1, (-1, 8)), 127)
            return self._dense((digits * scale).flatten(-2).to(x.dtype))
        digits, scale = self._rounded(x, 127)
        return self._dense((digits * scale).to(x.dtype))

    def _scaled_mm(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scale = (flat.abs().amax(-1, keepdim=True).float() / 448).clamp(min=1e-12)
        rows = (flat.float() / scale).clamp(-448, 448).to(FP8)
        y = torch._scaled_mm(rows, self.packed.t(), scale_a=scale, scale_b=self.scale.t(), out_dtype=x.dtype)
        return y.view(*x.shape[:-1], -1)

    def _rounded(self, x: Tensor, top: int) -> tuple[Tensor, Tensor]:
        """Whole numbers up to ``top``, and the scale that gives the rows back."""
        how = self.how
        x = x if how.early else x.float()
        dims: Any = {"dim": -1, "keepdim": True}
        if how.rows == "tensor":
            largest = x.abs().max()
        elif how.largest == "amax":
            largest = x.abs().amax(**dims)
        elif how.largest == "max":
            largest = x.abs().max(**dims).values
        else:
            largest = torch.linalg.vector_norm(x, torch.inf, **dims)
        if how.guard == "clamp":
            largest = largest.clamp(min=1e-5)
        elif how.guard == "add":
            largest = largest + 1e-6
        if how.down == "div":
            scale = largest / top
            digits = (x / scale).round()
        elif how.down == "reciprocal":
            scale = largest / top
            digits = (x * scale.reciprocal()).round()
        else:
            up = top / largest
            digits, scale = (x * up).round(), 1 / up
        return digits.clamp(-top - 1, top) if how.clamp else digits, scale


class QuantizedMLA(GeneratedMLA):
    """The generated module with some of its projections quantized, as its case says."""

    def __init__(self, how: Quantized) -> None:
        super().__init__(how.case)
        self.how = how
        dense = {
            "q_down": self.w_q_down,
            "q": self.w_q,
            "kv_a": torch.cat([self.w_c, self.w_r]),
            "k": self.w_k.flatten(0, 1),
            "v": self.w_v.flatten(0, 1),
            "kv": self._joined(self.w_k, self.w_v)[0],
            "o": self.w_o,
        }
        chosen = [n for layer in how.layers for n in NAMES[layer] if dense[n] is not None]
        self.layers = nn.ModuleDict({n: QuantizedProjection(dense[n].double(), how) for n in chosen})

    def exactly(self) -> QuantizedMLA:
        """Itself in float64, rows and weights without any further rounding."""
        for layer in self.layers.values():
            layer.exact = True
        return self.double()

    def _linear(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.layers[name](x, bias) if name in self.layers else super()._linear(name, x, weight, bias)


def quantized(count: int, start: int) -> Iterator[Quantized]:
    """``count`` legal attentions, each with a quantization of it; the same for each ``start``."""
    for index, case in enumerate(drawn(count, start)):
        yield _quantized(case, random.Random(f"{start} {index}"))


def _quantized(case: Case, rng: random.Random) -> Quantized:
    """``case``, wide enough for an error to mean something, quantized in any way."""

    def pick(*options: Any) -> Any:
        return rng.choice(options)

    product = pick("dense", "dense", "dense", "after", "int_mm", "int_mm", "fake", "int8pack", "scaled_mm")
    whole = product in ("after", *CHANNELS_ONLY)
    # Some operators of torch take tiles of 16, or read beyond their rows. Those of 8 leave groups and blocks cut.
    tiles = 16 if product in ("scaled_mm", "int8pack") else 8
    R = pick(0, 16, 16)
    case = replace(
        case,
        **{letter: tiles * rng.randint(32 // tiles, 64 // tiles) for letter in "DL"},
        **{letter: tiles * rng.randint(16 // tiles, 48 // tiles) for letter in "NV"},
        R=R,
        H=pick(2, 3),
        Q=pick(0, 48),
        B=pick(2, 3),
        T=4 + case.T,
        steps=1,
        groups=case.groups if product != "scaled_mm" else 1,
        tied=False,
        cut=False,
        latents=1,
        reads=False,
        padded=False,  # what a row without a visible key gets is another number in every precision
        pad_values=False,
        latent_norm=True,
        weight="plain",
        rope=pick("half", "interleaved", "complex", "none") if R else "none",
        up=pick("per_head", "blocks", "two"),
        dtype="bfloat16" if product == "scaled_mm" else pick("float32", "bfloat16", "float16"),
        door=pick(*["trace"] * 23, "dynamo"),
        forms="absorbed",
    )
    if case.H * min(case.N, case.V) <= case.L:  # no row of a sum is wider than what it makes by itself
        case = replace(case, beside="none")
    return Quantized(
        case,
        weight="int8_channels" if whole else pick(*FORMATS),
        group=pick(8, 16, 24, 32, 64),
        symmetric=whole or pick(True, False),
        order="none" if product == "scaled_mm" else pick("none", "none", "rows", *(() if whole else ("scales",))),
        product=product,
        early=pick(True, False),
        largest=pick("amax", "max", "norm"),
        down=pick("div", "reciprocal", "over"),
        guard=pick("clamp", "add", "none"),
        clamp=pick(True, False),
        rows=pick("token", "token", "tensor", *(("groups",) if product == "fake" else ())),
        layers=tuple(p for p in PROJECTIONS if p == "kv_b" or pick(True, False)),
        dequantize=pick("auto", "once", "step"),
    )
