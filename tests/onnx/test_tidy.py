"""Patterns that ONNX does not support are rewritten, and what only looks like one of them stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_compile.onnx.tidy import tidy
from tests.support.programs import calls, seeded, trace


def written(*ends: tuple[int, int | None], step: int = 1) -> Callable[..., Tensor]:
    """``x`` and ``y`` written beside each other into new memory of 5 columns, at these places."""

    def function(*parts: Tensor) -> Tensor:
        out = torch.zeros(3, 5, dtype=torch.float64)
        for part, (start, end) in zip(parts, ends, strict=True):
            out = torch.ops.aten.slice_scatter(out, part, 1, start, end, step)
        return out

    return function


@pytest.mark.parametrize(
    ("ends", "widths", "joined"),
    [
        (((0, 2), (2, 5)), (2, 3), True),
        (((2, 5), (0, 2)), (3, 2), True),
        (((0, 2), (2, None)), (2, 3), True),
        (((0, 2), (2, 99)), (2, 3), True),
        (((0, 2), (3, 5)), (2, 2), False),  # a column is left
        (((0, 3), (2, 5)), (3, 3), False),  # the second replaces a column of the first
        (((0, 5),), (5,), False),  # alone
        (((0, 2), (2, 4)), (2, 2), False),  # the last column is left
    ],
)
def test_slices_that_fill_new_memory_become_a_concatenation(
    ends: tuple[tuple[int, int | None], ...], widths: tuple[int, ...], joined: bool
) -> None:
    parts = [seeded(3, width, seed=n) for n, width in enumerate(widths)]
    program = trace(written(*ends), parts, [])
    (want,) = program.gm(*parts)
    tidy(program)
    assert ("cat.default" in calls(program)) == joined, calls(program)
    assert ("slice_scatter.default" in calls(program)) != joined
    (got,) = program.gm(*parts)
    assert torch.equal(got, want)


def test_slices_with_a_step_stay() -> None:
    parts = [seeded(3, 3), seeded(3, 2, seed=1)]
    program = trace(written((0, 5), (1, 5), step=2), parts, [])
    tidy(program)
    assert "cat.default" not in calls(program)
