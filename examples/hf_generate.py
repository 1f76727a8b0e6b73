"""Optimize a transformers model once, then use it as before: generate() runs the absorbed decode.

The model is tiny and has random weights, so that the example runs anywhere; with
``AutoModelForCausalLM.from_pretrained(...)`` in place of ``tiny_model`` the rest stays as it is.
"""

from __future__ import annotations

import argparse

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import mla_compile


def tiny_model() -> DeepseekV3ForCausalLM:
    """DeepSeek-V3's architecture with two small layers."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=24,
        initializer_range=0.1,
    )
    return DeepseekV3ForCausalLM(config).eval()


def main(arguments: list[str] | None = None) -> None:
    """Generate the same tokens with the original and the optimized model, with both kinds of cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--codegen", choices=("inductor", "eager"), default="inductor")
    given = parser.parse_args(arguments)
    model = tiny_model()
    fast = mla_compile.optimize(model, codegen=given.codegen)  # shares the weights; `model` itself stays as it was
    prompt = torch.randint(2, 256, (1, 12))
    settings = {"max_new_tokens": given.tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for cache in ("dynamic", "static"):
        expected = model.generate(prompt, cache_implementation=cache, **settings)
        tokens = fast.generate(prompt, cache_implementation=cache, **settings)
        print(f"{cache} cache:", tokens[0, 12:].tolist())
        print("the same as the original's:", torch.equal(tokens, expected))
    print(fast.mla_report.summary())


if __name__ == "__main__":
    main()
