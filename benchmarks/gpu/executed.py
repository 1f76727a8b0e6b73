"""Which features of the kernels were executed by machines that are not ours, as a table for the documentation.

    python -m benchmarks.gpu.executed FILE...    results of both machines -> benchmarks/results/executed.json

The rows are tests: those of the Triton kernels on AMD machine code (benchmarks/gpu/emulated.py), and those of the
Hopper kernels in triton-viz (benchmarks/gpu/simulated.py).
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results" / "executed.json"
# Feature: what its tests' names have, of the portable kernels (without ``tests/kernels/triton/test_``) and of the
# Hopper kernels; and whether offline.py compiles the portable kernels with it for NVIDIA's cards.
FEATURES: dict[str, tuple[str, str, bool]] = {
    "any number of heads": (r"decode_triton.*heads_of_any", r"decode_gluon.*(17 rows|two row blocks)", True),
    "any widths": (r"decode_triton.*test_widths", "", False),
    "float32, bfloat16, float16": (r"decode_triton.*test_dtypes", r"\[fp16", True),
    "requests of different lengths, zero included": (r"decode_triton.*test_lengths", r"ragged|empty and full", True),
    "several query tokens, causal and not": (r"several_query_tokens", r"causal", True),
    "pages": (r"decode_triton.*test_pages", r"page", True),
    "strided rows, in one piece and in two": (r"caches_of_one_piece", r"two layers|page 8, splits", True),
    "rows without a rotary part": (r"\bR=0", r"rows_without_rope|\bno rope", True),
    "separate values": (r"Lv=", "", False),
    "sliding window": (r"window=", r"window", False),
    "soft-cap": (r"softcap=", r"soft-cap", False),
    "sinks": (r"sinks=", r"33 rows|page 32|page 96", False),
    "boolean masks": (r"mask=bool", r"mask", True),
    "additive masks": (r"mask=(add|half)", "", True),
    "masks of a dtype's lowest value": (r"lowest", "", False),
    "tiles that nobody sees": (r"masks_skip|tiles_of_a_mask", r"decode_gluon.*mask", True),
    "one schedule for several layers": (r"schedule", r"schedule", True),
    "splits and their combination": (r"test_splits|deterministic", r"splits|fixed chunks", True),
    "one launch for a growing cache": (r"launches_bound|lists_that_grow", "", False),
    "float8, one scale": (r"fp8\[tensor|kv_scale=tensor", r"fp8_gluon.*(one row|contiguous|63, 64)", True),
    "float8, a scale for each token": (r"fp8\[token|kv_scale=token", r"fp8_gluon.*(tokens|page 48|schedule)", False),
    "float8, scales of groups of columns": (r"kv_scale=group", r"fp8_gluon.*(656|group)", True),
    "every value of float8": (r"every_fp8_value", "", True),
    "lists of keys": (r"lists_triton", r"list_gluon|for_lists", True),
    "a float32 query beside half precision": (r"float32_query|query_in_float32", "", True),
    "the scores of an indexer": (r"index_triton", "", True),
    "`weigh_alike`": (r"mean_triton", "", False),
    "rows beyond 2^31 elements": (r"2_to_the_31", "", False),
    "9 barriers, or the query in registers": ("", r"forms_give|held query", False),
    "a cluster of two": ("", r"two_ctas", False),
}


class Results:
    """A plugin of pytest that writes outcomes and seconds, after each test. ``executed``: instructions so far."""

    def __init__(self, path: str, about: dict[str, str], executed: Callable[[], int] | None = None) -> None:
        self.path, self.about, self.executed, self.before = Path(path), about, executed, 0
        self.rows: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test's row."""
        if report.when != "call" and not report.failed:
            return
        import triton

        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1)}
        if self.executed is not None:
            row["instructions"], self.before = self.executed() - self.before, self.executed()
        self.rows.append(row)
        about = {**self.about, "triton": triton.__version__, "date": time.strftime("%Y-%m-%d")}
        self.path.write_text(json.dumps({**about, "rows": self.rows}, indent=1) + "\n")


def table() -> str:
    """A row for each feature, then what ran, with versions, and which seeded faults showed."""
    runs = json.loads(RESULTS.read_text())
    head = ("feature", "as machine code, gfx1100", "gfx942", "simulated by others", "by us", "compiled", "on a GPU")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(_line(name, runs) for name in FEATURES)]
    return "\n".join([*lines, "", "Tests that passed, and their seconds.", "", *map(_about, runs)])


def _line(name: str, runs: list[dict[str, Any]]) -> str:
    portable, hopper, compiled = FEATURES[name]
    machines = (("gfx1100", portable), ("gfx942", portable), ("", hopper))
    cells = [_counted([run for run in runs if run["arch"] == arch], named) for arch, named in machines]
    return f"| {name} | {' | '.join(cells)} | in CI | {'in CI' if compiled or hopper else 'for AMD'} | never |"


def _counted(runs: list[dict[str, Any]], named: str) -> str:
    """``passed of all, seconds`` of the tests with such names that a machine ran."""
    rows = [row for run in runs for row in run["rows"] if named and re.search(named, row["test"])]
    ran = [row for row in rows if row["outcome"] != "skipped"]
    passed = sum(row["outcome"] == "passed" for row in ran)
    return f"{passed} of {len(ran)}, {sum(row['seconds'] for row in ran):.0f} s" if ran else "no"


def _about(run: dict[str, Any]) -> str:
    """Versions, how much ran, and the seeded faults: what they were, how many showed of how many."""
    seconds = sum(row["seconds"] for row in run["rows"])
    words = f"{run['of']}, Triton {run['triton']}{run['arch'] and ' for ' + run['arch']}, {run['date']}"
    faults = "".join(f" {what}: {shown} of {of} showed." for what, shown, of in run.get("seeded", ()))
    return f"* {words}: {len(run['rows'])} tests, {seconds:.0f} s.{faults}"


def main() -> None:
    """Command line."""
    runs = [json.loads(Path(path).read_text()) for path in sys.argv[1:]]
    RESULTS.write_text("[\n" + ",\n".join(map(_compact, runs)) + "\n]\n")


def _compact(run: dict[str, Any]) -> str:
    """A run as JSON, with a line for each test."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in run.pop("rows"))
    return json.dumps(run)[:-1] + f', "rows": [\n{rows}\n ]}}'


if __name__ == "__main__":
    main()
