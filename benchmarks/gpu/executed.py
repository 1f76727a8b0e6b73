"""Which features of the kernels were executed by machines that are not ours, as a table for the documentation.

The data are ``benchmarks/results/executed.json``. Its rows are tests: those of the Triton kernels on AMD machine code
(benchmarks/gpu/emulated.py), and those of the Hopper kernels in triton-viz.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
# Feature: (what its tests' names have, of the portable kernel; of the Hopper kernels; whether offline.py compiles the
# portable kernel with it for NVIDIA's cards).
FEATURES: dict[str, tuple[str, str, bool]] = {
    "any number of heads": (r"decode_triton.*heads_of_any_number", r"decode_gluon.*(17 rows|two row blocks)", True),
    "any widths": (r"decode_triton.*test_widths", "", False),
    "float32, bfloat16, float16": (r"decode_triton.*test_dtypes", r"\[fp16", True),
    "requests of different lengths, zero included": (r"decode_triton.*test_lengths", r"ragged|empty and full", True),
    "several query tokens, causal and not": (r"several_query_tokens", r"causal", True),
    "pages": (r"decode_triton.*test_pages", r"(decode|fp8)_gluon.*page", True),
    "strided rows, one piece and two": (r"caches_of_one_piece", r"two layers|page 8, splits", True),
    "separate values": (r"decode_triton.*Lv=", "", False),
    "sliding window": (r"triton.*window=", r"window", False),
    "soft-cap": (r"triton.*softcap=", r"soft-cap", False),
    "sinks": (r"triton.*sinks=", r"33 rows|page 32|page 96", False),
    "boolean masks": (r"tiles_triton.*bool", r"mask", True),
    "additive masks": (r"tiles_triton.*mask=(add|half)", "", True),
    "masks of a dtype's lowest value": (r"lowest", "", False),
    "tiles that nobody sees": (r"masks_skip|tiles_of_a_mask", r"decode_gluon.*mask", True),
    "one schedule for several layers": (r"schedule", r"schedule", True),
    "splits and their combination": (r"test_splits|deterministic", r"splits|fixed chunks", True),
    "one launch for a growing cache": (r"launches_bound|lists_that_grow", "", False),
    "float8, one scale": (r"fp8\[tensor|kv_scale=tensor", r"fp8_gluon.*(one row|contiguous|63, 64)", True),
    "float8, scales per token": (r"fp8\[token|kv_scale=token", r"fp8_gluon.*(tokens|page 48|schedule)", True),
    "float8, scales per group": (r"kv_scale=group", r"fp8_gluon.*(656|group)", True),
    "every value of float8": (r"every_fp8_value", "", True),
    "lists of keys": (r"lists_triton", r"list_gluon|for_lists", True),
    "float32 query beside half precision": (r"float32_query|query_in_float32", "", True),
    "scores of an indexer": (r"index_triton", "", True),
    "weigh_alike": (r"mean_triton", "", False),
    "rows beyond 2^31 elements": (r"2_to_the_31", "", False),
    "the planner's own tiles": (r"planners", "", True),
    "9 barriers, query in registers": ("", r"forms_give|held query", False),
    "cluster of two": ("", r"two_ctas", False),
}


def table() -> str:
    """A row for each feature, then what ran, with versions."""
    data = json.loads((RESULTS / "executed.json").read_text())
    head = ("feature", "executed as machine code", "simulated by others", "by us", "compiled", "on a GPU")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [_line(name, data["rows"]) for name in FEATURES]
    return "\n".join([*lines, "", *map(_machine, data["machines"].values())])


def _line(name: str, rows: list[dict[str, Any]]) -> str:
    portable, hopper, compiled = FEATURES[name]
    cells = [_counted(rows, machine, named) for machine, named in (("emulator", portable), ("simulator", hopper))]
    return f"| {name} | {' | '.join(cells)} | in CI | {'in CI' if compiled or hopper else 'gfx1100'} | never |"


def _counted(rows: list[dict[str, Any]], machine: str, named: str) -> str:
    """``passed of all, seconds`` of the tests with such names."""
    found = [row for row in rows if row["machine"] == machine and named and re.search(named, row["test"])]
    if not found:
        return "no"
    passed = sum(row["outcome"] == "passed" for row in found)
    return f"{passed} of {len(found)} tests, {sum(row['seconds'] for row in found):.0f} s"


def _machine(about: Mapping[str, Any]) -> str:
    return f"{about['what']}, {about['date']}. {about['tests']}\n"
