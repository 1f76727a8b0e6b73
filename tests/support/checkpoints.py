"""Checkpoints of quantized models, written to a folder by the tools of the libraries whose formats they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from tests.support.models import build

INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
CHANNEL: dict[str, Any] = {"strategy": "channel", "symmetric": True}
TOKEN: dict[str, Any] = {"strategy": "token", "symmetric": True, "dynamic": True}
FLOAT8: dict[str, Any] = {"num_bits": 8, "type": "float"}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int"}


def compressed_tensors(
    folder: Path, weights: dict[str, Any], rows: dict[str, Any] | None, ignore: list[str]
) -> nn.Module:
    """A model as compressed-tensors stores it, freshly loaded. ``rows``: how activations are rounded."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model = build("deepseek_v3", first_k_dense_replace=2, num_hidden_layers=1)
    inputs = None if rows is None else QuantizationArgs(**rows)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=inputs)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head", *ignore])
    apply_quantization_config(model, config)
    for layer in model.modules():
        if (own := getattr(layer, "quantization_scheme", None)) is not None:
            groups = layer.weight.unflatten(-1, (-1, own.weights.group_size or layer.in_features))
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), own.weights)
            layer.weight_scale.data.copy_(scale)
            if hasattr(layer, "weight_zero_point"):
                layer.weight_zero_point.data.copy_(zero)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    loaded: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return loaded
