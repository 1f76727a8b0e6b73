"""Sizes that guards make equal get one spelling; sizes they do not keep two."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Max, Mod

from mla_compile.passes.ir.sizes import holds, same, size


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


def test_whole_blocks_are_as_long_as_what_a_guard_says_they_cover(sizes):
    a, b, _ = sizes
    blocks = torch.sym_max(1, -(-(a + b) // 2))
    assert not same(size(2 * blocks), size(a + b))
    assert 2 * blocks == a + b
    assert same(size(2 * blocks), size(a + b))
    assert same(size(6 * blocks * b - 1), size(3 * (a + b) * b - 1))
    assert same(size(a + b + (-(a + b)) % 2), size(a + b)), "nothing is left over, of which a remainder is known"
    assert size(blocks) == -FloorDiv(-size(a + b), 2), "half of the length would be no whole number for all lengths"


def test_the_larger_of_two_sizes_is_known_for_all_that_are_not_nothing(sizes):
    a, b, _ = sizes
    assert size(torch.sym_max(2, a)).has(Max), "an exported program may be run with a length of one"
    assert same(size(torch.sym_max(2, a + b)), size(a + b)), "two sizes, of which none is nothing"


def test_the_ranges_of_another_graph_say_nothing(sizes):
    a, _, _ = sizes
    with tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv()))):
        assert size(torch.sym_max(2, a)).has(Max), "its symbols may have the same names"


def test_dynamo_guards_that_a_length_is_two_or_more(sizes):
    a, _, _ = sizes
    with tracing(TracingContext(FakeTensorMode(shape_env=a.node.shape_env))):
        assert same(size(torch.sym_max(2, a)), size(a))
        assert size(torch.sym_max(3, a)).has(Max)


def test_what_is_said_of_blocks_follows_a_symbol_that_is_replaced_later(sizes):
    a, b, c = sizes
    blocks = -(-(c + 1) // 3)
    assert 3 * blocks == c + 1
    assert a + b == b + c
    assert same(size(3 * blocks), size(a + 1))
    assert same(size(-3 * (-(a + 1) // 3)), size(c + 1))


def test_a_maximum_is_the_largest_only_where_it_is_for_all_lengths(sizes):
    a, b, _ = sizes
    assert same(size(torch.sym_max(1, a + 1)), size(a + 1))
    assert not same(size(torch.sym_max(a, b)), size(a))
    assert not same(size(torch.sym_max(4, a)), size(a))


def test_quotients_and_alternatives_that_hold_for_all_sizes():
    s = 2 + sympy.Symbol("s", integer=True, nonnegative=True)
    t = sympy.Symbol("t", integer=True, nonnegative=True)
    even, chunks = sympy.Eq(Mod(t, 2), 0), FloorDiv(3 * s - 1, s)
    assert holds(sympy.Eq(Mod(112 * (s + t), 56 * (s + t)), 0))
    assert holds(sympy.Eq(chunks, 2))
    assert holds(sympy.Ne(s + t, 1))
    assert holds(sympy.Or(even, sympy.Ne(s, 1)))
    assert not holds(even)
    assert not holds(sympy.Eq(chunks, 3))
    assert not holds(sympy.Eq(FloorDiv(2 * s + t, s), 2))
    assert not holds(sympy.Ne(t, 1))
    assert not holds(sympy.And(even, sympy.Ne(s, 1)))


def test_what_is_divided_by_one_of_its_factors_is_the_other(sizes):
    a, b, _ = sizes
    assert same(size(a * a // a), size(a)), "batch and length of one symbol, as `x.view(B, -1, D)` makes them"
    assert same(size(a * a * b // (a * b)), size(a))
    assert size(a * a // b).has(FloorDiv)
    assert size((a * a + 1) // a).has(FloorDiv)
