"""Sweep tiles on the card at hand and rewrite kernels/tuned.json: which tile is fastest, and its t0 and t_tile.

    python benchmarks/gpu/tune.py                       # every class of query rows and cache dtype, about 8 minutes
    python benchmarks/gpu/tune.py --classes half-16 --write
    python benchmarks/gpu/tune.py --dry-run             # no GPU: walks the code, writes nothing

A class is a cache dtype and a number of query rows. Its candidates are all tiles that fit shared memory; each has to be
right before it is timed. They are compared on a full card (as many requests as make several waves); the fastest one's
t0 and t_tile, of the formula in kernels/plan.py, are intercept and slope of a single block's time over several lengths.
Rows of other GPU generations stay as they are. Without ``--write`` the new rows are only printed and kept in ``--out``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:  # as a script: import from the checkout, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.gpu import common

import torch  # isort: skip  # after common, which sets the environment

from benchmarks.common import names, table
from benchmarks.gpu import timing
from benchmarks.gpu.cases import FP8, Problem, Shape, problem
from benchmarks.gpu.common import ROOT, Row, Run, SkipError, Store
from benchmarks.gpu.correctness import compare
from mla_compile.errors import InputError
from mla_compile.kernels import plan as planning
from mla_compile.kernels import tuned
from mla_compile.kernels.plan import Device, NoPlanError, Plan, check

DTYPES = {"half": torch.bfloat16, "float8": FP8, "float32": torch.float32}
CLASSES = {f"{kind}-{rows}": (kind, rows) for kind in DTYPES for rows in (16, 32, 128)}
MAX_ROWS = {16: 16, 32: 32, 128: None}  # the query rows a class stands for, as tuned.json has them
STAGES = (1, 2, 3, 4, 5, 7)


@dataclass(frozen=True)
class Candidate:
    """A tile. ``paged`` tells the loop that looks pages up from the one that does not."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    paged: bool

    def plan(self, splits: int = 1) -> Plan:
        """As a launch."""
        return Plan("triton", self.block_m, self.block_n, self.num_warps, self.num_stages, splits, None, 0)


def candidates(kind: str, rows: int, paged: bool, device: Device) -> Iterator[Candidate]:
    """Tiles for a class that fit shared memory: the plan's of today, the table's others, then the nearest to it."""
    blocks = [m for m in (16, 32, 64) if m <= max(16, 2 * rows)]
    known = [r for r in tuned.table() if r.cache == kind and r.kernel == "triton"]
    query = torch.float32 if kind == "float32" else torch.bfloat16
    now = planning.plan(
        B=64, S=1, H=rows, L=512, R=64, T=4096, query_dtype=query, cache_dtype=DTYPES[kind], device=device,
        page_size=64 if paged else None, gluon=False,
    )  # fmt: skip
    first = [Candidate(now.block_m, now.block_n, now.num_warps, now.num_stages, paged)]
    first += [
        Candidate(r.block_m, r.block_n, r.num_warps, r.num_stages, paged)
        for r in known
        if r.capability <= device.capability and r.block_m in blocks and r.paged in (None, paged)
    ]
    rest = [
        Candidate(m, n, w, s, paged)
        for m, n, w, s in itertools.product(blocks, (16, 32, 64, 128), (4, 8), STAGES)
        if m * 512 // (32 * w) <= 128  # float32 accumulators per thread: more always spills
    ]
    rest.sort(key=lambda candidate: _steps_between(candidate, first[0]))
    for candidate in dict.fromkeys([*first, *rest]):
        try:
            check(candidate.plan(), L=512, R=64, cache_dtype=DTYPES[kind], device=device, paged=paged)
        except InputError:
            continue
        yield candidate


def _steps_between(a: Candidate, b: Candidate) -> float:
    """Doublings of a tile's sides and warps, and stages, from one tile to another."""
    sides = ((a.block_m, b.block_m), (a.block_n, b.block_n), (a.num_warps, b.num_warps))
    return sum(abs(math.log2(x / y)) for x, y in sides) + 0.7 * abs(a.num_stages - b.num_stages)


def posed(kind: str, rows: int, batch: int, kv: int, paged: bool, device: torch.device) -> Problem:
    """Random data for a class."""
    query = torch.float32 if kind == "float32" else torch.bfloat16
    shape = Shape(batch, kv, rows, page=64 if paged else None, dtype=query, cache=DTYPES[kind])
    made = problem(shape, device, seed=rows)
    if kind == "float8":
        made.options["kv_scale"] = torch.tensor(0.13, device=device)
    return made


def sweep(run: Run, clock: timing.Clock, kind: str, rows: int, paged: bool) -> Row:
    """The fastest tile of a class on a full card, and all that were tried."""
    device = Device.of(run.device)
    batch, kv = (2, 70) if run.dry else (max(8, 4 * device.sms * 16 // max(16, rows) // 4), 4096)
    full = posed(kind, rows, batch, kv, paged, run.device)
    small = posed(kind, rows, 2, 70 if run.dry else 300, paged, run.device)
    want = small.truth()
    tried: list[Row] = []
    try:
        tiles = list(candidates(kind, rows, paged, device))
    except NoPlanError as error:
        raise SkipError(str(error)) from None
    for candidate in tiles:
        if run.left <= 0 or (run.dry and len(tried) == 2):
            break
        found: Row = {"tile": asdict(candidate)}
        tried.append(found)
        try:
            found |= compare(small.ours(candidate.plan()), want, small.shape.dtype)
            if found.get("status") != "failed":
                plan = candidate.plan()
                call, _ = clock.captured(lambda plan=plan: full.ours(plan))
                found["us"] = 1e6 * clock.median(call, rounds=12, budget=0.15)
        except Exception as error:  # noqa: BLE001  (a tile that does not compile or launch is a result of the sweep)
            found["error"] = common._short(error)
            torch.cuda.synchronize() if clock.cuda else None
    timed = sorted((t for t in tried if "us" in t), key=lambda t: t["us"])
    if not timed:
        return {"status": "failed", "error": "no tile was right and ran", "tried": tried}
    best = Candidate(**timed[0]["tile"])
    moved, flops = full.shape.cost()
    return {
        "best": asdict(best), "us": timed[0]["us"], "TBps": moved / timed[0]["us"] / 1e6,
        "TFLOPs": flops / timed[0]["us"] / 1e6, **line(run, clock, kind, rows, best), "tried": tried,
    }  # fmt: skip


def line(run: Run, clock: timing.Clock, kind: str, rows: int, best: Candidate) -> dict[str, float]:
    """``t0_us`` and ``tile_us``: intercept and slope of one block's time over its tiles (least squares)."""
    points = []
    for kv in (64, 128) if run.dry else (512, 1024, 2048, 4096):
        lone = posed(kind, min(rows, best.block_m), 1, kv, best.paged, run.device)
        call, _ = clock.captured(lambda lone=lone: lone.ours(best.plan()))
        points.append((-(-kv // best.block_n), 1e6 * clock.median(call, rounds=12, budget=0.1)))
    n, mean_x, mean_y = len(points), *(sum(p[i] for p in points) / len(points) for i in (0, 1))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    assert n > 1
    return {"t0_us": round(max(0.1, mean_y - slope * mean_x), 2), "tile_us": round(max(0.01, slope), 3)}


def rewritten(store: Store, device: Device, provenance: str) -> list[dict[str, Any]]:
    """All rows of the table, those of this device and the measured classes replaced."""
    content = json.loads(tuned.TABLE.read_text())
    rows: list[dict[str, Any]] = content["rows"]
    for (name, (kind, count)), paged in itertools.product(CLASSES.items(), (False, True)):
        found = store.rows("tune").get(f"{name} {_how(paged)}")
        if found is None or found["status"] != "ok":
            continue
        best = {k: v for k, v in found["best"].items() if k != "paged"}
        made = {
            "kernel": "triton", "capability": list(device.capability), "cache": kind, "max_rows": MAX_ROWS[count],
            "max_width": 512, "paged": paged, **best, "occupancy": 2 if best["block_m"] < 64 else 1,
            "t0_us": found["t0_us"], "tile_us": found["tile_us"], "tma": False, "pdl": False, "provenance": provenance,
        }  # fmt: skip
        rows = [part for row in rows for part in _without(made, row)] + [made]
    return sorted(rows, key=lambda r: (r["capability"], r["kernel"] != "triton", r["max_rows"] or 1 << 30))


def _how(paged: bool) -> str:
    return "paged" if paged else "contiguous"


def _without(new: dict[str, Any], old: dict[str, Any]) -> list[dict[str, Any]]:
    """What is left of an old row: nothing, or its half for the other loop."""
    if any(new[k] != old[k] for k in ("kernel", "capability", "cache", "max_rows", "max_width")):
        return [old]
    return [{**old, "paged": not new["paged"]}] if old["paged"] in (None, not new["paged"]) else []


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """The table with one row a line, as it is kept in the repository."""
    content = json.loads(tuned.TABLE.read_text())
    head = json.dumps({k: v for k, v in content.items() if k != "rows"}, indent=1)[:-2]
    path.write_text(head + ',\n "rows": [\n' + ",\n".join("  " + json.dumps(r) for r in rows) + "\n ]\n}\n")
    tuned.table.cache_clear()
    planning.plan.cache_clear()


def main(arguments: list[str] | None = None) -> int:
    """0 when every class asked for has a tile, 1 when not, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--classes", type=names(list(CLASSES)), default=list(CLASSES), help=",".join(CLASSES))
    parser.add_argument("--budget", type=float, default=500.0, help="seconds; a class gets an equal share")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_tune.json")
    parser.add_argument("--resume", action="store_true", help="keep the classes that --out already has")
    parser.add_argument("--write", action="store_true", help="rewrite kernels/tuned.json")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: tiny sizes on the CPU")
    args = parser.parse_args(arguments)
    if not args.dry_run and not torch.cuda.is_available():
        print("no CUDA device: tiles are measured on one. --dry-run walks through the code on the CPU.")
        return 2
    device = torch.device("cpu" if args.dry_run else "cuda")
    store = Store(args.out, common.machine(device), args.out if args.resume else None)
    run = Run(store, "tune", device, args.dry_run)
    clock, end = timing.Clock(device), time.monotonic() + args.budget
    todo = [(name, how) for name in args.classes for how in ("paged", "contiguous")]
    for index, (name, how) in enumerate(todo):
        run.end = time.monotonic() + (end - time.monotonic()) / (len(todo) - index)
        kind, rows = CLASSES[name]
        run.cases(
            [(f"{name} {how}", lambda kind=kind, rows=rows, how=how: sweep(run, clock, kind, rows, how == "paged"))]
        )
    found = Device.of(device)
    provenance = f"measured on {found.name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    rows_ = rewritten(store, replace(found), provenance)
    shown = [
        [key, *(row["best"][k] for k in ("block_m", "block_n", "num_warps", "num_stages")), f"{row['us']:.1f}",
         f"{row['TBps']:.2f}", f"{row['TFLOPs']:.0f}", row["t0_us"], row["tile_us"]]
        for key, row in store.rows("tune").items() if row["status"] == "ok"
    ]  # fmt: skip
    print(table(shown, ["class", "M", "N", "warps", "stages", "us", "TB/s", "TFLOP/s", "t0 us", "tile us"]))
    if args.write and not args.dry_run:
        write(tuned.TABLE, rows_)
        print(f"written to {tuned.TABLE}")
    else:
        write(args.out.with_name("tuned.json"), rows_)
        print(f"the table would be {args.out.with_name('tuned.json')}; --write puts it in its place")
    return int(bool(store.failures("tune")))


if __name__ == "__main__":
    sys.exit(main())
