"""Export a model, optimize it, compile it ahead of time, and run it where neither the model nor mla_compile is.

What ``torch._inductor.aoti_compile_and_package`` writes is machine code and weights in one file. The process that
decodes with it here has no module of this file and cannot import mla_compile; a C++ program loads the same file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_compile

RUNNER = """
import json, sys
sys.modules["mla_compile"] = None  # importing it would be an error
import torch
step = torch._inductor.aoti_load_package(sys.argv[1])
tokens = json.loads(sys.argv[2])
for position in range(int(sys.argv[3]) - 1):
    logits = step(torch.tensor([[tokens[position]]]), torch.tensor([position]))
    if position + 1 == len(tokens):
        tokens.append(int(logits[0, 0].argmax()))
print(json.dumps(tokens))
"""


class Decoder(nn.Module):
    """One layer of Multi-head Latent Attention between an embedding and its transpose; its cache is a buffer."""

    cache: Tensor

    def __init__(self, T: int, D: int = 96, H: int = 4, L: int = 48, N: int = 24, R: int = 8, V: int = 20) -> None:
        super().__init__()
        self.sizes = (H, L, N, R, V)
        self.embedding = nn.Embedding(256, D)
        self.query = nn.Linear(D, H * (N + R), bias=False)
        self.down = nn.Linear(D, L + R, bias=False)
        self.norm = nn.RMSNorm(L)
        self.up = nn.Linear(L, H * (N + V), bias=False)
        self.out = nn.Linear(H * V, D, bias=False)
        self.register_buffer("cache", torch.zeros(1, T, L + R))

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """``token`` [1,S] at ``position`` [S] to logits [1,S,256]; the cache is written in place."""
        x, (H, L, N, R, V) = self.embedding(token), self.sizes
        q, q_rot = self.query(x).view(1, -1, H, N + R).transpose(1, 2).split([N, R], dim=-1)
        latent, k_rot = self.down(x).split([L, R], dim=-1)
        self.cache.index_copy_(1, position, torch.cat([self.norm(latent), rotate(k_rot, position)], dim=-1))
        latent, k_rot = self.cache.split([L, R], dim=-1)
        k, v = self.up(latent).view(1, -1, H, N + V).transpose(1, 2).split([N, V], dim=-1)
        q = torch.cat([q, rotate(q_rot, position)], dim=-1)
        k = torch.cat([k, k_rot[:, None].expand(-1, H, -1, -1)], dim=-1)
        visible = torch.arange(self.cache.shape[1]) <= position[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return F.linear(x + self.out(y.transpose(1, 2).flatten(2)), self.embedding.weight)


def rotate(x: Tensor, position: Tensor) -> Tensor:
    """RoPE on the last axis of ``x`` [..., S, R]."""
    half = x.shape[-1] // 2
    angle = position[:, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    """Export, optimize, compile; decode in another process and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=24, help="tokens of prompt and answer")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    model, prompt = Decoder(given.context).eval(), [17, 4, 101, 5, 9, 33]

    exported = torch.export.export(model, (torch.tensor([[prompt[0]]]), torch.tensor([0])))
    fast = mla_compile.optimize(exported)
    print(fast.graph_module.meta["mla_report"].summary())
    with tempfile.TemporaryDirectory() as folder:
        package = torch._inductor.aoti_compile_and_package(fast, package_path=str(Path(folder) / "decoder.pt2"))
        print(f"decoder.pt2: {Path(package).stat().st_size:,} bytes")
        command = [sys.executable, "-I", "-c", RUNNER, package, json.dumps(prompt), str(given.context)]
        tokens = json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout)

    expected = list(prompt)
    for position in range(given.context - 1):
        logits = model(torch.tensor([[expected[position]]]), torch.tensor([position]))
        if position + 1 == len(expected):
            expected.append(int(logits[0, 0].argmax()))
    print("tokens:", tokens[len(prompt) :])
    print("the same as the original's:", tokens == expected)


if __name__ == "__main__":
    main()
