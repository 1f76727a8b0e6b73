"""Which method of a module could be compiled, by the calls that are being made."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

from mla_compile.dynamo.stack import step_among


class Incomparable:
    """Like an array, it has no truth value where it is compared."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")


class Stepped(nn.Module):
    def step(self, given: object) -> FrameType:
        return sys._getframe()


def test_variables_of_a_frame_are_not_compared() -> None:
    model = Stepped()
    frames = [model.step(Incomparable())]
    assert step_among(frames, model) == "step"
    assert step_among(frames, Stepped()) is None
