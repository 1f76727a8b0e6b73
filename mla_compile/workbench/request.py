"""The input of ``plan``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mla_compile.core.quantities import BYTES
from mla_compile.errors import InputError

AS_STORED = "as stored"
"""The ``weight_dtype`` of a request for weights in the formats of the model's checkpoint."""
WEIGHT_BYTES = {**BYTES, "fp4": 0.5625}
"""The bytes per weight of each dtype. ``fp4`` is NVFP4, where 16 values share a one-byte scale."""
MOST_DRAFTS = 64


@dataclass(frozen=True)
class Request:
    """A request to plan for: ``users`` with ``context`` tokens each. ``reserve`` is the share of memory kept free.

    ``weight_dtype`` is one of :data:`WEIGHT_BYTES` for all weights, or :data:`AS_STORED`. A step verifies
    ``draft_tokens`` per user. If all earlier drafts were accepted, a draft is accepted with probability ``acceptance``.
    ``prompt``: the tokens that each user sends; ``None`` means the whole context. ``output``: the tokens that each user
    gets; ``None`` means unknown.
    """

    context: int = 131072
    users: int = 32
    weight_dtype: str = "bf16"
    cache_dtype: str = "bf16"
    tp: int = 1
    dcp: int = 1
    reserve: float = 0.1
    draft_tokens: int = 0
    acceptance: float = 0.85
    prompt: int | None = None
    output: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens in each prompt."""
        return self.context if self.prompt is None else self.prompt

    @property
    def tokens_per_step(self) -> float:
        """The average number of tokens that a step adds to a user's output: accepted drafts and one other token."""
        return math.fsum(self.acceptance**i for i in range(1 + self.draft_tokens))

    def check(self) -> None:
        """Raise :class:`InputError` if a number of tokens or the acceptance is impossible."""
        if not 0 <= self.draft_tokens <= MOST_DRAFTS:
            raise InputError(f"draft_tokens is {self.draft_tokens}, expected a whole number from 0 to {MOST_DRAFTS}")
        if not 0 <= self.acceptance <= 1:
            raise InputError(f"acceptance is {self.acceptance}, expected a probability from 0 to 1")
        if not 1 <= self.prompt_tokens <= self.context:
            raise InputError(f"prompt is {self.prompt}, expected from 1 to the {self.context:,} tokens of context")
        if self.output is not None and self.output < 1:
            raise InputError(f"output is {self.output}, expected a whole number from 1")
