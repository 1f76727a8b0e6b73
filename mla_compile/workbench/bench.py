"""``mla-compile bench``: time decode steps of a model in eager, Inductor and mla, in turns on this machine.

Only a few layers and a small vocabulary are built, but layers have their full size. A published model then fits on a
small machine, and most of the measured time is attention. Timing starts only after all variants have returned equal
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mla_compile.core.cache_argument import cache_of
from mla_compile.core.dims import Dims
from mla_compile.core.measuring import Times, available_bytes, in_turns, machine, median_ratio, require_compiler
from mla_compile.core.quantities import gib
from mla_compile.errors import InputError, NothingToCompareError
from mla_compile.models import config_file, skeleton
from mla_compile.models.survey import Survey, survey_config
from mla_compile.report.facts import Facts
from mla_compile.report.wording import not_mla
from mla_compile.workbench.decode_steps import TOLERANCE, WARM_UP, DecodeSteps, differences, variants

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SCHEMA = "mla_compile.bench/1"
VARIANTS = ("eager", "inductor", "mla")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VOCABULARY = 256
_DEPTH = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_PART_OF_FREE = 0.8  # the share of free memory to use; the compiler and other programs need the rest


@dataclass(frozen=True)
class BenchSettings:
    """What to measure: at most ``rounds`` rounds and about ``seconds`` at each context length."""

    contexts: tuple[int, ...] = (512, 4096)
    dtype: str = "bf16"
    batch: int = 1
    layers: int = 1
    rounds: int = 15
    seconds: float = 20.0
    device: str = "cpu"
    codegen: str = "inductor"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)} to measure with")
        if not 0 < self.seconds <= 86400:
            raise InputError(f"seconds is {self.seconds}, expected a number above 0 and at most 86,400")


@dataclass(frozen=True)
class BenchRow:
    """Results at one context length.

    ``too_large`` lists the variants that do not fit in memory. ``error`` maps each variant to the error of its logits.
    ``seconds`` maps each variant to its times per step.
    """

    context: int
    too_large: tuple[str, ...]
    error: Mapping[str, float]
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """The number of rounds in which every variant ran."""
        return min(map(len, self.seconds.values()), default=0)

    def whole(self) -> BenchRow:
        """Return the row without the times of an interrupted round."""
        return replace(self, seconds={name: s[: self.rounds] for name, s in self.seconds.items()})

    def times(self) -> dict[str, Times]:
        """Return the times of each variant."""
        return {name: Times.of(seconds) for name, seconds in self.seconds.items()}

    def faster_than(self) -> dict[str, float]:
        """Return the median speedup of mla over each other variant."""
        return {v: median_ratio(s, self.seconds["mla"]) for v, s in self.seconds.items() if v != "mla"}

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able record with times in milliseconds."""
        return {
            "context": self.context,
            "too_large": list(self.too_large),
            "error": dict(self.error),
            "ms": {name: asdict(times) for name, times in self.times().items()},
            "faster_than": self.faster_than(),
        }


@dataclass(frozen=True)
class Subject:
    """A model to measure, which is not allocated yet."""

    config: PreTrainedConfig
    facts: Facts
    settings: BenchSettings
    notes: tuple[str, ...]

    @property
    def dims(self) -> Dims:
        """The sizes of the first site."""
        return self.facts.latent[0].dims

    def bytes_at(self, tokens: int, *, expanded: bool) -> int:
        """Estimate the bytes of the weights and of a step at ``tokens``.

        Latent rows are counted three times (pool, cache, next cache). If ``expanded``, the K and V of one layer and
        eager PyTorch's copies are added.
        """
        size, d = DTYPES[self.settings.dtype].itemsize, self.dims
        values: float = self.facts.weights.total
        rows = self.settings.batch * (tokens + 1)
        values += rows * 3 * self.facts.cache_values
        if expanded:
            values += rows * d.H * (3 * (d.N + d.V) + 2 * d.R)
        return int(values * size)


def config_of(source: str, layers: int) -> tuple[object, tuple[str, ...]]:
    """Read the config in a file or directory, and cut it to ``layers`` layers and a small vocabulary.

    Raises :class:`InputError` if the config cannot be read or cut.
    """
    if source.startswith("python:"):
        raise InputError("bench builds its model from a config; give a config.json, a directory with one, or --dims")
    raw, path = config_file.read_raw(source)
    notes = []
    cut = dict(raw)
    parts = [part for part in (cut.get("text_config"), cut) if isinstance(part, dict) and set(_DEPTH) & part.keys()]
    if not parts:
        raise InputError(f"{source} has none of {', '.join(_DEPTH)}, so it cannot be cut to {layers} layers")
    part = dict(parts[0])
    depth = next(part[name] for name in _DEPTH if name in part)
    if not isinstance(depth, int):
        raise InputError(f"{path}: the number of layers is {depth!r}, expected a whole number")
    part |= {name: min(layers, depth) for name in _DEPTH if name in part}
    # Also cut lists with one entry per layer, such as the layers' kinds of attention.
    part |= {n: v[:layers] for n, v in part.items() if isinstance(v, list) and len(v) == depth}
    if depth > layers:
        notes.append(f"{layers} of {depth} layers")
    if isinstance(part.get("vocab_size"), int) and part["vocab_size"] > VOCABULARY:
        notes.append(f"a vocabulary of {VOCABULARY} instead of {part['vocab_size']:,}")
        part["vocab_size"] = VOCABULARY
    part |= {name: None for name in part if name.endswith("_token_id")}
    cut = part if parts[0] is cut else {**cut, "text_config": part}
    config, more = config_file.parse(cut, path)
    return config, (*more, *([f"measured with {' and '.join(notes)}"] if notes else ()))


def config_with(dims: Dims, layers: int) -> PreTrainedConfig:
    """Return a config like DeepSeek-V3's with these sizes, a small dense network and a small vocabulary."""
    if dims.D is None:
        raise InputError("the width of the model, D, is missing")
    if dims.R % 2:
        raise InputError(f"R is {dims.R}, expected an even number: it is rotated in pairs")
    return config_file.transformers().DeepseekV3Config(
        vocab_size=VOCABULARY, hidden_size=dims.D, intermediate_size=1024, num_hidden_layers=layers,
        num_attention_heads=dims.H, num_key_value_heads=dims.H, kv_lora_rank=dims.L,
        q_lora_rank=None if dims.Q == dims.D else dims.Q,
        qk_nope_head_dim=dims.N, qk_rope_head_dim=dims.R, v_head_dim=dims.V, n_routed_experts=4, num_experts_per_tok=2,
        n_group=1, topk_group=1, first_k_dense_replace=layers, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def subject(config: object, notes: tuple[str, ...], settings: BenchSettings) -> Subject:
    """Survey a model without allocating it.

    Raises :class:`InputError` if it needs too much memory, and :class:`NothingToCompareError` if nothing is absorbed.
    """
    found = survey_config(config, settings.dtype)
    if not found.report.absorbed:
        raise NothingToCompareError(nothing(found))
    made = Subject(config, found.facts, settings, notes)
    room = int(_PART_OF_FREE * available_bytes(torch.device(settings.device)))
    longest = max(settings.contexts)
    alone, whole = made.bytes_at(0, expanded=False), made.bytes_at(longest, expanded=False)
    if alone > room:
        layers = f"{settings.layers} layers" if settings.layers > 1 else "one layer"
        advice = "give fewer --layers" if settings.layers > 1 else f"give the attention alone: --dims '{made.dims}'"
        raise InputError(
            f"the weights of {layers} of this model take {gib(alone)}, and {gib(room)} of memory can be used; {advice}"
        )
    if whole > room:
        raise InputError(
            f"a step at {longest:,} tokens with a batch of {settings.batch:,} takes {gib(whole)}, and {gib(room)} of "
            f"memory can be used; give shorter --contexts or a smaller --batch"
        )
    return made


def nothing(found: Survey) -> str:
    """Return a message that says why there is nothing to compare, and what to do instead."""
    name, family = found.facts.name, found.facts.family
    if family in ("MHA", "GQA", "MQA"):
        return f"{name} is {not_mla(family)} and nothing to compare; `mla-compile plan` says what it costs to serve"
    return f"nothing is absorbed ({found.report.summary()}), so nothing can be compared; `mla-compile explain` says why"


class Bench:
    """The model, its variants, and the results so far (``rows``)."""

    def __init__(self, made: Subject) -> None:
        self.subject, self.settings = made, made.settings
        self.rows: list[BenchRow] = []
        self.about = machine()
        self._steps: DecodeSteps | None = None

    def stages(self) -> int:
        """Return the number of stages of :meth:`run`."""
        return 1 + len(VARIANTS) + len(self.settings.contexts)

    @torch.no_grad()
    def run(self) -> Iterator[str]:
        """Run everything, and yield the name of each stage before the stage begins. Results are added to ``rows``.

        Raises :class:`NothingToCompareError` if the variants' results differ.
        """
        settings = self.settings
        if settings.codegen == "inductor" and settings.device == "cpu":
            require_compiler()
        yield "building the model"
        torch._dynamo.reset()
        steps = self._steps = self._build()
        for variant in VARIANTS:
            yield f"{variant}: first steps" if variant == "eager" else f"compiling: {variant}"
            for tokens in WARM_UP:
                steps.step(variant, tokens)
        for context in settings.contexts:
            yield f"{context:,} tokens"
            self._measure(steps, context)

    def _build(self) -> DecodeSteps:
        settings, device = self.settings, torch.device(self.settings.device)
        dtype = DTYPES[settings.dtype]
        torch.manual_seed(0)
        model: nn.Module = skeleton.build(self.subject.config, dtype, settings.device).requires_grad_(
            requires_grad=False
        )
        if device.type != "cpu":
            self.about["device"] = torch.get_device_module(device).get_device_name(device)
        try:
            cache = cache_of(model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device), use_cache=True))
        except Exception as error:  # a user's model may raise anything
            raise InputError(f"{type(model).__name__} does not run: {config_file.in_one_line(error)}") from error
        slots = []
        for slot in cache.layers:
            keys, values = getattr(slot, "keys", None), getattr(slot, "values", None)
            if keys is None or values is None or getattr(slot, "is_sliding", False):
                raise InputError(
                    f"its cache has a {type(slot).__name__}, and bench fills caches of keys and values only"
                )
            slots.append((keys.shape[1], keys.shape[3], values.shape[1], values.shape[3]))
        # The pool and the weights fit in memory together. If the expanded form does not fit, only mla is measured.
        longest = max(*settings.contexts, *WARM_UP) + 1
        calls = variants(model, VARIANTS, settings.codegen)
        return DecodeSteps(model, calls, slots, batch=settings.batch, longest=longest, dtype=dtype, device=device)

    def _measure(self, steps: DecodeSteps, context: int) -> None:
        needed = self.subject.bytes_at(context, expanded=True) - self.subject.bytes_at(0, expanded=False)
        fits = needed < _PART_OF_FREE * available_bytes(steps.device)
        chosen = VARIANTS if fits else ("mla",)
        # Run two steps each, because the first step at a length may compile.
        logits = {name: [steps.step(name, context)[1].float() for _ in range(2)][-1] for name in chosen}
        errors, allowed = differences(logits), TOLERANCE[steps.dtype]
        for name, error in errors.items():
            if not error <= allowed:
                raise NothingToCompareError(
                    f"at {context:,} tokens the logits of {name} differ from those of {chosen[0]} by {error:.1e}, "
                    f"allowed {allowed:.0e}; nothing is timed on wrong results"
                )
        row = BenchRow(context, tuple(name for name in VARIANTS if name not in chosen), errors)
        self.rows.append(row)

        def one(name: str) -> Callable[[], float]:
            return lambda: steps.step(name, context)[0]

        calls = {name: one(name) for name in chosen}
        in_turns(calls, self.settings.rounds, self.settings.seconds, times=row.seconds)

    def measured(self) -> list[BenchRow]:
        """Return the rows with at least one complete round."""
        return [row.whole() for row in self.rows if row.rounds]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able record; the key ``schema`` names the layout."""
        facts = self.subject.facts
        return {
            "schema": SCHEMA,
            "model": facts.name,
            "notes": list(self.subject.notes),
            "dims": asdict(self.subject.dims),
            "settings": asdict(self.settings),
            "machine": self.about,
            "complete": len(self.measured()) == len(self.settings.contexts),
            "rows": [row.to_dict() for row in self.measured()],
        }
