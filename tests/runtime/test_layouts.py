"""Rows of another graph, which code was made for as they lay then."""

from __future__ import annotations

import itertools

import pytest
import torch

from mla_compile.runtime.latent_calls import example_in_order, in_order

SIZES = 2, 5, 3, 4


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (2, 0, 3, 1)])
def test_rows_lie_as_the_code_expects_them_however_they_come(order: tuple[int, ...]) -> None:
    expected = example_in_order(torch.empty(SIZES), order).stride()
    for other in itertools.permutations(range(4)):
        rows = example_in_order(torch.empty(SIZES), other).copy_(torch.randn(SIZES))
        got = in_order(rows, order)
        assert got.stride() == expected
        assert torch.equal(got, rows)
        assert (got is rows) == (rows.stride() == expected), "no copy where none is needed"
