"""Write the configuration file that onnxruntime-genai needs next to a model of profile ``genai``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from mla_compile.onnx.manifest import Manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG = "genai_config.json"
_MAX_LENGTH = 4096


def write_config(model: PreTrainedModel, manifest: Manifest, directory: Path) -> None:
    """Write ``genai_config.json``.

    onnxruntime-genai allocates keys and values of equal shape for each layer. The two halves of the row [latent,
    k_rope] are stored as keys and values with one head.
    """
    config = model.config
    layers = len(manifest.caches) // 2
    half = manifest.caches[0].shape[-1]
    context = manifest.max_position or _MAX_LENGTH
    eos = list(manifest.eos_token_ids) or [manifest.pad_token_id]
    bos = getattr(config, "bos_token_id", None)
    content = {
        "model": {
            "type": "decoder",
            "bos_token_id": int(bos) if bos is not None else eos[0],
            "eos_token_id": eos[0] if len(eos) == 1 else eos,
            "pad_token_id": manifest.pad_token_id,
            "vocab_size": manifest.vocab_size,
            "context_length": context,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": manifest.graphs["decode"],
                "head_size": half,
                "hidden_size": int(config.hidden_size),
                "num_attention_heads": manifest.attention[0].H,
                "num_hidden_layers": layers,
                "num_key_value_heads": 1,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "do_sample": False,
            "max_length": min(context, _MAX_LENGTH),
            "min_length": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            "past_present_share_buffer": False,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_k": 1,
            "top_p": 1.0,
        },
    }
    (directory / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
