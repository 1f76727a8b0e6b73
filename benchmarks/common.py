"""What the benchmarks share: models at real sizes with random weights, what the machine does at best, tables.

Importing this module sets quiet OpenMP threads, so import it before torch.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads disturb each other on a shared machine
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are built from configs, nothing is downloaded
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_compile.core.dims import Dims
from mla_compile.core.measuring import Times as Times
from mla_compile.core.measuring import available_bytes as available_bytes
from mla_compile.core.measuring import in_turns as in_turns
from mla_compile.core.measuring import machine as machine_without_transformers
from mla_compile.core.measuring import median_ratio as median_ratio
from mla_compile.core.measuring import timed as timed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Spec:
    """A model family at its real attention sizes; the MLP is small and dense, because attention is what is measured."""

    config: str
    model: str
    dims: Dims
    dense: str | None = None  # the config entry that says how many first layers have a dense MLP
    extra: dict[str, Any] = field(default_factory=dict)


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

MODELS = {
    "v2lite": Spec(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        Dims(H=16, L=512, R=64, N=128, V=128, D=2048),
        "first_k_dense_replace",
    ),
    "minicpm3": Spec("MiniCPM3Config", "MiniCPM3ForCausalLM", Dims(H=40, L=256, R=32, N=64, V=64, D=2560, Q=768)),
    "v3": Spec(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        Dims(H=128, L=512, R=64, N=128, V=128, D=7168, Q=1536),
        "first_k_dense_replace",
        {"rope_parameters": _YARN},
    ),
    "v32": Spec(
        "DeepseekV32Config",
        "DeepseekV32ForCausalLM",
        Dims(H=128, L=512, R=64, N=128, V=128, D=7168, Q=1536),
        "first_k_dense_replace",
        {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64},
    ),
    "tiny": Spec("MiniCPM3Config", "MiniCPM3ForCausalLM", Dims(H=4, L=64, R=16, N=32, V=24, D=128, Q=48)),
}


def build(name: str, dtype: torch.dtype, layers: int, max_tokens: int, seed: int = 0) -> Any:
    """The model ``name`` of :data:`MODELS` with ``layers`` layers, seeded random weights, in eval mode."""
    import transformers

    spec, d = MODELS[name], MODELS[name].dims
    config: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": d.D, "intermediate_size": 1024, "num_hidden_layers": layers,
        "num_attention_heads": d.H, "num_key_value_heads": d.H, "kv_lora_rank": d.L, "q_lora_rank": d.Q,
        "qk_nope_head_dim": d.N, "qk_rope_head_dim": d.R, "v_head_dim": d.V, "max_position_embeddings": max_tokens,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **spec.extra,
    }  # fmt: skip
    if spec.dense:
        config |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, spec.dense: layers}
    torch.manual_seed(seed)
    model = getattr(transformers, spec.model)(getattr(transformers, spec.config)(**config))
    return model.eval().requires_grad_(False).to(dtype)


def filled_cache(model: Any, batch: int, tokens: int) -> Any:
    """A ``DynamicCache`` of random rows, the same in every call."""
    from transformers import DynamicCache

    cache: Any = DynamicCache(config=model.config)
    dtype, random = model.get_input_embeddings().weight.dtype, torch.Generator().manual_seed(0)
    for layer in cache.layers:
        widths = (model.config.kv_lora_rank, model.config.qk_rope_head_dim)
        rows = [torch.randn(batch, 1, tokens, width, generator=random).to(dtype) for width in widths]
        layer.lazy_initialization(*rows)
        layer.keys, layer.values = rows
    return cache


def machine() -> dict[str, Any]:
    """What figures depend on: processor, threads, versions, the date."""
    import transformers

    return {**machine_without_transformers(), "transformers": transformers.__version__}


def read_bandwidth(gib: float = 1.0, rounds: int = 5) -> float:
    """Bytes/s at which this process reads memory: the fastest of a sum, a maximum and a matrix-vector product."""
    rows = int(gib * 2**30 / 4 / 8192)
    data = torch.ones(rows, 8192)
    vector = torch.ones(8192)
    kernels: list[Callable[[], Tensor]] = [data.sum, data.amax, lambda: torch.mv(data, vector)]
    return data.numel() * 4 / min(timed(kernel) for kernel in kernels for _ in range(rounds))


def matmul_rate(dtype: torch.dtype, size: int = 1024, rounds: int = 8) -> float:
    """FLOP/s of a square matrix product in ``dtype`` in this process, the fastest of some."""
    a = torch.randn(size, size).to(dtype)
    return 2.0 * size**3 / min(timed(lambda: a @ a) for _ in range(rounds))


def table(rows: Sequence[Sequence[object]], head: Sequence[str]) -> str:
    """Columns padded to their widest entry."""
    text = [[str(c) for c in r] for r in [head, *rows]]
    widths = [max(len(r[k]) for r in text) for k in range(len(head))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in text]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def write(path: Path, about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """JSON: what was measured on what, then the rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "rows": list(rows)}, indent=1, default=str) + "\n")


def words(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argparse type: values separated by commas."""
    return lambda text: [kind(word) for word in text.split(",") if word]


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """An argparse type: known names separated by commas."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        wrong = [name for name in chosen if name not in known]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is none of {', '.join(known)}")
        return chosen

    return parse
