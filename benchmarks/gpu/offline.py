"""Compiles the GPU kernels without a GPU and holds them to budgets: spills, shared memory, tensor core instructions.

    python -m benchmarks.gpu.offline            compile, print, write docs/kernel_table.md and benchmarks/results/
    python -m benchmarks.gpu.offline --check    compile and print; exit status 1 when a budget is broken
    PYTHONPATH=DIR python -m ...                with the Triton that was installed there (pip install --target DIR)

What is compiled is what a launch compiles, planned and described by the same functions (kernels/launch.py,
kernels/triton/steps.py, kernels/hopper/steps.py): every row of kernels/tuned.json for sm_80, sm_90, sm_100 and sm_120,
the Hopper kernel in its variants, and the small kernels beside them. Triton needs no driver for that. Its own ptxas
tells registers and spills, its cuobjdump the instructions; benchmarks/gpu/ptx.py reads the Hopper kernel's fences and
barriers. AMD's gfx942 and gfx950 are compiled too, with the tiles of sm_80 cut to their LDS, to see how far the
portable kernel is from them: no launch takes them there.

A budget is a promise about the machine code, not a measurement of speed: a spill in the loop, or a product that fell
back from wgmma to mma.sync, costs more than any tuning brings, and a new Triton brings them without a word.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import ptx
from mla_compile.kernels.call import DecodeCall, IndexCall
from mla_compile.kernels.devices import PRESETS, Device
from mla_compile.kernels.hopper import runner as hopper_runner
from mla_compile.kernels.hopper import steps as hopper_steps
from mla_compile.kernels.hopper.steps import GluonStep
from mla_compile.kernels.launch import chosen_plan
from mla_compile.kernels.plan import NoPlanError, Plan
from mla_compile.kernels.triton.index_steps import index_step
from mla_compile.kernels.triton.steps import Step, steps
from mla_compile.kernels.tuned import table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TABLE = ROOT / "docs" / "kernel_table.md"
# The AMD cards' LDS and bandwidth are from their datasheets; the capability says whose tiles they are given.
AMD = {
    "gfx942": Device("AMD Instinct MI300X", (8, 0), 304, 64 * 1024, 5.3e12),
    "gfx950": Device("AMD Instinct MI355X", (8, 0), 256, 160 * 1024, 8.0e12),
}
DEVICES = {name: PRESETS[name] for name in ("sm_80", "sm_90", "sm_100", "sm_120")} | AMD
CACHES = {"half": torch.bfloat16, "float8": torch.float8_e4m3fn, "float32": torch.float32}
NAMES = {"half": "bf16", "float8": "fp8", "float32": "fp32"}
MMA = {"HGMMA": "wgmma", "UTCHMMA": "tcgen05", "HMMA": "mma.sync", "QGMMA": "wgmma", "UTCQMMA": "tcgen05"}  # by SASS
B, T = 4, 4096
# Both consumers score a block (9 chunks of 64 columns x 4 steps of 16) and apply two, with one more for the last block.
SEESAW = {"m64n64k16": 2 * 36, "m64n256k16": 2 * 3 * 4}
# Its arrives: the producer's three; of each consumer the query, the sums, P, three stage halves and the last block's.
ARRIVES = 3 + 2 * 6


@dataclass(frozen=True)
class Case:
    """One kernel to compile."""

    arch: str
    label: str
    kernel: str  # name of the step
    rows: int = 16
    cache: str = "half"
    page: int = 0
    query: str | None = None  # "float32" beside a half cache
    mask: torch.dtype | None = None  # of a mask [B,1,1,T]: bool hides tokens, a number is added to their scores
    hopper: bool = False
    splits: int = 4  # 0: the plan's own, which on Hopper cuts a paged batch on the device

    @property
    def tolerated(self) -> int:
        """Bytes of spill stores that are put up with, each for its reason."""
        if self.kernel == "attend" and self.rows == 32 and self.page:
            return 16  # 3.6 keeps three scalars of the block table outside the registers
        if self.arch == "sm_90" and self.rows > 32 and self.kernel == "attend" and self.cache == "float8":
            return 384  # the converted tile beside 64 x 512 sums; 32 rows would not, and read twice
        if self.arch == "sm_90" and self.rows > 32 and self.kernel == "attend" and self.mask:
            # A listed tile's bits beside 64 x 512 sums (the Hopper kernel takes such calls), an added mask's place.
            return 20 if self.mask == torch.bool else 64
        return 0

    def call(self) -> DecodeCall:
        """The call, on meta tensors."""
        dtype = CACHES[self.cache]
        query = torch.float32 if self.query else (torch.bfloat16 if self.cache == "float8" else dtype)
        outer, inner = (B * T // self.page, self.page) if self.page else (B, T)

        def empty(*shape: int, of: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=of, device="meta")

        cache = empty(outer, inner, 576, of=dtype)
        return DecodeCall(
            empty(B, 1, self.rows, 576, of=query),
            cache[..., :512],
            cache[..., 512:],
            mask=empty(B, 1, 1, T, of=self.mask) if self.mask else None,
            block_table=empty(B, T // self.page) if self.page else None,
            seq_lens=empty(B) if self.page else None,
            kv_scale=empty(of=torch.float32) if self.cache == "float8" else None,
            scale=0.1,
            causal=True,
            num_splits=self.splits,
        )

    def indexer(self) -> IndexCall:
        """A decode step of an indexer of as many heads as there are rows, on meta tensors."""
        shapes, dtype = ((B, 1, self.rows, 128), (B, T, 128)), CACHES[self.cache]
        query, keys = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
        return IndexCall(query, keys, torch.empty(B, 1, self.rows, device="meta"), 0.1)

    @property
    def device(self) -> Device:
        """What is compiled for."""
        return DEVICES[self.arch]

    def step(self) -> tuple[Step, Plan]:
        """The launch that this case is about. That of an indexer has no plan, and beside it stands an attention's."""
        if self.kernel == "index_scores":
            return index_step(self.indexer()), chosen_plan(replace(self, cache="half").call(), self.device)
        call, device = self.call(), self.device
        found = chosen_plan(call, device, gluon=self.hopper)
        every = hopper_steps.steps(call, found, device) if self.hopper else steps(call, found, device)
        return next(s for s in every if s.name == self.kernel), found


def cases() -> Iterator[Case]:
    """Every tuned row at the largest number of query rows it is for, contiguous and paged; then variants."""
    for arch, device in DEVICES.items():
        for cache in CACHES:
            known = [r for r in table() if (r.kernel, r.capability, r.cache) == ("triton", device.capability, cache)]
            for rows in sorted({r.max_rows or 128 for r in known}):
                for page in (0, 64):
                    label = f"{NAMES[cache]}, {rows} rows{f', page {page}' if page else ''}"
                    yield Case(arch, label, "attend", rows, cache, page)
        yield Case(arch, "bf16, 16 rows, page 16", "attend", 16, page=16)
        yield Case(arch, "bf16, 128 rows, mask", "attend", 128, mask=torch.bool)
        yield Case(arch, "bf16, 128 rows, added mask", "attend", 128, mask=torch.bfloat16)
        yield Case(arch, "bf16, 128 rows, fp32 query", "attend", 128, query="float32")
        yield Case(arch, "combine", "combine")
        yield Case(arch, "indexer, bf16, 64 heads", "index_scores", 64)
        yield Case(arch, "indexer, fp32, 64 heads", "index_scores", 64, "float32")
    yield Case("sm_90", "mask: scan", "scan_mask", mask=torch.bool)
    yield Case("sm_90", "mask: list", "list_tiles", mask=torch.bool)
    hopper = Case("sm_90", "", "mla_seesaw", 128, hopper=True)
    yield replace(hopper, label="Hopper, bf16, 1 split", splits=1)
    yield replace(hopper, label="Hopper, bf16")
    yield replace(hopper, label="Hopper, bf16, fp32 query", query="float32")
    yield replace(hopper, label="Hopper, bf16, mask", mask=torch.bool)
    yield replace(hopper, label="Hopper, bf16, mask, 1 split", mask=torch.bool, splits=1)
    yield replace(hopper, label="Hopper, bf16, 17 rows", rows=17)
    for page in (16, 32, 64):
        yield replace(hopper, label=f"Hopper, bf16, page {page}", page=page)
        yield replace(hopper, label=f"Hopper, bf16, page {page}, scheduled", page=page, splits=0)
    yield replace(hopper, label="Hopper, schedule", kernel="cut", page=64, splits=0)
    yield replace(hopper, label="Hopper, schedule: combine", kernel="combine_slots", page=64, splits=0)


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
    try:
        step, chosen = case.step()
    except NoPlanError:  # what the launch does there
        why = "no tile fits, the reference runs"
        return {**row, **nothing, "tile": "", "warps": 0, "stages": 0, "planned": 0, "absent": why}
    row |= {
        "tile": "" if case.kernel not in ("attend", "mla_seesaw") else f"{chosen.block_m}x{chosen.block_n}",
        "warps": 12 if case.kernel == "mla_seesaw" else step.options["num_warps"],
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


def compiled(case: Case, step: Step) -> Any:
    """A step of a case as Triton compiles it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if isinstance(step, GluonStep):
        source, options = hopper_runner.source(step)
    else:
        if case.arch in AMD and "PRECISION" in step.constants:  # tf32, unused in half precision, does not exist there
            step = replace(step, constants={**step.constants, "PRECISION": "ieee"})
        source, options = ASTSource(*step.source()[:4]), step.options
    amd = GPUTarget("hip", case.arch, 64)
    target = amd if case.arch in AMD else GPUTarget("cuda", int(case.arch.removeprefix("sm_")), 32)
    return triton.compile(source, target=target, options=options)


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
    if case.kernel == "mla_seesaw":
        counts, wrong = ptx.protocol(source)
        row |= {"local": operations["LDL"] + operations["STL"], "arrives": counts["arrive"], "protocol": wrong}
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
    if case.kernel not in ("attend", "mla_seesaw", "index_scores") or case.cache == "float32":
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
    if case.kernel == "mla_seesaw":
        found += row["protocol"]
        if row["wgmma"] != SEESAW:
            found.append(f"wgmma {row['wgmma']}, expected {SEESAW}")
        if row["arrives"] != ARRIVES:
            found.append(f"{row['arrives']} arrives, expected {ARRIVES}")
        if row["local"]:
            found.append(f"{row['local']} loads and stores of local memory")
    return found


def line(row: dict[str, Any]) -> str:
    """A row as the table prints it."""
    stores = "?" if row["spills"] is None else "/".join(map(str, row["spills"]))
    products = " ".join(f"{kind} {count}" for kind, count in row["mma"].items()) or "-"
    shape = f"{row['tile']} w{row['warps']} s{row['stages']}" if row["tile"] else f"w{row['warps']}"
    return (
        f"{row['arch']:<6}  {row['kernel']:<36} {shape:<14} {row['registers'] or 0:>4} {stores:>9} "
        f"{row['shared'] / 1024:>7.1f}  {products:<14} {row['absent']}{'; '.join(row['broken'])}"
    ).rstrip()


def markdown() -> str:
    """docs/kernel_table.md, of all versions of Triton that have results."""
    found = [json.loads(p.read_text()) for p in sorted(RESULTS.glob("offline_triton_*.json"))]
    versions = ", ".join(f"{f['triton']} ({f['date']})" for f in found)
    text = [
        "# The GPU kernels as compiled",
        "",
        f"Written by `python -m benchmarks.gpu.offline`, without a GPU, with Triton {versions}. Nothing was timed.",
        "One line per kernel and version: registers per thread (of the Hopper kernel: at its launch; its consumers",
        "take 232 and its producer 40), bytes of spill stores/loads, shared memory in KB beside the plan's bound, and",
        "the tensor core instructions in the code. The budgets, and the spills that are put up with, stand in that",
        "file; CI checks them. Of the Hopper kernel it also checks that no local memory is touched, that a fence and a",
        "barrier lie between a tile's stores and what reads it, and that a barrier precedes every single arrive.",
        "",
        "On sm_100 and sm_120 nothing is made for the card: all products are `mma.sync`, none is `tcgen05`, and",
        "nothing there is like the Hopper kernel.",
        "",
        "gfx942 and gfx950 (AMD MI300X and MI355X) are compiled by the same Triton with tiles made for sm_80, cut to",
        "their 64 and 160 KB of LDS by the bound for NVIDIA, which is not AMD's. Registers are vector and accumulation",
        "registers together, of 512; spills are bytes of scratch per thread. No launch takes these cards: on them the",
        "reference runs.",
        "",
        "| card | kernel | tile, warps, stages | Triton | registers | spills | shared | bound | instructions |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    # The list of cases may have grown between the runs of two versions.
    kernels: dict[tuple[str, str], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for of in found:
        for row in of["rows"]:
            kernels.setdefault((row["arch"], row["kernel"]), []).append((of, row))
    for rows in kernels.values():
        for of, r in rows:
            stores = "/".join(map(str, r["spills"] or ["?"]))
            products = ", ".join(f"{n} {kind}" for kind, n in r["mma"].items()) or "-"
            shape = f"{r['tile']}, {r['warps']}, {r['stages']}" if r["tile"] else f"{r['warps']} warps"
            bound = f"{r['planned'] / 1024:.0f}" if r["tile"] else "-"
            shared = f"{r['shared'] / 1024:.1f}"
            cells = (r["arch"], r["kernel"], shape, of["triton"], r["registers"], stores, shared, bound)
            if r["absent"]:
                cells, products = (*cells[:2], "-", of["triton"], "-", "-", "-", "-"), r["absent"]
            text.append(f"| {' | '.join(map(str, cells))} | {'; '.join((products, *r['broken']))} |")
    return "\n".join(text) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 with --check when a budget is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 when a budget is broken")
    parser.add_argument("--only", default="", help="cases whose architecture and name contain this")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args(arguments)
    import triton

    chosen = [c for c in cases() if given.only in f"{c.arch} {c.label}"]
    print(f"Triton {triton.__version__}: {len(chosen)} kernels")
    print(f"{'card':<6}  {'kernel':<36} {'tile':<14} {'regs':>4} {'spills':>9} {'smem KB':>7}  instructions")
    rows = []
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        for row in pool.map(measure, chosen):
            print(line(row), flush=True)
            rows.append(row)
    bad = sum(bool(row["broken"]) for row in rows)
    print(f"{bad} of {len(rows)} kernels break a budget" if bad else "every budget is kept")
    if not given.check and not given.only:
        date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        about = {"triton": triton.__version__, "torch": torch.__version__, "date": date, "rows": rows}
        path = RESULTS / f"offline_triton_{triton.__version__}.json"
        path.write_text(json.dumps(about, indent=1) + "\n")
        TABLE.write_text(markdown())
    return int(bool(bad) and given.check)


if __name__ == "__main__":
    sys.exit(main())
