"""Checkpoints of quantized models, written to a folder by the tools of the libraries whose formats they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from tests.support.models import build

INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
CHANNEL: dict[str, Any] = {"strategy": "channel", "symmetric": True}
TOKEN: dict[str, Any] = {"strategy": "token", "symmetric": True, "dynamic": True}
FLOAT8: dict[str, Any] = {"num_bits": 8, "type": "float"}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int"}

# Widths that groups of 32, blocks of 64 and tiles of 32 rows divide.
WIDTHS: dict[str, Any] = {"q_lora_rank": 64, "qk_nope_head_dim": 48, "qk_rope_head_dim": 32, "v_head_dim": 32}
DENSE: dict[str, Any] = {"num_hidden_layers": 1, "intermediate_size": 256}


def plain(dtype: torch.dtype, family: str = "deepseek_v3") -> nn.Module:
    """A model of one layer without experts, in ``dtype``."""
    first = {} if family == "minicpm3" else {"first_k_dense_replace": 2}
    return build(family, dtype=dtype, **WIDTHS, **DENSE, **first)


def load(folder: Path, dtype: torch.dtype, kind: Any = None, **options: Any) -> nn.Module:
    """The model of a folder, as users load it."""
    kind = kind or transformers.AutoModelForCausalLM
    loaded: nn.Module = kind.from_pretrained(folder, dtype=dtype, **options).eval()
    return loaded


def quantized(folder: Path, config: Any, dtype: torch.dtype = torch.float32, family: str = "deepseek_v3") -> nn.Module:
    """A model that transformers quantized as ``config`` says, freshly loaded: from a file if the format has one."""
    plain(dtype, family).save_pretrained(folder / "plain")
    model = load(folder / "plain", dtype, quantization_config=config)
    if not model.hf_quantizer.is_serializable():
        return model
    model.save_pretrained(folder / "quantized")
    return load(folder / "quantized", dtype)


def float8_blocks(folder: Path) -> nn.Module:
    """DeepSeek-V3's own format, each weight quantized by what transformers does it with on a GPU."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = transformers.FineGrainedFP8Config(weight_block_size=(32, 32))
    quantize = Fp8Quantize(type("Quantizer", (), {"quantization_config": config})())
    model = plain(torch.bfloat16)
    model.save_pretrained(folder)
    state = dict[str, torch.Tensor]()
    for name, value in model.state_dict().items():
        made = quantize.convert({name: value}) if name.endswith("_proj.weight") else {name: value}
        state |= {own: tensor.contiguous() for own, tensor in made.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config.to_dict()}))
    return load(folder, torch.bfloat16)


def gptq(folder: Path) -> nn.Module:
    """GPTQ, rounded to the nearest and packed by optimum and gptqmodel, whose kernel for a CPU multiplies."""
    from optimum.gptq import GPTQQuantizer

    config = transformers.GPTQConfig(bits=4, group_size=32, sym=True, dataset=["not read"])
    model = plain(torch.float16)
    chosen = {name: layer.weight for name, layer in linears(model)}
    found = {name: (None, *_rounding(weight), torch.arange(weight.shape[1]) // 32) for name, weight in chosen.items()}
    GPTQQuantizer.from_dict(config.to_dict_optimum()).pack_model(model, found)
    model.config.quantization_config = config
    model.save_pretrained(folder)
    return load(folder, torch.float16)


def awq(folder: Path) -> nn.Module:
    """AWQ without its scales of the inputs, packed by gptqmodel, whose kernel for a CPU multiplies."""
    from gptqmodel.nn_modules.qlinear.gemm_awq import AwqGEMMLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear

    model = plain(torch.float16)
    for name, layer in list(linears(model)):
        sizes = {"in_features": layer.in_features, "out_features": layer.out_features, "register_buffers": True}
        made = AwqTorchLinear(bits=4, group_size=32, sym=False, desc_act=False, bias=False, **sizes)
        AwqGEMMLinear.pack(made, layer, *_rounding(layer.weight))
        model.set_submodule(name, made)
    model.config.quantization_config = transformers.AwqConfig(bits=4, group_size=32, zero_point=True)
    model.save_pretrained(folder)
    return load(folder, torch.float16)


def linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The linear layers of a model by name, but for its head."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]


def _rounding(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [out, groups] of 4 bits in groups of 32 columns."""
    scale = weight.unflatten(1, (-1, 32)).abs().amax(-1) / 7.5
    return scale, torch.full_like(scale, 8)


def compressed_tensors(
    folder: Path, weights: dict[str, Any], rows: dict[str, Any] | None, ignore: list[str], kind: Any = None
) -> nn.Module:
    """A model as compressed-tensors stores it, freshly loaded, as one of ``kind`` if it is given.

    ``rows``: how activations are rounded.
    """
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
    return load(folder, torch.float32, kind)
