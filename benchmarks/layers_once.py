"""Layers that are compiled once: CPU seconds to the second token, and a decode step, beside one piece of code for all.

    python -m benchmarks.layers_once
    python -m benchmarks.layers_once --depths 3,27 --forms once,inductor --contexts ""    # compile times only
    python -m benchmarks.layers_once --depths "" --models v2lite --contexts 512           # steps only

``once`` and ``whole`` are ``backend="mla"`` with ``layers="once"`` and ``"whole"``, ``inductor`` is Inductor alone.
Compile times: the tiny DeepSeek-V3 of ``tests/support/models.py``, all layers dense, or of V3's structure (three dense
layers, in a model of three only one, then experts). A prompt and two steps, each in a process of its own with empty
caches; CPU seconds of that process and of the compilers that it starts. Steps: real sizes, all layers dense, one after
the other in one process, results compared.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common

import torch  # isort: skip  # after common, which sets the environment

from benchmarks.common import DTYPES, MODELS, Times, machine, names, table, words, write

OUT = Path(__file__).parent / "results" / "layers_once.json"
FORMS: dict[str, dict[str, Any]] = {
    "once": {"backend": "mla", "options": {"layers": "once"}},
    "whole": {"backend": "mla", "options": {"layers": "whole"}},
    "inductor": {"backend": "inductor"},
}
DEEPEST_WHOLE = 27
"""One piece of code for more layers is not waited for."""
PROMPT, STEPS, WARM_UP = 17, 2, 3
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""Between two orders of rounding. In bfloat16 the logits of eight layers are 2e-2 from those of float32 in either."""


def cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


@torch.no_grad()
def compile_here(form: str, layers: int, dense: int) -> list[float]:
    """CPU seconds of a prompt and each step in this process; that of the prompt begins with ``torch.compile``."""
    from tests.support import models

    model = models.build("deepseek_v3", num_hidden_layers=layers, first_k_dense_replace=dense)
    cache, ids, taken = None, torch.full((1, PROMPT), 7), []
    start = cpu_seconds()
    call = torch.compile(model, **FORMS[form])
    for _ in range(1 + STEPS):
        out = call(ids, past_key_values=cache, use_cache=True)
        taken.append(cpu_seconds() - start)
        start = cpu_seconds()
        cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
    return taken


def compiled(form: str, layers: int, structure: str) -> dict[str, Any]:
    """The same from a fresh process, with empty caches."""
    dense = layers if structure == "dense" else min(3, layers // 3)
    with tempfile.TemporaryDirectory() as folder:
        taken = in_a_process("benchmarks.layers_once", (form, layers, dense), folder)
    return {"kind": "compile", "form": form, "layers": layers, "structure": structure, "cpu_seconds": taken}


def in_a_process(module: str, what: Sequence[object], folder: str) -> Any:
    """What ``module`` prints of one measurement in a process of its own, with Inductor's caches in ``folder``."""
    command = [sys.executable, "-m", module, "--one", *map(str, what)]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
    # pip compiles what it installs to bytecode; a checkout is compiled in each process where that may not be kept.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{module} {what}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def steps(args: argparse.Namespace, name: str, dtype: str) -> list[dict[str, Any]]:
    """A step after each context; raises SystemExit where logits differ."""
    torch._dynamo.reset()
    model = common.build(name, DTYPES[dtype], args.layers, 2 * max(args.contexts))
    calls = {form: torch.compile(model, **FORMS[form]) for form in ("once", "whole")}
    ids, measured = torch.full((1, 1), 7), []
    for tokens in args.contexts:
        caches = {form: common.filled_cache(model, 1, tokens) for form in calls}
        logits: dict[str, torch.Tensor] = {}

        def step(form: str, caches: Any = caches, logits: dict[str, torch.Tensor] = logits) -> float:
            def call() -> None:
                logits[form] = calls[form](input_ids=ids, past_key_values=caches[form], use_cache=True).logits.float()

            return common.timed(call)

        for _ in range(WARM_UP):
            for form in calls:
                step(form)
        off = (logits["once"] - logits["whole"]).norm() / logits["whole"].norm()
        if not off <= TOLERANCE[dtype]:
            raise SystemExit(f"{name} {dtype} {tokens}: logits differ by {off:.1e}; nothing is timed on wrong ones")
        times = common.in_turns({form: partial(step, form) for form in calls}, args.rounds, args.budget, least=5)
        measured.append({
            "kind": "step", "model": name, "layers": args.layers, "context": tokens, "dtype": dtype,
            "ms": {form: asdict(Times.of(t)) for form, t in times.items()},
            "once_over_whole": common.median_ratio(times["once"], times["whole"]),
        })  # fmt: skip
    return measured


def describe(row: dict[str, Any]) -> list[str]:
    """One row as text."""
    if row["kind"] == "compile":
        return [f"{row['layers']} layers, {row['structure']}", row["form"], f"{sum(row['cpu_seconds']):.0f} s"]
    each = ", ".join(f"{form} {Times(**t)} ms" for form, t in row["ms"].items())
    return [f"{row['model']} {row['dtype']}, {row['context']} tokens", each, f"{row['once_over_whole']:.3f}"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=words(int), default=[3, 27, 61])
    parser.add_argument("--structures", type=names(["dense", "v3"]), default=["dense", "v3"])
    parser.add_argument("--forms", type=names(list(FORMS)), default=list(FORMS))
    parser.add_argument("--models", type=names(list(MODELS)), default=["v2lite", "minicpm3"])
    parser.add_argument("--dtypes", type=names(list(DTYPES)), default=["float32", "bfloat16"])
    parser.add_argument("--contexts", type=words(int), default=[512, 8192])
    parser.add_argument("--layers", type=int, default=8, help="of the models whose steps are timed")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for the rounds of one row")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(compile_here(args.one[0], int(args.one[1]), int(args.one[2]))))
        return
    rows: list[dict[str, Any]] = []

    def add(new: list[dict[str, Any]]) -> None:
        rows.extend(new)
        write(args.out, {"benchmark": "layers_once", "machine": machine()}, rows)
        print(table([describe(row) for row in new], ("", "", "")).partition("\n")[2], flush=True)

    for structure in args.structures:
        for layers in args.depths:
            for form in args.forms:
                if form == "once" or layers <= DEEPEST_WHOLE:
                    add([compiled(form, layers, structure)])
    with torch.no_grad():
        for name in args.models if args.contexts else ():
            for dtype in args.dtypes:
                add(steps(args, name, dtype))
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
