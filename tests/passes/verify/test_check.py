"""The numeric check of rewritten sites: it passes what is right, finds what is wrong, and rolls back only that."""

from __future__ import annotations

from collections import Counter
from types import CodeType

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from mla_compile import pipeline
from mla_compile.codes import Code
from mla_compile.errors import VerificationError
from mla_compile.options import Options
from mla_compile.passes.rewrite import absorb as absorb_pass
from mla_compile.passes.sources.records import AbsorbPlan
from mla_compile.passes.verify.evaluate import of_sizes
from mla_compile.pipeline import rewrites
from tests.support.calls import counted
from tests.support.modules import MLA, inputs
from tests.support.programs import assert_equal, assert_untouched, export
from tests.support.tiers import also

aten = torch.ops.aten


def verified(module, given, **options):
    program = export(module, given)
    return program, pipeline.run(program, Options(verify=True, forms="absorbed", **options))


@pytest.mark.singly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *also("family", torch.float16)], ids=str)
@pytest.mark.parametrize("core", ["sdpa", "matmul"])
def test_a_right_rewrite_passes_and_reports_its_ratio(core, dtype):
    _, outcome = verified(MLA(core=core).to(dtype), inputs(S=2, T=9, dtype=dtype))
    (site,) = outcome.report.sites
    assert site.code is Code.ABSORBED
    assert site.precision_ratio is not None
    assert 0 < site.precision_ratio < 1.5


def scaled(factor):
    """An absorb pass that gets the scale of the scores wrong."""

    def wrong(plan: AbsorbPlan, *how, **more):
        done = absorb_pass.absorb(plan, *how, **more)
        for node in done.out.graph.nodes:
            if node.target is torch.ops.mla_compile.decode_attention.default:
                node.kwargs = {**node.kwargs, "scale": node.kwargs["scale"] * factor}
        return done

    return wrong


def test_a_wrong_rewrite_is_rolled_back(monkeypatch):
    monkeypatch.setattr(rewrites, "absorb_site", scaled(1.001))
    module, given = MLA().double(), inputs()
    program, outcome = verified(module, given)
    (site,) = outcome.report.sites
    assert site.code is Code.VERIFY_FAILED
    assert "float64" in site.reason
    assert_untouched(program, outcome)
    assert_equal(module, outcome.program, given)


def test_strict_raises_instead_of_rolling_back(monkeypatch):
    monkeypatch.setattr(rewrites, "absorb_site", scaled(1.001))
    with pytest.raises(VerificationError, match="float64"):
        verified(MLA().double(), inputs(), strict=True)


def test_only_the_wrong_site_is_rolled_back(monkeypatch):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = MLA().double(), MLA(core="matmul").double()

        def forward(self, x, c, r):
            return self.first(x, c, r) + self.second(x, c, r)

    def wrong(plan, *how, **more):
        return scaled(1.01 if plan.site.probs is None else 1.0)(plan, *how, **more)

    monkeypatch.setattr(rewrites, "absorb_site", wrong)
    module, given = Two(), inputs()[:3]
    _, outcome = verified(module, given, lowering="aten")
    assert sorted(str(s.code) for s in outcome.report.sites) == ["absorbed", "verify_failed"]
    assert_equal(module, outcome.program, given)


def test_less_precision_than_the_original_is_found(monkeypatch):
    def coarse(plan, *how, **more):
        """Rounds the absorbed queries of a float32 model to bfloat16."""
        done = absorb_pass.absorb(plan, *how, **more)
        (node,) = (n for n in done.out.graph.nodes if n.target is torch.ops.mla_compile.decode_attention.default)
        query = node.args[0]
        with node.graph.inserting_before(node):
            low = node.graph.call_function(aten.mul.Tensor, (query, 2.0**12 + 1))
            high = node.graph.call_function(aten.sub.Tensor, (low, query))
            cut = node.graph.call_function(aten.sub.Tensor, (low, high))  # Dekker's split: 12 of 24 bits are kept
        for new in (low, high, cut):
            new.meta["val"] = query.meta["val"]
        node.replace_input_with(query, cut)
        return done

    monkeypatch.setattr(rewrites, "absorb_site", coarse)
    _, outcome = verified(MLA().float(), inputs(T=9, dtype=torch.float32))
    (site,) = outcome.report.sites
    assert site.code is Code.VERIFY_FAILED


def test_a_context_too_long_for_a_float64_run_is_said(monkeypatch):
    monkeypatch.setattr("mla_compile.passes.verify.sites.BUDGET_BYTES", 1)
    _, outcome = verified(MLA(core="matmul").float(), inputs(dtype=torch.float32))
    (site,) = outcome.report.sites
    assert site.code is Code.ABSORBED
    assert site.precision_ratio is None
    assert any("not checked" in note for note in site.notes)


def test_sizes_that_are_symbolic_stay_so():
    """A size read off an input that is no part of the site: drawing that input must not ask for its numbers."""

    class Sized(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(8, 2 * (6 + 4), bias=False)

        def forward(self, ids, query, latent):
            k, v = self.up(latent).view(ids.shape[0], latent.shape[1], 2, 10).transpose(1, 2).split([6, 4], -1)
            return torch.nn.functional.scaled_dot_product_attention(query, k, v)

    auto = torch.export.Dim.AUTO
    given = (torch.ones(2, 3, dtype=torch.long), torch.randn(2, 2, 3, 6), torch.randn(2, 9, 8))
    program = export(Sized(), given, ({0: auto, 1: auto}, {0: auto, 2: auto}, {0: auto, 1: auto}))
    outcome = pipeline.run(program, Options(verify=True, forms="absorbed"))
    assert [s.code for s in outcome.report.sites] == [Code.ABSORBED]
    shapes = [outcome.program.node(name).meta["val"].shape for name in ("ids", "query", "latent")]
    symbolic = [d for shape in shapes for d in shape if isinstance(d, torch.SymInt)]
    assert len(symbolic) == 6
    assert all(not d.node.expr.is_number for d in symbolic)


def test_symbols_that_others_replace_are_known_in_any_order():
    env = ShapeEnv()
    x = FakeTensorMode(shape_env=env).from_tensor(torch.ones(5, 7, 9), static_shapes=False)
    a, b, c = (dim.node.expr for dim in x.shape)
    env.replacements = {c: b + 2, b: a + 2}
    assert of_sizes([x.shape[0]]) == {a: 5, b: 7, c: 9}


def test_sizes_of_a_layer_cost_as_much_in_a_deep_model():
    """Each layer's length is a symbol, and replaced by that of the first."""

    def calls(layers: int) -> int:
        env, counts = ShapeEnv(), Counter[CodeType]()
        mode, of_its_own = FakeTensorMode(shape_env=env), StatelessSymbolicContext([DimDynamic.DYNAMIC])
        source = (ConstantSource(f"x{i}") for i in range(layers))
        rows = [mode.from_tensor(torch.ones(5), symbolic_context=of_its_own, source=one) for one in source]
        lengths = [one.shape[0] for one in rows]
        assert all(length == lengths[0] for length in lengths)  # from here on they are
        sizes = counted(of_sizes, counts)
        assert all(len(sizes([length])) == layers for length in lengths)
        return counts.total()

    calls(20)  # what sympy remembers of expressions
    assert calls(20) < 2.3 * calls(10)


@pytest.mark.parametrize(
    "narrow",
    [
        lambda s: s.softmax(-1, dtype=torch.float32),
        *also("combination", lambda s: s.float().softmax(-1)),
    ],
    ids=["in the softmax", "before it"],
)
def test_a_fill_that_a_cast_makes_infinite_is_so_in_the_float64_run_too(narrow):
    """Where every key is hidden, as in most of the masks drawn for two of them, the softmax gives nan."""

    class Filled(MLA):
        def attend(self, q, k, v, mask):
            hidden = ~(torch.arange(k.shape[2]) <= torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None])
            scores = (q @ k.mT * self.scale).masked_fill(hidden, torch.finfo(q.dtype).min)
            return narrow(scores).to(v.dtype) @ v

    _, outcome = verified(Filled(), inputs(T=2))
    (site,) = outcome.report.sites
    assert site.code is Code.ABSORBED, site.reason
