"""What ``plan`` is asked."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mla_compile.core.quantities import BYTES
from mla_compile.errors import InputError

AS_STORED = "as stored"
"""The dtype of weights in a request that takes them as the model's checkpoint stores them."""
WEIGHT_BYTES = {**BYTES, "fp4": 0.5625}
"""Bytes of a weight by dtype; ``fp4`` is NVFP4, in which 16 values share a scale of one byte."""
MOST_DRAFTS = 64


@dataclass(frozen=True)
class Request:
    """What is asked for: ``users`` with ``context`` tokens each; ``reserve`` is the share of memory kept free.

    ``weight_dtype`` is one of :data:`WEIGHT_BYTES` for all weights, or :data:`AS_STORED`. A step verifies
    ``draft_tokens`` for each user, each of which is accepted with the probability ``acceptance`` if those before it
    were. Each user brings a ``prompt`` of so many tokens, as long as the context where it is ``None``, and is answered
    with ``output`` tokens; ``None`` leaves open how many.
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
        """Of each prompt."""
        return self.context if self.prompt is None else self.prompt

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step adds to the output of a user, on average: the accepted ones and the one after them."""
        return math.fsum(self.acceptance**i for i in range(1 + self.draft_tokens))

    def check(self) -> None:
        """Raises :class:`InputError` for numbers of tokens that no step and no prompt can have."""
        if not 0 <= self.draft_tokens <= MOST_DRAFTS:
            raise InputError(f"draft_tokens is {self.draft_tokens}, expected a whole number from 0 to {MOST_DRAFTS}")
        if not 0 <= self.acceptance <= 1:
            raise InputError(f"acceptance is {self.acceptance}, expected a probability from 0 to 1")
        if not 1 <= self.prompt_tokens <= self.context:
            raise InputError(f"prompt is {self.prompt}, expected from 1 to the {self.context:,} tokens of context")
        if self.output is not None and self.output < 1:
            raise InputError(f"output is {self.output}, expected a whole number from 1")
