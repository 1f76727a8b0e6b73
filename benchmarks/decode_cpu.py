"""A whole decode step (and a prefill) of unmodified models: eager, Inductor and backend="mla", in turns in one process.

    python benchmarks/decode_cpu.py                                       # everything; takes an hour or more
    python benchmarks/decode_cpu.py --models v2lite --dtypes float32 --contexts 512,8192 --rounds 9

Models of transformers with the attention sizes of DeepSeek-V2-Lite, MiniCPM3 and DeepSeek-V3, random weights, a small
MLP. The cache is filled with random latents. Nothing is timed before all variants return the same logits.

The floor of a step is (bytes of the weights it reads + bytes of the latent cache) / read bandwidth, the bandwidth
measured in this process. A processor also has to do the 2H(2L+R) FLOPs per cached token, and for many heads that is
what takes longer: the roofline is weight bytes / bandwidth + the larger of cache bytes / bandwidth and attention FLOPs
/ the rate of a float32 matrix product in this process. A ratio is the median over the rounds of the ratio within one.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import (
    DTYPES,
    MODELS,
    Times,
    available_bytes,
    build,
    in_turns,
    machine,
    matmul_rate,
    median_ratio,
    names,
    read_bandwidth,
    table,
    timed,
    words,
    write,
)

import torch  # isort: skip  # after common, which sets the environment
from torch import Tensor, nn

from mla_compile.workbench.decode_steps import TOLERANCE, WARM_UP, DecodeSteps, differences, variants

VARIANTS = ("eager", "inductor", "mla")


class Bench(DecodeSteps):
    """One model in one dtype, its variants, and caches that grow or have their full length."""

    def __init__(self, args: argparse.Namespace, name: str, dtype: str) -> None:
        self.args, self.name, self.dtype_name = args, name, dtype
        torch._dynamo.reset()
        longest = max([*args.contexts, args.prefill, *WARM_UP]) + 1
        model = build(name, DTYPES[dtype], args.layers, longest + 16)
        d = MODELS[name].dims
        calls = variants(model, ["eager", *(v for v in args.variants if v != "eager")])
        super().__init__(
            model, calls, [(1, d.L, 1, d.R)] * args.layers, batch=args.batch, longest=longest, dtype=DTYPES[dtype]
        )

    def static(self, tokens: int) -> Any:
        """A cache with room for one token more than it holds."""
        from transformers import StaticCache

        cache: Any = StaticCache(config=self.model.config, max_cache_len=tokens + 1)
        for layer, (latent, rope) in zip(cache.layers, self.pool, strict=True):
            layer.lazy_initialization(latent[:, :, :0], rope[:, :, :0])
            layer.keys[:, :, :tokens].copy_(latent[:, :, :tokens])
            layer.values[:, :, :tokens].copy_(rope[:, :, :tokens])
        return cache

    def prefill(self, variant: str, tokens: int) -> tuple[float, Tensor]:
        """Seconds and logits of a prompt of ``tokens`` tokens on an empty cache."""
        from transformers import DynamicCache

        ids = torch.arange(tokens).repeat(self.args.batch, 1) % 250
        cache = DynamicCache(config=self.model.config)
        start = time.perf_counter()
        result = self.calls[variant](input_ids=ids, past_key_values=cache, use_cache=True)
        return time.perf_counter() - start, result.logits

    def fits(self, tokens: int) -> bool:
        """Whether one layer's K and V, and the copies that eager makes of them, fit in half of the free memory."""
        d = MODELS[self.name].dims
        values = self.args.batch * tokens * d.H * (3 * (d.N + d.V) + 2 * d.R)
        return bool(values * self.dtype.itemsize < available_bytes() / 2)

    def measure(self, kind: str, tokens: int) -> dict[str, Any]:
        """All variants in turns; raises SystemExit where their logits differ."""
        variants = list(self.calls) if self.fits(tokens) else ["mla"]
        row: dict[str, Any] = {
            "model": self.name, "dtype": self.dtype_name, "kind": kind, "context": tokens, "layers": self.args.layers,
            "batch": self.args.batch, "skipped": [v for v in self.calls if v not in variants],
        }  # fmt: skip
        cache = self.static(tokens) if kind == "static" else None

        def one(variant: str) -> tuple[float, Tensor]:
            return self.prefill(variant, tokens) if kind == "prefill" else self.step(variant, tokens, cache)

        logits = {}
        for variant in variants:
            for _ in range(2 if kind != "dynamic" else 1):  # new shapes compile here
                logits[variant] = one(variant)[1].float().clone()
        row["error"] = self._agree(kind, tokens, logits)
        times = in_turns(
            {v: (lambda v=v: one(v)[0]) for v in variants}, self.args.rounds, self.args.budget, least=self.args.least
        )
        row["ms"] = {v: asdict(Times.of(t)) for v, t in times.items()}
        row["mla_over"] = {v: median_ratio(times["mla"], times[v]) for v in variants if v != "mla" and "mla" in times}
        row["faster_than"] = {v: 1 / r for v, r in row["mla_over"].items()}
        if kind != "prefill":
            row |= self.floor(tokens)
            if "mla" in times:
                row["over_floor"] = Times.of(times["mla"]).median / row["floor_ms"]
                row["over_roofline"] = Times.of(times["mla"]).median / row["roofline_ms"]
        return row

    def _agree(self, kind: str, tokens: int, logits: dict[str, Tensor]) -> dict[str, float]:
        errors, allowed = differences(logits), TOLERANCE[self.dtype]
        for variant, error in errors.items():
            if not error <= allowed:
                raise SystemExit(
                    f"{self.name} {self.dtype_name} {kind} {tokens}: {variant} differs from {next(iter(logits))} by "
                    f"{error:.1e}, allowed {allowed:.0e}; nothing is timed on wrong results"
                )
        return errors

    def floor(self, tokens: int) -> dict[str, float]:
        """Milliseconds to read the weights of a step (one row of the embedding) and the latent cache, each once."""
        embeddings = {m.weight for m in self.model.modules() if isinstance(m, nn.Embedding)}
        tied = self.model.get_output_embeddings().weight
        read = [p for p in self.model.parameters() if p not in embeddings or p is tied]
        d, width = MODELS[self.name].dims, self.dtype.itemsize
        rows = self.args.layers * self.args.batch * (tokens + 1)
        weights = sum(p.numel() * p.element_size() for p in read) / self.args.bandwidth
        cache = rows * (d.L + d.R) * width / self.args.bandwidth
        compute = rows * 2 * d.H * (2 * d.L + d.R) / self.args.flops
        return {"floor_ms": 1e3 * (weights + cache), "roofline_ms": 1e3 * (weights + max(cache, compute))}


def run_case(args: argparse.Namespace, name: str, dtype: str) -> list[dict[str, Any]]:
    """All measurements of one model in one dtype."""
    bench = Bench(args, name, dtype)
    rows = []
    kinds = [(kind, t) for kind in args.caches for t in args.contexts]
    if "dynamic" in args.caches:
        for variant in bench.calls:
            seconds = timed(lambda v=variant: [bench.step(v, t) for t in WARM_UP])
            if variant != "eager":
                print(f"  {name} {dtype}: {variant} compiled in {seconds:.1f} s", flush=True)
    if args.prefill:
        kinds.append(("prefill", args.prefill))
    for kind, tokens in kinds:
        row = bench.measure(kind, tokens)
        rows.append(row)
        print("  " + "  ".join(describe(row)), flush=True)
        gc.collect()
    return rows


def describe(row: dict[str, Any]) -> list[str]:
    """One row as text, in the columns of :data:`HEAD`."""
    shown = [row["model"], row["dtype"], row["kind"], str(row["context"])]
    for v in VARIANTS:
        missing = "too large" if v in row["skipped"] else ""
        shown.append(str(Times(**row["ms"][v])) if v in row["ms"] else missing)
    shown += [f"{row['faster_than'][v]:.2f}x" if v in row["faster_than"] else "" for v in ("eager", "inductor")]
    shown += [f"{row['floor_ms']:.2f}" if "floor_ms" in row else ""]
    shown += [f"{row[key]:.2f}" if key in row else "" for key in ("over_floor", "over_roofline")]
    return shown


HEAD = ["model", "dtype", "cache", "T", *(f"{v} ms" for v in VARIANTS), "vs eager", "vs inductor", "floor ms"]
HEAD += ["mla/floor", "mla/roofline"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    real = [name for name in MODELS if name != "tiny"]
    parser.add_argument("--models", type=names(list(MODELS)), default=real)
    parser.add_argument("--dtypes", type=names(list(DTYPES)), default=["float32", "bfloat16"])
    parser.add_argument("--contexts", type=words(int), default=[128, 512, 2048, 8192, 32768])
    parser.add_argument("--caches", type=names(["dynamic", "static"]), default=["dynamic", "static"])
    parser.add_argument("--variants", type=names(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--prefill", type=int, default=512, help="prompt tokens; 0: no prefill")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15, help="at most")
    parser.add_argument("--least", type=int, default=3, help="rounds at least, whatever the budget")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of timing per row")
    parser.add_argument("--threads", type=int, default=0, help="0: as torch chooses")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "decode_cpu.json")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    # Every context of a static cache is a graph of its own, for two backends.
    torch._dynamo.config.recompile_limit = 64
    args.bandwidth = read_bandwidth()
    args.flops = matmul_rate(torch.float32)
    about = {
        "benchmark": "decode_cpu", "machine": machine(),
        "read_bandwidth_GBps": args.bandwidth / 1e9, "matmul_GFLOPs": args.flops / 1e9,
    }  # fmt: skip
    print(
        f"{about['machine']['cpu']}, {torch.get_num_threads()} threads, reads {args.bandwidth / 1e9:.1f} GB/s, "
        f"multiplies at {args.flops / 1e9:.0f} GFLOP/s", flush=True,
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for name in args.models:
            for dtype in args.dtypes:
                rows += run_case(args, name, dtype)
                write(args.out, about, rows)  # after each case: a long run that is stopped keeps what it has
    print("\n" + table([describe(row) for row in rows], HEAD))
    skipped = [r for r in rows if r["skipped"]]
    if skipped:
        print("too large: the expanded keys and values would not fit in half of the free memory; only mla was run.")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
