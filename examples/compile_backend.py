"""torch.compile(backend="mla"): torch finds the installed backend by its name, nothing else has to be imported.

Whatever the backend does not rewrite compiles as with Inductor; ``options`` takes Inductor's options and ours together.
"""

from __future__ import annotations

import argparse
import inspect
import logging
from typing import Any

import torch
from transformers import CompileConfig, MiniCPM3Config, MiniCPM3ForCausalLM, StaticCache


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
        eos_token_id=None,
        initializer_range=0.2,
    )
    return MiniCPM3ForCausalLM(config).eval()


@torch.no_grad()  # with gradients enabled a model runs in its original form
def own_loop(model: MiniCPM3ForCausalLM, prompt: torch.Tensor, count: int, **compiled: Any) -> list[int]:
    """Decode greedily with a cache of fixed size: the prompt as usual, then a compiled step for each token."""
    step: Any = torch.compile(model, backend="mla", **compiled)
    length = prompt.shape[1]
    cache = StaticCache(config=model.config, max_cache_len=length + count)
    past = {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}
    logits = model(prompt, **past).logits  # transformers 5.24 has a new name for it
    tokens = [int(logits[0, -1].argmax())]
    for position in range(length, length + count - 1):
        token = torch.tensor([[tokens[-1]]])
        logits = step(token, **past, position_ids=torch.tensor([[position]])).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def by_generate(model: MiniCPM3ForCausalLM, prompt: torch.Tensor, count: int, **compiled: Any) -> list[int]:
    """The same by generate(), which compiles decode steps itself when the cache has a fixed size.

    It does so on a GPU; on a CPU a ``compile_config`` is ignored, with a warning, unless its private field
    ``_compile_all_devices`` is set. Its ``mode`` is "reduce-overhead" (CUDA graphs) unless another is given, and torch
    takes either a mode or options: with options, ``mode=None``.
    """
    config = CompileConfig(backend="mla", **compiled)
    config._compile_all_devices = True
    settings = {"do_sample": False, "cache_implementation": "static", "compile_config": config}
    return list(model.generate(prompt, max_new_tokens=count, **settings)[0, prompt.shape[1] :].tolist())


def main(arguments: list[str] | None = None) -> None:
    """Decode the same tokens without the backend and with it, both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--codegen", choices=("inductor", "eager"), default="inductor")
    given = parser.parse_args(arguments)
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("mla_compile").setLevel(logging.INFO)  # one line for each graph with attention
    options = {"forms": "auto", "codegen": given.codegen}
    model = tiny_model()
    prompt = torch.randint(2, 256, (1, 12))
    expected = model.generate(prompt, max_new_tokens=given.tokens, do_sample=False)[0, 12:].tolist()
    for name, tokens in (
        ("torch.compile and a loop of our own", own_loop(model, prompt, given.tokens, options=options)),
        ("generate with a CompileConfig", by_generate(model, prompt, given.tokens, mode=None, options=options)),
    ):
        print(f"{name}:", tokens)
        print("the same as the original's:", tokens == expected)


if __name__ == "__main__":
    main()
