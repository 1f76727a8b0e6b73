"""CPU seconds to the second token in a process that finds Inductor's caches filled, beside one that does not.

    python -m benchmarks.warm_start
    python -m benchmarks.warm_start --depths 4 --rounds 5

The models and steps of benchmarks/layers_once.py, all layers dense: a prompt and two steps in a process of its own. The
first process of a form finds empty caches (``cold``), the others what it left (``warm``), Inductor and ours in turns.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import machine, names, table, words, write
from benchmarks.layers_once import FORMS, in_a_process

OUT = Path(__file__).parent / "results" / "warm_start.json"
ONE = "benchmarks.layers_once"
HEAD = ("layers", "form", "cold s", "warm s", "warm, of inductor's")


def measure(forms: list[str], layers: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each form, with the seconds of the prompt and each step in every process."""
    with tempfile.TemporaryDirectory() as folder:
        places = {form: str(Path(folder, form)) for form in forms}
        rows: list[dict[str, Any]] = [
            {
                "form": form,
                "layers": layers,
                "cold": in_a_process(ONE, (form, layers, layers), places[form]),
                "warm": [],
            }
            for form in forms
        ]
        for _ in range(rounds):
            for row in rows:
                row["warm"].append(in_a_process(ONE, (row["form"], layers, layers), places[row["form"]]))
    return rows


def describe(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The table of some rows of one depth."""
    warm = {row["form"]: [sum(one) for one in row["warm"]] for row in rows}
    base = median(warm["inductor"]) if "inductor" in warm else None
    return [
        [str(row["layers"]), row["form"], f"{sum(row['cold']):.1f}",
         f"{median(times):.1f} [{min(times):.1f}-{max(times):.1f}]",
         "" if base is None else f"{median(times) / base:.2f}x"]
        for row, times in ((row, warm[row["form"]]) for row in rows)
    ]  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=words(int), default=[4, 27])
    parser.add_argument("--forms", type=names(list(FORMS)), default=["inductor", "once"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for layers in args.depths:
        new = measure(args.forms, layers, args.rounds)
        rows += new
        write(args.out, {"benchmark": "warm_start", "machine": machine()}, rows)
        print(table(describe(new), HEAD), flush=True)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
