"""Structural keys: values with equal keys are the same value."""

from __future__ import annotations

import gc

import pytest
import torch

from mla_compile.core.alike import constant_of, each


def test_numbers_of_different_types_differ() -> None:
    assert len({constant_of(value) for value in (1, 1.0, True, "1", None, torch.int8, 1j)}) == 7
    assert constant_of(float("nan")) == constant_of(float("nan"))
    assert constant_of(0.0) != constant_of(-0.0)


def test_an_object_equals_only_itself() -> None:
    one = object()
    assert constant_of(one) == constant_of(one)
    assert len({constant_of(one), constant_of(one), constant_of(object())}) == 2


def test_no_object_takes_the_place_of_one_that_is_gone() -> None:
    keys = []
    for _ in range(64):  # CPython gives the place in memory of one to the next
        keys.append(constant_of(torch.Generator()))
        gc.collect(0)
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("one", "other"), [([1], (1,)), ({"a": 1}, {"b": 1}), (slice(1), slice(2)), ([[1], 2], [[1, 2]])]
)
def test_nested_values_keep_their_structure(one: object, other: object) -> None:
    assert each(one, constant_of) == each(one, constant_of)
    assert each(one, constant_of) != each(other, constant_of)
