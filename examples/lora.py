"""LoRA on the projections around the attention, attached, trained and merged after optimize(): all of it is followed.

An adapter on ``kv_b_proj`` is a sum of two linear maps of the latent, so decode is still absorbed. It is written by
hand here, in plain torch; adapters of peft are followed the same way.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import mla_compile


class Lora(nn.Module):
    """A linear layer that stays as it is, and two narrow ones beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4, scale: float = 2.0) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """``base(x)`` and the adapter's part."""
        return self.base(x) + self.scale * self.up(self.down(x))

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        """The base layer, with the adapter added to its weight."""
        self.base.weight += self.scale * self.up.weight @ self.down.weight
        return self.base


def tiny_model() -> DeepseekV3ForCausalLM:
    """DeepSeek-V3's architecture with one small layer."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=24,
        initializer_range=0.1,
    )
    return DeepseekV3ForCausalLM(config).eval().requires_grad_(False)


def train(model: nn.Module, steps: int) -> None:
    """Teach the adapters to predict a few random tokens."""
    text = torch.randint(2, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.train()
    for _ in range(steps):
        loss = model(text, labels=text).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    print(f"trained: loss {loss.item():.2f}")


def main(arguments: list[str] | None = None) -> None:
    """Generate with the original and the optimized model after each change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20, help="of training")
    parser.add_argument("--fold", choices=("never", "always"), default="never", help="multiply weights ahead of time")
    parser.add_argument("--codegen", choices=("inductor", "eager"), default="inductor")
    given = parser.parse_args(arguments)
    model = tiny_model()
    fast = mla_compile.optimize(model, fold=given.fold, codegen=given.codegen)
    prompt = torch.randint(2, 256, (1, 12))
    settings = {"max_new_tokens": given.tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def show(what: str) -> None:
        tokens = fast.generate(prompt, **settings)
        same = torch.equal(tokens, model.generate(prompt, **settings))
        print(f"{what}: {tokens[0, 12:].tolist()}, the same as the original's: {same}")

    show("without adapters")
    layers = [layer.self_attn for layer in model.model.layers]  # of `fast` too: it shares the modules below it
    for layer in layers:
        layer.q_proj, layer.kv_b_proj = Lora(layer.q_proj), Lora(layer.kv_b_proj)
    show("attached, still zero")
    train(model, given.steps)
    show("trained")
    for layer in layers:
        layer.q_proj, layer.kv_b_proj = layer.q_proj.merge(), layer.kv_b_proj.merge()
    show("merged")
    print(fast.mla_report.summary())


if __name__ == "__main__":
    main()
