"""Guards are asked one by one: an ``or`` in one of them says nothing about the others."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from mla_compile.core.guards import guards_of


def symbolic(*shape: int) -> tuple[ShapeEnv, Tensor]:
    """A fake tensor of which the first axis is open."""
    env = ShapeEnv()
    kinds: list[DimDynamic] = [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (len(shape) - 1)
    context: StatelessSymbolicContext = StatelessSymbolicContext(dynamic_sizes=kinds)  # type: ignore[type-arg]
    return env, FakeTensorMode(shape_env=env).from_tensor(torch.zeros(shape), symbolic_context=context)


def test_an_or_leaves_the_other_guards_in_force():
    env, x = symbolic(6, 4)
    n = x.shape[0]
    assert n > 3
    assert (n == 6) | (n % 5 == 0)
    assert n < 50
    holds = guards_of(env, [x], ignore_static=False)
    said = {shape: holds([torch.zeros(shape)]) for shape in [(6, 4), (10, 4), (12, 4), (60, 4), (6, 5), (10, 7)]}
    assert said == {(6, 4): True, (10, 4): True, (12, 4): False, (60, 4): False, (6, 5): False, (10, 7): False}


def test_numbers_may_stand_for_sizes():
    env, x = symbolic(6)
    assert (x.shape[0] == 6) | (x.shape[0] > 8)
    assert x.shape[0] < 20
    holds = guards_of(env, [x.shape[0]])
    assert [n for n in (2, 6, 8, 9, 19, 20, 30) if holds([n])] == [6, 9, 19]


def test_no_guards_hold_for_anything():
    assert guards_of(ShapeEnv(), [])([])
