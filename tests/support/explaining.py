"""Configs and functions whose models ``mla-compile explain`` is called with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from mla_compile.cli.app import app
from mla_compile.models import survey as surveying
from mla_compile.passes.report.draw import MOST
from mla_compile.report.report import Report
from tests.support.toy import Toy

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


TINY = {
    "model_type": "kimi_k2",  # not one of transformers: read by its architecture
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
}


FACTORY = """
import torch
import torch.nn.functional as F
from torch import nn
from tests.support.toy import Toy, decode_inputs

class Up(nn.Linear):
    def forward(self, latent):
        return torch.tanh(super().forward(latent))

class Squashed(Toy):
    def __init__(self):
        super().__init__()
        self.up = Up(self.up.in_features, self.up.out_features)

def refused():
    return Squashed(), decode_inputs()

class Loud(Toy):
    def forward(self, x, rows):
        print("a line of the model's")
        return super().forward(x, rows)

def absorbed():
    print("a line of their own")
    return Loud(), decode_inputs(cached=300)

class Core(nn.Module):
    def __init__(self, squash):
        super().__init__()
        self.k_up, self.v_up, self.squash = nn.Linear(24, 44), nn.Linear(24, 40), squash

    def forward(self, q, latent):  # the queries and the latent come from outside
        k, v = (f(latent).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.k_up, self.v_up))
        return F.scaled_dot_product_attention(q, self.squash(k), v)

def in_part():
    return Core(torch.tanh), (torch.randn(1, 4, 1, 11), torch.randn(1, 90, 24))

def alone():
    return Core(nn.Identity()), (torch.randn(1, 4, 1, 11), torch.randn(1, 90, 24))

class ByHand(Core):
    def forward(self, q, latent):
        w_k, w_v = (f.weight.unflatten(0, (4, -1)) for f in (self.k_up, self.v_up))
        rows = latent[:, None]
        return F.scaled_dot_product_attention(q @ w_k, rows, rows) @ w_v.mT

def by_hand():
    return ByHand(None), (torch.randn(1, 4, 1, 11), torch.randn(1, 90, 24))

class Heads(nn.Linear):
    def forward(self, x):
        return F.scaled_dot_product_attention(*super().forward(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4))

def heads():
    return Heads(32, 96), (torch.randn(1, 5, 32),)

def bare():
    return Toy()

def number():
    return 3

def unfit():
    return Toy(), (torch.randn(2, 1, 32), torch.randn(19, 22))
"""


def call(*arguments: str):
    return CliRunner().invoke(app, ["explain", *arguments])


_traced: dict[tuple[object, ...], Report] = {}


def trace_once(patch: pytest.MonkeyPatch) -> None:
    """Trace equal models once, however their weights are stored: for tests of what is counted and said of them."""
    trace = surveying._step_explained

    def traced(model: Any, cache: Any) -> Report:
        told = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
        dtype = next(model.parameters()).dtype
        key = type(model), dtype, cache.get_seq_length(), json.dumps(told, sort_keys=True, default=str)
        if key not in _traced:
            _traced[key] = trace(model, cache)
        return _traced[key]

    patch.setattr(surveying, "_step_explained", traced)


def write(config: object, name: str = "config.json") -> str:
    Path(name).write_text(config if isinstance(config, str) else json.dumps(config))
    return name


class Long(Toy):
    """A refusal behind more steps than a drawing takes."""

    def attend(self, x: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q = self.q(x).view(2, 1, 4, 18).transpose(1, 2)
        k = torch.tanh(self.up(rows[..., :16])).view(2, -1, 4, 22).transpose(1, 2)
        k, v = k.split([12, 10], dim=-1)
        for _ in range(MOST + 20):
            k = torch.sin(k)
        k = torch.cat([k, rows[..., 16:].unsqueeze(1).expand(-1, 4, -1, -1)], dim=-1)
        o = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(o.transpose(1, 2).reshape(2, 1, 40))
