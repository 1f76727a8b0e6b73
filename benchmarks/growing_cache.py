"""A decode step in a cache that grows: new rows appended in place beside a copy of all rows, and what each moves.

    python benchmarks/growing_cache.py
    python benchmarks/growing_cache.py --models v2lite --contexts 8192 --batches 4

One layer of a model of transformers at its real attention sizes, in a ``DynamicCache`` that holds random rows. Three
variants take steps in turns, each in a cache of its own, which grows as it does in ``generate``: ``torch.compile`` as
it is, and ours with ``appends="copy"`` and ``appends="in_place"``. Before that they have to return the same logits.

``moved`` are the bytes that keeping the cache takes in a step: a copy reads the old rows and writes all of them, an
append writes the new ones. Every power of two of tokens the memory doubles, and that step copies, too.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import (
    DTYPES,
    MODELS,
    Times,
    build,
    filled_cache,
    in_turns,
    machine,
    median_ratio,
    names,
    table,
    words,
    write,
)

import torch  # isort: skip  # after common, which sets the environment

import mla_compile

WARM_UP = 4  # steps: the first is compiled for its length, the second for any length


def measure(args: argparse.Namespace, name: str, batch: int, tokens: int) -> dict[str, Any]:
    """All variants in turns; raises SystemExit where their logits differ."""
    torch._dynamo.reset()
    model = build(name, DTYPES[args.dtype], 1, 2 * tokens)
    variants = {
        "inductor": torch.compile(model),
        "copy": mla_compile.optimize(model, appends="copy", strict=True),
        "in_place": mla_compile.optimize(model, appends="in_place", strict=True),
    }
    caches = {variant: filled_cache(model, batch, tokens) for variant in variants}
    ids = torch.full((batch, 1), 7)
    logits: dict[str, torch.Tensor] = {}

    def step(variant: str) -> float:
        start = time.perf_counter()
        result = variants[variant](input_ids=ids, past_key_values=caches[variant], use_cache=True)
        seconds = time.perf_counter() - start
        logits[variant] = result.logits.float()
        return seconds

    for _ in range(WARM_UP):
        for variant in variants:
            step(variant)
    scale = logits["inductor"].abs().max()
    errors = {variant: float((one - logits["inductor"]).abs().max() / scale) for variant, one in logits.items()}
    if max(errors.values()) > args.tolerance:
        raise SystemExit(f"{name}, batch {batch}, {tokens} tokens: logits differ by {errors} of their largest")
    times = in_turns({v: (lambda v=v: step(v)) for v in variants}, args.rounds, args.budget)
    held = caches["in_place"].layers[0].keys
    row = batch * (model.config.kv_lora_rank + model.config.qk_rope_head_dim) * held.element_size()
    return {
        "model": name, "dtype": args.dtype, "batch": batch, "context": tokens, "errors": errors,
        "ms": {v: asdict(Times.of(t)) for v, t in times.items()},
        "in_place_over_copy": median_ratio(times["in_place"], times["copy"]),
        "in_place_over_inductor": median_ratio(times["in_place"], times["inductor"]),
        "moved": {"copy": (2 * tokens + 1) * row, "in_place": row},
        "room": held.untyped_storage().nbytes() / (held.numel() * held.element_size()),
    }  # fmt: skip


def describe(row: dict[str, Any]) -> list[str]:
    """One row as text."""
    times = [f"{t['median']:.2f} [{t['low']:.2f}-{t['high']:.2f}]" for t in row["ms"].values()]
    moved = [f"{row['moved']['copy'] / 2**20:.2f}", f"{row['moved']['in_place'] / 2**10:.1f}"]
    return [row["model"], str(row["batch"]), str(row["context"]), *times, f"{row['in_place_over_copy']:.2f}", *moved]


HEAD = ("model", "batch", "context", "inductor ms", "copy ms", "in place ms", "ratio", "copied MiB", "written KiB")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names(list(MODELS)), default=["v2lite", "minicpm3"])
    parser.add_argument("--batches", type=words(int), default=[1, 4])
    parser.add_argument("--contexts", type=words(int), default=[512, 8192, 32768])
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for each row, after three rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=0.05, help="of the largest logit")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "growing_cache.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for name in args.models:
            for batch in args.batches:
                for tokens in args.contexts:
                    rows.append(measure(args, name, batch, tokens))
                    print("  " + "  ".join(describe(rows[-1])), flush=True)
                    write(args.out, {"benchmark": "growing_cache", "machine": machine()}, rows)
    print("\n" + table([describe(row) for row in rows], HEAD))
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
