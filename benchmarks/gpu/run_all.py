"""Everything that needs a GPU, in as many commands as it takes: correctness, the card's floors, kernels, models, tests.

    python benchmarks/gpu/run_all.py --sections correctness,floors,kernels --keep-going --out DIR/gpu.json
    python benchmarks/gpu/run_all.py --sections models --out DIR/gpu.json      # goes on in the same file
    python benchmarks/gpu/run_all.py --resume OLD.json --out DIR/gpu.json      # with the rows of another file
    python benchmarks/gpu/run_all.py --peer flashmla=/path/to/FlashMLA --peer vllm=/path/triton_decode_attention.py
    python benchmarks/gpu/run_all.py --dry-run                                 # no GPU: tiny sizes, to test this script

Runs from the checkout, nothing has to be installed. Of every section, what is cheap or most wanted is run before the
rest of any. A section runs in processes of its own, which tell this one what they find; only this one writes the file.
A command that is killed, or whose time is spent, loses at most the rows in progress, and the same command goes on.
Nothing is timed when a correctness check fails, unless --keep-going, which leaves out the kernels that hung or died.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

if not __package__:  # as a script: import from the checkout, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.gpu import common

import torch  # isort: skip  # after common, which sets the environment

from benchmarks.common import names
from benchmarks.gpu import correctness, kernels_bench, model_bench, onnx_native, suite, tune
from benchmarks.gpu.common import DEAD_CONTEXT, DONE, FAULTS, ROOT, Case, OutOfTimeError, Row, Run, Store, Wire
from benchmarks.gpu.peers import PEERS

CHECK = ("mla_compile/kernels", *(f"benchmarks/gpu/{name}.py" for name in ("cases", "compare", "correctness")))
TIMING = (*CHECK, "benchmarks/gpu/timing.py")
# Most of the time of a check goes into compiling its kernel, on one core; what is not timed can share the GPU.
PARALLEL = max(1, min(8, (os.cpu_count() or 1) // 2))


@dataclass(frozen=True)
class Section:
    """``sources``: what its rows depend on, tiles aside. ``patience``: seconds without a row that mean it hangs."""

    cases: Callable[[Run], Iterable[Case]]
    sources: tuple[str, ...]
    patience: float = 60.0
    workers: int = 1
    needs: str = ""  # a section whose rows it reads
    timed: bool = False


SECTIONS = {
    "correctness": Section(correctness.cases, CHECK, workers=PARALLEL),
    "floors": Section(kernels_bench.floors, ("benchmarks/gpu/timing.py",), timed=True),
    "kernels": Section(
        kernels_bench.cases, (*TIMING, "benchmarks/gpu/kernels_bench.py", "benchmarks/gpu/peers.py"), 90.0,
        needs="floors", timed=True,
    ),
    "models": Section(
        model_bench.cases,
        ("mla_compile", "benchmarks/common.py", "benchmarks/gpu/timing.py", "benchmarks/gpu/model_bench.py"), 400.0,
        needs="floors", timed=True,
    ),
    "onnx": Section(onnx_native.cases, onnx_native.SOURCES, 300.0),
    "tests": Section(suite.cases, ("mla_compile", "mla_compile/kernels/tuned.json", "tests"), 300.0),
    "tiles": Section(tune.tiles, (*CHECK, "benchmarks/gpu/tune.py"), workers=PARALLEL),
    "tune": Section(tune.tune, (*TIMING, "benchmarks/gpu/tune.py", "benchmarks/gpu/fit.py"), needs="tiles", timed=True),
    "consan": Section(correctness.consan, CHECK, 1e6),  # only its time ends it: its compilation takes minutes
}  # fmt: skip
STANDING = [name for name in SECTIONS if name not in ("tiles", "tune")]  # without --sections
CHECKS = ("correctness", "consan")
RESTARTS = 4
START = 12.0  # seconds until a process has imported torch and made its context
CLOSING = 5.0  # seconds kept for ending processes and the tables
NO_GPU, NOT_FINISHED = 2, 3


@dataclass
class Command:
    """One command: its results file, which only it writes, and its time."""

    args: argparse.Namespace
    store: Store
    end: float  # of time.monotonic()
    notes: dict[str, str] = field(default_factory=dict)  # what went wrong with a section outside its rows
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """The cases of all sections that are asked for, and of the checks, whose failures count."""
        wanted = (*self.args.sections, *(CHECKS if not self.args.worker else ()))
        self.cases = {section: list(SECTIONS[section].cases(self.run_of(section))) for section in wanted}
        for section, cases in self.cases.items():  # what was measured of other sources, tiles or machines goes
            digests = {case.key: self.run_of(section).digest(case) for case in cases}
            rows = self.store.rows(section)
            self.store.section(section)["rows"] = {k: r for k, r in rows.items() if r.get("of") == digests.get(k)}

    def run_of(self, section: str, first: bool | None = None, **how: object) -> Run:
        """A section's run, in this process to see what there is to do, in a worker to do it."""
        device, dry = torch.device("cpu" if self.args.dry_run else "cuda"), self.args.dry_run
        return Run(
            self.store, section, device, dry, sources=SECTIONS[section].sources, peers=dict(self.args.peer),
            first=first, without=self.lost(section), faults=dict(self.args.inject), **how,  # type: ignore[arg-type]
        )  # fmt: skip

    def lost(self, section: str) -> frozenset[str]:
        """Kernels that took processes down: two checks of this run bar other checks, one row of any run a timing."""
        checks, timed = section in CHECKS, SECTIONS[section].timed
        if not (checks or timed):
            return frozenset()
        rows = [*self.store.rows(section).items(), *(self.store.rows("correctness").items() if timed else ())]
        found = Counter(
            common.kernel_of(key, row) for key, row in rows
            if (row["status"] == "died" or row.get("hung")) and (timed or row["run"] == self.store.run)
        )  # fmt: skip
        return frozenset(kernel for kernel, count in found.items() if kernel and count >= 1 + checks)

    def need(self, section: str, first: bool) -> float:
        """Seconds that the rows to do take, roughly; 0 for none."""
        run, workers = self.run_of(section, first), self.workers(section)
        todo = [run.seconds(case) for case in run.todo(self.cases[section])]
        return START + max(*todo, sum(todo) / workers) if todo else 0.0

    def workers(self, section: str) -> int:
        """Processes at once."""
        return min(2, SECTIONS[section].workers) if self.args.dry_run else SECTIONS[section].workers

    def unfinished(self, section: str) -> list[Case]:
        """Cases without a result."""
        rows = self.store.rows(section)
        return [c for c in self.cases[section] if rows.get(c.key, {"status": ""})["status"] not in DONE]

    def gate(self, section: str) -> str:
        """Why a section may not run, or nothing."""
        wrong = [key for check in CHECKS for key in self.store.failures(check)]
        if not SECTIONS[section].timed or not wrong or self.args.keep_going:
            return ""
        return f"nothing is timed: {len(wrong)} checks failed, {wrong[0]} first (--keep-going times all the same)"

    def run(self) -> None:
        """What comes first of every section, then the rest of each, in the time there is."""
        jobs = [(section, first) for first in (True, False) for section in self.args.sections]
        for index, (section, first) in enumerate(jobs):
            needs = [self.need(*job) for job in jobs[index:]]
            left = self.end - time.monotonic() - CLOSING
            if needs[0] == 0 or self.gate(section):
                continue
            # What comes first takes what it needs, and half as much again; the rest shares what is left.
            limit = min(left, 1.5 * needs[0] + 15 if first else left * needs[0] / sum(needs))
            count = len(self.run_of(section, first).todo(self.cases[section]))
            print(
                f"{section}{', first' if first else ''}: {count} rows, about {needs[0]:.0f} s, at most "
                f"{max(0.0, limit):.0f} s of {max(0.0, left):.0f} s",
                flush=True,
            )
            if limit > 0:
                self.supervise(section, first, time.monotonic() + limit)
        for section in self.args.sections:
            self.close(section)

    def close(self, section: str) -> None:
        """How a section stands."""
        todo, note = self.unfinished(section), self.notes.get(section, "")
        if note or self.store.failures(section):
            status = "failed"
        elif todo and self.gate(section):
            status, note = "skipped", self.gate(section)
        else:
            status = "unfinished" if todo else "complete"
        if todo and status != "skipped":
            run = self.run_of(section)
            seconds = START + sum(run.seconds(case) for case in todo) / self.workers(section)
            note = f"{note} {len(todo)} rows to do, about {seconds:.0f} s: the same command goes on".strip()
        self.store.close(section, status, note)

    def supervise(self, section: str, first: bool, end: float) -> None:
        """A section's workers, each followed by a thread."""
        self.store.write()  # where they read what there is
        count = self.workers(section)
        with ThreadPoolExecutor(count) as pool:
            try:
                list(pool.map(lambda index: self._attend(section, first, end, (index, count)), range(count)))
            except KeyboardInterrupt:
                self.end = 0.0  # the threads end their workers
                raise

    def _attend(self, section: str, first: bool, end: float, share: tuple[int, int]) -> None:
        """Processes for one share of a section, one after the other, each until it ends, dies or hangs."""
        for _ in range(RESTARTS + 1):
            with self.lock:
                todo = self.run_of(section, first, share=share).todo(self.cases[section])
            if time.monotonic() > end or not todo:
                return
            code, running, why = self._follow(section, first, end, share)
            if code == 0:
                return
            if running:
                with self.lock:
                    row = self.store.rows(section)[running]
                    fate = {"status": "unfinished", "hung": why.startswith("no result")} if why else {"status": "died"}
                    row |= {**fate, "error": why or f"the process died with status {code}"}
                    self.store.record(section, running, row)
                print(f"  {row['status']}: {running}: {row['error']}", flush=True)
            elif code != DEAD_CONTEXT and not why:
                self.notes[section] = f"a process ended with status {code} outside a row;"
                return

    def _follow(self, section: str, first: bool, end: float, share: tuple[int, int]) -> tuple[int, str, str]:
        """One worker: its exit status, the row that it was in, and why it was killed, if it was."""
        read, write = os.pipe()
        process = subprocess.Popen(
            self._worker(section, first, end, share, write), cwd=ROOT, start_new_session=True, pass_fds=(write,),
            stdin=subprocess.PIPE,  # which ends when this process does, whatever ends it
        )  # fmt: skip
        os.close(write)
        patience = self.args.patience or SECTIONS[section].patience
        pending, running, why, heard = b"", "", "", time.monotonic()
        while not why:
            chunk = b""
            if select.select([read], [], [], 0.1)[0]:
                chunk = os.read(read, 1 << 16)
                if not chunk:  # it is leaving
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(CLOSING)
                    break
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                heard = time.monotonic()
                where, key, row = json.loads(line)
                with self.lock:
                    self.store.record(where, key, row)
                running = key if row["status"] == "started" else ""
            if not chunk and process.poll() is not None:
                break
            now = time.monotonic()
            allowed = patience if running else max(patience, 10 * START)  # imports, on a disk that is not warm
            why = f"no result for {allowed:.0f} s" if now - heard > allowed else ""
            # A row in progress may end, as long as this command has time.
            why = why or ("its time was spent" if now > min(end + 30, self.end - CLOSING / 2) else "")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it started
        code = process.wait()
        os.close(read)
        assert process.stdin is not None
        process.stdin.close()
        return code, running, why

    def _worker(self, section: str, first: bool, end: float, share: tuple[int, int], write: int) -> list[str]:
        """The command line of a worker."""
        args = self.args
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", section, "--out", str(args.out)]
        command += ["--until", str(end), "--share", f"{share[0]}/{share[1]}", "--rows", str(write)]
        command += ["--first"] * first + ["--dry-run"] * args.dry_run
        command += [f"--peer={name}={path}" for name, path in args.peer]
        return command + [f"--inject={key}={fault}" for key, fault in args.inject]


def work(args: argparse.Namespace) -> NoReturn:
    """A section in this process, as a worker. It ends at once: taking down a context that is lost may take forever."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    os.set_inheritable(args.rows, False)
    section, code = args.worker, 0
    with os.fdopen(args.rows, "w") as out:
        command = Command(args, Wire(args.out, out), args.until)
        run = command.run_of(section, args.first, share=args.share, end=args.until)
        try:
            run.cases(command.cases[section])
        except OutOfTimeError:
            print(f"  {section}: what is left does not fit the time", flush=True)
        except SystemExit as left:  # the context is lost
            code = int(left.code or 0)
    sys.stdout.flush()
    os._exit(code)


def _end_with_the_parent() -> None:
    """A worker that outlived the command would hold the GPU."""
    while os.read(0, 1):  # sys.stdin has a lock that this thread would hold when the interpreter ends
        pass
    os.killpg(0, signal.SIGKILL)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sections", type=names(list(SECTIONS)), default=STANDING, help=",".join(SECTIONS))
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which it stops")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu.json; a dry run's is temporary")
    parser.add_argument("--resume", type=Path, action="append", default=[], help="rows of another file, too")
    parser.add_argument("--peer", type=_peer, action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--keep-going", action="store_true", help="time although a check failed")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: tiny sizes on the CPU")
    parser.add_argument("--inject", type=_fault, action="append", default=[], metavar=f"ROW={'|'.join(FAULTS)}")
    parser.add_argument("--patience", type=float, help="seconds without a row after which it is taken to hang")
    parser.add_argument("--worker", choices=list(SECTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--share", type=_share, default=(0, 1), help=argparse.SUPPRESS)
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    # Of time.monotonic(), which is one clock for all processes of a Linux machine.
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.inject and not args.dry_run:
        parser.error("--inject is for --dry-run")
    if args.out is None:
        folder = Path(tempfile.mkdtemp(prefix="mla_gpu_")) if args.dry_run else ROOT / "benchmarks" / "results"
        args.out = folder / "gpu.json"
    args.out = args.out.resolve()
    chosen = [args.worker] if args.worker else args.sections
    needed = [SECTIONS[section].needs for section in chosen]
    args.sections = [section for section in SECTIONS if section in chosen or (section in needed and not args.worker)]
    return args


def _share(text: str) -> tuple[int, int]:
    index, count = text.split("/")
    return int(index), int(count)


def _fault(text: str) -> tuple[str, str]:
    key, _, fault = text.rpartition("=")
    if fault not in FAULTS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected row=fault, the fault one of {', '.join(FAULTS)}")
    return key, fault


def _peer(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals or name not in PEERS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected name=path, the name one of {', '.join(PEERS)}")
    return name, path


def summary(store: Store) -> str:
    """The short tables that are printed last."""
    lines = []
    if store.rows("kernels"):
        lines += [kernels_bench.summary(store), ""]
    if store.rows("models"):
        lines += [model_bench.summary(store), ""]
    floors = store.rows("floors")
    if "bytes_per_s" in floors.get("copy", {}):
        product = floors.get("matmul bfloat16", {}).get("flop_per_s", float("nan"))
        lines.append(
            f"floors: copy {floors['copy']['bytes_per_s'] / 1e12:.2f} TB/s, product {product / 1e12:.0f} TFLOP/s"
        )
    for name in [s for s in SECTIONS if store.rows(s)]:
        found = store.section(name)
        lines.append(f"{name:12} {found['status']:12} {common.counted(found['rows'])} {found['note']}".rstrip())
        bad = [(key, row) for key, row in found["rows"].items() if row["status"] not in ("ok", "skipped")]
        lines += [f"    {row['status']}: {key}: {row.get('error', '')}"[:200] for key, row in bad[:8]]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """0 all right, 1 something failed, 2 without a GPU, 3 not finished: the same command goes on."""
    args = parse(arguments)
    if not args.dry_run and not torch.cuda.is_available():
        print("no CUDA device: these checks and benchmarks need one. --dry-run walks through all of them on the CPU.")
        return NO_GPU
    if args.worker:
        work(args)
    end = time.monotonic() + args.budget
    store = Store(args.out)
    for path in args.resume:
        store.adopt(path)
    about: Row = {**common.machine(torch.device("cpu" if args.dry_run else "cuda")), "dry_run": args.dry_run}
    store.data["about"] = {**about, "run": store.run + 1}
    print(f"{store.note}\nresults in {args.out}".strip(), flush=True)
    command = Command(args, store, end)
    command.run()
    print("\n" + summary(store))
    if args.dry_run:
        print("dry run: tiny sizes on the CPU, no figure above is a measurement")
    print(f"written to {args.out}")
    states = [store.section(section)["status"] for section in args.sections]
    if "failed" in states:
        return 1
    return NOT_FINISHED if "unfinished" in states else 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
