"""Models without MLA: through the backend they give what they gave, and every attention is reported as not MLA."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers

import mla_compile.backend as backend
from mla_compile.codes import Code
from mla_compile.errors import MlaCompileWarning
from tests.support.tiers import also, full

_BASE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {
    "vocab_size": 97,
    "n_embd": 48,
    "n_layer": 1,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _BASE | {"num_key_value_heads": 2}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2 | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", _BASE | {"num_key_value_heads": 1, "head_dim": 16}),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        _BASE | {"multi_query": True, "alibi": False, "parallel_attn": True},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _BASE | {"num_key_value_heads": 2, "head_dim": 16}),
    "opt": ("OPTConfig", "OPTForCausalLM", _BASE | {"ffn_dim": 64, "word_embed_proj_dim": 48}),
}


def build(name, attention):
    config, model, kwargs = MODELS[name]
    made = getattr(transformers, model)(getattr(transformers, config)(**kwargs, attn_implementation=attention)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise / weight.shape[-1] ** 0.5 if weight.dim() > 1 else 1 + 0.2 * noise)
    return made.double()


def prefill_and_decode(run, ids):
    """Logits of six tokens at once and of two more, one by one."""
    out = run(ids[:, :6], use_cache=True)
    logits = [out.logits]
    for t in range(6, ids.shape[1]):
        out = run(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits)
    return logits


@full("family")  # test_other_families.py shows that the very graphs come back
@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, "sdpa") for name in MODELS), ("llama", "eager"), ("falcon", "eager")],
)
def test_outputs_are_the_original_ones(name, attention):
    model = build(name, attention)
    ids = torch.randint(3, 97, (2, 8), generator=torch.Generator().manual_seed(1))
    backend._recent.clear()
    compiled = torch.compile(model, backend=backend.mla, options={"codegen": "eager"})
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nothing was absorbed", MlaCompileWarning)
        expected, logits = (prefill_and_decode(run, ids) for run in (model, compiled))
    for got, want in zip(logits, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    sites = [site for report in backend.reports() for site in report.sites]
    assert len(sites) >= 2
    assert {site.code for site in sites} == {Code.NOT_MLA}, [(site.code, site.reason, site.blame) for site in sites]


@pytest.mark.parametrize("name", ["gpt2", *also("family", "llama", "opt")])
def test_without_a_cache_nothing_is_absorbed_and_the_user_is_told(name):
    """K and V are then images of the hidden state, which is no latent: the queries are made of it as well."""
    model = build(name, "sdpa")
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    backend._recent.clear()
    compiled = torch.compile(model, backend=backend.mla, options={"codegen": "eager", "forms": "absorbed"})
    with torch.no_grad(), pytest.warns(MlaCompileWarning, match="nothing was absorbed"):
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    codes = {site.code for report in backend.reports() for site in report.sites}
    assert codes == {Code.NOT_MLA}
