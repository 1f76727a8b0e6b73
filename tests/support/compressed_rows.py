"""A tiny DeepSeek-V4: a window, rows that stand for several tokens, an indexer that picks some of them."""

from __future__ import annotations

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


def tiny(*layers: str, dtype: torch.dtype = torch.float64, **sizes: object) -> DeepseekV4ForCausalLM:
    torch.manual_seed(0)
    given = {
        "vocab_size": 67, "hidden_size": 40, "moe_intermediate_size": 24, "num_hidden_layers": len(layers),
        "num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 20, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "hc_mult": 2, "max_position_embeddings": 512, "sliding_window": 8, "index_n_heads": 2,
        "index_head_dim": 12, "index_topk": 3, "o_groups": 2, "o_lora_rank": 8, "layer_types": list(layers),
        "mlp_layer_types": ["moe"] * len(layers), "compress_rates": {SPARSE: 4, HEAVY: 8},
        "partial_rotary_factor": 0.5, "experts_implementation": "batched_mm", "attn_implementation": "eager",
    }  # fmt: skip
    config = DeepseekV4Config(**given | sizes)
    model = DeepseekV4ForCausalLM(config).eval().to(dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, dtype=torch.float64)
            weight.copy_(1 + 0.1 * noise if "norm" in name else noise * (0.3 if weight.dim() > 1 else 0.5))
    return model
