"""One launch of a Hopper kernel as data: what kernels/triton/step.py has not. Meta tensors will do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.triton.step import Step

_I32 = (1 << 31) - 1


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


def reach(call: DecodeCall) -> int | None:
    """How many cache rows the query tokens of a request see between them; None without a window."""
    return min(call.window + call.sizes.S - 1, _I32) if call.window > 0 else None


def numbers(call: DecodeCall) -> dict[str, int | float | None]:
    """What the kernels do to the scores, in base 2, and the window; None compiles to nothing."""
    factor, capped = math.log2(math.e), call.softcap > 0
    return {
        "scale": call.scale / call.softcap if capped else call.scale * factor,
        "softcap": call.softcap * factor if capped else None,
        "reach": reach(call),
    }
