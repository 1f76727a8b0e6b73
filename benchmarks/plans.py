"""What ``plan`` says about published deployments, and about DeepSeek-V3 and V3.2 on 8 and 16 H200: nothing is measured.

    python -m benchmarks.plans

Each layout with as many users as fit in it, with the prompts that they bring, and with a token drafted for each step.
Published figures of decoding and of prompts stand beside the bound of the best layout.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import common
from mla_compile.models.survey import survey
from mla_compile.workbench.machines import machine
from mla_compile.workbench.planning import plan
from mla_compile.workbench.request import AS_STORED, Request

OUT = Path(__file__).parent / "results" / "plans.json"
CONFIGS = Path(__file__).parent.parent / "examples" / "configs"
MODELS = ("deepseek-v3", "deepseek-v3.2")

# Output tokens per second and GPU, all for DeepSeek-V3 or R1. Half of the output is counted to the context.
PUBLISHED: tuple[dict[str, Any], ...] = (
    {"by": "DeepSeek, 144 H800 (planned as H100)", "url": "https://aiposthub.cc/5152", "gpu": "h100", "tp": 144,
     "context": 4989, "weights": "fp8", "cache": "bf16", "tokens_per_s": 14800 / 8},
    {"by": "SGLang, 72 H100", "url": "https://lmsys.org/blog/2025-05-05-large-scale-ep/", "gpu": "h100", "tp": 72,
     "context": 2048, "weights": "fp8", "cache": "bf16", "tokens_per_s": 22300 / 8},
    {"by": "SGLang, 48 GB200", "url": "https://lmsys.org/blog/2025-09-25-gb200-part-2", "gpu": "gb200", "tp": 48,
     "context": 2048, "weights": "fp8", "cache": "bf16", "tokens_per_s": 9087},
    {"by": "SGLang, 48 GB200, NVFP4", "url": "https://lmsys.org/blog/2025-09-25-gb200-part-2", "gpu": "gb200", "tp": 48,
     "context": 2048, "weights": "fp4", "cache": "fp8", "tokens_per_s": 13386},
)  # fmt: skip

# Input tokens per second and GPU. Of DeepSeek's 56 % were cached already.
PUBLISHED_PROMPTS: tuple[dict[str, Any], ...] = (
    {"by": "DeepSeek, 32 H800 (planned as H100), cached ones included", "url": "https://aiposthub.cc/5152",
     "gpu": "h100", "tp": 32, "context": 4989, "weights": "fp8", "cache": "bf16", "tokens_per_s": 73700 / 8},
    {"by": "SGLang, 32 H100", "url": "https://lmsys.org/blog/2025-05-05-large-scale-ep/", "gpu": "h100", "tp": 32,
     "context": 2000, "weights": "fp8", "cache": "bf16", "tokens_per_s": 52300 / 8},
    {"by": "SGLang, 8 GB200", "url": "https://lmsys.org/blog/2025-09-25-gb200-part-2", "gpu": "gb200", "tp": 8,
     "context": 2000, "weights": "fp8", "cache": "bf16", "tokens_per_s": 18471},
    {"by": "SGLang, 8 GB200, NVFP4", "url": "https://lmsys.org/blog/2025-09-25-gb200-part-2", "gpu": "gb200", "tp": 8,
     "context": 2000, "weights": "fp4", "cache": "fp8", "tokens_per_s": 26156},
)  # fmt: skip
PROMPT, OUTPUT = 126 * 1024, 2 * 1024


def layouts(facts: Any, gpu: str, request: Request) -> list[dict[str, Any]]:
    """Each layout of a request, with as many users as fit in it."""
    found = []
    for i, room in enumerate(plan(facts, machine(gpu), replace(request, users=1)).layouts):
        full = plan(facts, machine(gpu), replace(request, users=max(1, room.most_users))).layouts[i]
        found.append(asdict(full) | {"users": room.most_users})
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    facts = {name: survey(str(CONFIGS / f"{name}.json")).facts for name in MODELS}
    rows: list[dict[str, Any]] = []
    for name in MODELS:
        for tp in (8, 16):
            request = Request(
                PROMPT + OUTPUT, weight_dtype=AS_STORED, cache_dtype="bf16", tp=tp, prompt=PROMPT, output=OUTPUT
            )
            drafted = layouts(facts[name], "h200", replace(request, draft_tokens=1))
            rows += [
                {"kind": "layout", "model": name, "tp": tp, **row, "drafted": more}
                for row, more in zip(layouts(facts[name], "h200", request), drafted, strict=True)
            ]
    for given in PUBLISHED:
        request = Request(given["context"], 1, given["weights"], given["cache"], given["tp"])
        best = max(layouts(facts["deepseek-v3"], given["gpu"], request), key=lambda row: row["most_tokens_per_s"])
        rows.append({"kind": "published", **given, "best": best})
    for given in PUBLISHED_PROMPTS:
        request = Request(given["context"], given["tp"], given["weights"], given["cache"], given["tp"])
        found = plan(facts["deepseek-v3"], machine(given["gpu"]), request).layouts
        best = asdict(max(found, key=lambda row: row.prefill.most_tokens_per_s))
        rows.append({"kind": "published prompts", **given, "best": best})
    common.write(args.out, {"benchmark": "plans"}, rows)
    for row in rows:
        print({k: v for k, v in row.items() if k in ("model", "tp", "layout", "users", "step_s", "by", "tokens_per_s")})


if __name__ == "__main__":
    main()
