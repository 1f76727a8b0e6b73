"""Sizes of the graph, and tensors put together and taken apart along them."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.passes.attention.flex import _is_true
from mla_compile.passes.canonical.normalize import normalize
from mla_compile.passes.ir.arrange import SizeSources, arrange
from mla_compile.passes.ir.axes import fresh_axes
from mla_compile.passes.ir.expr import Expr
from mla_compile.passes.ir.graph import Builder, shape
from mla_compile.passes.ir.sizes import quotient, same
from tests.passes.linear.test_odd import symbolic
from tests.support.programs import calls, seeded, trace

s, t = sympy.symbols("s t", integer=True, positive=True)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(12, 4, 3), (12, 5, None), (12, 0, None), (6 * s, 2 * s, 3), (6 * s, 3, 2 * s), (s * t, t, s), (s, t, None),
     (s, 2, None), (6, s, None)],
)  # fmt: skip
def test_quotient(a, b, expected):
    found = quotient(a, b)
    assert found is None if expected is None else same(found, expected)


def test_two_products_of_symbolic_sizes_in_one_reshape():
    """One of them can be inferred; the other is multiplied when it runs."""
    program = symbolic(lambda z: z.clone(), [seeded(2, 3, 4, 5)], [])
    gm = program.gm
    z, output = gm.graph.find_nodes(op="placeholder")[0], gm.graph.output_node()
    axes = fresh_axes(shape(z))
    builder = Builder(output, program.fake_mode)
    (a,), (b,), (c,), (d,) = axes
    output.args = ((arrange(builder, SizeSources(builder, [(z, axes)]), z, axes, [(a, c), (b, d)]),),)
    gm.graph.lint()
    gm.recompile()
    for data in (seeded(2, 3, 4, 5), seeded(7, 2, 3, 2)):
        assert torch.equal(gm(data)[0], data.transpose(1, 2).flatten(2, 3).flatten(0, 1))


def test_a_slice_of_everything_is_no_operator():
    program = trace(lambda z: z.clone(), [seeded(2, 3)], [])
    whole = Expr.leaf(program.gm.graph.find_nodes(op="placeholder")[0], program.fake_mode)
    assert whole.slice(1, 0, 3) is whole
    assert whole.slice(1, 0, 2).shape == (2, 2)


def test_detach_is_empty():
    program = trace(lambda z: torch.ops.aten.detach.default(z) * 2.0, [seeded(2, 3)], [])
    assert normalize(program.gm.graph) == 1
    assert calls(program) == ["mul.Tensor"]


@pytest.mark.parametrize(
    ("mask", "hides_nothing"),
    [
        (lambda b: torch.ops.aten.full.default([], True), True),
        (lambda b: torch.ops.aten.new_full.default(b, [], True), True),
        (lambda b: torch.ops.aten.new_ones.default(b, []), True),
        (lambda b: torch.ops.aten.full.default([], False), False),
        (lambda b: b >= 0, False),
    ],
)
def test_mask_mods_that_hide_nothing(mask, hides_nothing):
    assert _is_true(make_fx(mask)(torch.tensor(0))) is hides_nothing
