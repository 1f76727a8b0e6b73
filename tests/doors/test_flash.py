"""The attention implementations of transformers that call FlashAttention, and ``output_attentions`` under sdpa.

The library is not there: :mod:`tests.support.flash` stands in for it, under its names and schemas.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers.modeling_flash_attention_utils as interface

import mla_compile
from mla_compile.codes import Code
from tests.support import flash
from tests.support.models import build, greedy, prompt
from tests.support.releases import BEFORE_2_13
from tests.support.tiers import full


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers finds the library's functions, as if it had imported them."""
    flash.register()
    functions = {
        "_loaded_implementation": "flash_attention_2",
        "_flash_fn": flash.flash_attn_func,
        "_flash_varlen_fn": flash.flash_attn_varlen_func,
        "_flash_with_kvcache_fn": None,
        "_pad_fn": interface._pad_input,
        "_unpad_fn": interface._unpad_input,
        "_process_flash_kwargs_fn": interface._lazy_define_process_function(flash.flash_attn_varlen_func),
        "_process_with_kvcache_kwargs_fn": dict,
    }
    for name, value in functions.items():
        monkeypatch.setattr(interface, name, value)


def with_flash(family: str, **fields: Any) -> Any:
    model = build(family, **fields)
    # Set here and not by set_attn_implementation, which looks for the package.
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "flash_attention_2"
    return model


@full("family")  # the zoo has modules that call these functions
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("family", "layers"), [("minicpm3", 1), ("deepseek_v3", 2)])
def test_decoding_is_absorbed(family: str, layers: int) -> None:
    """V is padded to the width of K and the result cut, as FlashAttention 2 asks for."""
    model, inputs = with_flash(family, num_hidden_layers=layers), prompt(length=9, pad=0)
    with torch.no_grad():
        tokens, logits = greedy(model, inputs, 3)
        fast = mla_compile.optimize(model, codegen="eager", strict=True)
        got_tokens, got = greedy(fast, inputs, 3)
    assert torch.equal(got_tokens, tokens)
    torch.testing.assert_close(got, logits, rtol=1e-4, atol=1e-4)
    assert {site.code for site in fast.mla_report.sites} == {Code.COST_PREFILL, Code.ABSORBED}
    assert {site.where.op for site in fast.mla_report.sites} == {"flash_attn::_flash_attn_forward"}
    # A model in float32 makes transformers log once that it casts.
    assert any("logs once" in message for message in fast.mla_report.messages)


@full("combination")  # what a broken graph leaves of an attention, other tests of this room show
@pytest.mark.usefixtures("library")
@pytest.mark.filterwarnings("ignore:nothing was absorbed")
@pytest.mark.filterwarnings("ignore:Dynamo reached recompile_limit" if BEFORE_2_13 else "default")
def test_padding_is_refused_because_transformers_breaks_the_graph() -> None:
    """It counts the tokens that are no padding, which is a value, just before the operator."""
    model, inputs = with_flash("minicpm3", num_hidden_layers=1), prompt(length=9, pad=3)
    with torch.no_grad():
        tokens, _ = greedy(model, inputs, 3)
        fast = mla_compile.optimize(model, codegen="eager")
        assert torch.equal(greedy(fast, inputs, 3)[0], tokens)
    assert {site.code for site in fast.mla_report.sites} == {Code.GRAPH_BREAK}
    assert {site.where.op for site in fast.mla_report.sites} == {"flash_attn::_flash_attn_varlen_forward"}


@full("family")  # dynamo/test_logs.py shows what is said once
@pytest.mark.parametrize(("family", "attn"), [("deepseek_v3", "eager"), ("minicpm3", "sdpa")])
def test_asking_for_the_weights(family: str, attn: str) -> None:
    """sdpa has none and says so once, which broke the graph. Eager attention returns them, and is absorbed."""
    model = build(family, attn=attn, num_hidden_layers=1)
    fast = mla_compile.optimize(model, codegen="eager")
    ids = prompt(length=9, pad=0)["input_ids"]
    with torch.no_grad():
        results = []
        for one in (model, fast):
            out = one(input_ids=ids, use_cache=True, output_attentions=True)
            cache = out.past_key_values
            results.append(one(input_ids=ids[:, :1], past_key_values=cache, use_cache=True, output_attentions=True))
    want, got = results
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
    assert len(got.attentions) == len(want.attentions) == (1 if attn == "eager" else 0)
    for a, b in zip(got.attentions, want.attentions, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert {site.code for site in fast.mla_report.sites} == {Code.COST_PREFILL, Code.ABSORBED}
