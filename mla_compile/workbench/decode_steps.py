"""Decode steps of a transformers causal language model, with the arguments of generate(), on random cache rows.

Caches are not filled by running a prompt. Attention takes just as long on random rows, and reading a prompt of 100,000
tokens would take longer than all measurements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mla_compile.backend import mla
from mla_compile.core.cache_argument import cache_argument

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutputWithPast

WARM_UP = (97, 98, 99)
"""Contexts of steps before timing. The first compiles for a static size, the second for a symbolic size."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 8e-2, torch.float16: 2e-2}
"""The allowed difference of logits, relative to the largest logit."""


def variants(
    model: PreTrainedModel, names: Sequence[str], codegen: str = "inductor"
) -> dict[str, Callable[..., CausalLMOutputWithPast]]:
    """Return the model uncompiled (``eager``), compiled (``inductor``), and compiled by mla_compile (``mla``).

    If ``codegen`` is "eager", the compiled variants run their graphs without Inductor.
    """
    made: dict[str, Callable[..., CausalLMOutputWithPast]] = {}
    for name in names:
        if name == "eager":
            made[name] = model
        elif name == "inductor":
            made[name] = torch.compile(model, backend=codegen)
        else:  # passed as a function, because a checkout that is not installed has no entry point
            made[name] = torch.compile(model, backend=mla, options={"codegen": codegen})
    return made


class DecodeSteps:
    """A model, the variants to compare, and a pool of random rows from which caches are cut.

    Args:
        model: the model in eval mode, on its device.
        calls: maps each variant to the callable that runs its step.
        slots: for each slot of the cache, the heads and width of K, then the heads and width of V.
        longest: the number of tokens in the longest cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        calls: Mapping[str, Callable[..., CausalLMOutputWithPast]],
        slots: Sequence[tuple[int, int, int, int]],
        *,
        batch: int,
        longest: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self.model, self.calls, self.batch = model, calls, batch
        self.dtype, self.device = dtype, device or torch.device("cpu")
        self._synchronize: Callable[[], None] = torch.get_device_module(self.device).synchronize  # no-op on a CPU
        generator = torch.Generator(self.device).manual_seed(3)

        def rows(heads: int, width: int) -> Tensor:
            return torch.randn(
                batch, heads, longest, width, generator=generator, dtype=torch.float32, device=self.device
            ).to(dtype)

        self.pool = [(rows(h, w), rows(h2, w2)) for h, w, h2, w2 in slots]

    def dynamic(self, tokens: int) -> Cache:
        """Return a cache of ``tokens`` tokens that grows by concatenation."""
        from transformers import DynamicCache

        cache: Cache = DynamicCache(config=self.model.config)
        for layer, (keys, values) in zip(cache.layers, self.pool, strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = (_cut(rows, tokens) for rows in (keys, values))
        return cache

    def inputs(self, tokens: int, cache: Cache) -> dict[str, object]:
        """Return the arguments that generate() gives the model for the token after ``tokens`` cached tokens."""
        static = hasattr(cache.layers[0], "cumulative_length")
        if static:
            for layer in cache.layers:
                layer.cumulative_length.fill_(tokens)
        shape, device = (self.batch, 1), self.device
        mask = torch.ones(self.batch, tokens + 1, dtype=torch.long, device=device) if static else None
        prepared: dict[str, object] = self.model.prepare_inputs_for_generation(
            torch.full(shape, 7, device=device), next_sequence_length=1, attention_mask=mask,
            position_ids=torch.full(shape, tokens, device=device), use_cache=True,
            **{cache_argument(self.model): cache},
        )  # fmt: skip
        return prepared

    def step(self, variant: str, tokens: int, cache: Cache | None = None) -> tuple[float, Tensor]:
        """Return seconds and logits of one decode step. The device is idle before and after the step.

        If ``cache`` is None, the second step in a growing cache is timed, because the first step copies the rows.
        """
        if cache is None:
            cache = self.dynamic(tokens - 1)
            self.calls[variant](**self.inputs(tokens - 1, cache))
        inputs = self.inputs(tokens, cache)
        self._synchronize()
        start = time.perf_counter()
        result = self.calls[variant](**inputs)
        self._synchronize()
        return time.perf_counter() - start, result.logits


def _cut(rows: Tensor, tokens: int) -> Tensor:
    """Return a contiguous copy of the first rows, because compiled code checks strides even if the batch is 1."""
    return rows[:, :, :tokens].clone(memory_format=torch.contiguous_format)


def differences(logits: Mapping[str, Tensor]) -> dict[str, float]:
    """Return each variant's largest difference from the first variant, divided by the first variant's largest logit."""
    (_, reference), *others = logits.items()
    return {name: float((x - reference).abs().max() / reference.abs().max()) for name, x in others}
