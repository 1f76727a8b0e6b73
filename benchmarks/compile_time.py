"""Time of each pass, for models of 3, 16, 62 and 128 layers, and beside Inductor's.

    python benchmarks/compile_time.py
    python benchmarks/compile_time.py --inductor --models tiny,v2lite --layers 2,8,32

One decode step is captured and rewritten, the check of every distinct site included; with ``--inductor`` it is compiled
twice from nothing, caches off: with Inductor alone, and with backend="mla". ``capture`` is making the graph functional,
``passes`` is everything in mla_compile/passes, and what is left is Inductor on the rewritten graph. Our share is
(capture + passes) / what Inductor alone takes for the same graph.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import DTYPES, MODELS, build, machine, names, table, words, write

import torch  # isort: skip  # after common, which sets the environment

from mla_compile.dynamo.compiler import Compiler
from mla_compile.options import Options

CONTEXT = 100


def compile_step(model: Any, tokens: int, backend: Callable[..., Any]) -> None:
    """Runs one decode step of ``model`` after ``tokens`` cached tokens, compiled by ``backend`` from nothing."""
    from transformers import DynamicCache

    torch._dynamo.reset()
    d = model.config
    cache: Any = DynamicCache(config=d)
    dtype = model.get_input_embeddings().weight.dtype
    for layer in cache.layers:
        rows = [torch.randn(1, 1, tokens, w).to(dtype) for w in (d.kv_lora_rank, d.qk_rope_head_dim)]
        layer.lazy_initialization(*rows)
        layer.keys, layer.values = rows
    torch.compile(model, backend=backend, dynamic=True)(
        input_ids=torch.full((1, 1), 7), past_key_values=cache, use_cache=True, position_ids=torch.full((1, 1), tokens)
    )


class Stopwatch:
    """A backend that adds up the seconds another one takes."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self.backend, self.seconds, self.graphs = backend, 0.0, 0

    def __call__(self, gm: Any, inputs: Sequence[Any]) -> Any:
        """What the other backend returns."""
        start = time.perf_counter()
        try:
            return self.backend(gm, inputs)
        finally:
            self.seconds += time.perf_counter() - start
            self.graphs += 1


def inductor(gm: Any, inputs: Sequence[Any]) -> Any:
    """What torch.compile(backend="inductor") calls."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, inputs)


def measure(name: str, layers: int, dtype: str, *, code: bool) -> dict[str, Any]:
    """Seconds of both backends for one model; without ``code``, of ours alone, which then makes none."""
    model = build(name, DTYPES[dtype], layers, 4096)
    alone = Stopwatch(inductor)
    if code:
        compile_step(model, CONTEXT, alone)

    compiler = Compiler(Options(strict=True, codegen="inductor" if code else "eager"), None)
    ours = Stopwatch(compiler)
    compile_step(model, CONTEXT, ours)
    passes: dict[str, float] = {}
    for report in compiler.reports:
        for record in report.passes:
            passes[record.name] = passes.get(record.name, 0.0) + record.seconds
    absorbed = sum(site.verdict == "absorbed" for report in compiler.reports for site in report.sites)
    if absorbed != layers * ours.graphs:
        raise SystemExit(f"{name}, {layers} layers: {absorbed} attentions absorbed in {ours.graphs} graph(s)")
    functional = passes.pop("capture")
    total = sum(passes.values())
    row = {
        "model": name, "layers": layers, "dtype": dtype, "graphs": ours.graphs, "mla_s": ours.seconds,
        "capture_s": functional, "passes_s": total, "passes": passes,
    }  # fmt: skip
    if code:
        row |= {"inductor_s": alone.seconds, "our_share": (total + functional) / alone.seconds}
    return row


def describe(row: dict[str, Any]) -> list[str]:
    """One row as text."""
    seconds = [f"{row[k]:.2f}" for k in ("capture_s", "passes_s")]
    per_layer = f"{1e3 * row['passes_s'] / row['layers']:.1f}"
    stages = ", ".join(f"{name} {taken:.2f}" for name, taken in row["passes"].items() if taken >= SHOWN)
    beside = [f"{row['inductor_s']:.2f}", f"{row['our_share']:.1%}"] if "inductor_s" in row else ["", ""]
    return [row["model"], str(row["layers"]), *seconds, per_layer, *beside, stages]


SHOWN = 0.01
HEAD = ("model", "layers", "capture s", "passes s", "ms/layer", "inductor s", "our share", "passes, seconds")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names(list(MODELS)), default=["tiny"])
    parser.add_argument("--layers", type=words(int), default=[3, 16, 62, 128])
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--inductor", action="store_true", help="make code as well, and beside it with Inductor alone")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "compile_time.json")
    args = parser.parse_args()
    torch._inductor.config.force_disable_caches = True
    rows = []
    with torch.no_grad():
        # What the first compilation of a process imports and starts is nobody's share.
        measure("tiny", 1, args.dtype, code=args.inductor)
        for name in args.models:
            for layers in args.layers:
                rows.append(measure(name, layers, args.dtype, code=args.inductor))
                print("  " + "  ".join(describe(rows[-1])), flush=True)
                write(args.out, {"benchmark": "compile_time", "machine": machine()}, rows)
    print("\n" + table([describe(row) for row in rows], HEAD))
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
