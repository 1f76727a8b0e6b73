"""Is a quantized up-projection better dequantized once and kept, or in every step? One layer at DeepSeek-V3's sizes.

    python benchmarks/dequantize_cpu.py                      # minutes
    python benchmarks/dequantize_cpu.py --batches 1 --rounds 101

The attention of one step over a short context, absorbed: its time is that of W_kc and W_v (H=128 L=512 N=128 V=128).
``bytes`` is the least that a step has to read of them, and ``auto`` what the cost model takes.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import Times, in_turns, machine, table, words, write

import torch  # isort: skip  # after common, which sets the environment
import torch.nn.functional as F
from torch import Tensor, nn

import mla_compile

H, L, N, R, V, BLOCK = 128, 512, 128, 64, 128, 128
CONTEXT = 64
OUT = Path(__file__).parent / "results" / "dequantize_cpu.json"


class Up(nn.Module):
    """A weight [H(N+V),L]: bfloat16, int8 with a scale for each row, or float8 with one for each block."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        weight = torch.randn(H * (N + V), L, generator=torch.Generator().manual_seed(0)) / L**0.5
        if kind == "int8":
            scale = weight.abs().amax(1, keepdim=True) / 127
            stored = (weight / scale).round().to(torch.int8)
        elif kind == "float8":
            tiles = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
            scale = tiles.abs().amax((1, 3), keepdim=True) / 448
            stored = (tiles / scale).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
        else:
            scale, stored = None, weight.bfloat16()
        self.register_buffer("stored", stored)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """Rows [...,L] -> [...,H(N+V)]."""
        weight = self.stored
        if self.scale is not None and self.scale.dim() == 2:
            weight = weight.float() * self.scale
        elif self.scale is not None:
            tiles = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
            weight = (tiles * self.scale).flatten(2).flatten(0, 1)
        return F.linear(x, weight.to(x.dtype))


class Attention(nn.Module):
    """One step over rows of a cache."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up = Up(kind)

    def forward(self, q: Tensor, latent: Tensor, rotary: Tensor) -> Tensor:
        """Queries [B,H,1,N+R], latents [B,T,L], rotary keys [B,T,R] -> [B,H,1,V]."""
        k, v = self.up(latent).unflatten(-1, (H, N + V)).transpose(1, 2).split([N, V], -1)
        k = torch.cat([k, rotary[:, None].expand(-1, H, -1, -1)], -1)
        return F.scaled_dot_product_attention(q, k, v)


VARIANTS = [("bfloat16", "auto"), *((kind, how) for kind in ("int8", "float8") for how in ("step", "once", "auto"))]


def measure(batch: int, rounds: int, budget: float, tolerance: float) -> dict[str, Any]:
    """All variants in turns; raises SystemExit where a result is far from the original's."""
    torch._dynamo.reset()
    random = torch.Generator().manual_seed(1)
    shapes = ((batch, H, 1, N + R), (batch, CONTEXT, L), (batch, CONTEXT, R))
    given = [torch.randn(shape, generator=random).bfloat16() for shape in shapes]
    calls, kept = {}, {}
    for kind, how in VARIANTS:
        module, name = Attention(kind).eval(), f"{kind}, {how}"
        fast = mla_compile.optimize(module, dequantize=how, forms="absorbed", strict=True)
        result, expected = fast(*given).float(), module(*given).float()
        error = float((result - expected).norm() / expected.norm())
        if not error < tolerance:
            raise SystemExit(f"{name}, batch {batch}: {error:.1e} from the original")
        kept[name] = sum(p.changes for p in fast.mla_report.passes if p.name == "dequantize")
        calls[name] = fast

    def timed(name: str) -> float:
        start = time.perf_counter()
        calls[name](*given)
        return time.perf_counter() - start

    for _ in range(3):
        for name in calls:
            timed(name)
    times = in_turns({name: (lambda name=name: timed(name)) for name in calls}, rounds, budget)
    values = H * (N + V) * L
    return {
        "batch": batch, "kept": kept, "ms": {name: asdict(Times.of(t)) for name, t in times.items()},
        "bytes": {name: values * (2 if name.startswith("bfloat16") or kept[name] else 1) for name in calls},
    }  # fmt: skip


def describe(row: dict[str, Any]) -> list[list[str]]:
    """A row for each variant as text."""
    return [
        [str(row["batch"]), name, f"{t['median']:.2f} [{t['low']:.2f}-{t['high']:.2f}]", str(row["kept"][name]),
         f"{row['bytes'][name] / 2**20:.0f}"]
        for name, t in row["ms"].items()
    ]  # fmt: skip


HEAD = ("batch", "stored, dequantized", "ms", "weights kept", "MiB")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=words(int), default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for each row, after three rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=0.02, help="relative, of the results")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for batch in args.batches:
            rows.append(measure(batch, args.rounds, args.budget, args.tolerance))
            print(table(describe(rows[-1]), HEAD), flush=True)
            write(args.out, {"benchmark": "dequantize_cpu", "machine": machine()}, rows)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
