"""Draw the next token of each request according to the request's own settings.

transformers samples all requests of a step with the settings of its scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.continuous_batching.model_runner import ModelRunner

from mla_compile.core.sampling import check_sampling
from mla_compile.errors import OptionError


def check_drawn(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int | None = None) -> None:
    """Raise :class:`OptionError` if a request's settings would make the batched step fail."""
    check_sampling(temperature, top_k, top_p, seed)
    if temperature == 0:
        raise OptionError("temperature is 0, expected more; without a sampling the most probable token is taken")
    for name, value, bits in (("top_k", top_k, 31), ("seed", seed or 0, 64)):
        if value >= 1 << bits:
            raise OptionError(f"{name} is {value}, expected a number below 2**{bits}")


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are drawn: ``add_request(..., mla_sampling=Sampling(temperature=0.7))``.

    Attributes:
        temperature: above 0.
        top_k: the number of most probable tokens to draw from; 0 means all.
        top_p: tokens are drawn from the most probable tokens whose probabilities sum to this value.
        seed: equal seeds give equal tokens, unless rounding differs; None draws different tokens each time.

    Raises :class:`OptionError` for settings with which no token can be drawn.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    _generators: dict[torch.device, torch.Generator] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_drawn(self.temperature, self.top_k, self.top_p, self.seed)

    @classmethod
    def of(cls, config: GenerationConfig, seed: int | None = None) -> Sampling | None:
        """Return the sampling that a ``GenerationConfig`` specifies; None means the most probable token."""
        if not config.do_sample or config.temperature == 0:
            return None
        temperature = 1.0 if config.temperature is None else config.temperature
        top_p = 1.0 if config.top_p is None else config.top_p
        return cls(temperature, config.top_k or 0, top_p, seed)

    def draw(self, scores: torch.Tensor) -> torch.Tensor:
        """Draw a token [1] from ``scores`` [1,vocab]."""
        warpers = LogitsProcessorList()
        if self.temperature != 1.0:
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            warpers.append(TopPLogitsWarper(self.top_p))
        probabilities = warpers(None, scores).softmax(-1)
        if not probabilities.sum() > 0:  # the scores are NaN, and an error in multinomial would end the loop
            return scores[0].argmax(-1, keepdim=True)
        return torch.multinomial(probabilities, 1, generator=self._generator(scores.device))[0]

    def _generator(self, device: torch.device) -> torch.Generator | None:
        if self.seed is not None and device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators.get(device)

    def __deepcopy__(self, _: dict[int, object]) -> Sampling:
        return self  # a request that is put back into the queue continues its random sequence


class LatentRunner(ModelRunner):
    """Draws tokens with a request's own settings, if the request has settings."""

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        super()._sample(scores, output_ids)
        futures = [one for one in self.inputs_and_outputs.requests_in_batch if one.has_new_token]
        for row, future in enumerate(futures):
            sampling = future.state.logit_processor_kwargs.get("mla_sampling")
            if sampling is not None:
                token = sampling.draw(scores[0, row : row + 1])
                output_ids[0, row : row + 1].copy_(token)
                if self.return_logprobs:  # stored as float32 bits in the same integer tensor
                    log = scores[0, row].log_softmax(-1)[token]
                    output_ids[1, row : row + 1].copy_(log.view(torch.int32))
