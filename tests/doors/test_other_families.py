"""Other families of transformers: nothing is rewritten, and the compiler behind us gets what Dynamo made."""

from __future__ import annotations

import copy
import os
import warnings
from collections import Counter

import pytest
import torch
import torch._dynamo
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch._guards import TracingContext

import mla_compile
import mla_compile.backend as backend
from mla_compile.codes import Code
from mla_compile.errors import MlaCompileWarning
from tests.support.families import FAMILIES, build, run
from tests.support.releases import BEFORE_2_13
from tests.support.tiers import also, full

# What the analysis meets: biases by distance, scores of distances.
CHOSEN = ("bloom", "deberta_v2")
# With these every kind once; the others run with MLA_COMPILE_ALL_FAMILIES=1.
KINDS = (
    "llama", "gpt2", "falcon", "qwen3", "gemma2", "gpt_oss", "mixtral", "recurrent_gemma", "t5", "bert", "xlnet",
    "wav2vec2", "segformer", "whisper", "canine", "mamba",
)  # fmt: skip
# An older Dynamo breaks their graphs in front of the second attention of a decoder: the encoder's states, which that
# reads, are then kept in place of K and V, and the numbers are the same.
BROKEN = ("t5", "bart", "whisper") if BEFORE_2_13 else ()
EVERYTHING = os.environ.get("MLA_COMPILE_ALL_FAMILIES", "") == "1"
WITHOUT_ATTENTION = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "fnet")


@pytest.fixture(autouse=True)
def _expected_warnings():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nothing was absorbed", MlaCompileWarning)
        # Dynamo, on what transformers calls in wav2vec2.
        warnings.filterwarnings("ignore", "(?s).*functools.lru_cache.*wrapped function", UserWarning)
        # Dynamo, on models with an activation of their own (bloom).
        warnings.filterwarnings(
            "ignore", ".*autograd.function.Function.* should not be instantiated", DeprecationWarning
        )
        yield


def check(name):
    sites = [site for report in backend.reports() for site in report.sites]
    assert bool(sites) == (name not in WITHOUT_ATTENTION)
    # canine joins the first token to the rows of every window: no longer the very rows that the queries are made of.
    # Keys and values of an encoder that a cache brings into a decode step were made in another call.
    known = {Code.NOT_MLA, *{"canine": [Code.COST_PREFILL], "whisper": [Code.EXPANDED_INPUTS]}.get(name, [])}
    assert {site.code for site in sites} <= known, [(site.code, site.reason, site.blame) for site in sites]


@pytest.mark.parametrize("name", FAMILIES if EVERYTHING else [*CHOSEN, *also("family", *KINDS)])
def test_graphs_come_back_as_they_went_in(name):
    """The very graph, so that what is made of it cannot differ: of a decode step, or of all that is read at once."""
    graphs = 0

    def spy(gm, inputs):
        nonlocal graphs
        graphs += 1
        before = str(gm.graph)
        made = backend.mla(gm, inputs, options={"codegen": "eager", "strict": True})
        assert str(gm.graph) == before
        assert made is gm or name in BROKEN
        return made

    backend._recent.clear()
    model = build(name)
    decodes = FAMILIES[name].reads == "tokens"
    how = {"steps": int(decodes), "prompt": model if decodes else None}
    got = run(name, torch.compile(model, backend=spy, dynamic=False), **how)
    assert graphs
    for a, b in zip(got, run(name, model, **how), strict=True):
        assert b.isfinite().all()
        assert (a - b).abs().max() < 1e-4 * b.abs().max()
    if name not in BROKEN:
        check(name)


class Plain(torch.nn.Module):
    """Keys and values of two heads for four of queries, and a cache that grows."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(24, width) for width in (24, 12, 12))

    def forward(self, x, past):
        q, k, v = (made(x).unflatten(-1, (-1, 6)).transpose(1, 2) for made in (self.q, self.k, self.v))
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, enable_gqa=True), k, v


NAMES = sorted({*FAMILIES} - {*BROKEN}) if EVERYTHING else ["qwen3", "segformer", *({"whisper"} - {*BROKEN})]


@pytest.mark.parametrize("name", ["plain", *also("family", *NAMES)])
def test_no_guard_is_added_to_those_of_inductor(name):
    """A guard more would make Dynamo compile more graphs. AOTAutograd, with which Inductor begins, goes first."""
    met = []

    def spy(gm, inputs):
        met.append(gm)
        aot_eager(copy.deepcopy(gm), inputs)
        shapes = TracingContext.get().fake_mode.shape_env
        before = [str(g.expr) for g in shapes.guards], dict(shapes.replacements)
        assert backend.mla(gm, inputs, options={"codegen": "eager", "strict": True}) is gm
        assert ([str(g.expr) for g in shapes.guards], dict(shapes.replacements)) == before
        return gm

    backend._recent.clear()
    if name == "plain":
        with torch.no_grad():
            torch.compile(Plain(), backend=spy, dynamic=True)(torch.ones(2, 1, 24), torch.ones(2, 2, 2, 7, 6).unbind())
    else:
        run(name, torch.compile(build(name), backend=spy, dynamic=True), steps=1)
    assert met
    check(name)


@full("family")  # test_untouched_models.py shows what is said, test_held_weights.py a report of such an attention
@pytest.mark.parametrize("name", ["gemma2", *({"t5"} - {*BROKEN})])
def test_explain_and_optimize_say_so(name):
    model = build(name)
    ids = torch.tensor([[3, 4, 5, 6]])
    given = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :2]} if name == "t5" else {})
    report = mla_compile.explain(model, **given)
    assert (report.absorbed, report.kept, report.refused) == (0, 0, 0)
    assert report.not_mla == len(report.sites) >= 2
    fast = mla_compile.optimize(model, codegen="eager")
    with torch.no_grad(), pytest.warns(MlaCompileWarning, match="nothing was absorbed: .* MHA, GQA or MQA"):
        got = fast(**given).logits
    with torch.no_grad():
        assert (got - model(**given).logits).abs().max() < 1e-4 * got.abs().max()


@full("inductor")  # with MLA_COMPILE_ALL_FAMILIES=1 half a minute for each of a hundred models
@pytest.mark.parametrize("name", FAMILIES if EVERYTHING else ["qwen3"])
def test_inductor_compiles_as_many_graphs_to_the_same_numbers(name):
    results, counts = [], []
    for compiler in ("inductor", backend.mla):
        torch._dynamo.reset()
        counters.clear()
        results.append(run(name, torch.compile(build(name), backend=compiler), steps=1))
        counts.append(Counter(counters["stats"]) + Counter(breaks=sum(counters["graph_break"].values())))
    assert counts[0] == counts[1]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
