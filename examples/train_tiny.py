"""Train a small MLA language model on the text of this repository, and see what optimize() does to its perplexity.

Byte level, three layers, half a million weights. Every held-out byte is then decoded one by one against a cache of
latent rows, by the model as it was trained and by the optimized one, in float32 and bfloat16, with and without folding.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import mla_compile

ROOT = Path(__file__).resolve().parent.parent


class Layer(nn.Module):
    """Multi-head Latent Attention and an MLP; the letters are those of docs/how_it_works.md."""

    def __init__(self, D: int, H: int = 4, L: int = 48, N: int = 32, R: int = 16, V: int = 24) -> None:
        super().__init__()
        self.sizes = (H, L, N, R, V)
        self.norm, self.norm_latent = nn.RMSNorm(D), nn.RMSNorm(L)
        self.query = nn.Linear(D, H * (N + R), bias=False)
        self.down = nn.Linear(D, L + R, bias=False)
        self.up = nn.Linear(L, H * (N + V), bias=False)
        self.out = nn.Linear(H * V, D, bias=False)
        self.mlp = nn.Sequential(nn.RMSNorm(D), nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x: Tensor, position: Tensor, cache: Tensor | None) -> Tensor:
        """``x`` [B,S,D] at ``position`` [S]; its rows are written into ``cache`` [B,T,L+R] where there is one."""
        x = x + self.attend(self.norm(x), position, cache)
        return x + self.mlp(x)

    def attend(self, x: Tensor, position: Tensor, cache: Tensor | None) -> Tensor:
        """The attention as it is trained: K and V are made from the rows of all tokens."""
        (B, S, _), (H, L, N, R, V) = x.shape, self.sizes
        q, q_rot = self.query(x).view(B, S, H, N + R).transpose(1, 2).split([N, R], dim=-1)
        latent, k_rot = self.down(x).split([L, R], dim=-1)
        rows = torch.cat([self.norm_latent(latent), rotate(k_rot, position)], dim=-1)
        if cache is not None:
            rows = cache.index_copy_(1, position, rows)
        latent, k_rot = rows.split([L, R], dim=-1)
        k, v = self.up(latent).view(B, -1, H, N + V).transpose(1, 2).split([N, V], dim=-1)
        q = torch.cat([q, rotate(q_rot, position)], dim=-1)
        k = torch.cat([k, k_rot[:, None].expand(-1, H, -1, -1)], dim=-1)
        visible = torch.arange(rows.shape[1]) <= position[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, D: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, D)
        nn.init.normal_(self.embedding.weight, std=0.02)
        stack = [Layer(D) for _ in range(layers)]
        self.layers, self.width = nn.ModuleList(stack), stack[0].down.out_features
        self.norm = nn.RMSNorm(D)

    def forward(self, text: Tensor, position: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        """``text`` [B,S] at ``position`` [S] to logits [B,S,256]."""
        x = self.embedding(text)
        for index, layer in enumerate(self.layers):
            x = layer(x, position, None if cache is None else cache[index])
        return F.linear(self.norm(x), self.embedding.weight)

    def new_cache(self, B: int, T: int) -> list[Tensor]:
        """A buffer for T rows in each layer."""
        return [torch.zeros(B, T, self.width, dtype=self.embedding.weight.dtype) for _ in self.layers]


def rotate(x: Tensor, position: Tensor) -> Tensor:
    """RoPE on the last axis of ``x`` [..., S, R]."""
    half = x.shape[-1] // 2
    angle = position[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def read_text() -> tuple[Tensor, Tensor]:
    """The bytes to train on, and the last tenth of each file, which is held out."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = [torch.tensor(list(file.read_bytes())) for file in files]
    cuts = [len(text) * 9 // 10 for text in texts]
    train = torch.cat([text[:cut] for text, cut in zip(texts, cuts, strict=True)])
    return train, torch.cat([text[cut:] for text, cut in zip(texts, cuts, strict=True)])


def train(model: Model, text: Tensor, length: int, seconds: float, steps: int | None) -> int:
    """AdamW with a cosine schedule over the time, or over the number of steps; returns the number of steps."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    start, step, done = time.perf_counter(), 0, 0.0
    while done < 1:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)
        first = torch.randint(len(text) - length, (16, 1))
        batch = text[first + torch.arange(length + 1)]
        logits = model(batch[:, :-1], torch.arange(length))
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        done = step / steps if steps else (time.perf_counter() - start) / seconds
        if step % 100 == 0:
            print(f"step {step}, {done:4.0%}: perplexity of the batch {loss.exp():.2f}")
    return step


@torch.no_grad()
def decode(step: Callable[..., Tensor], model: Model, windows: Tensor) -> tuple[float, float]:
    """Perplexity of the bytes of ``windows`` [B,T+1], each decoded by one call of ``step``, and milliseconds a call."""
    B, T = windows.shape[0], windows.shape[1] - 1
    cache, loss, times = model.new_cache(B, T), 0.0, []
    for t in range(T):
        start = time.perf_counter()
        logits = step(windows[:, t : t + 1], torch.tensor([t]), cache)
        times.append(1e3 * (time.perf_counter() - start))
        loss += F.cross_entropy(logits[:, 0].float(), windows[:, t + 1]).item() / T
    return math.exp(loss), sorted(times)[T // 2]


@torch.no_grad()
def generate(step: Callable[..., Tensor], model: Model, prompt: bytes, length: int) -> bytes:
    """``prompt`` and what greedy decoding makes of it, ``length`` bytes in all."""
    text, cache = list(prompt), model.new_cache(1, length)
    for t in range(length - 1):
        logits = step(torch.tensor([[text[t]]]), torch.tensor([t]), cache)
        if t + 1 == len(text):
            text.append(int(logits[0, 0].argmax()))
    return bytes(text)


def compare(model: Model, windows: Tensor, codegen: str) -> Table:
    """Perplexity of ``windows`` by the model as it was trained and optimized, by dtype and with and without folding."""
    table = Table(title=f"{windows[:, 1:].numel():,} held-out bytes, decoded one by one", title_justify="left")
    for column in ("dtype", "model", "absorbed", "perplexity", "against float32", "ms a step"):
        table.add_column(column, justify="left" if column in ("dtype", "model") else "right")
    wanted = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        one = copy.deepcopy(model).to(dtype)
        for fold in (None, "never", "always"):
            step: Any = one if fold is None else mla_compile.optimize(one, fold=fold, codegen=codegen)
            perplexity, milliseconds = decode(step, one, windows)
            wanted = wanted or perplexity
            name = "as trained" if fold is None else f"optimized, fold={fold}"
            absorbed = "" if fold is None else f"{step.mla_report.absorbed} of {len(step.mla_report.sites)}"
            change = f"{perplexity / wanted - 1:+.1e}"
            cells = (str(dtype).removeprefix("torch."), name, absorbed, f"{perplexity:.5f}", change)
            table.add_row(*cells, f"{milliseconds:.2f}", end_section=fold == "always")
    return table


def main(arguments: list[str] | None = None) -> None:
    """Train, save, load, compare, generate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.5, help="time to train")
    parser.add_argument("--steps", type=int, help="train this many steps instead")
    parser.add_argument("--context", type=int, default=128, help="bytes the model sees")
    parser.add_argument("--windows", type=int, default=32, help="held-out texts of that length")
    parser.add_argument("--codegen", choices=("inductor", "eager"), default="inductor")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    text, held_out = read_text()
    trained = Model()
    count = train(trained, text, given.context, 60 * given.minutes, given.steps)
    print(f"{count} steps on {len(text):,} bytes; {sum(p.numel() for p in trained.parameters()):,} weights")

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tiny.safetensors"
        save_file(trained.state_dict(), file)
        print(f"saved: {file.name}, {file.stat().st_size:,} bytes")
        model = Model().eval()
        model.load_state_dict(load_file(file))

    first = torch.linspace(0, len(held_out) - given.context - 1, given.windows).long()
    windows = held_out[first[:, None] + torch.arange(given.context + 1)]
    Console(width=100).print(compare(model, windows, given.codegen))

    fast = mla_compile.optimize(model, codegen=given.codegen)
    expected = generate(model, model, b"The absorbed form ", given.context)
    written = generate(fast, model, b"The absorbed form ", given.context)
    print(written.decode(errors="replace"))
    print("the same as the original's:", written == expected)


if __name__ == "__main__":
    main()
