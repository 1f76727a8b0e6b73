"""Other families of transformers, tiny, from configs: dense, grouped, windowed, with experts, linear, encoders, vision.

None of them has a latent. Sizes have other names in every config; what is uniform has one layer, what is not has one
of each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

VOCAB = 97
_IDS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LM = _IDS | {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GPT = _IDS | {"n_embd": 48, "n_layer": 1, "n_head": 4, "n_positions": 64}
_GQA = _LM | {"num_key_value_heads": 2}
_HEAD = _GQA | {"head_dim": 16}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 0}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOW = {"sliding_window": 5}
_WINDOWS = _WINDOW | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 8, "mamba_chunk_size": 4, "mamba_n_groups": 2}
_STATE = _IDS | {"hidden_size": 48, "num_hidden_layers": 1, "state_size": 8}
_T5 = _IDS | {"d_model": 48, "d_kv": 12, "d_ff": 56, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
_BART = _IDS | {
    "d_model": 48,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 56,
    "decoder_ffn_dim": 56,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}
_BERT = _LM | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_IMAGE = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 8,
}
_PYRAMID = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "hidden_sizes": [16, 24],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
}
_WAVE = _BERT | {
    "conv_dim": [16, 16],
    "conv_kernel": [5, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "layerdrop": 0.0,
}


@dataclass(frozen=True)
class Family:
    """A config class and its sizes, the auto class that builds the model, and what the model reads."""

    config: str
    sizes: dict[str, Any]
    auto: str = "AutoModelForCausalLM"
    reads: str = "tokens"


def _encoder(config: str, sizes: dict[str, Any], reads: str = "text") -> Family:
    return Family(config, sizes, "AutoModel", reads)


def _seq2seq(config: str, sizes: dict[str, Any]) -> Family:
    return Family(config, sizes, "AutoModelForSeq2SeqLM", "pairs")


FAMILIES = {
    # one key head per head
    "llama": Family("LlamaConfig", _LM),
    "gpt2": Family("GPT2Config", _GPT),
    "gpt_neox": Family("GPTNeoXConfig", _LM | {"rotary_pct": 0.5}),
    "gptj": Family("GPTJConfig", _GPT | {"rotary_dim": 6}),
    "codegen": Family("CodeGenConfig", _GPT | {"n_ctx": 64, "rotary_dim": 6}),
    "gpt_neo": Family(
        "GPTNeoConfig",
        _LM | {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 5},
    ),
    "opt": Family("OPTConfig", _LM | {"ffn_dim": 56, "word_embed_proj_dim": 48}),
    "bloom": Family("BloomConfig", _IDS | {"hidden_size": 48, "n_layer": 1, "n_head": 4}),
    "mpt": Family("MptConfig", _IDS | {"d_model": 48, "n_heads": 4, "n_layers": 1, "max_seq_len": 64}),
    "phi": Family("PhiConfig", _LM | {"partial_rotary_factor": 0.5}),
    "persimmon": Family("PersimmonConfig", _LM),
    "biogpt": Family("BioGptConfig", _LM),
    "xglm": Family("XGLMConfig", _IDS | {"d_model": 48, "ffn_dim": 56, "num_layers": 1, "attention_heads": 4}),
    "openai": Family("OpenAIGPTConfig", _GPT, reads="text"),
    # fewer key heads
    "falcon": Family("FalconConfig", _LM | {"multi_query": True, "alibi": False}),
    "falcon_alibi": Family("FalconConfig", _LM | {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": True}),
    "gpt_bigcode": Family("GPTBigCodeConfig", _GPT | {"multi_query": True}),
    "qwen2": Family("Qwen2Config", _GQA),
    "qwen3": Family("Qwen3Config", _HEAD),
    "gemma": Family("GemmaConfig", _HEAD | {"num_key_value_heads": 1}),
    "phi3": Family("Phi3Config", _GQA),
    "olmo": Family("OlmoConfig", _GQA),
    "olmo2": Family("Olmo2Config", _GQA),
    "cohere": Family("CohereConfig", _GQA),
    "granite": Family("GraniteConfig", _GQA),
    "starcoder2": Family("Starcoder2Config", _GQA),
    "stablelm": Family("StableLmConfig", _GQA | {"partial_rotary_factor": 0.5}),
    "nemotron": Family("NemotronConfig", _GQA),
    "glm": Family("GlmConfig", _HEAD),
    "glm4": Family("Glm4Config", _HEAD),
    "smollm3": Family("SmolLM3Config", _GQA),
    "helium": Family("HeliumConfig", _HEAD | {"head_dim": 12}),
    "ernie4_5": Family("Ernie4_5Config", _HEAD),
    "seed_oss": Family("SeedOssConfig", _HEAD),
    "diffllama": Family("DiffLlamaConfig", _GQA),
    "arcee": Family("ArceeConfig", _GQA),
    "apertus": Family("ApertusConfig", _GQA),
    "nanochat": Family("NanoChatConfig", _GQA),
    # windows, soft caps, sinks
    "mistral": Family("MistralConfig", _GQA | _WINDOW),
    "ministral": Family("MinistralConfig", _HEAD | _WINDOW),
    "gemma2": Family("Gemma2Config", _HEAD | _WINDOWS),
    "gemma3": Family("Gemma3TextConfig", _HEAD | _WINDOWS),
    "cohere2": Family("Cohere2Config", _GQA | _WINDOWS),
    "olmo3": Family("Olmo3Config", _GQA | _WINDOWS),
    "exaone4": Family("Exaone4Config", _HEAD | _WINDOWS),
    "gpt_oss": Family("GptOssConfig", _HEAD | _WINDOWS | _LOCAL),
    "vaultgemma": Family("VaultGemmaConfig", _HEAD | _WINDOWS),
    "modernbert_decoder": Family("ModernBertDecoderConfig", _LM | {"local_attention": 5}),
    # experts
    "mixtral": Family("MixtralConfig", _GQA | _LOCAL),
    "qwen2_moe": Family("Qwen2MoeConfig", _GQA | _MOE | {"shared_expert_intermediate_size": 24}),
    "qwen3_moe": Family("Qwen3MoeConfig", _HEAD | _MOE),
    "olmoe": Family("OlmoeConfig", _GQA | _MOE),
    "phimoe": Family("PhimoeConfig", _GQA | _LOCAL),
    "granitemoe": Family("GraniteMoeConfig", _GQA | _LOCAL),
    "glm4_moe": Family("Glm4MoeConfig", _HEAD | _ROUTED),
    "dots1": Family("Dots1Config", _HEAD | _ROUTED | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeConfig",
        _GQA | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 0},
    ),
    "dbrx": Family(
        "DbrxConfig",
        _IDS
        | {
            "d_model": 48,
            "n_heads": 4,
            "n_layers": 1,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 56, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "llama4": Family(
        "Llama4TextConfig", _HEAD | {"intermediate_size_mlp": 56, "num_local_experts": 2, "attention_chunk_size": 8}
    ),
    # linear attention and state spaces, alone and beside attention
    "mamba": Family("MambaConfig", _STATE),
    "mamba2": Family("Mamba2Config", _STATE | {"num_heads": 8, "head_dim": 12, "n_groups": 2, "chunk_size": 4}),
    "falcon_mamba": Family("FalconMambaConfig", _STATE),
    "rwkv": Family("RwkvConfig", _IDS | {"hidden_size": 48, "num_hidden_layers": 1, "context_length": 64}),
    "xlstm": Family("xLSTMConfig", _IDS | {"hidden_size": 48, "num_hidden_layers": 1, "num_heads": 4, "chunk_size": 4}),
    "recurrent_gemma": Family(  # its cache is its own, and not returned
        "RecurrentGemmaConfig",
        _GQA | {"num_hidden_layers": 3, "lru_width": 48, "attention_window_size": 5},
        reads="text",
    ),
    "jamba": Family(
        "JambaConfig",
        _GQA
        | {
            "num_hidden_layers": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    "bamba": Family("BambaConfig", _GQA | _MAMBA | {"num_hidden_layers": 2, "attn_layer_indices": [1]}),
    "falcon_h1": Family("FalconH1Config", _HEAD | _MAMBA | {"mamba_d_ssm": 96}),
    "zamba2": Family(
        "Zamba2Config",
        _LM
        | {
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "hybrid_layer_ids": [1],
            "mamba_d_state": 8,
            "mamba_headdim": 12,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "chunk_size": 4,
            "num_mem_blocks": 1,
            "adapter_rank": 4,
        },
    ),
    "qwen3_next": Family(
        "Qwen3NextConfig",
        _HEAD
        | _MOE
        | {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridConfig",
        _GQA | _LOCAL | _MAMBA | {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    ),
    "nemotron_h": Family(
        "NemotronHConfig",
        _HEAD
        | {
            "num_hidden_layers": 2,
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "ssm_state_size": 8,
            "chunk_size": 4,
            "n_groups": 2,
        },
    ),
    "lfm2": Family("Lfm2Config", _GQA | {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}),
    "minimax": Family(
        "MiniMaxConfig",
        _HEAD
        | _LOCAL
        | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "block_size": 4},
    ),
    # an encoder and a decoder
    "t5": _seq2seq("T5Config", _T5),
    "umt5": _seq2seq("UMT5Config", _T5),
    "bart": _seq2seq("BartConfig", _BART),
    "pegasus": _seq2seq("PegasusConfig", _BART),
    "whisper": Family(
        "WhisperConfig",
        _BART | {"num_mel_bins": 10, "max_source_positions": 12, "max_target_positions": 32},
        "AutoModelForSpeechSeq2Seq",
        "speech",
    ),
    # encoders
    "bert": _encoder("BertConfig", _BERT),
    "roberta": _encoder("RobertaConfig", _BERT),
    "electra": _encoder("ElectraConfig", _BERT | {"embedding_size": 24}),
    "albert": _encoder("AlbertConfig", _BERT | {"embedding_size": 24}),
    "deberta_v2": _encoder("DebertaV2Config", _BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "distilbert": _encoder("DistilBertConfig", _IDS | {"dim": 48, "hidden_dim": 56, "n_layers": 1, "n_heads": 4}),
    "modernbert": _encoder(
        "ModernBertConfig",
        _LM
        | {"num_hidden_layers": 2, "local_attention": 5, "global_attn_every_n_layers": 2}
        | {"cls_token_id": 1, "sep_token_id": 2},
    ),
    "esm": _encoder("EsmConfig", _BERT | {"position_embedding_type": "rotary", "mask_token_id": 3}),
    "mpnet": _encoder("MPNetConfig", _BERT),
    "nomic_bert": _encoder("NomicBertConfig", _BERT),
    "fnet": _encoder("FNetConfig", _LM),
    "xlnet": _encoder("XLNetConfig", _IDS | {"d_model": 48, "n_layer": 1, "n_head": 4, "d_inner": 56}),
    "convbert": _encoder("ConvBertConfig", _BERT),
    "canine": _encoder(
        "CanineConfig", _BERT | {"local_transformer_stride": 4, "num_hash_buckets": 31, "downsampling_rate": 3}
    ),
    # images, sound, images and text
    "vit": _encoder("ViTConfig", _IMAGE, "image"),
    "deit": _encoder("DeiTConfig", _IMAGE, "image"),
    "beit": _encoder("BeitConfig", _IMAGE, "image"),
    "dinov2": _encoder("Dinov2Config", _IMAGE, "image"),
    "dinov3_vit": _encoder("DINOv3ViTConfig", _IMAGE, "image"),
    "siglip_vision": _encoder("SiglipVisionConfig", _IMAGE, "image"),
    "swin": _encoder(
        "SwinConfig",
        {"image_size": 24, "embed_dim": 24, "depths": [1, 1], "num_heads": [2, 4], "window_size": 3, "patch_size": 4},
        "image",
    ),
    "segformer": _encoder("SegformerConfig", _PYRAMID | {"sr_ratios": [2, 1], "patch_sizes": [7, 3]}, "image"),
    "pvt": _encoder(
        "PvtConfig", _PYRAMID | {"sequence_reduction_ratios": [2, 1], "patch_sizes": [4, 2], "image_size": 24}, "image"
    ),
    "wav2vec2": _encoder("Wav2Vec2Config", _WAVE, "wave"),
    "clip": _encoder(
        "CLIPConfig",
        {
            "text_config": _LM | {"projection_dim": 24},
            "vision_config": _IMAGE | {"projection_dim": 24},
            "projection_dim": 24,
        },
        "captions",
    ),
    "siglip": _encoder("SiglipConfig", {"text_config": _LM, "vision_config": _IMAGE}, "captions"),
    "llava": Family(
        "LlavaConfig",
        {
            "text_config": _LM | {"model_type": "llama"},
            "vision_config": _IMAGE | {"model_type": "clip_vision_model", "num_hidden_layers": 2},
            "image_token_id": VOCAB - 1,
        },
        "AutoModelForImageTextToText",
        "prompt and image",
    ),
}


def build(name: str) -> torch.nn.Module:
    """The model; weights of a size that keeps activations near 1, as trained ones are."""
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**family.sizes)
    model: torch.nn.Module = getattr(transformers, family.auto).from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise / weight.shape[-1] ** 0.5 if weight.dim() > 1 else 1 + 0.2 * noise)
    return model


def run(
    name: str, forward: Callable[..., Any], steps: int, prompt: Callable[..., Any] | None = None
) -> list[torch.Tensor]:
    """What a model says of its inputs, and of ``steps`` more tokens one by one where it has a cache.

    ``prompt``: what reads the first inputs, if not ``forward``.
    """
    reads = FAMILIES[name].reads
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB - 1, (2, 12), generator=generator)
    image = torch.randn(2, 3, 24, 24, generator=generator)
    decoder = reads in ("pairs", "speech")
    given = {
        "tokens": {"input_ids": ids[:, :6]},
        "text": {"input_ids": ids},
        "pairs": {"input_ids": ids, "decoder_input_ids": ids[:, :6]},
        "speech": {
            "input_features": torch.randn(2, 10, 24, generator=generator),
            "decoder_input_ids": ids[:, :6],
        },
        "image": {"pixel_values": image},
        "wave": {"input_values": torch.randn(2, 200, generator=generator)},
        "captions": {"input_ids": ids, "pixel_values": image},
        "prompt and image": {
            "input_ids": torch.cat([torch.full((2, 9), VOCAB - 1), ids[:, :6]], 1),
            "pixel_values": image,
        },
    }[reads]
    with torch.no_grad():
        generates = decoder or reads in ("tokens", "prompt and image")
        out = (prompt or forward)(**given, **({"use_cache": True} if generates else {}))
        said = [_said(out)]
        cache = next((key for key in ("past_key_values", "cache_params", "state") if generates and key in out), None)
        for t in range(6, 6 + steps if cache is not None else 6):
            more = {"encoder_outputs": (out.encoder_last_hidden_state,)} if decoder else {}
            more |= {"decoder_input_ids" if decoder else "input_ids": ids[:, t : t + 1], cache: out[cache]}
            out = forward(**more, use_cache=True)
            said.append(_said(out))
    return said


def _said(out: Any) -> torch.Tensor:
    found: torch.Tensor = next(out[key] for key in ("logits", "logits_per_image", "last_hidden_state") if key in out)
    return found
