"""The demo: decode a small model like DeepSeek-V3 before and after optimizing, compare the tokens, and time both.

The savings of absorption depend on L, R, N and V, so the demo has the model's real widths (L=512 R=64 N=128 V=128).
Heads, layers and model width are small enough for two CPU cores. Weights are seeded, so nothing is downloaded.
:mod:`mla_compile.cli.app` prints what :func:`run` returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import mla_compile
from mla_compile.core.cache_argument import cache_of
from mla_compile.core.measuring import Times, available_bytes, in_turns, require_compiler
from mla_compile.core.quantities import gib
from mla_compile.errors import InputError, NothingToCompareError
from mla_compile.report.report import Report
from mla_compile.runtime.latent import held_bytes
from mla_compile.workbench.decode_steps import DecodeSteps

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# The largest relative difference of logits that rounding can cause.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}

_CONFIG: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 384,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


@dataclass(frozen=True)
class DemoSettings:
    """What to run. At each context length, ``rounds`` interleaved steps are timed."""

    layers: int = 2
    contexts: tuple[int, ...] = (512, 2048, 8192)
    dtype: str = "float32"
    prompt: int = 32
    tokens: int = 24
    rounds: int = 7

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        if self.layers < 1:
            raise InputError(f"layers is {self.layers}, expected at least 1")
        if not self.contexts or min(self.contexts) < 1:
            raise InputError(f"contexts is {list(self.contexts)}, expected lengths of at least 1")


@dataclass(frozen=True)
class Agreement:
    """Compares the greedily decoded tokens of the original and the optimized model for one prompt.

    ``first_difference``: the first step whose tokens differ, ``None`` if all are equal. ``tie``: whether rounding
    explains that step. This is assumed if the original's two best logits differ by at most twice the largest difference
    between the models. ``logits_error``: the largest difference of logits divided by the largest logit, in the steps
    with equal inputs.
    """

    tokens: tuple[int, ...]
    first_difference: int | None
    tie: bool
    logits_error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the two models agree up to rounding."""
        return (self.first_difference is None or self.tie) and self.logits_error <= self.tolerance


@dataclass(frozen=True)
class Timing:
    """Times of a decode step at one context length for ``eager``, ``inductor`` and ``mla``, in interleaved rounds."""

    context: int
    times: Mapping[str, Times]

    def per_1000(self, last: Timing, variant: str) -> float | None:
        """Return the milliseconds per 1,000 additional cached tokens, between this context and the context of ``last``.

        Return ``None`` if the spread of the times hides the difference.
        """
        a, b = self.times[variant], last.times[variant]
        grown, spread = b.median - a.median, (b.high - b.low) / 2 + (a.high - a.low) / 2
        return None if grown <= spread else 1000 * grown / (last.context - self.context)


@dataclass(frozen=True)
class Decoded:
    """What a model generated: tokens [count] and logits [count, vocabulary]. ``held``: the cache's bytes per token."""

    tokens: Tensor
    logits: Tensor
    held: float = 0.0


@dataclass(frozen=True)
class DemoResult:
    """The results of the demo.

    ``report`` describes a decode step at the longest context. ``precision_ratio`` is the largest ratio, over all
    absorbed sites, of the absorbed form's error to the original form's error, both against float64. It is ``None`` if
    no site was checked. ``held``: the bytes per token in the caches of the original and the optimized model, measured
    after generation.
    """

    settings: DemoSettings
    report: Report
    agreement: Agreement
    timings: tuple[Timing, ...]
    precision_ratio: float | None = None
    held: tuple[float, float] | None = None

    @property
    def read_bytes(self) -> tuple[int, int]:
        """The bytes per cached token that absorbed attentions read, before and after optimizing."""
        size = DTYPES[self.settings.dtype].itemsize
        absorbed = [site for site in self.report.sites if site.verdict == "absorbed"]
        expanded = sum(site.values_read_before or 0 for site in absorbed)
        return size * expanded, size * sum(site.values_read_after or 0 for site in absorbed)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able record."""
        kinds = {"held": self.held, "read": self.read_bytes}
        return {
            "settings": asdict(self.settings),
            "agreement": asdict(self.agreement) | {"ok": self.agreement.ok},
            "bytes_per_cached_token": {
                kind: None if pair is None else dict(zip(("before", "after"), pair, strict=True))
                for kind, pair in kinds.items()
            },
            "precision_ratio": self.precision_ratio,
            "timings": [
                {"context": t.context, "ms": {name: asdict(times) for name, times in t.times.items()}}
                for t in self.timings
            ],
            "report": self.report.to_dict(),
        }


def stages(settings: DemoSettings) -> int:
    """Return the number of times that :func:`run` calls ``progress``."""
    return 5 + len(settings.contexts)


def run(settings: DemoSettings, progress: Callable[[str], None]) -> DemoResult:
    """Build, optimize, compare and time a model. Call ``progress`` with the name of each stage at its beginning.

    Raises :class:`InputError` if transformers or a C++ compiler is missing or memory is too small, and
    :class:`NothingToCompareError` if nothing was absorbed. Different tokens raise no error: see :attr:`Agreement.ok`.
    """
    _check_memory(settings)
    require_compiler()
    progress("building the model")
    model = build(settings)
    progress("optimizing it")
    optimized = mla_compile.optimize(model, progress=False)
    progress(f"generating {settings.tokens} tokens with the original")
    prompt = torch.randint(_CONFIG["vocab_size"], (1, settings.prompt), generator=torch.Generator().manual_seed(1))
    original = generate(model, prompt, settings.tokens)
    progress(f"compiling, and generating {settings.tokens} tokens with the optimized model")
    decoded = generate(optimized, prompt, settings.tokens)
    agreement = compare(original, decoded, _TOLERANCE[settings.dtype])
    precision_ratio = _precision(getattr(optimized, "mla_report", None))
    steps = _decode_steps(model, optimized, settings)
    longest = max(settings.contexts)
    report = mla_compile.explain(model, **steps.inputs(longest, steps.dynamic(longest)))
    progress("compiling the original with Inductor")
    steps.step("inductor", settings.prompt)  # This runs two lengths, and the second makes the context symbolic.
    timings = []
    for context in settings.contexts:
        progress(f"decoding at a context of {context:,} tokens")
        timings.append(measure(steps, context, settings.rounds))
    return DemoResult(settings, report, agreement, tuple(timings), precision_ratio, (original.held, decoded.held))


def _check_memory(settings: DemoSettings) -> None:
    """Raise :class:`InputError` if memory is too small.

    The estimate includes 14 million weights per layer, expanded K and V with eager's copies, and three caches.
    """
    longest = max(settings.contexts)
    values = 5e6 + settings.layers * (14e6 + 3 * 576 * longest) + 16 * (3 * 256 + 128) * longest
    needed, free = values * DTYPES[settings.dtype].itemsize, available_bytes()
    if needed > 0.8 * free:
        raise InputError(
            f"{settings.layers:,} layers and {longest:,} tokens take about {gib(needed)}, and "
            f"{gib(free)} of memory are free; ask for fewer"
        )


def _precision(report: Report | None) -> float | None:
    """Return the worst ratio in a report on compiled graphs. Raise an error if no site was absorbed."""
    if report is None or not report.absorbed:
        found = "no graph with attention was compiled" if report is None else report.summary()
        raise NothingToCompareError(f"the optimized model absorbed nothing, so there is nothing to show: {found}")
    return max((site.precision_ratio for site in report.sites if site.precision_ratio is not None), default=None)


def build(settings: DemoSettings) -> PreTrainedModel:
    """Build the model in eval mode. Seeded weights are scaled by fan-in, so that logits are far from uniform."""
    try:
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    except ImportError as error:
        raise InputError(
            'the demo builds its model with transformers, which cannot be imported; pip install "mla-compile[demo]"'
        ) from error
    torch.manual_seed(0)
    config = DeepseekV3Config(**_CONFIG, num_hidden_layers=settings.layers)
    model = DeepseekV3ForCausalLM(config).eval().requires_grad_(requires_grad=False)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_().div_(math.sqrt(weight.shape[-1]))
    model.generation_config.eos_token_id = None  # no token ends the text early
    model.generation_config.pad_token_id = 0
    return model.to(DTYPES[settings.dtype])


def generate(model: PreTrainedModel, prompt: Tensor, count: int) -> Decoded:
    """Decode the next ``count`` tokens greedily."""
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=count,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    cache = cache_of(out)
    held = held_bytes(t for layer in cache.layers for t in (layer.keys, layer.values)) / cache.get_seq_length()
    return Decoded(out.sequences[0, prompt.shape[1] :], torch.cat(out.logits).float(), held)


def compare(original: Decoded, optimized: Decoded, tolerance: float) -> Agreement:
    """Compare two results of :func:`generate` up to the first different token, because later inputs differ."""
    tokens, logits, other_tokens, other_logits = original.tokens, original.logits, optimized.tokens, optimized.logits
    different = (tokens != other_tokens).nonzero()
    first = int(different[0]) if len(different) else None
    same_input = slice(None if first is None else first + 1)
    distance = (logits[same_input] - other_logits[same_input]).abs()
    tie = False
    if first is not None:
        best, second = logits[first].topk(2).values
        tie = bool(best - second <= 2 * distance[first].max())
    error = float(distance.max() / logits[same_input].abs().max())
    return Agreement(tuple(tokens.tolist()), first, tie, error, tolerance)


def measure(steps: DecodeSteps, context: int, rounds: int) -> Timing:
    """Time a decode step of each variant in turn, ``rounds`` times."""

    def one(variant: str) -> Callable[[], float]:
        return lambda: steps.step(variant, context)[0]

    in_turns({name: one(name) for name in steps.calls}, 1, math.inf)  # compiles, if need be
    seconds = in_turns({name: one(name) for name in steps.calls}, rounds, math.inf)
    return Timing(context, {name: Times.of(taken) for name, taken in seconds.items()})


def _decode_steps(model: PreTrainedModel, optimized: PreTrainedModel, settings: DemoSettings) -> DecodeSteps:
    """Return steps of the original model (eager and Inductor) and of the optimized model."""
    of_generate = {"logits_to_keep": 1, "return_dict": True}  # like generate(), so that compiled code is reused
    models = {"eager": model, "inductor": torch.compile(model), "mla": optimized}
    calls = {name: torch.no_grad()(partial(one, **of_generate)) for name, one in models.items()}
    cached = (1, model.config.kv_lora_rank, 1, model.config.qk_rope_head_dim)  # heads, width: latents, rotary keys
    return DecodeSteps(
        model, calls, [cached] * settings.layers, batch=1, longest=max(settings.contexts),
        dtype=DTYPES[settings.dtype],
    )  # fmt: skip
