"""Tiny MLA models of transformers, built from their configs with seeded weights: nothing is downloaded.

Every dimension is different (H=4 L=64 N=32 R=16 V=24 Q=48 D=128), so that a rewrite which confuses two of them cannot
pass. Weights are scaled by fan-in and queries sharpened, so that attention is far from uniform and logits have a
standard deviation of about 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

VOCAB = 199

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_INDEX: dict[str, Any] = {"index_topk": 8, "index_head_dim": 24, "index_n_heads": 8}
_SHARED: dict[str, Any] = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
_MOE: dict[str, Any] = {
    "moe_intermediate_size": 40,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
# Positions past 8 change the query's scale: a rewrite that drops a factor of the query shows within a short prompt.
_SCALED_YARN = _YARN | {
    "factor": 64.0,
    "original_max_position_embeddings": 8,
    "max_position_embeddings": 512,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in names}


@dataclass(frozen=True)
class Family:
    """One model family: its two transformers classes, its tiny config, and what is particular about it."""

    config: str
    model: str
    kwargs: dict[str, Any]
    note: str
    mla_sites: int = 2  # attention sites that are MLA, in the whole model
    fullgraph: bool = True  # False: the stock model breaks Dynamo's graph outside its attention
    traits: frozenset[str] = field(default_factory=frozenset)


FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        _BASE | _MOE | {"q_lora_rank": None},
        "no query latent, complex RoPE",
    ),
    "deepseek_v3": Family(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        _BASE | _MOE | {"rope_parameters": _YARN},
        "query latent, interleaved RoPE, YaRN factor in the softmax scale",
    ),
    "deepseek_v32": Family(
        "DeepseekV32Config",
        "DeepseekV32ForCausalLM",
        _BASE | _MOE | _INDEX,
        "deepseek_v3 with an indexer that keeps the best 8 keys of each query",
        traits=frozenset({"indexer"}),
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        _without(_BASE | _MOE, "first_k_dense_replace"),
        "deepseek_v3's attention",
    ),
    "kimi_linear": Family(
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        _without(_BASE | _MOE, "n_routed_experts", "q_lora_rank")
        | {
            "num_local_experts": 4,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "one linear attention layer, one MLA layer whose rotary part is not rotated; no query latent",
        mla_sites=1,
        traits=frozenset({"recurrent"}),
    ),
    "longcat_flash": Family(
        "LongcatFlashConfig",
        "LongcatFlashForCausalLM",
        _without(_BASE, "num_hidden_layers", "intermediate_size")
        | {
            "num_layers": 1,
            "ffn_hidden_size": 160,
            "expert_ffn_hidden_size": 40,
            "moe_topk": 2,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "head_dim": 16,
        },
        "two MLA sublayers in a layer, constant scales on query and latent, experts that break the graph",
        fullgraph=False,
    ),
    "minicpm3": Family(
        "MiniCPM3Config",
        "MiniCPM3ForCausalLM",
        _BASE | {"dim_model_base": 64, "scale_emb": 1.5},
        "dense MLP, half-split RoPE, scaled residuals",
    ),
    "mistral4": Family(
        "Mistral4Config",
        "Mistral4ForCausalLM",
        _BASE | _MOE | {"rope_parameters": _SCALED_YARN},
        "a factor on the query that depends on the position",
    ),
    "youtu": Family("YoutuConfig", "YoutuForCausalLM", _BASE, "deepseek_v3's attention, dense MLP, tied embeddings"),
}

# More models with an indexer, for the tests of sparse attention alone.
SPARSE: dict[str, Family] = {
    "glm_moe_dsa": Family(
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        _BASE | _MOE | _INDEX | _SHARED,
        "a layer that takes the keys of the layer before it",
        mla_sites=3,
    ),
    "hy_v4": Family(
        "HYV4Config",
        "HYV4ForCausalLM",
        _without(_BASE | _MOE, "first_k_dense_replace") | _INDEX | _SHARED | {"hc_mult": 2},
        "sinks, the greatest score taken off by hand",
        mla_sites=3,
    ),
    "axk2": Family("AXK2Config", "AXK2ForCausalLM", _BASE | _MOE | _INDEX | {"gated_norm_rank": 8}, "gated norms"),
    "mistral_large4": Family(
        "MistralLarge4Config",
        "MistralLarge4ForConditionalGeneration",
        {
            "text_config": _BASE | _MOE | _INDEX | _SHARED | {"no_rope_layers": [1, 1, 1]},
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "head_dim": 16,
                "patch_size": 14,
                "image_size": 28,
                "hidden_act": "silu",
            },
            "image_token_index": 198,
        },
        "shared keys, in a model that also takes images",
        mla_sites=3,
    ),
    "dots3_note": Family(
        "Dots3NoteTextConfig",
        "Dots3NoteForCausalLM",
        _BASE
        | _MOE
        | _INDEX
        | {
            "shared_experts_intermediate_size": 40,
            "head_dim": 48,
            "num_hidden_layers": 3,
            "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
            "sliding_window": 10,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_q_lora_rank": 48,
            "swa_kv_lora_rank": 64,
            "swa_head_dim": 48,
            "swa_qk_nope_head_dim": 32,
            "swa_v_head_dim": 24,
        },
        "a layer with a sliding window between two with an indexer",
        mla_sites=3,
    ),
}


def build(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, attn: str | None = None, **overrides: Any
) -> transformers.PreTrainedModel:
    """The tiny model ``name`` of :data:`FAMILIES` or :data:`SPARSE`, in eval mode, weights without gradients.

    ``attn`` is the attention implementation (``"sdpa"`` or ``"eager"``); ``overrides`` replace entries of the config.
    """
    family = (FAMILIES | SPARSE)[name]
    config = getattr(transformers, family.config)(**{**family.kwargs, **overrides})
    torch.manual_seed(seed)
    model = getattr(transformers, family.model)(config).eval().requires_grad_(False)
    if attn is not None:
        model.set_attn_implementation(attn)
    _seed_weights(model, seed + 1)
    # Greedy decoding runs for a fixed number of steps: no token ends it.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(dtype)


def prompt(batch: int = 2, length: int = 17, pad: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """``input_ids`` and ``attention_mask`` [batch, length]; row i begins with i * pad tokens of padding."""
    ids = torch.randint(3, VOCAB - 10, (batch, length), generator=torch.Generator().manual_seed(seed))
    column, row = torch.arange(length), torch.arange(batch)[:, None]
    mask = (column >= row * pad).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def greedy(
    model: Any, inputs: dict[str, torch.Tensor], steps: int = 24, cache: str = "dynamic"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, steps] and logits [B, steps, vocabulary] of ``model.generate()``, greedily decoded."""
    out = model.generate(
        **inputs,
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        cache_implementation=cache,
        return_dict_in_generate=True,
        output_logits=True,
        disable_compile=True,  # what compiles here is the model that was handed in, never generate() itself
    )
    return out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits, dim=1)


@torch.no_grad()
def _seed_weights(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator)

    for name, weight in model.named_parameters():  # a tied weight appears once, as the embedding
        leaf = name.rsplit(".", 1)[-1]
        if "embed_tokens" in name:
            weight.copy_(normal(weight))
        elif weight.dim() >= 2 and leaf in ("weight", "gate_up_proj", "down_proj"):
            weight.copy_(normal(weight) / math.sqrt(weight.shape[-1]))
            if name.endswith(("q_proj.weight", "q_b_proj.weight")):
                weight.mul_(1.7)
        elif leaf == "sinks":
            weight.copy_(normal(weight))
        elif weight.dim() == 1 and leaf == "weight":
            weight.copy_(1 + 0.2 * normal(weight))
