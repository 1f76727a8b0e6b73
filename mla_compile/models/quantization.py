"""Reads the ``quantization_config`` of a published config: which weights are quantized, and to how many bytes.

Only the config is read; the model itself is built unquantized. Each format has its own reader in this module.
transformers' classes are not used, because some of them need the library that made the checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mla_compile.core.quantities import BYTES
from mla_compile.errors import InputError
from mla_compile.models.weights import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_DTYPES: Mapping[object, str] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Packing:
    """How a matrix [outputs, inputs] is stored: the bits of a weight, and the data stored with each block of weights.

    Attributes:
        words: a description for reports.
        bits: bits of a weight. If a weight has fewer than 8 bits, the weights of a row fill whole 32-bit words.
        block: how many outputs and how many inputs share a scale; 0 means all.
        scale_bytes: bytes of the scale of a block.
        zero_bits: bits of the zero point of a block. The zero points of a column of blocks fill whole 32-bit words.
        index_bytes: bytes per input, for formats that store the group of each input.
        flat: whether blocks are cut from the flattened matrix. ``block`` is then (1, block length).
    """

    words: str
    bits: int
    block: tuple[int, int]
    scale_bytes: float
    zero_bits: int = 0
    index_bytes: int = 0
    flat: bool = False

    def sizes(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the bytes of a matrix's weights, and the bytes of everything stored with the weights.

        A few bytes per matrix are not counted: the shape, a code book, a scale of the scales.
        """
        if self.flat:
            return math.ceil(rows * columns * self.bits / 8), math.ceil(
                math.ceil(rows * columns / self.block[1]) * self.scale_bytes
            )
        weights = rows * columns * self.bits // 8 if self.bits % 8 == 0 else rows * _words(columns * self.bits)
        high, wide = self.block[0] or rows, self.block[1] or columns
        down, across = math.ceil(rows / high), math.ceil(columns / wide)
        zeros = across * _words(down * self.zero_bits)
        return weights, math.ceil(down * across * self.scale_bytes) + zeros + columns * self.index_bytes


def _words(bits: int) -> int:
    return math.ceil(bits / 32) * 4


@dataclass(frozen=True)
class PathRule:
    """The packing of modules whose paths match ``pattern`` from the start, or ``None`` for unquantized modules."""

    pattern: re.Pattern[str]
    packing: Packing | None


@dataclass(frozen=True)
class Quantization:
    """A parsed config. The first rule that matches a module decides. Only weights of linear layers are packed.

    ``keeps_head``: whether the output projection is unquantized despite the rules. ``dtype``: the dtype of unquantized
    weights. ``arithmetic``: the dtype in which quantized weights are multiplied.
    """

    method: str
    dtype: str
    arithmetic: str
    rules: tuple[PathRule, ...]
    keeps_head: bool

    def packing(self, tensor: Tensor) -> Packing | None:
        """Return how a weight is packed, or ``None`` if it is not."""
        if not tensor.linear or (tensor.head and self.keeps_head):
            return None
        return next((rule.packing for rule in self.rules if rule.pattern.match(tensor.module)), None)


class _NotReadError(Exception):
    """No reader here supports a format, or a variant of a format."""


def read(config: PreTrainedConfig) -> tuple[Quantization | None, tuple[str, ...]]:
    """Return the quantization that a transformers config describes, and a note if its format has no reader here.

    Raises :class:`InputError` if no format is named, or if a reader finds an illegal value in a field.
    """
    text = config.get_text_config()
    raw = next((q for part in (config, text) if (q := getattr(part, "quantization_config", None))), None)
    if raw is None:
        return None, ()
    fields = _Fields(raw if isinstance(raw, Mapping) else raw.to_dict())
    method = fields.text("quant_method", "")
    if not method and any(fields.get(f"load_in_{bits}bit") for bits in (4, 8)):
        method = "bitsandbytes"  # published before the field quant_method existed
    if not method:
        known = ", ".join(_READERS)
        raise InputError(f"the config's quantization_config names no quant_method; the ones read are {known}")
    try:
        if method not in _READERS:
            raise _NotReadError
        return _READERS[method](fields, _DTYPES.get(getattr(text, "dtype", None), "bf16")), ()
    except _NotReadError as error:
        what = f"{method!r}" + (f" ({error})" if str(error) else "")
        return None, (f"quantized with {what}, which is not read: weights are counted as if they were not quantized",)


class _Fields(dict[str, Any]):
    """The fields of a quantization_config, checked as they are read."""

    def text(self, name: str, default: str) -> str:
        return str(self._checked(name, default, "a string", lambda v: isinstance(v, str)))

    def flag(self, name: str, *, default: bool) -> bool:
        return bool(self._checked(name, default, "true or false", lambda v: isinstance(v, bool)))

    def bits(self, name: str, default: int, allowed: Sequence[int]) -> int:
        expected = f"one of {', '.join(map(str, allowed))}"
        return int(self._checked(name, default, expected, lambda v: type(v) is int and v in allowed))

    def group(self, name: str, default: int) -> int:
        """Return the number of inputs in a group, or 0 for all inputs (-1 in configs)."""
        size = self._checked(name, default, "a whole number above 0, or -1", _is_group)
        return max(0, int(size))

    def block(self, name: str, default: Sequence[int]) -> tuple[int, int]:
        height, width = self._checked(name, default, "two whole numbers above 0", _is_pair)
        return height, width

    def names(self, name: str) -> tuple[str, ...]:
        return tuple(self._checked(name, (), "a list of names", lambda v: _is_list_of(v, str)))

    def part(self, name: str) -> _Fields:
        return _Fields(self._checked(name, {}, "an object", lambda v: isinstance(v, Mapping)))

    def _checked(self, name: str, default: object, expected: str, good: Callable[[object], bool]) -> Any:
        value = self.get(name)
        if value is None:
            return default
        if not good(value):
            raise InputError(f"the config's quantization_config: {name} is {value!r}, expected {expected}")
        return value


def _is_group(value: object) -> bool:
    return type(value) is int and (value == -1 or value > 0)


def _is_pair(value: Any) -> bool:
    return _is_list_of(value, int) and len(value) == 2 and min(value) > 0


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, (list, tuple)) and all(type(v) is kind for v in value)


def _regex(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InputError(
            f"the config's quantization_config names modules by {pattern!r}, which is no regular expression: {error}"
        ) from error


_ALL = re.compile("")


def _skipped(names: Iterable[str]) -> tuple[PathRule, ...]:
    """Return rules that leave modules unquantized. A name is a regular expression for consecutive parts of a path.

    transformers matches such a name at the beginning or the end of a path, and AutoAWQ anywhere in the path. These
    rules match anywhere.
    """
    return tuple(PathRule(_regex(rf"(?:.*\.)?(?:{name})(?:(?<=\.)|(?=\.|$))"), None) for name in names)


def _fp8(fields: _Fields, dtype: str) -> Quantization:
    """Read float8 with float32 block scales, as in DeepSeek-V3's README_WEIGHTS.md.

    Defaults are as in ``FineGrainedFP8Config``. ``scale_fmt`` is not read, because DeepSeek-V3.1 gives ue8m0, but
    stores scales in float32.
    """
    if (experts := fields.text("expert_dtype", "fp8")) != "fp8":
        raise _NotReadError(f"experts in {experts}")
    whole = "weight_block_size" in fields and fields["weight_block_size"] is None
    height, width = (0, 0) if whole else fields.block("weight_block_size", (128, 128))
    words = "fp8, one scale for a matrix" if whole else f"fp8 with a scale for {height} x {width}"
    skip = fields.names("modules_to_not_convert") or fields.names("ignored_layers")
    rules = (*_skipped(skip), PathRule(_ALL, Packing(words, 8, (height, width), 4)))
    return Quantization("fp8", dtype, "fp8", rules, keeps_head=not skip)


def _gptq(fields: _Fields, dtype: str) -> Quantization:
    """Read GPTQModel's format: tensors ``qweight``, ``qzeros``, ``scales`` (fp16) and ``g_idx`` (int32).

    The field ``dynamic`` has rules by path.
    """

    def packing(bits: int, group: int) -> Packing:
        return Packing(f"int{bits} in {_groups(group)} with zero points", bits, (1, group), 2, bits, 4)

    sizes = (2, 3, 4, 5, 6, 7, 8)
    bits, group = fields.bits("bits", 4, sizes), fields.group("group_size", 128)
    rules = []
    for pattern in (dynamic := fields.part("dynamic")):
        if pattern.startswith("-:"):
            rules.append(PathRule(_regex(pattern.removeprefix("-:")), None))
            continue
        own = dynamic.part(pattern)
        chosen = packing(own.bits("bits", bits, sizes), own.group("group_size", group or -1))
        rules.append(PathRule(_regex(pattern.removeprefix("+:")), chosen))
    rules.append(PathRule(_ALL, packing(bits, group)))
    return Quantization("gptq", dtype, dtype, tuple(rules), keeps_head=not fields.flag("lm_head", default=False))


def _awq(fields: _Fields, dtype: str) -> Quantization:
    """Read AutoAWQ's format: tensors ``qweight``, ``qzeros`` and ``scales`` (fp16). All layouts have 4 bits."""
    bits = fields.bits("bits", fields.bits("w_bit", 4, (4,)), (4,))
    group = fields.group("group_size", fields.group("q_group_size", 128) or -1)
    words = f"int{bits} in {_groups(group)} with zero points"
    rules = (
        *_skipped(fields.names("modules_to_not_convert")),
        PathRule(_ALL, Packing(words, bits, (1, group), 2, bits)),
    )
    return Quantization("awq", dtype, dtype, rules, keeps_head=True)


def _bitsandbytes(fields: _Fields, dtype: str) -> Quantization:
    """Read the formats of bitsandbytes.

    ``Linear8bitLt`` has a float32 scale per output, and ``Linear4bit`` a scale per 64 weights. Scales of 4-bit weights
    are float32, or are quantized to 8 bits with one float32 per 256 scales.
    """
    in_4, in_8 = (
        fields.flag(f"load_in_{n}bit", default=fields.flag(f"_load_in_{n}bit", default=False)) for n in (4, 8)
    )
    if in_4 == in_8:
        raise InputError("the config's quantization_config: expected one of load_in_4bit and load_in_8bit to be true")
    if in_8:
        packing = Packing("int8 with a scale for an output", 8, (1, 0), 4)
    else:
        double = fields.flag("bnb_4bit_use_double_quant", default=False)
        kind = fields.text("bnb_4bit_quant_type", "fp4")
        scales = "quantized scales" if double else "scales"
        packing = Packing(f"{kind} with {scales} for 64", 4, (1, 64), 1 + 4 / 256 if double else 4, flat=True)
    skip = fields.names("llm_int8_skip_modules")
    return Quantization("bitsandbytes", dtype, dtype, (*_skipped(skip), PathRule(_ALL, packing)), keeps_head=not skip)


def _compressed_tensors(fields: _Fields, dtype: str) -> Quantization:
    """Read the formats of compressed-tensors 0.20. Rules of ``ignore`` come first, then the groups' rules in order."""
    rules = [PathRule(_named(name), None) for name in fields.names("ignore")]
    arithmetic = dtype
    groups = fields.part("config_groups")
    if not groups:
        raise InputError("the config's quantization_config has no config_groups, expected at least one")
    for name in groups:
        group = groups.part(name)
        form = group.text("format", fields.text("format", "dense"))
        weights, inputs = group.part("weights"), group.part("input_activations")
        packing = _of_group(weights, form, dtype) if weights and form != "dense" else None
        rules += [PathRule(_named(target), packing) for target in group.names("targets")]
        if packing and packing.words.startswith("fp8") and inputs.get("num_bits") == 8:
            arithmetic = "fp8"
    return Quantization("compressed-tensors", dtype, arithmetic, tuple(rules), keeps_head=False)


def _named(target: str) -> re.Pattern[str]:
    """Return the pattern for a target (a regex, a path or ``Linear``), like ``match_name`` of compressed-tensors."""
    if target.startswith("re:"):
        return _regex(target.removeprefix("re:"))
    return _ALL if target == "Linear" else re.compile(rf"{re.escape(target)}$")


def _of_group(weights: _Fields, form: str, dtype: str) -> Packing:
    """Return how a group is stored. ``form`` gives the bits per weight. The strategy says what shares a scale."""
    bits = stored = weights.bits("num_bits", 8, (2, 3, 4, 5, 6, 7, 8))
    kind, scale = "fp" if weights.text("type", "int") == "float" else "int", BYTES[dtype]
    if form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        kind, scale = form.partition("4")[0], 1  # the scales of these formats are 8-bit floats
    elif form in ("int-quantized", "float-quantized", "naive-quantized"):
        stored = 8  # one weight per byte, even if fewer bits are used
    elif form != "pack-quantized":
        raise _NotReadError(f"format {form}")
    words, block = _shared(weights)
    symmetric, ordered = weights.flag("symmetric", default=True), weights.get("actorder") == "group"
    return Packing(
        f"{kind}{bits}{words}{'' if symmetric else ' with zero points'}", stored, block, scale,
        0 if symmetric else stored, 4 if ordered else 0,
    )  # fmt: skip


def _shared(weights: _Fields) -> tuple[str, tuple[int, int]]:
    """Return which outputs and inputs share a scale, in words and as a block.

    If the config names no strategy, the group size decides.
    """
    group = weights.group("group_size", -1)
    plain = "tensor" if weights.get("group_size") is None else "channel"
    strategy = weights.text("strategy", "group" if group else plain)
    if strategy in ("group", "tensor_group"):
        return f" in {_groups(group)}", (1, group)
    if strategy == "channel":
        return " with a scale for an output", (1, 0)
    if strategy == "tensor":
        return ", one scale for a matrix", (0, 0)
    if strategy == "block":
        height, width = weights.block("block_structure", (128, 128))
        return f" with a scale for {height} x {width}", (height, width)
    raise _NotReadError(f"strategy {strategy}")


def _groups(size: int) -> str:
    return f"groups of {size}" if size else "whole rows"


_READERS: Mapping[str, Callable[[_Fields, str], Quantization]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
}
