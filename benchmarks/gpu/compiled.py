"""The GPU kernels as compiled, for the documentation: a summary by card and family, and every row for the site.

The data are ``benchmarks/results/offline_triton_*.json``, which ``python -m benchmarks.gpu.offline`` writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
CARDS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
# A kernel belongs to the first family whose pattern its name begins with.
FAMILIES = {
    "Hopper, half precision": r"Hopper, bf16(?!.*\blist)",
    "Hopper, lists of keys": r"Hopper, .*\blist",
    "Hopper, float8": r"Hopper, fp8",
    "portable, half precision": "bf16",
    "portable, float8": "fp8",
    "portable, float32": "fp32",
    "preparation and combining": "",
}


def runs() -> list[dict[str, Any]]:
    """The results of every version of Triton."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("offline_triton_*.json"))]


def rows() -> list[dict[str, Any]]:
    """One row per kernel, card and version of Triton, with the names and units that the site shows."""
    order = {card: place for place, card in enumerate(CARDS)}
    return sorted(_rows(), key=lambda row: (order[row["card"]], row["family"], row["kernel"], row["Triton"]))


def _rows() -> Iterator[dict[str, Any]]:
    for run in runs():
        for row in run["rows"]:
            yield {
                "card": row["arch"],
                "family": next(name for name, start in FAMILIES.items() if re.match(start, row["kernel"])),
                "kernel": row["kernel"],
                "Triton": run["triton"],
                "tile": row["tile"],
                "warps": row["warps"],
                "stages": row["stages"],
                "registers": row["registers"],
                "spilled bytes": None if row["spills"] is None else row["spills"][0],
                "shared KB": round(row["shared"] / 1024, 1),
                "instructions": ", ".join(f"{count} {kind}" for kind, count in row["mma"].items()),
                "note": "; ".join([*filter(None, [row["absent"]]), *row["broken"]]),
            }


def summary() -> str:
    """Versions, broken budgets, and the worst figures of each card and family over all versions of Triton."""
    every = runs()
    versions = ", ".join(f"{run['triton']} ({_dates(run)})" for run in every)
    over = sum(bool(row["broken"]) for run in every for row in run["rows"])
    lines = [
        "| card | family | kernels | registers | spilled bytes | shared KB | instruction |",
        "|---|---|---|---|---|---|---|",
    ]
    found = rows()
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in found:
        if row["registers"] is not None:
            family = "all" if row["card"].startswith("gfx") else row["family"]
            groups.setdefault((row["card"], family), []).append(row)
    lines += [_worst(card, family, own) for (card, family), own in groups.items()]
    told = f"Compiled with Triton {versions}. Kernels that break a budget: {over}."
    return "\n".join([told, "", *lines])


def _worst(card: str, family: str, own: list[dict[str, Any]]) -> str:
    most = [max(r[name] or 0 for r in own) for name in ("registers", "spilled bytes", "shared KB")]
    kinds = sorted({kind for r in own for kind in re.findall(r"[a-z][\w.]+", r["instructions"])})
    count = len({r["kernel"] for r in own})
    return f"| {' | '.join(map(str, (card, family, count, *most, ', '.join(kinds) or 'none')))} |"


def _dates(run: dict[str, Any]) -> str:
    """When the rows of a file were compiled."""
    every = {row.get("date", run["date"]) for row in run["rows"]}
    return min(every) if len(every) == 1 else f"{min(every)} to {max(every)}"
