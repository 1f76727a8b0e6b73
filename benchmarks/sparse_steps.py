"""Decode steps of a sparse attention: as the model is, compiled, absorbed with its mask, and absorbed with its list.

    python -m benchmarks.sparse_steps
    python -m benchmarks.sparse_steps --tokens 8192 --threads 2 --rounds 9

One layer of DeepSeek-V3.2's sizes (2,048 keys chosen by 64 heads of 128 columns), random weights, a small MLP, a cache
of random rows. All variants run in turns in one process, after their logits were found to agree. What eager attention
cannot hold in memory is skipped and said so.

``attention`` has the operator alone: all T rows, the k rows of a list among T, and a cache of k rows. The second should
cost what the third does, whatever T is. ``ours`` is what a step spends on choosing and attending: the indexer's scores,
their ``topk``, and attention over the list.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import MODELS, Times

import torch  # isort: skip  # after common, which sets the environment
from torch import Tensor

from mla_compile import ops
from mla_compile.backend import mla
from mla_compile.workbench.decode_steps import TOLERANCE, WARM_UP, DecodeSteps, differences

OUT = Path(__file__).parent / "results" / "sparse_steps.json"
NAME = "v32"
HEAD = ("tokens", "eager ms", "Inductor ms", "mask ms", "list ms", "mask/list", "eager/list")
ATTENTION = ("tokens", "all rows ms", "choosing ms", "listed rows ms", "k rows ms", "listed/k", "all/(choosing+listed)")


class Bench(DecodeSteps):
    """One layer with its indexer, whose keys are cached too."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.d, self.extra = args, MODELS[NAME].dims, MODELS[NAME].extra
        longest = max([*args.tokens, *WARM_UP]) + 1
        model = common.build(NAME, torch.float32, 1, longest + 16)
        calls: dict[str, Callable[..., Any]] = {
            "eager": model,
            "inductor": torch.compile(model),
            "mask": torch.compile(model, backend=mla, options={"sparse": "never"}),
            "list": torch.compile(model, backend=mla),
        }
        slots = [(1, self.d.L, 1, self.d.R)]
        super().__init__(model, calls, slots, batch=1, longest=longest, dtype=torch.float32)
        random = torch.Generator().manual_seed(4)
        self.index_keys = torch.randn(1, longest, self.extra["index_head_dim"], generator=random)

    def dynamic(self, tokens: int) -> Any:
        """A cache that holds the indexer's keys as well."""
        cache = super().dynamic(tokens)
        (layer,) = cache.layers
        layer.lazy_initialization_indexer(self.index_keys)
        layer.indexer_keys = self.index_keys[:, :tokens].contiguous()
        return cache

    def fits(self, tokens: int) -> bool:
        """Whether K and V, and the copies that eager attention makes of them, fit in the free memory."""
        values = tokens * self.d.H * (3 * (self.d.N + self.d.V) + 2 * self.d.R)
        return values * 4 < 0.8 * common.available_bytes()

    def steps(self, tokens: int) -> dict[str, Any]:
        """All variants in turns; raises SystemExit where their logits differ."""
        names = [v for v in self.calls if self.fits(tokens) or v in ("mask", "list")]
        logits = {v: self.step(v, tokens)[1].clone() for v in names}
        errors = differences(logits)
        if not all(error <= TOLERANCE[torch.float32] for error in errors.values()):
            raise SystemExit(f"{tokens} tokens: logits differ by {errors}; nothing is timed on wrong results")
        times = common.in_turns(
            {v: (lambda v=v: self.step(v, tokens)[0]) for v in names}, self.args.rounds, self.args.budget, least=3
        )
        return {
            "tokens": tokens, "error": errors, "skipped": [v for v in self.calls if v not in names],
            "ms": {v: asdict(Times.of(t)) for v, t in times.items()},
            "over_list": {v: common.median_ratio(times[v], times["list"]) for v in names if v != "list"},
        }  # fmt: skip

    def attention(self, tokens: int) -> dict[str, Any]:
        """The operators alone."""
        random = torch.Generator().manual_seed(5)
        d, k = self.d, min(self.extra["index_topk"], tokens)
        query = torch.randn(1, 1, d.H, d.L + d.R, generator=random)
        latent, rope = (x[:, 0, :tokens] for x in self.pool[0])
        heads, width = self.extra["index_n_heads"], self.extra["index_head_dim"]
        index_query, weights = (torch.randn(*s, generator=random) for s in ((1, 1, heads, width), (1, 1, heads)))
        keys = self.index_keys[:, :tokens]

        def choose() -> Tensor:
            return ops.index_scores(index_query, keys, weights, width**-0.5).topk(k, dim=-1).indices.to(torch.int32)

        def attend(n: int, indices: Tensor | None = None) -> Tensor:
            rows = latent[:, :n], rope[:, :n]
            return ops.decode_attention(query, *rows, indices=indices, scale=d.N**-0.5)[0]

        chosen = choose()
        calls: dict[str, Callable[[], Tensor]] = {
            "all": lambda: attend(tokens),
            "choosing": choose,
            "listed": lambda: attend(tokens, chosen),
            "k": lambda: attend(k),
            "ours": lambda: attend(tokens, choose()),
        }
        for call in calls.values():
            call()
        timed = {name: (lambda f=f: common.timed(f)) for name, f in calls.items()}
        times = common.in_turns(timed, 5 * self.args.rounds, self.args.budget, least=5)
        return {
            "tokens": tokens, "k": k, "ms": {name: asdict(Times.of(t)) for name, t in times.items()},
            "listed_over_k": common.median_ratio(times["listed"], times["k"]),
            "all_over_ours": common.median_ratio(times["all"], times["ours"]),
        }  # fmt: skip


def describe(row: dict[str, Any]) -> list[str]:
    """One row of steps as text."""
    cells = [
        str(Times(**row["ms"][v])) if v in row["ms"] else "too large" for v in ("eager", "inductor", "mask", "list")
    ]
    over = row["over_list"]
    return [str(row["tokens"]), *cells, *(f"{over[v]:.1f}" if v in over else "" for v in ("mask", "eager"))]


def describe_attention(row: dict[str, Any]) -> list[str]:
    """One row of operators as text."""
    cells = [str(Times(**row["ms"][name])) for name in ("all", "choosing", "listed", "k")]
    return [str(row["tokens"]), *cells, f"{row['listed_over_k']:.2f}", f"{row['all_over_ours']:.1f}"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=common.words(int), default=[8192, 32768, 131072])
    parser.add_argument("--rounds", type=int, default=9, help="at most")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for each row, after three rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch._dynamo.config.recompile_limit = 64
    rows: list[dict[str, Any]] = []
    alone: list[dict[str, Any]] = []
    with torch.no_grad():
        bench = Bench(args)
        for tokens in args.tokens:
            alone.append(bench.attention(tokens))
            print("  " + "  ".join(describe_attention(alone[-1])), flush=True)
        for variant in bench.calls:
            seconds = common.timed(lambda v=variant: [bench.step(v, t) for t in WARM_UP])
            print(f"  {variant}: three steps that compile in {seconds:.1f} s", flush=True)
        for tokens in args.tokens:
            rows.append(bench.steps(tokens))
            print("  " + "  ".join(describe(rows[-1])), flush=True)
            common.write(args.out, {"benchmark": "sparse_steps", "machine": common.machine(), "attention": alone}, rows)
            gc.collect()
    print("\n" + common.table([describe_attention(row) for row in alone], ATTENTION))
    print("\n" + common.table([describe(row) for row in rows], HEAD))


if __name__ == "__main__":
    main()
