"""Prompts whose attention is computed for a few heads at a time, through the doors that users take."""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import mla_compile
from mla_compile import backend
from mla_compile.errors import OptionError
from mla_compile.options import Options
from tests.passes.rewrite.test_by_heads import Merged
from tests.support.models import build, greedy, prompt
from tests.support.modules import H, inputs
from tests.support.tiers import full

FIRST = {"expanded_bytes": 0, "codegen": "eager"}


def notes(reports):
    return [note for report in reports for site in report.sites for note in site.notes if "heads at a time" in note]


@full("family")
@pytest.mark.parametrize(
    ("name", "attn"), [("deepseek_v2", "sdpa"), ("deepseek_v3", "sdpa"), ("minicpm3", "sdpa"), ("deepseek_v3", "eager")]
)
def test_models_of_transformers_generate_the_same_tokens(name, attn):
    model = build(name, attn=attn)
    fast = mla_compile.optimize(model, **FIRST)
    given = prompt(2, 11)
    tokens, logits = greedy(model, given, steps=6)
    ours, found = greedy(fast, given, steps=6)
    assert torch.equal(ours, tokens)
    assert torch.allclose(found, logits, atol=1e-4)
    assert notes([fast.mla_report])


@full("family")  # the test below gives it to the backend with a small module
def test_the_backend_takes_the_option():
    model, given = build("deepseek_v3", attn="eager", num_hidden_layers=1), prompt(2, 11)
    compiled = torch.compile(model, backend="mla", options=FIRST)
    before = len(backend.reports())
    with torch.no_grad():
        assert torch.allclose(compiled(**given).logits, model(**given).logits, atol=1e-4)
    assert notes(backend.reports()[before:])


@torch.no_grad()
def test_sizes_beyond_the_limit_are_compiled_once_more():
    """The limit is a guard: graphs of symbolic sizes are for calls on one side of it."""
    torch._dynamo.reset()
    module = Merged(core="matmul", H=2).eval()
    limit = 8 * 2 * 2 * (9 * 10 + 9 * 10 + 9 * 5 + 2 * 9 * 9 + 9 * 5)  # what nine queries of nine keys make
    before = len(backend.reports())
    options = {"expanded_bytes": limit, "codegen": "eager", "forms": "expanded"}
    compiled = torch.compile(module, backend="mla", dynamic=True, options=options)
    for size, graphs, groups in ((9, 1, 0), (10, 2, 1), (23, 2, 1), (6, 2, 1)):
        given = inputs(S=size, T=size)
        assert torch.allclose(compiled(*given), module(*given), rtol=0, atol=1e-10)
        new = backend.reports()[before:]
        assert (len(new), len(notes(new))) == (graphs, groups), size


@full("inductor")  # tests/passes/rewrite/test_by_heads.py shows what each group waits for in the graph
@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_groups_run_one_after_the_other(dynamic):
    """Inductor sorts calls by what they wait for: each group waits for the one before it."""
    torch._dynamo.reset()
    module, given = Merged().float().eval(), inputs(S=40, T=40, dtype=torch.float32)
    options = {"expanded_bytes": 0, "forms": "expanded"}
    compiled = torch.compile(module, backend="mla", dynamic=dynamic, options=options)
    result, (code, *_) = run_and_get_code(compiled, *given)
    assert torch.allclose(result, module(*given), atol=1e-4)
    calls = re.findall(r"= torch\.ops\.(mla_compile\.copy_after|aten\._scaled_dot_product_flash_attention)", code)
    attentions = [i for i, name in enumerate(calls) if name.startswith("aten")]
    assert len(attentions) == H
    # Rows of three weights and the rotary key: none of the next group's before the attention of this one.
    assert calls.count("mla_compile.copy_after") == 4 * (H - 1)
    assert all(at - group <= 4 * group for group, at in enumerate(attentions))
    assert attentions[1] > 1


@pytest.mark.parametrize("value", [-1, True, 1.5, "1 GiB"])
def test_a_limit_is_a_number_of_bytes(value):
    with pytest.raises(OptionError, match="a number of bytes or None"):
        Options.parse({"expanded_bytes": value})
