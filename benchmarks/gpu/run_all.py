"""Everything that needs a GPU in one command: correctness first, then the card's floors, kernels, models and tests.

    python benchmarks/gpu/run_all.py                                      # under 9 minutes on an H200
    python benchmarks/gpu/run_all.py --sections correctness,floors,kernels --budget 300
    python benchmarks/gpu/run_all.py --resume                             # go on where a run was stopped
    python benchmarks/gpu/run_all.py --peer flashmla=/path/to/FlashMLA --peer vllm=/path/triton_decode_attention.py
    python benchmarks/gpu/run_all.py --dry-run                            # no GPU: tiny sizes, to test this script

Runs from the checkout, nothing has to be installed. Each section is a process of its own, so that a kernel that hangs
or destroys its CUDA context costs one row: it is marked, and the section goes on in a new process. Nothing is timed
when a correctness check fails, unless --keep-going, which leaves out the kernels that failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree

if not __package__:  # as a script: import from the checkout, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.gpu import common

import torch  # isort: skip  # after common, which sets the environment

from benchmarks.common import names
from benchmarks.gpu.common import DEAD_CONTEXT, ROOT, Case, OutOfTimeError, Row, Run, Store, counted

# Section and its share of the time that is left when it begins; what one does not use goes to those after it.
SECTIONS = {"consan": 5, "correctness": 30, "floors": 3, "kernels": 32, "models": 28, "onnx": 10, "tests": 12}
TIMED = ("floors", "kernels", "models")
CHECKED = ("consan", "correctness")
# Seconds without a result after which a worker is taken to hang. A row of models compiles four times; tests are one.
CASE_LIMIT = {"consan": 150.0, "models": 300.0, "onnx": 300.0, "tests": 600.0}
RESTARTS = 4
# Most of the time of a check goes into compiling its kernel, on one core; what is not timed can share the GPU.
WORKERS = {"correctness": max(1, min(8, (os.cpu_count() or 1) // 2))}
NO_GPU = 2


def blocked_kernels(store: Store) -> set[str]:
    """Our kernels with a failed check: the word before the colon of a correctness key."""
    failed = [key for section in CHECKED for key in store.failures(section)]
    return {"gluon" if key.startswith("gluon") else "triton" for key in failed}


def tests(run: Run) -> None:
    """The test suite's GPU tests, one row each."""
    report = run.store.path.with_suffix(".tests.xml")
    marks = "not gpu and not slow" if run.dry else "gpu"
    # Only files with such tests: the others need not even be importable where the GPU is.
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    files = ["tests/kernels/test_tiles.py::test_padded_widths"] if run.dry else files
    command = [sys.executable, "-m", "pytest", "-q", "-m", marks, f"--junitxml={report}", "-p", "no:cacheprovider"]

    def call() -> Row:
        limit = max(20.0, run.left)
        try:
            done = subprocess.run(
                [*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return {"status": "failed", "error": f"not done within {limit:.0f} s"}
        if not report.exists():
            return {"status": "failed", "error": (done.stderr or done.stdout)[-500:]}
        row: Row = {"tests": {}, "exit": done.returncode, "output": done.stdout[-3000:]}
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            states = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            row["tests"][f"{case.get('classname')}::{case.get('name')}"] = states[0] if states else "passed"
        report.unlink()
        bad = [name for name, state in row["tests"].items() if state in ("failure", "error")]
        if bad or done.returncode not in (0, 5):
            row |= {"status": "failed", "error": f"{len(bad)} tests failed: {', '.join(bad[:5])}"}
        return row

    cases: list[Case] = [("pytest -m gpu", call)]
    run.cases(cases)


def sections() -> dict[str, Callable[[Run], None]]:
    """The work of each section; imported here, since the parent process needs none of it."""
    from benchmarks.gpu import correctness, kernels_bench, model_bench, onnx_native

    return {
        "consan": correctness.consan,
        "correctness": correctness.section,
        "floors": kernels_bench.floors,
        "kernels": lambda run: kernels_bench.section(run, blocked_kernels(run.store)),
        "models": model_bench.section,
        "onnx": onnx_native.onnx_native,
        "tests": tests,
    }


def work(args: argparse.Namespace, section: str, store: Store, end: float) -> int:
    """One section in this process; returns an exit status."""
    device = torch.device("cpu" if args.dry_run else "cuda")
    run = Run(store, section, device, args.dry_run, end, dict(args.peer), args.share)
    if args.dry_run and section == "consan":
        store.close(section, "skipped", "the sanitizer runs on a GPU only")
        return 0
    try:
        sections()[section](run)
    except OutOfTimeError:
        store.close(section, "out of time", "go on with --resume")
        return 0
    store.close(section, "failed" if store.failures(section) else "complete")
    return 0


def supervise(args: argparse.Namespace, section: str, limit: float, workers: int | None = None) -> None:
    """One section in processes of its own; several at once where WORKERS says so, each with a file that is merged."""
    count = workers or WORKERS.get(section, 1)
    if count == 1:
        _supervise(args, section, limit, args.out, (0, 1))
        return
    before = Store(args.out, resume=args.out)
    parts = [args.out.with_name(f"{args.out.stem}.{section}.{index}.json") for index in range(count)]
    for path in parts:
        Store(path, before.data["about"], args.out).write()
    with ThreadPoolExecutor(count) as pool:
        for index, path in enumerate(parts):
            pool.submit(_supervise, args, section, limit, path, (index, count))
    states = []
    for path in parts:
        part = Store(path, resume=path)
        before.rows(section).update(part.rows(section))
        states.append(part.section(section)["status"])
        path.unlink()
    worst = next((s for s in ("failed", "out of time", "pending") if s in states), "complete")
    before.close(section, worst, "go on with --resume" if worst == "out of time" else "")


def _supervise(args: argparse.Namespace, section: str, limit: float, out: Path, share: tuple[int, int]) -> None:
    """Workers one after the other, each until it ends, dies or hangs; the file is the only thing shared with them."""
    end = time.monotonic() + limit
    for _ in range(RESTARTS + 1):
        left = end - time.monotonic()
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", section, "--budget", str(left)]
        command += ["--out", str(out), "--resume", str(out), "--share", f"{share[0]}/{share[1]}"]
        command += [f"--peer={name}={path}" for name, path in args.peer]
        command += ["--dry-run"] * args.dry_run + ["--keep-going"] * args.keep_going
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        why = watch(process, out, end + 30, CASE_LIMIT.get(section, 60.0))
        store = Store(out, resume=out)
        if process.returncode == 0:
            return
        dead = store.bury(section, why or f"the process died with status {process.returncode}")
        print(
            f"  {section}: {why or f'worker died ({process.returncode})'}{' in ' + dead[0] if dead else ''}", flush=True
        )
        if not dead and process.returncode != DEAD_CONTEXT:
            store.close(section, "failed", f"the worker ended with status {process.returncode} outside a case")
            return
        if time.monotonic() > end:
            break
    Store(out, resume=out).close(section, "failed", "stopped: too many workers died, or the time was spent")


def watch(process: subprocess.Popen[bytes], out: Path, end: float, patience: float) -> str:
    """Wait for a worker; kill it, and what it started, when it wrote nothing for ``patience`` s or past ``end``."""
    begun = time.time()
    while process.poll() is None:
        time.sleep(0.1)
        quiet = time.time() - max(begun, out.stat().st_mtime if out.exists() else begun)
        why = f"no result for {patience:.0f} s" if quiet > patience else ""
        why = why or ("past its time" if time.monotonic() > end else "")
        if why:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return why
    return ""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sections", type=names(list(SECTIONS)), default=list(SECTIONS), help=",".join(SECTIONS))
    parser.add_argument("--budget", type=float, default=500.0, help="seconds after which it stops cleanly")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu.json; a dry run's is temporary")
    parser.add_argument(
        "--resume", type=Path, nargs="?", const=True, help="keep the rows of this file (--out when none is given)"
    )
    parser.add_argument("--peer", type=_peer, action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--keep-going", action="store_true", help="time the kernels whose checks passed")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: tiny sizes on the CPU, one process")
    parser.add_argument("--worker", choices=list(SECTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--share", type=_share, default=(0, 1), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.out is None:
        folder = Path(tempfile.mkdtemp(prefix="mla_gpu_")) if args.dry_run else ROOT / "benchmarks" / "results"
        args.out = folder / "gpu.json"
    args.out = args.out.resolve()
    args.resume = args.out if args.resume is True else args.resume
    return args


def _share(text: str) -> tuple[int, int]:
    index, count = text.split("/")
    return int(index), int(count)


def _peer(text: str) -> tuple[str, str]:
    from benchmarks.gpu.peers import PEERS

    name, equals, path = text.partition("=")
    if not equals or name not in PEERS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected name=path, the name one of {', '.join(PEERS)}")
    return name, path


def summary(store: Store) -> str:
    """The short tables that are printed last."""
    from benchmarks.gpu import kernels_bench, model_bench

    lines = []
    if store.rows("kernels"):
        lines += [kernels_bench.summary(store), ""]
    if store.rows("models"):
        lines += [model_bench.summary(store), ""]
    floors = store.rows("floors")
    if "copy" in floors and "bytes_per_s" in floors["copy"]:
        product = floors.get("matmul bfloat16", {}).get("flop_per_s", float("nan"))
        lines.append(
            f"floors: copy {floors['copy']['bytes_per_s'] / 1e12:.2f} TB/s, product {product / 1e12:.0f} TFLOP/s"
        )
    for name in [s for s in SECTIONS if s in store.data["sections"]]:
        found = store.section(name)
        lines.append(f"{name:12} {found['status']:12} {counted(found['rows'])} {found['note']}".rstrip())
        lines += [f"    {key}: {store.rows(name)[key].get('error', '')}"[:200] for key in store.failures(name)[:8]]
    return "\n".join(lines)


def gate(args: argparse.Namespace, section: str, store: Store) -> str:
    """Why a section may not run, or nothing."""
    wrong = blocked_kernels(store)
    if section not in TIMED or not wrong:
        return ""
    if not args.keep_going:
        return f"nothing is timed: {', '.join(sorted(wrong))} failed a check (--keep-going times the rest)"
    return "both kernels failed a check" if section == "kernels" and len(wrong) == 2 else ""


def main(arguments: list[str] | None = None) -> int:
    """0 when everything asked for is right, 1 when something failed, 2 without a GPU."""
    args = parse(arguments)
    if not args.dry_run and not torch.cuda.is_available():
        print("no CUDA device: these checks and benchmarks need one. --dry-run walks through all of them on the CPU.")
        return NO_GPU
    if args.worker:
        return work(args, args.worker, Store(args.out, resume=args.out), time.monotonic() + args.budget)
    end = time.monotonic() + args.budget
    about = {**common.machine(torch.device("cpu" if args.dry_run else "cuda")), "dry_run": args.dry_run}
    store = Store(args.out, about, args.resume)
    store.forget_unfinished()
    print(store.note or f"results in {args.out}", flush=True)
    store.write()
    for index, section in enumerate(args.sections):
        rest = args.sections[index:]
        limit = (end - time.monotonic() - 5) * SECTIONS[section] / sum(SECTIONS[s] for s in rest)
        why = gate(args, section, store)
        if why or limit <= 0:
            store.close(section, "skipped", why or "no time left")
            continue
        print(f"{section}: at most {limit:.0f} s", flush=True)
        if args.dry_run:
            work(args, section, store, time.monotonic() + limit)
        else:
            supervise(args, section, limit)
            store = Store(args.out, resume=args.out)
    print("\n" + summary(store))
    if args.dry_run:
        print("dry run: tiny sizes on the CPU, no figure above is a measurement")
    print(f"written to {args.out}")
    states = [store.section(section)["status"] for section in args.sections]
    return int(any(store.failures(section) for section in args.sections) or "failed" in states)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
