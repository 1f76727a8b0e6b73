"""Sweep tiles on the card at hand and rewrite kernels/tuned.json: which tile is fastest, and the times of its plan.

    python benchmarks/gpu/tune.py                       # every class of query rows and cache dtype, about 8 minutes
    python benchmarks/gpu/tune.py --classes half-16 --write
    python benchmarks/gpu/tune.py --hopper --write      # and from how many query rows on the Hopper kernel wins
    python benchmarks/gpu/tune.py --dry-run             # no GPU: walks the code, writes nothing

A class is a cache dtype and a number of query rows. Its candidates are all tiles that fit shared memory; each has to be
right before it is timed. They are compared on a full card (as many requests as make several blocks for every SM). Of
the fastest one, t0 and what a tile takes a block alone are intercept and slope of a single block's time over several
lengths, and t_tile of the formula in kernels/plan.py is the smaller of that and an SM's time for a tile on the full
card. From both, of all classes, benchmarks/gpu/fit.py fits how long a block waits; that goes into kernels/devices.py by
hand. ``--hopper`` compares the Hopper kernel with the portable one by the number of query rows, and sets ``min_rows``.
Rows of other GPU generations stay as they are. Without ``--write`` the new rows are only printed and kept in ``--out``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
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
from benchmarks.gpu import fit, timing
from benchmarks.gpu.cases import FP8, Problem, Shape, problem
from benchmarks.gpu.common import ROOT, Row, Run, SkipError, Store
from benchmarks.gpu.correctness import compare
from mla_compile.errors import InputError
from mla_compile.kernels import plan as planning
from mla_compile.kernels import tuned
from mla_compile.kernels.devices import preset
from mla_compile.kernels.plan import Device, NoPlanError, Plan, check
from mla_compile.kernels.tiles import Layout, depth

DTYPES = {"half": torch.bfloat16, "float8": FP8, "float32": torch.float32}
CLASSES = {f"{kind}-{rows}": (kind, rows) for kind in DTYPES for rows in (16, 32, 128)}
MAX_ROWS = {16: 16, 32: 32, 128: None}  # the query rows a class stands for, as tuned.json has them
STAGES = (1, 2, 3, 4, 5, 7)
HOPPER_ROWS = (4, 8, 12, 16, 20, 24, 32, 48, 64)  # query rows at which the two kernels are compared


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
    batch, kv = (2, 70) if run.dry else (4 * device.sms * 16 // min(64, max(16, rows)), 4096)
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
    blocks = batch * -(-rows // best.block_m)
    shared = timed[0]["us"] * min(device.sms, blocks) / (blocks * -(-kv // best.block_n))
    return {
        "best": asdict(best), "us": timed[0]["us"], "TBps": moved / timed[0]["us"] / 1e6,
        "TFLOPs": flops / timed[0]["us"] / 1e6, **alone(run, clock, kind, rows, best), "full_us": round(shared, 3),
        "links": planning.links(_layout(kind, paged), best.block_n), "depth": depth(best.num_stages, paged),
        "tried": tried,
    }  # fmt: skip


def _layout(kind: str, paged: bool) -> Layout:
    bytes_ = DTYPES[kind].itemsize
    return Layout(512, 64, 0, bytes_, max(2, bytes_), paged)


def alone(run: Run, clock: timing.Clock, kind: str, rows: int, best: Candidate) -> dict[str, float]:
    """``t0_us`` and ``lone_us``: intercept and slope of one block's time over its tiles."""
    points = []
    for kv in (64, 128) if run.dry else (512, 1024, 2048, 4096):
        lone = posed(kind, min(rows, best.block_m), 1, kv, best.paged, run.device)
        call, _ = clock.captured(lambda lone=lone: lone.ours(best.plan()))
        points.append((-(-kv // best.block_n), 1e6 * clock.median(call, rounds=12, budget=0.1)))
    start, slope = fit.line(points)
    return {"t0_us": round(max(0.1, start), 2), "lone_us": round(max(0.01, slope), 3)}


def against_hopper(run: Run, clock: timing.Clock, rows: int) -> Row:
    """The Hopper kernel and the portable one with this many query rows on a full card, in turns, after a check."""
    made, by = {}, {}
    for kv in (300, 4096):
        shape = Shape(2 if kv == 300 else 128, kv, rows)
        given = problem(shape, run.device, seed=rows)
        # Up to 64 rows are one block of its rows, whatever their number: the plan of 64 is theirs.
        hopper = replace(given, shape=replace(shape, H=64)).plan("gluon")
        if hopper is None:
            raise SkipError("the Hopper kernel is not for this card")
        by = {"gluon": hopper, "triton": given.plan("triton")}
        for name, plan in by.items():
            if kv == 300 and (wrong := compare(given.ours(plan), given.truth(), shape.dtype)).get("status") == "failed":
                return {**wrong, "kernel": name}
            made[name], _ = clock.captured(lambda given=given, plan=plan: given.ours(plan))
    times = clock.seconds(made, rounds=12, budget=0.5)
    return {f"{name}_us": 1e6 * statistics.median(of) for name, of in times.items()}


def least_rows(found: dict[int, Row]) -> int | None:
    """From how many query rows on the Hopper kernel is the faster one, of those measured; None where it never is."""
    least = None
    for rows in sorted(found, reverse=True):
        if found[rows]["gluon_us"] >= found[rows]["triton_us"]:
            break
        least = rows
    return least


def fitted(store: Store, device: Device) -> str:
    """What the measured tiles say about waiting, as kernels/devices.py has it, beside what stands there."""
    rows = [row for row in store.rows("tune").values() if row["status"] == "ok"]
    tiles = [fit.Tile(row["links"], row["depth"], row["lone_us"], row["full_us"]) for row in rows]
    now = device.pace or preset(device.capability).pace
    assert now is not None  # every preset has one
    try:
        found, error = fit.pace(tiles, now)
    except ValueError as reason:
        return f"{now} stays: {reason}"
    return f"{found} fits with an error of {error:.1%}; kernels/devices.py has {now}"


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
            "t0_us": found["t0_us"], "tile_us": min(found["lone_us"], found["full_us"]), "tma": False, "pdl": False,
            "provenance": provenance,
        }  # fmt: skip
        rows = [part for row in rows for part in _without(made, row)] + [made]
    measured = {int(key): row for key, row in store.rows("hopper").items() if row["status"] == "ok"}
    if (least := least_rows(measured)) is not None:
        rows = [row | {"min_rows": least} if row["kernel"] == "gluon" else row for row in rows]
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
    parser.add_argument("--hopper", action="store_true", help="from how many query rows on the Hopper kernel wins")
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
    if args.hopper:
        beside = Run(store, "hopper", device, args.dry_run, end + 60)
        beside.cases([(str(n), lambda n=n: against_hopper(beside, clock, n)) for n in HOPPER_ROWS])
    found = Device.of(device)
    provenance = f"measured on {found.name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    rows_ = rewritten(store, replace(found), provenance)
    shown = [
        [key, *(row["best"][k] for k in ("block_m", "block_n", "num_warps", "num_stages")), f"{row['us']:.1f}",
         f"{row['TBps']:.2f}", f"{row['TFLOPs']:.0f}", row["t0_us"], row["lone_us"], row["full_us"]]
        for key, row in store.rows("tune").items() if row["status"] == "ok"
    ]  # fmt: skip
    print(table(shown, ["class", "M", "N", "warps", "stages", "us", "TB/s", "TFLOP/s", "t0 us", "alone us", "full us"]))
    print(fitted(store, found))
    for rows, row in store.rows("hopper").items():
        print(f"Hopper kernel, {rows} rows: {row}")
    if args.write and not args.dry_run:
        write(tuned.TABLE, rows_)
        print(f"written to {tuned.TABLE}")
    else:
        write(args.out.with_name("tuned.json"), rows_)
        print(f"the table would be {args.out.with_name('tuned.json')}; --write puts it in its place")
    return int(bool(store.failures("tune") or store.failures("hopper")))


if __name__ == "__main__":
    sys.exit(main())
