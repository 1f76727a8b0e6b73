"""Sizes that guards make equal get one spelling; sizes they do not keep two."""

from __future__ import annotations

import pytest
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from mla_compile.passes.ir.sizes import same, size


@pytest.fixture
def sizes():
    """Three symbolic sizes of one shape environment: 5, 3 and 5."""
    env = ShapeEnv()
    found = []
    for name, value in (("a", 5), ("b", 3), ("c", 5)):
        source = ConstantSource(name)
        symbol = env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
        found.append(env.create_symintnode(symbol, hint=value, source=source))
    return found


def test_a_guard_on_two_sums_makes_their_terms_one(sizes):
    a, b, c = sizes
    assert not same(size(a + b), size(b + c))
    assert a + b == b + c  # a guard
    assert same(size(a + b), size(b + c))
    assert same(size(a), size(c))
    assert not same(size(a), size(b))


def test_later_guards_are_read_too_and_meet_the_earlier_ones(sizes):
    a, b, c = sizes
    assert a + c == 2 * b + 4
    assert not same(size(a), size(c))
    assert a + b == b + c
    assert same(size(a), size(b + 2))
    assert same(size(c), size(b + 2))


def test_inequalities_and_products_say_nothing(sizes):
    a, b, c = sizes
    assert a > b
    assert a * b == b * c
    assert not same(size(a), size(b))
