"""torch.compile(backend="mla"): torch finds the installed backend by its name, nothing else has to be imported.

Whatever the backend does not rewrite compiles as with Inductor; ``options`` takes Inductor's options and ours together.
"""

from __future__ import annotations

import torch
from transformers import MiniCPM3Config, MiniCPM3ForCausalLM, StaticCache


def tiny_model() -> MiniCPM3ForCausalLM:
    """MiniCPM3's architecture with two small layers."""
    torch.manual_seed(0)
    config = MiniCPM3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=24,
        pad_token_id=0,
        initializer_range=0.2,
    )
    return MiniCPM3ForCausalLM(config).eval()


def decode(step: torch.nn.Module, model: MiniCPM3ForCausalLM, prompt: torch.Tensor, count: int) -> list[int]:
    """Decode greedily with a cache of fixed size: the prompt through ``model``, then ``step`` for each token."""
    length = prompt.shape[1]
    cache = StaticCache(config=model.config, max_cache_len=length + count)
    logits = model(prompt, past_key_values=cache).logits
    tokens = [int(logits[0, -1].argmax())]
    for position in range(length, length + count - 1):
        token = torch.tensor([[tokens[-1]]])
        logits = step(token, past_key_values=cache, position_ids=torch.tensor([[position]])).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def main() -> None:
    """Decode the same tokens with and without the backend."""
    model = tiny_model()
    step = torch.compile(model, backend="mla", options={"forms": "auto"})
    prompt = torch.randint(2, 256, (1, 12))
    with torch.no_grad():  # with gradients enabled a model runs in its original form
        expected = decode(model, model, prompt, 16)
        tokens = decode(step, model, prompt, 16)
    print("tokens: ", tokens)
    print("the same as the original's:", tokens == expected)


if __name__ == "__main__":
    main()
