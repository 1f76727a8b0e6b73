"""What a decode step is told in place of its masks, for each family and cache: a table of results/README.md.

    python -m benchmarks.step_masks                            # every family, every way
    python -m benchmarks.step_masks --families minicpm3        # some of them again; the others stay

Tiny models of ``tests/support/models.py``, batch 2: a prompt and two decode steps, logits compared with the original's.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.common import machine, names, write

import torch  # isort: skip  # after common, which sets the environment

import mla_compile
from benchmarks.support_matrix import LIMIT, cache_of, difference
from tests.support import models

OUT = Path(__file__).parent / "results" / "step_masks.json"
PROMPT, STEPS = 9, 2
WAYS = [
    (attn, cache, padded)
    for attn in ("sdpa", "eager")
    for cache in ("dynamic", "static")
    for padded in (False, True)
    if attn == "sdpa" or not padded
]


def run(call: Any, model: Any, cache: str, padded: bool) -> torch.Tensor:
    """Logits of a prompt and of two steps."""
    given = models.prompt(2, PROMPT + STEPS, 3 if padded else 0)
    kept = cache_of(cache, model)
    parts = []
    for start, stop in ((0, PROMPT), *((p, p + 1) for p in range(PROMPT, PROMPT + STEPS))):
        mask = {"attention_mask": given["attention_mask"][:, :stop]} if padded else {}
        parts.append(call(given["input_ids"][:, start:stop], past_key_values=kept, **mask).logits[:, -1:])
    return torch.cat(parts, 1)


def measured(family: str, attn: str, cache: str, padded: bool) -> dict[str, Any]:
    """What the newest graph, which is that of the steps, says of each of its attentions."""
    torch._dynamo.reset()
    model = models.build(family, attn=attn)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = mla_compile.optimize(model, codegen="eager", verify=False)
        error = difference(run(fast, model, cache, padded), run(model, model, cache, padded))
    absorbed = [s for s in fast.mla_report.sites if s.verdict == "absorbed"]
    # Sites stand in the order of their graphs.
    told = [next((n for n in s.notes if n.startswith("mask: ")), "mask: none") for s in absorbed]
    return {
        "family": family, "attn": attn, "cache": cache, "padded": padded,
        "told": told[-1].removeprefix("mask: ") if told else None, "error": error,
    }  # fmt: skip


def main(argv: Iterable[str] | None = None) -> int:
    """Command line; exit code 1 where logits differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", type=names(list(models.FAMILIES)), default=list(models.FAMILIES))
    args = parser.parse_args(None if argv is None else list(argv))
    rows = json.loads(OUT.read_text())["rows"] if OUT.exists() else []
    rows = [r for r in rows if r["family"] not in args.families]
    for family in args.families:
        for way in WAYS:
            rows.append(measured(family, *way))
            print(rows[-1], flush=True)
    write(OUT, {"machine": machine()}, rows)
    return int(any(not r["error"] < LIMIT for r in rows))


if __name__ == "__main__":
    sys.exit(main())
