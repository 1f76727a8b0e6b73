"""CPU seconds from nothing to the second token of ``optimize(model)``, by stage, beside Inductor alone.

    python -m benchmarks.first_token
    python -m benchmarks.first_token --depths 3,62 --forms optimize

The tiny DeepSeek-V3 of benchmarks/layers_once.py, all layers dense. A prompt and a step, each time in a process of its
own: the first of a form finds empty caches (``cold``), the second what Inductor left there (``warm``), Inductor and
ours in turns. ``saved`` is ``mla_compile.load`` of a folder, which the first process writes. Stages of ours are seconds
of the clock: on a busy machine they say how the CPU seconds are shared out.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import machine, names, table, words, write
from benchmarks.layers_once import PROMPT, cpu_seconds, in_a_process

import torch  # isort: skip  # after common, which sets the environment

OUT = Path(__file__).parent / "results" / "first_token.json"
FORMS = ("inductor", "optimize", "saved")
STAGES = ("trace", "capture", "passes", "code", "guards")
HEAD = ("layers", "form", "caches", "first token s", "second token s", "together", *STAGES)


@torch.no_grad()
def ready_here(form: str, layers: int) -> dict[str, Any]:
    """CPU seconds of a prompt and a step in this process, and those of the stages of what is ours."""
    from tests.support import models

    model = models.build("deepseek_v3", num_hidden_layers=layers, first_k_dense_replace=layers)
    start = cpu_seconds()
    call = ready(form, model)
    first, second = two_tokens(call, PROMPT)
    return {"cpu_seconds": [first - start, second - first], "stages": stages(call) if form == "optimize" else {}}


def ready(form: str, model: Any) -> Any:
    """What calls the model in this form."""
    import mla_compile

    if form == "inductor":
        return torch.compile(model)
    if form == "optimize":
        return mla_compile.optimize(model)
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "saved")
    if not folder.exists():

        def run(fast: Any) -> None:
            for prompt in (PROMPT, PROMPT + 1):
                two_tokens(fast, prompt)

        mla_compile.save(mla_compile.optimize(model), folder, run)
    return mla_compile.load(folder, model)


def two_tokens(call: Any, prompt: int) -> list[float]:
    """The CPU seconds that this process has used after a prompt, and after a step."""
    cache, ids, used = None, torch.full((1, prompt), 7), []
    for _ in range(2):
        out = call(input_ids=ids, past_key_values=cache, use_cache=True)
        used.append(cpu_seconds())
        cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
    return used


def stages(call: Any) -> dict[str, float]:
    """Seconds by stage, those of the passes together and one by one."""
    found = dict.fromkeys(STAGES, 0.0)
    for record in call.mla_report.passes:
        stage, of, what = record.name.partition(" of ")
        found[stage if stage in STAGES else "passes"] += record.seconds
        if stage not in STAGES or of:
            found[f"{stage}.{what}" if of else f"passes.{stage}"] = record.seconds
    return found


def measure(forms: list[str], layers: int) -> list[dict[str, Any]]:
    """A row for each form, cold and warm."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            {"form": form, "layers": layers, "caches": caches,
             **in_a_process("benchmarks.first_token", (form, layers), str(Path(folder, form)))}
            for caches in ("cold", "warm")
            for form in forms
        ]  # fmt: skip


def describe(row: dict[str, Any]) -> list[str]:
    """One row as text."""
    first, second = row["cpu_seconds"]
    numbers = [f"{n:.1f}" for n in (first, second, first + second)]
    by_stage = [f"{row['stages'][stage]:.1f}" if row["stages"] else "" for stage in STAGES]
    return [str(row["layers"]), row["form"], row["caches"], *numbers, *by_stage]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=words(int), default=[3, 27, 62])
    parser.add_argument("--forms", type=names(FORMS), default=list(FORMS))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(ready_here(args.one[0], int(args.one[1]))))
        return
    rows: list[dict[str, Any]] = []
    for layers in args.depths:
        new = measure(args.forms, layers)
        rows += new
        write(args.out, {"benchmark": "first_token", "machine": machine()}, rows)
        print(table([describe(row) for row in new], HEAD), flush=True)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
