"""A decode step of code that keeps K and V in buffers of its own: as it is, compiled, and with rows in their place.

    python -m benchmarks.own_buffers
    python -m benchmarks.own_buffers --models v2lite --contexts 8192 --dtypes float32

One attention layer as DeepSeek's inference code keeps its cache in its naive mode, at the attention sizes of a model: K
and V of all heads lie in buffers of the module, a step writes its own at ``start_pos`` and reads all up to there (with
SDPA, which is faster on a CPU than the products written out). In turns in one process, after their results were found
to agree: eager, ``torch.compile`` as it is, and ``optimize``. Before that, each variant's buffers are filled by a
prompt in pieces. ``held`` are the bytes of what the buffers hold, for as many tokens as were measured.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import DTYPES, MODELS, Times

import torch  # isort: skip  # after common, which sets the environment
import torch.nn.functional as F
from torch import Tensor, nn

import mla_compile
from mla_compile.core.dims import Dims

OUT = Path(__file__).parent / "results" / "own_buffers.json"
WARM_UP = 4  # steps: the first is compiled for its position, the second for any
PIECE = 512  # tokens of the prompt in one call


class Naive(nn.Module):
    """One attention with K [B,T,H,N+R] and V [B,T,H,V] in buffers; x [B,S,D] in and out."""

    def __init__(self, d: Dims, batch: int, tokens: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.d = d
        self.q = nn.Linear(d.D, d.H * (d.N + d.R), bias=False, dtype=dtype)
        self.down = nn.Linear(d.D, d.L + d.R, bias=False, dtype=dtype)
        self.norm = nn.RMSNorm(d.L, dtype=dtype)
        self.up = nn.Linear(d.L, d.H * (d.N + d.V), bias=False, dtype=dtype)
        self.out = nn.Linear(d.H * d.V, d.D, bias=False, dtype=dtype)
        self.register_buffer("k_cache", torch.zeros(batch, tokens, d.H, d.N + d.R, dtype=dtype), persistent=False)
        self.register_buffer("v_cache", torch.zeros(batch, tokens, d.H, d.V, dtype=dtype), persistent=False)

    def turned(self, x: Tensor, start: int) -> Tensor:
        """Rotary embedding of x [B,S,heads,R]."""
        half = x.shape[-1] // 2
        frequencies = 10000.0 ** -(torch.arange(half, dtype=torch.float32) / half)
        angles = torch.arange(start, start + x.shape[1])[:, None, None] * frequencies
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1).to(x.dtype)

    def forward(self, x: Tensor, start_pos: int) -> Tensor:
        """The attention's output for tokens from ``start_pos`` on."""
        d = self.d
        B, S, _ = x.shape
        end = start_pos + S
        latent, rope = self.down(x).split([d.L, d.R], -1)
        k, v = self.up(self.norm(latent)).view(B, S, d.H, d.N + d.V).split([d.N, d.V], -1)
        k = torch.cat([k, self.turned(rope[:, :, None], start_pos).expand(-1, -1, d.H, -1)], -1)
        self.k_cache[:B, start_pos:end] = k
        self.v_cache[:B, start_pos:end] = v
        q_n, q_r = self.q(x).view(B, S, d.H, d.N + d.R).split([d.N, d.R], -1)
        q = torch.cat([q_n, self.turned(q_r, start_pos)], -1)
        keys, values = self.k_cache[:B, :end].transpose(1, 2), self.v_cache[:B, :end].transpose(1, 2)
        mask = None if S == 1 else torch.ones(S, end, dtype=torch.bool).tril(start_pos)
        o = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask)
        return self.out(o.transpose(1, 2).flatten(2))


def measure(args: argparse.Namespace, name: str, dtype: str, tokens: int) -> dict[str, Any]:
    """All variants in turns; raises SystemExit where their results differ."""
    torch._dynamo.reset()
    d, batch, random = MODELS[name].dims, args.batch, torch.Generator().manual_seed(1)
    room = tokens + WARM_UP + args.rounds + 1
    plain = Naive(d, batch, room, DTYPES[dtype]).eval().requires_grad_(False)
    ours = mla_compile.optimize(plain, strict=True)
    variants = {"eager": plain, "inductor": torch.compile(plain), "mla": ours}  # the first two share their buffers

    def fill(call: Any) -> None:
        x = torch.Generator().manual_seed(2)
        for start in range(0, tokens, PIECE):
            n = min(PIECE, tokens - start)
            call(torch.randn(batch, n, d.D, generator=x).to(DTYPES[dtype]), start)

    fill(ours)  # first, for rows take the place of buffers that hold zeros
    fill(plain)
    position = dict.fromkeys(variants, tokens)
    results: dict[str, Tensor] = {}
    x = torch.randn(batch, 1, d.D, generator=random).to(DTYPES[dtype])

    def step(variant: str) -> float:
        def call() -> None:
            results[variant] = variants[variant](x, position[variant])

        seconds = common.timed(call)
        position[variant] += 1
        return seconds

    for _ in range(WARM_UP):
        for variant in variants:
            step(variant)
    wide = {variant: result.float() for variant, result in results.items()}
    errors = {v: float((one - wide["eager"]).norm() / wide["eager"].norm()) for v, one in wide.items()}
    if not max(errors.values()) <= args.tolerance:
        raise SystemExit(f"{name}, {dtype}, {tokens} tokens: results differ by {errors}; wrong ones are not timed")
    times = common.in_turns({v: (lambda v=v: step(v)) for v in variants}, args.rounds, args.budget, least=3)
    widths = {"expanded": d.H * (d.N + d.R + d.V), "rows": d.L + d.R}
    return {
        "model": name, "dtype": dtype, "batch": batch, "context": tokens, "errors": errors,
        "ms": {v: asdict(Times.of(t)) for v, t in times.items()},
        "held": {form: batch * tokens * width * DTYPES[dtype].itemsize for form, width in widths.items()},
        "faster_than": {v: common.median_ratio(times[v], times["mla"]) for v in ("eager", "inductor")},
    }  # fmt: skip


def describe(row: dict[str, Any]) -> list[str]:
    """One row as text."""
    held = [f"{row['held'][form] / 2**20:.0f}" for form in ("expanded", "rows")]
    return [row["model"], row["dtype"], str(row["context"]), *(str(Times(**t)) for t in row["ms"].values()), *held,
            *(f"{x:.1f}" for x in row["faster_than"].values())]  # fmt: skip


HEAD = ("model", "dtype", "context", "eager ms", "inductor ms", "mla ms", "K, V MiB", "rows MiB", "vs eager", "vs ind.")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=common.names(list(MODELS)), default=["v2lite", "minicpm3", "v3"])
    parser.add_argument("--contexts", type=common.words(int), default=[512, 8192])
    parser.add_argument("--dtypes", type=common.names(list(DTYPES)), default=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds for each row, after three rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=0.02, help="of the result, in norm")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for name in args.models:
            for dtype in args.dtypes:
                for tokens in args.contexts:
                    rows.append(measure(args, name, dtype, tokens))
                    print("  " + "  ".join(describe(rows[-1])), flush=True)
                    common.write(args.out, {"benchmark": "own_buffers", "machine": common.machine()}, rows)
                    gc.collect()
    print("\n" + common.table([describe(row) for row in rows], HEAD))


if __name__ == "__main__":
    main()
