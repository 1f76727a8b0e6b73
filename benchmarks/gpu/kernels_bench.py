"""How fast are the kernels: time, bytes/s, FLOP/s and the ratio to this card's own floor, beside peers, in turns.

The floor of a problem is max(bytes / copy bandwidth, FLOPs / rate of a bfloat16 matrix product), both measured on the
card in the section ``floors``; bytes are the cache, the queries and the outputs, each once. No kernel runs faster,
except where the cache of one problem fits the L2 and was not flushed, which is why it is flushed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import table
from benchmarks.gpu import timing
from benchmarks.gpu.cases import FP8, Problem, Shape, kernels_for, left_padded, lists, stored
from benchmarks.gpu.common import Case, Row, Run, SkipError, Store, _short
from benchmarks.gpu.compare import compare_out
from benchmarks.gpu.correctness import not_replaced, seed_of
from benchmarks.gpu.peers import OTHER_NUMBERS, PEERS, where_timed

OURS = ("triton", "gluon", "gluon splits")
ROUNDS = 30
SECONDS = 0.6  # of timing per shape
HEADS = ((16, 1), (32, 1), (64, 1), (128, 1), (128, 2))
HEADLINE = (
    (128, 8192, 16, 1), (128, 8192, 128, 1), (1, 8192, 16, 1), (1, 8192, 128, 1), (32, 8192, 16, 1), (32, 8192, 128, 1),
)  # fmt: skip
NEXT = (  # what the targets of the project speak of, and one shape for each regime
    (128, 4096, 16, 1), (128, 4096, 128, 1), (64, 4096, 64, 1), (1, 32768, 128, 1), (32, 4096, 32, 1),
    (1, 32768, 16, 1), (128, 4096, 128, 2), (1, 4096, 128, 1), (8, 4096, 128, 1), (8, 4096, 16, 1),
)  # fmt: skip


# Requests of very different lengths: heads, query tokens, lengths. The first is ThunderMLA's batch (Hazy Research).
RAGGED = ((16, 4, (4641, 45118, 1730, 1696)), (128, 1, tuple(512 << (i % 7) for i in range(32))))


# Lists of 2048 keys, as DeepSeek-V3.2's indexer makes them: heads, requests, tokens. 16 heads: one of 8 GPUs.
CHOSEN = 2048
LISTED = (
    (128, 1, 32768), (128, 64, 32768), (128, 128, 8192), (128, 8, 131072), (16, 1, 131072), (16, 64, 32768),
    (32, 64, 32768),
)  # fmt: skip

PACKED = 4  # of these, how many are measured over rows of 656 bytes in float8, too

# DeepSeek-V4's rows, which have no rotary part, with sinks: heads, requests, rows, keys of a list (0: all rows). It has
# one row for 4 tokens, of which a list names 512 or 1024, one row for 128 tokens, and a window of 128.
SHARED = ((64, 1, 8192, 512), (64, 64, 8192, 512), (128, 64, 8192, 1024), (64, 64, 1024, 0), (64, 64, 128, 0))

LEFT_PADDED = tuple((H, 1, tuple(4096 - 96 * i for i in range(32))) for H in (32, 128))  # as generate() pads prompts
PAGE = 64


def uneven(dry: bool) -> list[tuple[str, Shape, tuple[int, ...]]]:
    """What splits by request are bad at, and a batch cut into equal amounts of work is made for; then masked caches."""
    pages, masked = (RAGGED, LEFT_PADDED) if not dry else (((4, 1, (70, 3)),), ((4, 1, (128, 50)),))
    made = [("ragged", Shape(B=len(lens), kv=max(lens), H=H, S=S, page=PAGE), lens) for H, S, lens in pages]
    made += [("left-padded", Shape(B=len(lens), kv=max(lens), H=H, S=S, page=None), lens) for H, S, lens in masked]
    return [(f"{name} {shape}", shape, lens) for name, shape, lens in made]


def without_rope(dry: bool) -> list[tuple[str, Shape, tuple[int, ...] | None]]:
    """Rows that are keys and values at once."""
    made = [Shape(B, kv, H, R=0, k=k, page=PAGE) for H, B, kv, k in (((4, 2, 70, 30),) if dry else SHARED)]
    return [(str(shape), shape, None) for shape in made]


def with_lists(dry: bool) -> list[tuple[str, Shape, tuple[int, ...] | None]]:
    """Sparse attention: whatever the length of a request, its list is as long."""
    made = [(4, 2, 70)] if dry else LISTED
    every = [Shape(B=B, kv=kv, H=H, page=PAGE, k=30 if dry else CHOSEN) for H, B, kv in made]
    every += [replace(shape, cache=FP8, groups=4) for shape in every[:PACKED]]
    return [(str(shape), shape, None) for shape in every]


def shapes(dry: bool) -> list[Shape]:
    """The grid of kernels.md 1b, the shapes that matter most first."""
    if dry:
        return [Shape(B=2, kv=70, H=4), Shape(B=1, kv=70, H=2, S=2)]
    grid = [(b, kv, h, s) for kv in (4096, 1024, 8192, 32768, 131072) for b in (32, 1, 128, 8, 64) for h, s in HEADS]
    return [Shape(B=b, kv=kv, H=h, S=s) for b, kv, h, s in dict.fromkeys([*HEADLINE, *NEXT, *grid])]


def _pages(shape: Shape) -> int:
    return shape.B * -(-shape.kv // PAGE)


def masks(shape: Shape, lens: tuple[int, ...] | None, device: torch.device) -> dict[str, Tensor]:
    """The option that says which tokens of a cache in one piece are read; over pages the lengths say it."""
    return {} if shape.page is not None or lens is None else {"mask": left_padded(lens, shape.kv, device)}


class Pool:
    """The clock, and one allocation of random pages for all shapes; requests own random ones of it."""

    def __init__(self, run: Run, shapes: list[Shape]) -> None:
        self.run, self.wanted = run, max(map(_pages, shapes))

    @cached_property
    def clock(self) -> timing.Clock:
        """Made by the first shape that is measured."""
        return timing.Clock(self.run.device)

    @cached_property
    def kv(self) -> torch.Tensor:
        """[pages,64,576], as many as are wanted or fit 0.4 of the free memory."""
        free = torch.cuda.mem_get_info()[0] if self.run.device.type == "cuda" else 1 << 22
        pages = min(self.wanted, int(0.4 * free) // (64 * 576 * 2))
        made = torch.empty(pages, 64, 576, dtype=torch.bfloat16, device=self.run.device)
        for part in made.split(4096):  # float32 of all of it at once would be twice the memory
            part.copy_(0.1 * torch.randn(part.shape, device=self.run.device, dtype=torch.bfloat16))
        return made

    @cached_property
    def packed(self) -> torch.Tensor:
        """The same rows in float8 as DeepSeek-V3.2 is served from them: bytes [pages,64,656]."""
        made = torch.empty(*self.kv.shape[:2], 656, dtype=torch.uint8, device=self.run.device)
        shape = Shape(1, 1, 1, cache=FP8, groups=4)
        for part, into in zip(self.kv.split(1024), made.split(1024), strict=True):
            into.copy_(stored(shape, part.float()))
        return made

    def pages(self, shape: Shape) -> Tensor:
        """The pages as rows of this shape: bytes, or in half precision."""
        if shape.groups:
            return self.packed
        return self.kv.flatten()[: len(self.kv) * PAGE * (shape.L + shape.R)].view(len(self.kv), PAGE, -1)

    def problem(self, shape: Shape, lens: tuple[int, ...] | None = None) -> Problem:
        """Requests of these lengths (None: all full) over random pages, or left-padded to them in one piece."""
        count = _pages(shape)
        if count > len(self.kv):
            raise SkipError(f"needs {count} pages, {len(self.kv)} fit in memory")
        generator = torch.Generator(self.run.device).manual_seed(seed_of(str(shape)))
        order = torch.randperm(len(self.kv), generator=generator, device=self.run.device)[:count]
        size = (shape.B, shape.S, shape.H, shape.L + shape.R)
        query = 10 * torch.randn(size, generator=generator, device=self.run.device, dtype=torch.float32)
        options = {"causal": shape.S > 1, **masks(shape, lens, self.run.device)}
        if shape.k:
            options["indices"] = lists(shape, shape.k, self.run.device)
        if shape.R == 0:
            options["sinks"] = torch.linspace(-2, 3, shape.H, device=self.run.device)
        if shape.page is None:
            full = torch.full((shape.B,), shape.kv, dtype=torch.int32, device=self.run.device)
            whole = self.kv[:count].view(shape.B, -1, 576)[:, : shape.kv]
            return Problem(shape, query.to(shape.dtype), whole, None, full, options)
        lengths = torch.tensor(lens or [shape.kv] * shape.B, dtype=torch.int32, device=self.run.device)
        made = order.int().reshape(shape.B, shape.pages)
        return Problem(shape, query.to(shape.dtype), self.pages(shape), made, lengths, options)


def floors(run: Run) -> Iterator[Case]:
    """What this card reaches: copy and read bandwidth, a bfloat16 product, and the time of an empty graph."""
    for key, measured in (
        ("copy", timing.copy_bandwidth), ("read", timing.read_bandwidth), ("matmul bfloat16", timing.matmul_rate),
        ("empty graph", timing.empty_graph),
    ):  # fmt: skip
        yield Case(key, lambda measured=measured: measured(timing.Clock(run.device)), 2.0, True)  # type: ignore[misc]


def measured_floors(store: Store) -> tuple[float, float]:
    """Bytes/s and FLOP/s of the card, from the section ``floors``."""
    rows = store.rows("floors")
    try:
        return rows["copy"]["bytes_per_s"], rows["matmul bfloat16"]["flop_per_s"]
    except KeyError:
        raise SkipError("the floors of this card were not measured") from None


def measure(run: Run, pool: Pool, shape: Shape, lens: tuple[int, ...] | None = None) -> Row:
    """One shape: every variant's first output against the truth, then all of them in turns.

    A variant of ours that does not compile, run or come out right makes the row failed; the others are still timed.
    """
    bandwidth, rate = measured_floors(run.store)
    clock, posed = pool.clock, pool.problem(shape, lens)
    moved, flops = shape.cost(sum(lens) if lens else None)
    floor = max(moved / bandwidth, flops / rate)
    row: Row = {"bytes": moved, "flops": flops, "floor_us": 1e6 * floor, "bound": "c" if flops / rate == floor else "m"}
    plans = kernels_for(shape, run.device, posed.options)
    row["plan"] = {name: str(made) for name, made in plans.items()}
    row["absent"] = dict.fromkeys(run.without, "hung or died in an earlier row")
    calls: dict[str, Any] = {}
    for name, made in plans.items():
        if name.split()[0] not in run.without:
            calls[name] = lambda made=made: posed.ours(made)[0]
    for name, make in PEERS.items():
        if name in run.without:
            continue
        run.at(name)
        try:
            where_timed(name, shape)
            call = make(posed, run.peers.get(name.split()[0]))
            call()
            calls[name] = call
        except SkipError as reason:
            row["absent"][name] = str(reason)
        except Exception as error:  # noqa: BLE001  (a peer that fails is left out, with the reason)
            row["absent"][name] = _short(error)
    problems = _agree(run, posed, calls, row)
    graphs = {}
    for name, call in calls.items():
        run.at(name)
        graphs[name], captured = clock.captured(call)
        if not captured and clock.cuda:
            row.setdefault("not_captured", []).append(name)
    run.at("")
    for name, seconds in clock.seconds(graphs, ROUNDS, 0.05 if run.dry else SECONDS).items():
        found = timing.spread(seconds)
        us = found["median"]
        row[name] = {
            **found, "TBps": round(moved / us / 1e6, 3), "TFLOPs": round(flops / us / 1e6, 1),
            "over_floor": round(us / (1e6 * floor), 3),
        }  # fmt: skip
    for name in plans:
        if name in calls and shape.B <= 8:
            row[name]["host_us"] = round(timing.host_cost(clock, calls[name]), 2)
    return {**row, "status": "failed", "error": "; ".join(problems)} if problems else row


def _agree(run: Run, posed: Problem, calls: dict[str, Any], row: Row) -> list[str]:
    """Takes what fails, or differs from the truth, out of ``calls``; returns what is wrong with ours."""
    shape = posed.shape
    subset = shape.B * (shape.k or shape.kv) * shape.H * shape.S > 1 << 28
    reference = None if subset else posed.truth()[0]
    problems = []
    for name in [n for n in calls if n not in OTHER_NUMBERS]:
        run.at(name)
        try:
            got = calls[name]()
            if name in OURS:
                not_replaced(name)
            reference = got.double() if reference is None else reference  # too large for the truth: each other
            found = compare_out(got, reference, posed.shape.dtype)
        except Exception as error:  # noqa: BLE001  (compilers and launches fail in many ways; the others are timed)
            found = {"status": "failed", "error": _short(error)}
        row.setdefault("error_of", {})[name] = found.get("out_relative", found.get("error"))
        if found.get("status") == "failed":
            row["absent"][name] = found["error"]
            problems += [f"{name}: {found['error']}"] if name in OURS else []
            del calls[name]
    return problems


def cases(run: Run) -> Iterator[Case]:
    """The headline shapes, the next ones, requests of uneven lengths, the grid."""
    listed: list[tuple[str, Shape, tuple[int, ...] | None]] = [(str(shape), shape, None) for shape in shapes(run.dry)]
    place = len(HEADLINE) + len(NEXT)
    listed[place:place] = [*uneven(run.dry), *with_lists(run.dry), *without_rope(run.dry)]
    pool = Pool(run, [shape for _, shape, _ in listed])
    for index, (key, shape, lens) in enumerate(listed):
        first = index < (1 if run.dry else len(HEADLINE))
        of = f"{kernels_for(shape, run.device, masks(shape, lens, torch.device('cpu')))} {sorted(run.peers)}"
        # The first ones compile their kernels.
        yield Case(key, lambda s=shape, n=lens: measure(run, pool, s, n), 6.0 if first else 2.5, first, of)  # type: ignore[misc]


def summary(store: Store) -> str:
    """A line per shape: the floor, microseconds (ratio to the floor) of each variant, and the rates of our best."""
    rows = {key: row for key, row in store.rows("kernels").items() if "floor_us" in row}
    names = [n for n in (*OURS, *PEERS) if any(n in row for row in rows.values())]
    lines = []
    for key, row in rows.items():
        best = min((row[n] for n in OURS if n in row), key=lambda r: r["median"], default=None)
        shown = [f"{row[n]['median']:.1f} ({row[n]['over_floor']:.2f})" if n in row else "" for n in names]
        rates = [f"{best['TBps']:.2f}", f"{best['TFLOPs']:.0f}"] if best else ["", ""]
        lines.append([key, f"{row['floor_us']:.1f} {row['bound']}", *shown, *rates])
    absent = {name: why for row in rows.values() for name, why in row["absent"].items() if name not in names}
    text = table(lines, ["shape", "floor us", *(f"{n} us" for n in names), "TB/s", "TFLOP/s"])
    return text + "".join(f"\n  not timed: {name}: {why}" for name, why in absent.items())
