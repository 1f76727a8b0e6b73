"""Attention that a model absorbs by hand: as it is written, compiled by Inductor, and with its core as one operator.

    python benchmarks/absorbed_by_hand.py
    python benchmarks/absorbed_by_hand.py --heads 16 --contexts 4096 --queries 1

One attention as DeepSeek's own inference code writes it in its absorbed form: einsums of all heads with the rows of the
cache, a softmax in float32, an einsum with the latent. The limit on query rows (passes/decide/fuse.py) is lifted, to
see where it should lie; ``taken`` says which rows are within it.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import DTYPES, Times, in_turns, machine, median_ratio, table, words, write

import torch  # isort: skip  # after common, which sets the environment
from torch import Tensor, nn
from torch.nn import functional as F

import mla_compile  # noqa: F401  registers the backend
from mla_compile.passes.decide import fuse

L, R, N, V, WIDTH = 512, 64, 128, 128, 512


class Attention(nn.Module):
    """One decode step over cached rows [B,T,L+R]; the output projection is left out."""

    def __init__(self, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        shapes = {"q": (heads * (N + R), WIDTH), "down": (L + R, WIDTH), "up": (heads * (N + V), L)}
        for name, shape in shapes.items():
            self.register_buffer(name, torch.randn(shape, dtype=torch.float32).mul(shape[1] ** -0.5).to(dtype))

    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        """[B,S,heads*V]."""
        w_k, w_v = self.up.view(self.heads, N + V, L).split([N, V], 1)
        q, q_rope = F.linear(x, self.q).unflatten(-1, (self.heads, -1)).split([N, R], -1)
        c, r = torch.cat([past, F.linear(x, self.down)], 1).split([L, R], -1)
        q = torch.einsum("bshn,hnl->bshl", q, w_k)
        scores = torch.einsum("bshl,btl->bsht", q, c) + torch.einsum("bshr,btr->bsht", q_rope, r)
        weights = (scores * (N + R) ** -0.5).softmax(-1, dtype=torch.float32).type_as(x)
        return torch.einsum("bshl,hvl->bshv", torch.einsum("bsht,btl->bshl", weights, c), w_v).flatten(2)


def measure(args: argparse.Namespace, heads: int, queries: int, tokens: int) -> dict[str, Any]:
    """Both in turns; raises SystemExit where their results differ."""
    torch._dynamo.reset()
    dtype = DTYPES[args.dtype]
    module = Attention(heads, dtype).eval()
    call = torch.randn(1, queries, WIDTH, dtype=dtype), torch.randn(1, tokens, L + R, dtype=dtype)
    variants = {"inductor": torch.compile(module), "one operator": torch.compile(module, backend="mla")}
    results = {name: run(*call).float() for name, run in variants.items()}
    want = results["inductor"]
    error = float((results["one operator"] - want).abs().max() / want.abs().max())
    if error > args.tolerance:
        raise SystemExit(f"{heads} heads, {tokens} tokens: results differ by {error} of their largest")

    def step(name: str) -> float:
        start = time.perf_counter()
        variants[name](*call)
        return time.perf_counter() - start

    times = in_turns({name: (lambda name=name: step(name)) for name in variants}, args.rounds, args.budget)
    return {
        "heads": heads, "queries": queries, "context": tokens, "dtype": args.dtype, "error": error,
        "taken": heads * queries <= args.limit and queries <= fuse.MOST_QUERIES,
        "ms": {name: asdict(Times.of(t)) for name, t in times.items()},
        "ratio": median_ratio(times["one operator"], times["inductor"]),
    }  # fmt: skip


def describe(row: dict[str, Any]) -> list[str]:
    """One row as text."""
    times = [f"{t['median']:.2f} [{t['low']:.2f}-{t['high']:.2f}]" for t in row["ms"].values()]
    return [*(str(row[k]) for k in ("heads", "queries", "context")), *times, f"{row['ratio']:.2f}", str(row["taken"])]


HEAD = ("heads", "queries", "context", "inductor ms", "one operator ms", "ratio", "taken")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=words(int), default=[16, 40, 128])
    parser.add_argument("--queries", type=words(int), default=[1, 4])
    parser.add_argument("--contexts", type=words(int), default=[512, 4096, 16384])
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds for each row, after three rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=0.05, help="of the largest result")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "absorbed_by_hand.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.limit, fuse.MOST_ROWS = fuse.MOST_ROWS, 1 << 30
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for heads in args.heads:
            for queries in args.queries:
                for tokens in args.contexts:
                    rows.append(measure(args, heads, queries, tokens))
                    print("  " + "  ".join(describe(rows[-1])), flush=True)
                    write(args.out, {"benchmark": "absorbed_by_hand", "machine": machine()}, rows)
    print("\n" + table([describe(row) for row in rows], HEAD))
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
