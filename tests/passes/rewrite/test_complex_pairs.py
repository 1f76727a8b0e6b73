"""Complex numbers in graphs that Inductor compiles: they become pairs of real numbers, all of them or none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import mla_compile
from mla_compile.core.program import Program
from mla_compile.passes.rewrite.complex_pairs import real_rotations, unsplit
from tests.support.models import build
from tests.support.programs import export, optimized, run, seeded, trace
from tests.support.tiers import full
from tests.zoo import rope_complex_table
from tests.zoo.base import Dims

real, pairs = torch.view_as_real, torch.view_as_complex


def computed(program: Program) -> list[fx.Node]:
    """The operators with complex results."""
    called = [n for n in program.gm.graph.nodes if n.op == "call_function"]
    return [n for n in called if isinstance(v := n.meta["val"], Tensor) and v.is_complex()]


def split(function: Callable[..., Tensor], *given: Tensor) -> int:
    """How many values are replaced; the results have to stay the same."""
    program = trace(function, given, [])
    done = real_rotations(program.gm.graph, program.fake_mode)
    program.gm.graph.lint()
    program.gm.recompile()
    assert not (done and computed(program))
    torch.testing.assert_close(program.gm(*given)[0], function(*given), rtol=1e-12, atol=1e-12)
    return done


X, ANGLE = seeded(2, 3, 4, 2), seeded(3, 4)
TURN = torch.polar(torch.ones_like(ANGLE), ANGLE)


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (lambda x, t: real(pairs(x) * t), (X, TURN)),
        (lambda x, t: real(pairs(x).transpose(0, 1) * t.unsqueeze(1)).flatten(2), (X, TURN)),
        (lambda x, t: real(pairs(x) * t.conj()), (X, TURN)),
        (lambda x, a: real(pairs(x) * torch.polar(torch.ones_like(a), a)), (X, ANGLE)),
        (lambda x, t: real(torch.add(pairs(x), t, alpha=2) - pairs(x)[:1]), (X, TURN)),
        (lambda x, t: real(t[None, 1:, :2] * pairs(x)[:, 1:, :2] * x[:, 1:, :2, 0]), (X, TURN)),
    ],
    ids=["rotation", "moved", "conjugate", "polar", "sums", "slices"],
)
def test_complex_values_become_pairs(function: Callable[..., Tensor], given: tuple[Tensor, ...]):
    assert split(function, *given) > 1


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda x, t: pairs(x) * t, "a complex result"),
        (lambda x, t: real(pairs(x) * t + x[..., 0]), "add.Tensor of a complex and a real number"),
        (lambda x, t: real((pairs(x) * t).sqrt()), "sqrt.default on complex numbers"),
        (lambda x, t: (pairs(x) * t).abs(), "abs.default on complex numbers"),
    ],
)
def test_a_graph_with_other_operators_stays(function: Callable[..., Tensor], what: str):
    program = trace(function, (X, TURN), [])
    found = unsplit(program.gm.graph)
    assert found is not None
    assert what in found[1]
    before = str(program.gm.graph)
    assert real_rotations(program.gm.graph, program.fake_mode) == 0
    assert str(program.gm.graph) == before


def test_graphs_without_complex_numbers_stay():
    assert split(lambda x: x * 2, X) == 0


@pytest.mark.parametrize("codegen", ["inductor", "eager"])
def test_the_graph_that_is_compiled_has_pairs(codegen: str):
    """A module with a table of complex numbers, which an input becomes; as eager code, it stays."""
    module = rope_complex_table.build(Dims())
    given = seeded(2, 1, 11), seeded(2, 5, 7), seeded(2, 5, 4)
    outcome = optimized(export(module, given), codegen=codegen)
    assert outcome.absorbed == 1
    assert bool(computed(outcome.program)) is (codegen == "eager")
    with torch.no_grad():
        torch.testing.assert_close(run(outcome.program, *given)[0], module(*given)[0], rtol=1e-10, atol=1e-10)


@full("inductor")
def test_a_model_that_rotates_complex_numbers():
    """Inductor compiles DeepSeek-V2 without its warning about complex operators."""
    model = build("deepseek_v2", num_hidden_layers=1).float()
    given = {"input_ids": torch.arange(20)[None] % 90}
    fast: Any = mla_compile.optimize(model, strict=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*complex operators")
        torch.testing.assert_close(fast(**given).logits, model(**given).logits, rtol=1e-4, atol=1e-4)
    assert {p.name: p.changes for p in fast.mla_report.passes}["complex_pairs"] > 1
