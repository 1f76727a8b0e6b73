"""Patterns that ONNX does not support are rewritten, and what only looks like one of them stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from mla_compile.core.program import Program
from mla_compile.onnx.complex_weights import split_complex
from mla_compile.onnx.tidy import tidy
from tests.support.programs import calls, seeded, trace


def tidied(program: Program, inputs: Sequence[Tensor]) -> Tensor:
    """The result of a program after it was rewritten."""
    tidy(program)
    program.gm.recompile()
    (result,) = program.gm(*inputs)
    return result


def written(*ends: tuple[int | None, int | None], step: int = 1) -> Callable[..., Tensor]:
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
        (((None, 2), (2, None)), (2, 3), True),
        (((0, 2), (2, 99)), (2, 3), True),
        (((0, 2), (3, 5)), (2, 2), False),  # a column is left
        (((0, 3), (2, 5)), (3, 3), False),  # the second replaces a column of the first
        (((0, 5),), (5,), False),  # alone
        (((0, 2), (2, 4)), (2, 2), False),  # the last column is left
    ],
)
def test_slices_that_fill_new_memory_become_a_concatenation(
    ends: tuple[tuple[int | None, int | None], ...], widths: tuple[int, ...], joined: bool
) -> None:
    parts = [seeded(3, width, seed=n) for n, width in enumerate(widths)]
    program = trace(written(*ends), parts, [])
    (want,) = program.gm(*parts)
    assert torch.equal(tidied(program, parts), want)
    assert ("cat.default" in calls(program)) == joined, calls(program)
    assert ("slice_scatter.default" in calls(program)) != joined


def test_slices_with_a_step_stay() -> None:
    parts = [seeded(3, 2), seeded(3, 1, seed=1)]
    program = trace(written((0, 4), (4, 5), step=2), parts, [])  # columns 0 and 2, then 4
    tidy(program)
    assert "cat.default" not in calls(program)


@pytest.mark.parametrize(("dims", "left"), [((1, 2), (1,)), ((-1, 1), (1,)), ((2,), None), ((1,), (1,))])
def test_only_axes_of_size_1_are_squeezed(dims: tuple[int, ...], left: tuple[int, ...] | None) -> None:
    """torch ignores the others, and ONNX raises an error."""
    x = seeded(2, 1, 3)
    program = trace(lambda x: torch.ops.aten.squeeze.dims(x, dims) * 2, [x], [])
    assert torch.equal(tidied(program, [x]), x.squeeze(dims) * 2)
    found = [n.args[1] for n in program.gm.graph.nodes if "squeeze" in str(n.target)]
    assert [tuple(axes) for axes in found] == ([] if left is None else [left])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.view_as_real(torch.view_as_complex(x) * (0.5 - 2j)),
        lambda x: torch.view_as_real((2j * x) * torch.view_as_complex(x)[..., None]),
        lambda x: torch.view_as_real(torch.view_as_complex(x) * 3.0),
    ],
)
def test_complex_numbers_of_python_multiply_both_parts(function: Callable[[Tensor], Tensor]) -> None:
    x = seeded(3, 4, 2)
    program = trace(function, [x], [])
    split_complex(program)
    program.gm.recompile()
    (got,) = program.gm(x)
    assert not any(n.meta["val"].is_complex() for n in program.gm.graph.nodes if isinstance(n.meta.get("val"), Tensor))
    torch.testing.assert_close(got, function(x), rtol=1e-12, atol=1e-12)


def added(x: Tensor, at: Tensor, *rows: Tensor) -> Tensor:
    for one in rows:
        x = x.index_add(0, at, one)
    return x


def test_rows_of_experts_are_summed_in_float32() -> None:
    """ONNX Runtime adds no half-precision rows on a CPU; the sum is rounded once, behind the last expert."""
    rows = [seeded(2, 5, seed=n).bfloat16() for n in range(3)]
    given = seeded(4, 5, seed=9).bfloat16(), torch.tensor([1, 1]), *rows
    program = trace(added, given, [])
    got = tidied(program, given)
    assert torch.equal(got, added(given[0].float(), given[1], *(one.float() for one in rows)).bfloat16())
    sums = program.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.index_add.default)
    assert [node.meta["val"].dtype for node in sums] == [torch.float32] * 3
    assert sums[1].args[0] is sums[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_rows_of_other_dtypes_are_summed_as_they_are(dtype: torch.dtype) -> None:
    given = torch.ones(4, 5, dtype=dtype), torch.tensor([1, 1]), torch.ones(2, 5, dtype=dtype)
    program = trace(added, given, [])
    tidy(program)
    assert calls(program) == ["index_add.default"]
