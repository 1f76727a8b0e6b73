"""Which tile is fastest on the card at hand, the times of its plan, and kernels/tuned.json rewritten from that.

    python benchmarks/gpu/run_all.py --sections tiles,tune      # measures: the sections are here
    python benchmarks/gpu/tune.py [RESULTS]                     # prints; writes a table beside the results
    python benchmarks/gpu/tune.py [RESULTS] --write             # puts it in place of kernels/tuned.json

A class is a cache dtype, a number of query rows, and a cache in pages or in one piece. Its candidates are the tiles
that fit shared memory and are nearest to the table's. ``tiles`` compiles each, on all cores, and holds its result
against the truth; ``tune`` times those that are right, alone on a full card (several blocks for every SM). Of the
fastest one, t0 and what a tile takes a lone block are intercept and slope of a single block's time over several
lengths; t_tile of the formula in kernels/plan.py is the smaller of that and an SM's time for a tile on the full card.
From both, of all tiles that have them, benchmarks/gpu/fit.py fits how long a block waits; that line is printed, and
goes into kernels/devices.py by hand. On a Hopper card both sections also hold its kernel against the portable one by
the number of query rows, which is where ``min_rows`` comes from, and its forms (FORMS, SHARED) against the plain one.
The same of rows without rope is printed alone: the table has no rows of its own for them. Rows of other GPU generations
stay as they are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

if not __package__:  # as a script: import from the checkout, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.gpu.common import DONE, ROOT, Case, Row, Run, SkipError, Store  # sets the environment, so before torch

import torch  # isort: skip

from benchmarks.common import table
from benchmarks.gpu import fit, timing
from benchmarks.gpu.cases import FP8, Problem, Shape, plan_of, problem
from benchmarks.gpu.compare import compare
from benchmarks.gpu.correctness import not_replaced
from mla_compile.errors import InputError
from mla_compile.kernels import plan as planning
from mla_compile.kernels import tuned
from mla_compile.kernels.devices import preset
from mla_compile.kernels.hopper import steps as hopper_steps
from mla_compile.kernels.plan import HOPPER_BLOCK, Device, NoPlanError, Plan, check
from mla_compile.kernels.tiles import RowLayout, depth

DTYPES = {"half": torch.bfloat16, "float8": FP8, "float32": torch.float32}
CLASSES = {f"{kind}-{rows}": (kind, rows) for kind in DTYPES for rows in (16, 32, 128)}
MAX_ROWS = {16: 16, 32: 32, 128: None}  # the query rows a class stands for, as tuned.json has them
STAGES = (1, 2, 3, 4, 5, 7)
BESIDE = "gluon: "  # what the keys begin with where the Hopper kernel is held against the portable one
MOST = 24  # candidates of a class
NO_ROPE = "no rope"  # rows in half precision that are keys and values at once
# Rows at which they are, and how that is said in keys.
HOPPER_KINDS = {"half": "", "float8": "float8, ", NO_ROPE: "no rope, "}
HOPPER_ROWS = (4, 8, 12, 16, 20, 24, 32, 48, 64)  # query rows at which the two kernels are compared
FORMS: dict[str, dict[str, Any]] = {  # of the Hopper kernel, beside the one without any of it
    "9 barriers": {"barriers": 9},
    "held query": {"held": True},
    "9 barriers, held query": {"barriers": 9, "held": True},
}
SHARED = {  # and each with two CTAs that share what is copied from memory
    ", ".join(filter(None, (form, "cluster of 2"))): {**change, "cluster": 2}
    for form, change in ({"": {}} | FORMS).items()
}
# Float8 rows are stored, with three arrivals a block; without rope there is none to hold.
KIND_FORMS = {"half": tuple(FORMS), "float8": ("held query",), NO_ROPE: ("9 barriers",)}
WORTH = 0.99  # a form has to take less than this share of the plain one's time
FORM_ROWS = (32, 64, 128)  # query rows at which forms are compared
SHARED_ROWS = (128,)  # of them, those of two CTAs
FIRST = 4  # of them, the nearest to the table: of all classes before the others of any


@dataclass(frozen=True)
class Candidate:
    """A tile. ``paged`` tells the loop that looks pages up from the one that does not."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    paged: bool

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} w{self.num_warps} s{self.num_stages}"

    def plan(self, splits: int = 1) -> Plan:
        """As a launch."""
        return Plan("triton", self.block_m, self.block_n, self.num_warps, self.num_stages, splits, None, 0)


def candidates(kind: str, rows: int, paged: bool, device: Device) -> Iterator[Candidate]:
    """Tiles for a class that fit shared memory: the plan's of today, the table's others, then the nearest to it."""
    blocks = [m for m in (16, 32, 64) if m <= max(16, 2 * rows)]
    known = [r for r in tuned.table() if r.cache == kind and r.kernel == "triton" and not r.listed]
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
    made = problem(replace(_shape(kind, rows, batch, kv), page=64 if paged else None), device, seed=rows)
    if kind == "float8":
        made.options["kv_scale"] = torch.tensor(0.13, device=device)
    return made


def _shape(kind: str, rows: int, batch: int, kv: int) -> Shape:
    """Pages of a cache dtype, or of rows without rope."""
    query = torch.float32 if kind == "float32" else torch.bfloat16
    return Shape(batch, kv, rows, R=0 if kind == NO_ROPE else 64, dtype=query, cache=DTYPES.get(kind, torch.bfloat16))


def _classes(run: Run) -> Iterator[tuple[int, str, str, int, Candidate]]:
    """Rank, key, cache dtype and query rows of every candidate, and itself; the nearest ones of all classes first."""
    device, found = Device.of(run.device), []
    for (name, (kind, rows)), paged in itertools.product(CLASSES.items(), (True, False)):
        try:
            tiles = list(itertools.islice(candidates(kind, rows, paged, device), 2 if run.dry else MOST))
        except NoPlanError:
            continue
        found += [(rank, f"{name} {_how(paged)} {tile}", kind, rows, tile) for rank, tile in enumerate(tiles)]
    return iter(sorted(found, key=lambda entry: entry[0] >= FIRST))


def _one(make: Callable[[], Problem], kept: dict[object, Any], key: object) -> Any:
    """What ``make`` returns, kept until another key is asked for: one class at a time is in memory."""
    if key not in kept:
        kept.clear()
        kept[key] = make()
    return kept[key]


def _both(kind: str, rows: int, batch: int, kv: int, device: torch.device) -> tuple[Shape, dict[str, Plan]]:
    """A paged shape of this many query rows and both kernels' plans; no plans where the Hopper kernel is not for it."""
    shape = _shape(kind, rows, batch, kv)
    # Up to 64 rows are one block of its rows, whatever their number: the plan of 64 is theirs, whatever min_rows says.
    hopper = plan_of(replace(shape, H=max(rows, HOPPER_BLOCK)), device, "gluon", {})
    portable = plan_of(shape, device, "triton", {})
    return shape, {} if hopper is None or portable is None else {"gluon": hopper, "triton": portable}


def _beside(run: Run, batch: int, kv: int) -> Iterator[tuple[str, str, Shape, dict[str, Plan]]]:
    """Key, cache dtype, shape and plans of each comparison of the two kernels, then of the Hopper kernel's forms."""
    for kind, rows in itertools.product(HOPPER_KINDS, HOPPER_ROWS):
        shape, plans = _both(kind, rows, batch, kv, run.device)
        if plans:
            yield f"{BESIDE}{HOPPER_KINDS[kind]}{rows} rows", kind, shape, plans
    for kind, rows in itertools.product(HOPPER_KINDS, FORM_ROWS):
        shape, plans = _both(kind, rows, batch, kv, run.device)
        pairs = tuple(SHARED) if kind == "half" and rows in SHARED_ROWS and hopper_steps.clusters() else ()
        for form in (*KIND_FORMS[kind], *pairs) if plans else ():
            forms = {"form": replace(plans["gluon"], **(FORMS | SHARED)[form]), "gluon": plans["gluon"]}
            yield _form_key(kind, form, rows), kind, shape, forms


def _form_key(kind: str, form: str, rows: int) -> str:
    return f"{BESIDE}{HOPPER_KINDS[kind]}{form}, {rows} rows"


def tiles(run: Run) -> Iterator[Case]:
    """Every candidate against the truth, on few requests; the Hopper kernel and the portable one too, by query rows."""
    kept: dict[object, Any] = {}

    def call(kind: str, rows: int, tile: Candidate) -> Row:
        kv = 70 if run.dry else 300
        small = _one(lambda: posed(kind, rows, 2, kv, tile.paged, run.device), kept, (kind, rows, tile.paged))
        return compare(small.ours(tile.plan()), small.truth(), small.shape.dtype)

    for rank, key, kind, rows, tile in _classes(run):
        yield Case(key, lambda k=kind, r=rows, t=tile: call(k, r, t), 3.0, rank < FIRST)  # type: ignore[misc]
    for key, kind, shape, plans in _beside(run, 2, 70 if run.dry else 300):
        yield Case(key, lambda k=kind, s=shape, p=plans: _both_right(run, k, s, p), 3.0, True, str(plans))  # type: ignore[misc]


def _both_right(run: Run, kind: str, shape: Shape, plans: dict[str, Plan]) -> Row:
    small = posed(kind, shape.H, shape.B, shape.kv, True, run.device)
    want, row = small.truth(), Row()
    for name, made in plans.items():
        row = compare(small.ours(made), want, shape.dtype)
        not_replaced(made.kernel)
        if row.get("status") == "failed":
            return {**row, "error": f"{name}: {row['error']}"}
    return row


def tune(run: Run) -> Iterator[Case]:
    """Every candidate that is right, timed; of the fastest so far of its class, the times of its plan too."""
    kept: dict[object, Any] = {}
    clock = cache(lambda: timing.Clock(run.device))
    sms = Device.of(run.device).sms

    def call(key: str, kind: str, rows: int, tile: Candidate) -> Row:
        if (why := _unchecked(run.store, key)) is not None:
            return why
        batch, kv = (2, 70) if run.dry else (4 * sms * 16 // min(64, max(16, rows)), 4096)
        full = _one(lambda: posed(kind, rows, batch, kv, tile.paged, run.device), kept, (kind, rows, tile.paged))
        timed, _ = clock().captured(lambda: full.ours(tile.plan()))
        us = 1e6 * clock().median(timed, rounds=12, budget=0.15)
        moved, flops = full.shape.cost()
        row = {"tile": asdict(tile), "us": us, "TBps": moved / us / 1e6, "TFLOPs": flops / us / 1e6}
        before = best(run.store, key.removesuffix(f" {tile}"))
        if before is not None and before["us"] <= us:
            return row
        blocks = batch * -(-rows // tile.block_m)
        shared = us * min(sms, blocks) / (blocks * -(-kv // tile.block_n))
        return {**row, **alone(run, clock(), kind, rows, tile), "full_us": round(shared, 3)}

    def beside(key: str, kind: str, shape: Shape, plans: dict[str, Plan]) -> Row:
        if (why := _unchecked(run.store, key)) is not None:
            return why
        full = posed(kind, shape.H, shape.B, shape.kv, True, run.device)
        calls = {name: clock().captured(lambda made=made: full.ours(made))[0] for name, made in plans.items()}
        times = clock().seconds(calls, rounds=12, budget=0.5)
        return {f"{name}_us": 1e6 * statistics.median(of) for name, of in times.items()}

    for rank, key, kind, rows, tile in _classes(run):
        yield Case(key, lambda a=key, k=kind, r=rows, t=tile: call(a, k, r, t), 1.0, rank < FIRST)  # type: ignore[misc]
    for key, kind, shape, plans in _beside(run, *((2, 70) if run.dry else (128, 4096))):
        yield Case(key, lambda a=key, k=kind, s=shape, p=plans: beside(a, k, s, p), 1.5, True, str(plans))  # type: ignore[misc]


def _unchecked(store: Store, key: str) -> Row | None:
    """Why something may not be timed yet, as a row; raises :class:`SkipError` where its check went wrong."""
    status = store.rows("tiles").get(key, {"status": "pending"})["status"]
    if status not in DONE:
        return {"status": "unfinished", "error": f"its check is {status}"}
    if status != "ok":
        raise SkipError(f"its check is {status}")
    return None


def best(store: Store, name: str) -> Row | None:
    """The fastest row of a class; it has the times of :func:`alone`, since nothing before it was faster."""
    found = [row for key, row in store.rows("tune").items() if key.startswith(f"{name} ") and row["status"] == "ok"]
    return min((row for row in found if "t0_us" in row), key=lambda row: row["us"], default=None)


def alone(run: Run, clock: timing.Clock, kind: str, rows: int, best: Candidate) -> dict[str, float]:
    """``t0_us`` and ``lone_us``, intercept and slope of one block's time over its tiles, and the formula's counts."""
    points = []
    for kv in (64, 128) if run.dry else (512, 1024, 2048, 4096):
        lone = posed(kind, min(rows, best.block_m), 1, kv, best.paged, run.device)
        call, _ = clock.captured(lambda lone=lone: lone.ours(best.plan()))
        points.append((-(-kv // best.block_n), 1e6 * clock.median(call, rounds=12, budget=0.1)))
    start, slope = fit.line(points)
    bytes_ = DTYPES[kind].itemsize
    return {
        "t0_us": round(max(0.1, start), 2), "lone_us": round(max(0.01, slope), 3),
        "links": planning.links(RowLayout(512, 64, 0, bytes_, max(2, bytes_), best.paged), best.block_n),
        "depth": depth(best.num_stages, paged=best.paged),
    }  # fmt: skip


def compared(store: Store, kind: str = "half") -> dict[int, Row]:
    """What the two kernels took over rows of a dtype, by query rows."""
    found = {rows: store.rows("tune").get(f"{BESIDE}{HOPPER_KINDS[kind]}{rows} rows") for rows in HOPPER_ROWS}
    return {rows: row for rows, row in found.items() if row is not None and row["status"] == "ok"}


def least_rows(found: dict[int, Row]) -> int | None:
    """From how many query rows on the Hopper kernel is the faster one, of those measured; None where it never is."""
    least = None
    for rows in sorted(found, reverse=True):
        if found[rows]["gluon_us"] >= found[rows]["triton_us"]:
            break
        least = rows
    return least


def form_ratios(store: Store, kind: str) -> dict[str, float]:
    """What each form of the Hopper kernel took in place of the plain one, of those that were measured."""
    rows = dict.fromkeys(KIND_FORMS[kind], FORM_ROWS) | (dict.fromkeys(SHARED, SHARED_ROWS) if kind == "half" else {})
    found = {form: _ratio(store, kind, form, counts) for form, counts in rows.items()}
    return {form: ratio for form, ratio in found.items() if ratio is not None}


def _ratio(store: Store, kind: str, form: str, counts: tuple[int, ...]) -> float | None:
    """The mean of a form's ratios at so many query rows; None where not all were measured."""
    rows = [store.rows("tune").get(_form_key(kind, form, count), {}) for count in counts]
    if any(row.get("status") != "ok" for row in rows):
        return None
    return statistics.geometric_mean([row["form_us"] / row["gluon_us"] for row in rows])


def best_form(store: Store, kind: str) -> dict[str, Any] | None:
    """What the table says of the fastest form; None where not all were measured.

    Two CTAs share copies if that is faster than the same form without, at the query rows where it was measured.
    """
    found = form_ratios(store, kind)
    if not set(KIND_FORMS[kind]) <= set(found):
        return None
    best = min(KIND_FORMS[kind], key=lambda form: found[form])
    change, alone, pair = FORMS[best], _ratio(store, kind, best, SHARED_ROWS), f"{best}, cluster of 2"
    if found[best] >= WORTH:
        change, alone, pair = {}, 1.0, "cluster of 2"
    assert alone is not None  # SHARED_ROWS are among FORM_ROWS
    shared = found.get(pair)
    cluster = 2 if shared is not None and shared < WORTH * alone else 1
    return {"barriers": 3, "held": False, "cluster": cluster, **change}


def fitted(store: Store) -> str:
    """What the measured tiles say about waiting, as kernels/devices.py has it, beside what stands there."""
    rows = [row for row in store.rows("tune").values() if "lone_us" in row]
    now = preset(_card(store)[1]).pace
    assert now is not None  # every preset has one
    try:
        found, error = fit.pace([fit.Tile(r["links"], r["depth"], r["lone_us"], r["full_us"]) for r in rows], now)
    except ValueError as reason:
        return f"{now} stays: {reason}"
    return f"{found} fits with an error of {error:.1%}; kernels/devices.py has {now}"


def _card(store: Store) -> tuple[str, tuple[int, int]]:
    """Name and capability of what was measured."""
    gpu = store.data["about"]["gpu"]
    if gpu is None:
        return "a CPU", (8, 0)  # what a dry run plans for
    major, minor = gpu["capability"]
    return gpu["name"], (major, minor)


def rewritten(store: Store) -> list[dict[str, Any]]:
    """All rows of the table, those of the device and the classes that were measured replaced."""
    about, (name, capability) = store.data["about"], _card(store)
    provenance = f"measured on {name}, torch {about['host']['torch']}, {about['host']['date'][:10]}"
    content = json.loads(tuned.TABLE.read_text())
    rows: list[dict[str, Any]] = content["rows"]
    for (group, (kind, count)), paged in itertools.product(CLASSES.items(), (False, True)):
        found = best(store, f"{group} {_how(paged)}")
        if found is None:
            continue
        tile = {k: v for k, v in found["tile"].items() if k != "paged"}
        made = {
            "kernel": "triton", "capability": list(capability), "cache": kind, "max_rows": MAX_ROWS[count],
            "max_width": 512, "paged": paged, **tile, "occupancy": 2 if tile["block_m"] < 64 else 1,
            "t0_us": found["t0_us"], "tile_us": min(found["lone_us"], found["full_us"]), "tma": False, "pdl": False,
            "provenance": provenance,
        }  # fmt: skip
        rows = [part for row in rows for part in _without(made, row)] + [made]
    for kind in HOPPER_KINDS:
        this = ("gluon", kind)
        if (least := least_rows(compared(store, kind))) is not None:
            rows = [row | {"min_rows": least} if (row["kernel"], row["cache"]) == this else row for row in rows]
        if (form := best_form(store, kind)) is not None:
            rows = [row | form if (row["kernel"], row["cache"]) == this else row for row in rows]
    return sorted(rows, key=lambda r: (r["capability"], r["kernel"] != "triton", r["max_rows"] or 1 << 30))


def _how(paged: bool) -> str:
    return "paged" if paged else "contiguous"


def _without(new: dict[str, Any], old: dict[str, Any]) -> list[dict[str, Any]]:
    """What is left of an old row: nothing, or its half for the other loop."""
    if old.get("listed") or any(new[k] != old[k] for k in ("kernel", "capability", "cache", "max_rows", "max_width")):
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
    """0 when a class, or the Hopper kernel beside the portable one, was measured, 1 when neither was."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="?", default=ROOT / "benchmarks" / "results" / "gpu.json")
    parser.add_argument("--write", action="store_true", help="rewrite kernels/tuned.json")
    args = parser.parse_args(arguments)
    store = Store(args.results)
    names = [f"{name} {_how(paged)}" for name, paged in itertools.product(CLASSES, (True, False))]
    found = {name: row for name in names if (row := best(store, name)) is not None}
    beside = {kind: rows for kind in HOPPER_KINDS if (rows := compared(store, kind))}
    if not found and not beside:
        print(f"{args.results} has no rows of the section tune: run_all.py --sections tiles,tune --out {args.results}")
        return 1
    shown = [
        [name, str(Candidate(**row["tile"])), f"{row['us']:.1f}", f"{row['TBps']:.2f}", f"{row['TFLOPs']:.0f}",
         row["t0_us"], row["lone_us"], row["full_us"]]
        for name, row in found.items()
    ]  # fmt: skip
    if found:
        print(table(shown, ["class", "tile", "us", "TB/s", "TFLOP/s", "t0 us", "alone us", "full us"]))
        print(fitted(store))
    for kind, rows in beside.items():
        for count, row in sorted(rows.items()):
            both = f"Hopper kernel {row['gluon_us']:.1f} us, portable {row['triton_us']:.1f} us"
            print(f"{HOPPER_KINDS[kind]}{count:3} query rows: {both}")
        for form, ratio in form_ratios(store, kind).items():
            print(f"{HOPPER_KINDS[kind]}{form}: {ratio:.3f} of the time without")
        why = f"stays: at {max(rows)} query rows it is not the faster one"
        print(f"{HOPPER_KINDS[kind]}min_rows of the Hopper kernel: {least_rows(rows) or why}")
    dry = store.data["about"]["dry_run"]
    place = tuned.TABLE if args.write and not dry else args.results.with_name("tuned.json")
    write(place, rewritten(store))
    print(f"written to {place}" if args.write else f"the table would be {place}; --write puts it in its place")
    return 0


if __name__ == "__main__":
    sys.exit(main())
