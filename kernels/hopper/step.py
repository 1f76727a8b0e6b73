"""One launch of a Hopper kernel as data: what kernels/triton/step.py has not, TMA descriptors. Meta tensors will do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from mla_compile.kernels.triton.step import Step


class Box(NamedTuple):
    """A TMA descriptor but for its address: of a 3-D tensor, in elements."""

    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    block: tuple[int, int, int]
    dtype: torch.dtype

    def of(self, T: int) -> Box:
        """The box of as many requests of T tokens: dense requests stay so, others keep their distance."""
        (B, tokens, width), (outer, row, column) = self.shape, self.strides
        return self._replace(shape=(B, T, width), strides=(T * row if outer == tokens * row else outer, row, column))


@dataclass(frozen=True)
class GluonStep(Step):
    """A launch of a Gluon kernel; ``boxes`` are the arguments that are TMA descriptors."""

    boxes: dict[str, Box]
