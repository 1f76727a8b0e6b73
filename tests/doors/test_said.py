"""Doors that do nothing, or not yet, say so, once and at the user's line."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch._inductor import compile_fx
from torch._inductor.exc import InductorError

import mla_compile
from mla_compile import backend
from mla_compile.codes import Code
from mla_compile.errors import MlaCompileWarning
from mla_compile.report.facts import facts_of
from mla_compile.report.verdicts import verdict
from mla_compile.report.wording import headline, not_mla
from tests.support.toy import Toy, decode_inputs

TESTS = Path(__file__).parents[1]


def said(call):
    """The messages of our warnings during ``call()``, all of which point to the tests and not to a library."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    ours = [w for w in caught if issubclass(w.category, MlaCompileWarning)]
    assert all(Path(w.filename).is_relative_to(TESTS) for w in ours), [w.filename for w in ours]
    return [str(w.message) for w in ours]


def through_optimize(module):
    return mla_compile.optimize(module, codegen="eager")


def through_backend(module):
    return torch.compile(module, backend="mla", options={"codegen": "eager"})


@pytest.mark.parametrize("door", [through_optimize, through_backend])
def test_gradients_that_are_enabled(door):
    """However many graphs are compiled of them."""
    module, given = Toy().eval(), decode_inputs(queries=1)
    fast = door(module)
    (message,) = said(lambda: [fast(*decode_inputs(queries=queries)) for queries in (1, 2, 3)])
    assert message.startswith("gradients are enabled")
    assert "inference_mode" in message
    assert said(lambda: fast(*given)) == []
    with torch.inference_mode():
        assert said(lambda: fast(*given)) == []


class Plain(torch.nn.Linear):
    """Attention of K and V per head, which no weight makes of fewer values."""

    def forward(self, x):
        heads = super().forward(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(*heads)


@pytest.mark.parametrize("door", [through_optimize, through_backend])
@torch.no_grad()
def test_attention_without_a_latent_however_many_graphs_have_it(door):
    fast = door(Plain(8, 3 * 4 * 8))
    (message,) = said(lambda: [fast(torch.randn(1, tokens, 8)) for tokens in (5, 6, 1)])
    assert message == f"nothing was absorbed: this is {not_mla()}"
    report = mla_compile.explain(Plain(8, 3 * 4 * 8), torch.randn(1, 5, 8))
    assert verdict(facts_of(report.sites, (), ""))[1] == f"This is {not_mla()}."
    assert not_mla().startswith(headline(report.sites[0]).removeprefix("not MLA: "))


class Broken(Plain):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("door", [through_optimize, through_backend])
@torch.no_grad()
def test_graphs_behind_a_break_are_of_the_same_model(door):
    """Their weights are others. A second model is told for itself."""
    for sizes in ((5, 6), (5,)):
        torch._dynamo.reset()  # which would take the code of an equal model
        fast = door(torch.nn.Sequential(*(Broken(32, 3 * 4 * 8) for _ in range(2))).eval())
        (message,) = said(lambda fast=fast, sizes=sizes: [fast(torch.randn(1, tokens, 32)) for tokens in sizes])
        assert message.startswith("nothing was absorbed: this is MHA")


@torch.compiler.disable
def left_out(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


class LeftOut(Plain):
    """Its attention is in no graph."""

    attend = staticmethod(left_out)

    def forward(self, x):
        heads = torch.nn.Linear.forward(self, x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.attend(*heads) * 2


class InALoop(torch.nn.Module):
    """Dynamo makes no graph of a loop with a break."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(LeftOut(8, 3 * 4 * 8) for _ in range(2))
        for layer in self.layers:
            layer.forward = torch.compiler.disable(layer.forward)

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
        return y


class Logs(Toy):
    """A break, and an attention in a graph."""

    def forward(self, *given):
        torch._dynamo.graph_break()
        return super().forward(*given)


UNSEEN = "no graph that was compiled has an attention"
DOORS = [through_optimize, through_backend]


def compiled_function(module):
    def call(x):
        return module(x)

    return through_backend(call)


@pytest.mark.parametrize(
    ("door", "make"),
    [*((door, lambda: LeftOut(8, 3 * 4 * 8)) for door in (*DOORS, compiled_function)), (through_optimize, InALoop)],
)
@torch.no_grad()
def test_attention_in_code_that_dynamo_leaves_out(door, make):
    torch._dynamo.reset()
    backend._recent.clear()
    fast = door(make().eval())
    (message,) = said(lambda: [fast(torch.randn(1, 5, 8)) for _ in range(3)])
    assert message.startswith(UNSEEN)
    assert "is under torch.compiler.disable" in message
    if door is through_optimize:
        assert fast.mla_report.summary() == message
        assert "nothing was compiled yet" not in str(fast.mla_report)
        assert str(fast.mla_report).count("no graph") == 1


class Branches(Plain):
    """A branch on a value between the product and the attention."""

    def forward(self, x):
        heads = torch.nn.Linear.forward(self, x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        if heads.sum() > 1e9:
            return heads[0]
        return torch.nn.functional.scaled_dot_product_attention(*heads)


@torch.no_grad()
def test_the_line_that_broke_the_graph_is_named():
    fast = mla_compile.optimize(Branches(8, 3 * 4 * 8).eval(), codegen="eager")
    said(lambda: fast(torch.randn(1, 5, 8)))
    (site,) = fast.mla_report.sites
    assert site.code is Code.GRAPH_BREAK
    for told in ("a branch depends on the values of a tensor", "test_said.py", "if heads.sum() > 1e9"):
        assert told in site.reason


class Stem(torch.nn.Module):
    """Layers of one graph with a break before the first attention, and another attention that Dynamo leaves out."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.plain, self.left_out = Plain(8, 3 * 4 * 8), LeftOut(8, 3 * 4 * 8)

    def forward(self, x):
        for layer in self.stem:
            x = layer(x)
            torch._dynamo.graph_break()
        return self.plain(x), self.left_out(x)


@torch.no_grad()
def test_a_graph_that_runs_again_in_the_same_call():
    """Other graphs may still be compiled."""
    torch._dynamo.reset()
    fast = through_backend(Stem().eval())
    messages = said(lambda: [fast(torch.randn(1, 5, 8)) for _ in range(3)])
    assert not any(message.startswith(UNSEEN) for message in messages)


@pytest.mark.parametrize("door", DOORS)
@torch.no_grad()
def test_code_that_dynamo_leaves_out_beside_an_attention(door):
    torch._dynamo.reset()
    backend._recent.clear()
    fast = door(Logs().eval())
    assert said(lambda: [fast(*decode_inputs(queries=1)) for _ in range(3)]) == []


def test_a_report_before_the_first_call_and_after_one_without_attention():
    fast = mla_compile.optimize(Toy().eval(), codegen="eager")
    assert "nothing was compiled yet" in str(fast.mla_report)
    assert "no attention" not in str(fast.mla_report)
    assert str(fast.mla_report).count("nothing was compiled yet") == 1
    with torch.no_grad():
        fast(*decode_inputs(queries=1))
        assert fast.mla_report.absorbed == 1
        plain = mla_compile.optimize(torch.nn.Linear(3, 4).eval(), codegen="eager")
        plain(torch.randn(2, 3))
    assert plain.mla_report.summary() == "no attention sites"


@pytest.mark.parametrize("strict", [False, True])
def test_inductor_fails_with_a_graph_that_was_rewritten(strict, monkeypatch):
    failed = []

    def fails(gm, *_, **__):
        if any("mla_compile" in str(node.target) for node in gm.graph.nodes):
            failed.append(gm)
            raise InductorError(AssertionError("a layout that nobody expected"), None)
        return gm

    monkeypatch.setattr(compile_fx, "compile_fx", fails)
    module, given = Toy().eval(), decode_inputs(queries=1)
    with torch.no_grad():
        want = module(*given)
        fast = mla_compile.optimize(module, strict=strict)
        if strict:
            with pytest.raises(Exception, match="a layout that nobody expected"):
                fast(*given)
            return
        (message,) = said(lambda: torch.testing.assert_close(fast(*given), want))
    assert "a layout that nobody expected" in message
    assert failed
    (site,) = fast.mla_report.sites
    assert (site.verdict, site.code) == ("kept", Code.CODE_FAILED)


def test_what_is_seen_at_the_prompt():
    fast = mla_compile.optimize(Toy().eval(), codegen="eager")
    with torch.no_grad():
        fast(*decode_inputs(queries=1))
    assert repr(fast.mla_report) == f"<Report: {fast.mla_report.summary()}>"
    page = fast.mla_report._repr_html_()
    assert page.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert page.count('"') == 4, "nothing of the page ends the attribute"
    assert "values are read per key and layer instead of" in page
    assert all(f"``{name}``" in mla_compile.optimize.__doc__ for name in {*mla_compile.Options.names()} - {"inductor"})
    assert dir(mla_compile) == sorted(mla_compile.__all__)
    assert mla_compile.backend.reports is backend.reports
