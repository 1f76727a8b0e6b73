"""The scores of an indexer in a decode step: one operator beside what transformers writes, eager and compiled.

    python -m benchmarks.index_scores
    python -m benchmarks.index_scores --tokens 8192 --dtypes bfloat16 --threads 2

One query of DeepSeek-V3.2's sizes (64 heads of 128 columns) and T keys. All run in turns in one process, after the
operator's error against float64 was found to be within bounds. ``floor`` is the larger of two times: the FLOPs at the
rate of a large square product in that dtype, and the bytes of the keys at the rate at which this process reads memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import DTYPES, Times

import torch  # isort: skip  # after common, which sets the environment
from torch import Tensor

from mla_compile import ops
from mla_compile.kernels import reference
from mla_compile.kernels.call import IndexCall

OUT = Path(__file__).parent / "results" / "index_scores.json"
SCALE = 128**-0.5
LIMIT = 1e-6  # of the sum of all terms without their signs
HEAD = ("dtype", "tokens", "eager ms", "Inductor ms", "op ms", "floor ms", "eager/op", "Inductor/op", "error")


def written(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """As transformers writes it (5.x, the indexers of DeepSeek-V3.2 and GLM-MoE-DSA)."""
    scores = torch.matmul(query.float(), keys.transpose(-1, -2).float().unsqueeze(1)) * SCALE
    return torch.matmul(weights.unsqueeze(-2), torch.relu(scores)).squeeze(-2)


def error(got: Tensor, call: IndexCall) -> float:
    """The largest error, in sums of the terms without their signs."""
    wide = IndexCall(*(x.double() for x in call[:3]), call.scale)
    terms = IndexCall(*(x.abs() for x in wide[:3]), call.scale)
    return float(((got - reference.index_scores(wide)).abs() / reference.index_scores(terms)).max())


def measure(args: argparse.Namespace, dtype: str, tokens: int, flops_s: float, bytes_s: float) -> dict[str, Any]:
    """One row; raises SystemExit where the operator is wrong."""
    torch._dynamo.reset()
    random = torch.Generator().manual_seed(0)
    query, keys, weights = (
        torch.randn(*sizes, generator=random)
        for sizes in ((1, 1, args.heads, args.width), (1, tokens, args.width), (1, 1, args.heads))
    )
    query, keys = query.to(DTYPES[dtype]), keys.to(DTYPES[dtype])
    wrong = error(ops.index_scores(query, keys, weights, SCALE), IndexCall(query, keys, weights, SCALE))
    if not wrong <= LIMIT:
        raise SystemExit(f"wrong before fast: an error of {wrong:.1e} of {tokens} keys in {dtype}")
    compiled = torch.compile(written, dynamic=False)
    calls: dict[str, Callable[[], Tensor]] = {
        "eager": lambda: written(query, keys, weights),
        "inductor": lambda: compiled(query, keys, weights),
        "op": lambda: ops.index_scores(query, keys, weights, SCALE),
    }
    for call in calls.values():
        call()
    times = common.in_turns(
        {name: (lambda f=f: common.timed(f)) for name, f in calls.items()}, args.rounds, args.budget
    )
    flops, read = 2 * args.heads * tokens * (args.width + 1), keys.numel() * keys.element_size()
    return {
        "dtype": dtype, "tokens": tokens, "heads": args.heads, "width": args.width, "error": wrong,
        "ms": {name: asdict(Times.of(t)) for name, t in times.items()},
        "over_op": {name: common.median_ratio(times[name], times["op"]) for name in ("eager", "inductor")},
        "floor_ms": {"flops": 1e3 * flops / flops_s, "bytes": 1e3 * read / bytes_s},
    }  # fmt: skip


def describe(row: dict[str, Any]) -> list[str]:
    """One row as text."""
    times = [f"{t['median']:.2f} [{t['low']:.2f}-{t['high']:.2f}]" for t in row["ms"].values()]
    ratios = [f"{r:.1f}" for r in row["over_op"].values()]
    floor = f"{max(row['floor_ms'].values()):.2f}"
    return [row["dtype"], str(row["tokens"]), *times, floor, *ratios, f"{row['error']:.0e}"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=common.words(int), default=[8192, 32768, 131072])
    parser.add_argument("--dtypes", type=common.names(list(DTYPES)), default=["float32", "bfloat16"])
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds for each row, after three rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rates = {dtype: common.matmul_rate(DTYPES[dtype]) for dtype in args.dtypes}
    bytes_s = common.read_bandwidth()
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for dtype in args.dtypes:
            for tokens in args.tokens:
                rows.append(measure(args, dtype, tokens, rates[dtype], bytes_s))
                print("  " + "  ".join(describe(rows[-1])), flush=True)
                about = {"benchmark": "index_scores", "machine": common.machine()}
                common.write(args.out, about | {"flops_per_s": rates, "bytes_per_s": bytes_s}, rows)
    print("\n" + common.table([describe(row) for row in rows], HEAD))


if __name__ == "__main__":
    main()
