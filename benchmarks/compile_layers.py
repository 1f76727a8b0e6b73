"""Seconds by stage of compiling a deep model, to see whether every stage grows linearly with the layers.

    python -m benchmarks.compile_layers
    python -m benchmarks.compile_layers --layers 4,8 --cpu

The tiny DeepSeek-V3 of ``tests/support/models.py`` with dense layers, ``codegen="eager"`` and ``verify``: a prompt, and
a step, whose graph is made for any length. ``capture`` and the passes are timed by the report. ``code`` is what is left
of our backend: graphs for the code generator, and what runs around them. ``dynamo`` is what is left of the call:
Dynamo's trace and guards, and the call itself. ``ours`` is all but ``dynamo`` and ``capture``, and ``step_ms`` a later
call.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import machine, table, words, write

import torch  # isort: skip  # after common, which sets the environment

from mla_compile.dynamo.compiler import Compiler
from mla_compile.options import Options
from tests.support import models

OUT = Path(__file__).parent / "results" / "compile_layers.json"
CALLS = ("prompt", "step")
PROMPT, LATER = 17, 9


class Backend:
    """Ours, and how long it took for the newest graph."""

    def __init__(self) -> None:
        self.compiler = Compiler(Options(codegen="eager", strict=True, verify=True))
        self.seconds, self.nodes = 0.0, 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """What the compiler returns."""
        start = time.perf_counter()
        call = self.compiler(gm, inputs)
        self.seconds, self.nodes = time.perf_counter() - start, len(gm.graph.nodes)
        return call


def measure(layers: int) -> list[dict[str, Any]]:
    """One row for each of :data:`CALLS`."""
    torch._dynamo.reset()
    backend = Backend()
    model = models.build("deepseek_v3", num_hidden_layers=layers, first_k_dense_replace=layers)
    compiled, cache = torch.compile(model, backend=backend), None
    rows = []

    def step(length: int = 1) -> float:
        nonlocal cache
        start = time.perf_counter()
        cache = compiled(torch.full((1, length), 7), past_key_values=cache, use_cache=True).past_key_values
        return time.perf_counter() - start

    for number, call in enumerate(CALLS, start=1):
        wall = step(PROMPT if number == 1 else 1)
        if len(backend.compiler.reports) != number or len(backend.compiler.reports[-1].sites) != layers:
            raise SystemExit(f"{layers} layers, {call}: not one graph with an attention for each layer")
        report = backend.compiler.reports[-1]
        passes = {record.name: record.seconds for record in report.passes}
        seconds = {"dynamo": wall - backend.seconds, **passes, "code": backend.seconds - sum(passes.values())}
        rows.append(
            {"layers": layers, "call": call, "nodes": backend.nodes, "absorbed": report.absorbed, "seconds": seconds}
        )
    rows[-1]["step_ms"] = 1e3 * statistics.median(step() for _ in range(LATER))
    if len(backend.compiler.reports) != len(CALLS):
        raise SystemExit(f"{layers} layers: a later step was compiled again")
    return rows


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """Seconds of the calls together: a line for each stage, a column for each number of layers."""
    totals: dict[str, dict[int, float]] = {}
    for row in rows:
        for stage, seconds in row["seconds"].items():
            for name in (stage, *(["ours"] if stage not in ("dynamo", "capture") else [])):
                of = totals.setdefault(name, {})
                of[row["layers"]] = of.get(row["layers"], 0.0) + seconds
    several = list(dict.fromkeys(row["layers"] for row in rows))
    lines = [[name, *(f"{of[n]:.2f}" for n in several)] for name, of in totals.items() if max(of.values()) >= 0.01]
    return table(lines, ["seconds", *(f"{n} layers" for n in several)])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=words(int), default=[4, 8, 27, 61])
    parser.add_argument("--cpu", action="store_true", help="seconds of this process alone, on a busy machine")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if args.cpu:
        time.perf_counter = time.process_time  # the clock of the report, too
    clock = "cpu" if args.cpu else "wall"
    rows: list[dict[str, Any]] = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measure(1)  # what the first compilation of a process imports and starts is nobody's share
        for layers in args.layers:
            rows += measure(layers)
            write(args.out, {"benchmark": "compile_layers", "clock": clock, "machine": machine()}, rows)
            print(f"  {layers} layers: a later step takes {rows[-1]['step_ms']:.1f} ms", flush=True)
    print("\n" + shown(rows))
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
