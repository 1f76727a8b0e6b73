"""Compiles the GPU kernels without a GPU and holds them to budgets: spills, shared memory, tensor core instructions.

    python -m benchmarks.gpu.offline            compile, print, write benchmarks/results/ (then: benchmarks.pages)
    python -m benchmarks.gpu.offline --only gfx the same of some kernels; the results of the others stay
    python -m benchmarks.gpu.offline --changed  the same of those that are not made of the same as their results
    python -m benchmarks.gpu.offline --check    compile and print; exit status 1 when a budget is broken
    python -m benchmarks.gpu.offline --check --changed --share 3/40
                                                the same of the kernels whose sources, description or compiler are not
                                                those of the committed results, and of every 40th of the others
    PYTHONPATH=DIR python -m ...                with the Triton that was installed there (pip install --target DIR)

What is compiled is what a launch compiles, planned and described by the same functions (kernels/launch.py,
kernels/triton/steps.py, kernels/hopper/steps.py): every row of kernels/tuned.json for sm_80, sm_90, sm_100 and sm_120,
the Hopper kernel and the one for lists in their variants, and the small kernels beside them. Triton needs no driver for
that. Its own ptxas tells registers and spills, its cuobjdump the instructions; benchmarks/gpu/ptx.py reads the Hopper
kernel's fences and barriers. AMD's gfx942 and gfx950 are compiled too, with the tiles of sm_80 cut to their LDS, to see
how far the portable kernel is from them: no launch takes them there.

Results carry a digest of what a kernel's figures follow from (:func:`digest`). Compiling is deterministic, so a kernel
whose digest is that of a committed row has that row's figures, and ``--changed`` only asks whether these keep today's
budgets. The share is compiled all the same, to show that nothing else decides.

A budget is a promise about the machine code, not a measurement of speed: a spill in the loop, or a product that fell
back from wgmma to mma.sync, costs more than any tuning brings, and a new Triton brings them without a word.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import functools
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from inspect import getsource
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu import ptx
from benchmarks.gpu.offline_cases import AMD, Case, cases
from mla_compile.kernels.hopper import branches
from mla_compile.kernels.hopper import runner as hopper_runner
from mla_compile.kernels.hopper.step import GluonStep
from mla_compile.kernels.plan import NoPlanError, Plan
from mla_compile.kernels.triton.step import Step

if TYPE_CHECKING:
    from triton.runtime.jit import JITCallable

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MMA = {"HGMMA": "wgmma", "UTCHMMA": "tcgen05", "HMMA": "mma.sync", "QGMMA": "wgmma", "UTCQMMA": "tcgen05"}  # by SASS
# The Hopper kernel's arrives besides those for the parts of a block: of each consumer the query, the sums, P, three
# stage halves and the last block's; beside lists one of the producer with all that it wrote.
ARRIVES = {"mla_seesaw": 12, "mla_seesaw_fp8": 12, "mla_seesaw_lists": 13, "mla_seesaw_fp8_lists": 13}


def seesaw(case: Case) -> dict[str, int]:
    """The products of a Hopper kernel: both consumers score a block, 16 columns at a time, and apply three."""
    return {"m64n64k16": 2 * (512 + case.rope) // 16, "m64n256k16": 2 * 3 * 4}


def arrives(case: Case, chosen: Plan) -> tuple[int, int]:
    """The arrives of a Hopper kernel, and those for copies, at which all threads of the producer arrive.

    The producer arrives for each part of a block: halves, or with nine barriers eighths, and rope if there is any.
    """
    parts = chosen.barriers - (case.rope == 0)
    copied = case.kernel == "mla_seesaw_lists"
    return ARRIVES[case.kernel] + parts * (not copied), parts * copied


def tool(name: str) -> str:
    """A program that comes with Triton."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def inspect(ptx: str, cubin: bytes, arch: str) -> tuple[str, str]:
    """What ptxas says of the PTX, and the machine code."""
    from triton.backends.nvidia.compiler import get_ptxas

    major = int(arch.removeprefix("sm_"))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "k.ptx").write_text(ptx)
        Path(folder, "k.cubin").write_bytes(cubin)
        assembler, target = get_ptxas(major).path, f"{arch}{'a' if major >= 90 else ''}"
        commands = (
            [assembler, "-v", f"--gpu-name={target}", "k.ptx", "-o", "again.cubin"],
            [tool("cuobjdump"), "--dump-sass", "k.cubin"],
        )
        done = [subprocess.run(c, capture_output=True, text=True, check=True, cwd=folder) for c in commands]
    return done[0].stderr, done[1].stdout


def measure(case: Case) -> dict[str, Any]:
    """Compiles one case; runs in a process of the pool."""
    begin = time.perf_counter()
    row: dict[str, Any] = {"arch": case.arch, "kernel": case.label, "absent": "", "broken": []}
    nothing = {"registers": None, "spills": None, "shared": 0, "mma": {}, "wgmma": {}, "seconds": 0.0}
    step, chosen, why = described(case)
    if step is None or chosen is None:
        return {**row, **nothing, "tile": "", "warps": 0, "stages": 0, "planned": 0, "absent": why}
    row |= {
        "digest": digest(case, step),
        "tile": "" if case.kernel not in ("attend", *ARRIVES) else f"{chosen.block_m}x{chosen.block_n}",
        "warps": 12 if case.kernel in ARRIVES else step.options["num_warps"],
        "stages": chosen.num_stages,
        "planned": chosen.smem,
    }
    try:
        kernel = compiled(case, step)
    except Exception as error:  # noqa: BLE001  compilers fail in many ways, and the other kernels are still of interest
        why = str(error).strip().splitlines()[-1]
        return {**row, **nothing, "broken": [f"does not compile: {type(error).__name__}: {why}"]}
    row |= {"shared": kernel.metadata.shared, **(_amd(kernel) if case.arch in AMD else _nvidia(kernel, case))}
    row |= {"seconds": round(time.perf_counter() - begin, 1), "broken": broken(case, chosen, row)}
    return row


def described(case: Case) -> tuple[Step | None, Plan | None, str]:
    """The launch of a case and its plan, or why there is none with this Triton."""
    try:
        step, chosen = case.step()
    except NoPlanError:  # what the launch does there
        return None, None, "no tile fits, the reference runs"
    if step.options.get("num_ctas", 1) != case.cluster:
        return None, None, "no barriers between CTAs, one CTA runs"
    if case.arch in AMD and "PRECISION" in step.constants:  # tf32, unused in half precision, does not exist there
        step = replace(step, constants={**step.constants, "PRECISION": "ieee"})
    return step, chosen, ""


def digest(case: Case, step: Step) -> str:
    """A hash of what a row's figures follow from.

    These are the code of the kernel and of what it calls, its description, the compiler, and what reads its output.
    Comments, docstrings and line numbers do not count.
    """
    import triton

    fn, *description = step.source()
    _keep_only_code()
    parts = [triton.__version__, case.arch, fn.cache_key, *map(str, description), *_readers(case.kernel in ARRIVES)]
    if case.cluster > 1:
        parts.append(_code(Path(branches.__file__).read_text()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _keep_only_code() -> None:
    """Remove from the loaded kernels what has no influence on machine code but is part of Triton's cache keys."""
    from triton.runtime.jit import JITCallable

    modules = [module for name, module in sys.modules.items() if name.startswith("mla_compile.kernels.")]
    ours = [fn for module in modules for fn in vars(module).values() if isinstance(fn, JITCallable)]
    new = [fn for fn in ours if fn.__module__.startswith("mla_compile.") and fn.starting_line_number]
    for fn in new:
        fn._unsafe_update_src(_code(fn.src))
        fn.starting_line_number = 0
    # A function's key holds the keys of the functions that it calls, and those of their globals that are known by then:
    # with Triton 3.6 it depends on which key was asked for first, until all are known.
    before, keys = [], _keys(ours) if new else []
    while before != keys:
        before, keys = keys, _keys(ours)


def _keys(functions: list[JITCallable]) -> list[str]:
    for fn in functions:
        fn.hash = None
    return [fn.cache_key for fn in functions]


def _code(source: str) -> str:
    """``source`` without comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


@functools.cache
def _readers(protocol: bool) -> tuple[str, ...]:
    """The code that reads what is compiled; ``protocol``: fences and barriers are read as well."""
    sources = [*map(getsource, (inspect, _nvidia, _amd)), *([Path(ptx.__file__).read_text()] if protocol else [])]
    return tuple(map(_code, sources))


def known(case: Case, rows: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any] | None:
    """The committed row of a case with the same digest, held to today's budgets; None where it has to be compiled."""
    row = rows.get((case.arch, case.label))
    step, chosen, why = described(case)
    if row is None or step is None or chosen is None:
        return row if row is not None and row["absent"] == why else None
    if row.get("digest") != digest(case, step) or row["registers"] is None:
        return None
    return {**row, "broken": broken(case, chosen, row)}


def compiled(case: Case, step: Step) -> Any:
    """A step of a case as Triton compiles it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    amd = GPUTarget("hip", case.arch, 64)
    target = amd if case.arch in AMD else GPUTarget("cuda", int(case.arch.removeprefix("sm_")), 32)
    if isinstance(step, GluonStep):
        return hopper_runner.built(step, target)
    return triton.compile(ASTSource(*step.source()[:4]), target=target, options=step.options)


def _nvidia(kernel: Any, case: Case) -> dict[str, Any]:
    """What ptxas and the machine code say of a kernel; of the Hopper kernel, its protocol too."""
    source = kernel.asm["ptx"]
    log, sass = inspect(source, kernel.asm["cubin"], case.arch)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    operations = Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", sass, re.MULTILINE))
    row: dict[str, Any] = {
        "registers": int(registers[1]) if registers else None,
        "spills": [int(spills[1]), int(spills[2])] if spills else None,
        "mma": {},
        "wgmma": dict(Counter(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)", source))),
        "serialised": "C7510" in log or "C7511" in log or "C7517" in log,
    }
    for operation, kind in MMA.items():
        if operations[operation]:
            row["mma"][kind] = row["mma"].get(kind, 0) + operations[operation]
    if case.kernel in ARRIVES:
        counts, wrong = ptx.protocol(source)
        arrives = (counts["arrive"], counts["landed"])
        row |= {"local": operations["LDL"] + operations["STL"], "arrives": arrives, "protocol": wrong}
        row |= {"ctas": ptx.between_ctas(source)}
    return row


def _amd(kernel: Any) -> dict[str, Any]:
    """What the assembler's metadata say. Scratch is bytes per thread; registers are the accumulation ones too."""
    text = kernel.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"^\s+\.{name}:\s+(\d+)", text, re.MULTILINE)
        assert found is not None
        return int(found[1])

    products = len(re.findall(r"^\s+v_s?mfma_", text, re.MULTILINE))
    return {
        "registers": number("vgpr_count"),
        "spills": [number("private_segment_fixed_size")],
        "mma": {"mfma": products} if products else {},
        "wgmma": {},
        "serialised": False,
    }


def expected_mma(case: Case, chosen: Plan) -> str | None:
    """The tensor core instruction that a tile of this size can have on this architecture."""
    if case.kernel not in ("attend", *ARRIVES, "index_scores") or case.cache == "float32":
        return None  # float32 products have no tensor core instruction
    warpgroup = case.kernel == "index_scores" or (chosen.block_m >= 64 and chosen.num_warps >= 4)
    return {"sm_90": "wgmma", "sm_100": "tcgen05"}.get(case.arch, "mma.sync") if warpgroup else "mma.sync"


def broken(case: Case, chosen: Plan, row: dict[str, Any]) -> list[str]:
    """The budgets that a row does not keep."""
    found, mma = [], expected_mma(case, chosen)
    if case.arch in AMD:  # tiles made for other cards: what they take is listed, not promised
        return found if row["shared"] <= case.device.smem else [f"{row['shared']} bytes of LDS"]
    if row["spills"] is None or row["spills"][0] > case.tolerated:
        found.append(f"spills {row['spills']}, at most {case.tolerated}")
    if row["shared"] > case.device.smem:
        found.append(f"{row['shared']} bytes of shared memory, the device has {case.device.smem}")
    if row["tile"] and row["shared"] > row["planned"]:
        found.append(f"{row['shared']} bytes of shared memory, the plan says {row['planned']}")
    if set(row["mma"]) != ({mma} if mma else set()):
        found.append(f"tensor core instructions {row['mma']}, expected {mma}")
    if row["serialised"] and not case.tolerated:
        found.append("ptxas serialises wgmma")
    if case.kernel in ARRIVES:
        found += row["protocol"]
        if row["wgmma"] != seesaw(case):
            found.append(f"wgmma {row['wgmma']}, expected {seesaw(case)}")
        if tuple(row["arrives"]) != arrives(case, chosen):
            found.append(f"{row['arrives']} arrives, of them of copies, expected {arrives(case, chosen)}")
        shared = {"shared": 0, "remote": 0}
        if case.cluster > 1:  # the announcements, and six places where a half is given back
            shared = {"alone": 0, "remote": 6 + arrives(case, chosen)[0] - ARRIVES[case.kernel], "met": 4}
        if not shared.items() <= row["ctas"].items():
            found.append(f"{row['ctas']} between CTAs, expected {shared}")
        if row["local"] > case.tolerated_local:
            found.append(f"{row['local']} loads and stores of local memory")
    return found


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    stores = "?" if row["spills"] is None else "/".join(map(str, row["spills"]))
    products = " ".join(f"{kind} {count}" for kind, count in row["mma"].items()) or "-"
    shape = f"{row['tile']} w{row['warps']} s{row['stages']}" if row["tile"] else f"w{row['warps']}"
    return (
        f"{row['arch']:<6}  {row['kernel']:<36} {shape:<14} {row['registers'] or 0:>4} {stores:>9} "
        f"{row['shared'] / 1024:>7.1f}  {products:<14} {row['absent']}{'; '.join(row['broken'])}"
    ).rstrip()


def _known(chosen: list[Case], rows: list[dict[str, Any]], share: str) -> list[dict[str, Any]]:
    """The rows of cases that need not be compiled: they are made of the same, and are not of the share."""
    committed = {(row["arch"], row["kernel"]): row for row in rows}
    part, parts = map(int, share.split("/")) if share else (-1, 1)
    found = (known(case, committed) for i, case in enumerate(chosen) if i % parts != part - 1)
    return [row for row in found if row is not None]


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]], date: str) -> list[dict[str, Any]]:
    """Rows of some cases in place of the old ones of those, in the order of the cases; ``date`` is of the old rows."""
    rows = {(row["arch"], row["kernel"]): row for row in [*({"date": date, **row} for row in old), *new]}
    names = [(case.arch, case.label) for case in cases()]
    return [rows[name] for name in names if name in rows]


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 with --check when a budget is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 when a budget is broken")
    parser.add_argument(
        "--only", default="", help="cases whose architecture and name contain this; the others' results stay"
    )
    parser.add_argument(
        "--changed", action="store_true", help="compile what is not made of the same as its committed row"
    )
    parser.add_argument("--share", default="", help="with --changed: K/N, compile the K-th of every N others as well")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args(arguments)
    if given.share and not given.changed:
        parser.error("--share goes with --changed")
    import triton

    chosen = [c for c in cases() if given.only in f"{c.arch} {c.label}"]
    path = RESULTS / f"offline_triton_{triton.__version__}.json"
    before = json.loads(path.read_text()) if path.exists() else {"rows": [], "date": ""}
    rows = _known(chosen, before["rows"], given.share) if given.changed else []
    done = {(row["arch"], row["kernel"]) for row in rows}
    chosen = [c for c in chosen if (c.arch, c.label) not in done]
    print(f"Triton {triton.__version__}: {len(chosen)} kernels" + f", {len(rows)} as committed" * given.changed)
    print(f"{'card':<6}  {'kernel':<36} {'tile':<14} {'regs':>4} {'spills':>9} {'smem KB':>7}  instructions")
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    for row in rows:
        if row["broken"]:
            print(line(row), flush=True)
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        for row in pool.map(measure, chosen):
            print(line(row), flush=True)
            rows.append({**row, "date": date})
    bad = sum(bool(row["broken"]) for row in rows)
    print(f"{bad} of {len(rows)} kernels break a budget" if bad else "every budget is kept")
    if not given.check:
        if before["rows"]:
            rows = merged(before["rows"], rows, before["date"])
        about = {"triton": triton.__version__, "torch": torch.__version__, "date": date, "rows": rows}
        path.write_text(json.dumps(about, indent=1) + "\n")
        print(f"written: {path}; `python -m benchmarks.pages` brings docs/kernel_table.md up to date")
    return int(bool(bad) and given.check)


if __name__ == "__main__":
    sys.exit(main())
