"""Builds the native library of the ONNX operator: ``python -m mla_compile.onnx.build``.

The library holds a CPU kernel and, for CUDA, the machine code of mla_compile's Triton kernels. The Triton kernels are
compiled without a GPU and embedded in the library. Host code in C launches them. Building needs Triton and a C
compiler, but no CUDA toolkit and no headers of ONNX Runtime. Using the library needs neither Triton nor torch.
``native.py`` decides whether a session uses the library.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from pathlib import Path

from mla_compile.errors import ExportError, MlaCompileError, ModelFileError, OptionError, nearest
from mla_compile.kernels.devices import PRESETS
from mla_compile.kernels.plan import NoPlanError
from mla_compile.kernels.tiles import depth
from mla_compile.onnx import cubins
from mla_compile.onnx.cubins import Cubin
from mla_compile.onnx.manifest import OP_VERSION
from mla_compile.onnx.native import API_VERSION, NAME, default_folder
from mla_compile.onnx.profile import PROFILES
from mla_compile.onnx.variants import DTYPES, FLOAT, MASKS, TUNED, NodeWidths, Variant, variants
from mla_compile.version import __version__

SOURCES = Path(__file__).with_name("csrc")
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
_ELEMENTS = {"float32": "ORT_FLOAT", "float16": "ORT_FLOAT16", "bfloat16": "ORT_BFLOAT16"}
_ROLES = {"attend": "ATTEND", "scan_mask": "SCAN", "list_tiles": "LIST", "combine": "COMBINE"}
_MASKS = dict(zip(MASKS, ("NO_MASK", "LISTED_MASK", "BOOL_MASK", "FLOAT_MASK"), strict=True))
_FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-Wl,--no-undefined")
_ALIGNMENT = 64  # of each kernel's image, in bytes
_KERNEL_S = 6  # seconds to compile a kernel: the median of ten kernels for sm_90 on one core of a 2.6 GHz EPYC
Say = Callable[[str], None]


def build_library(
    output: str | Path | None = None,
    *,
    archs: Sequence[str] = ARCHITECTURES,
    dims: Sequence[NodeWidths] = TUNED,
    dtypes: Sequence[str] = tuple(DTYPES),
    jobs: int = 1,
    cache: str | Path | None = None,
    say: Say | None = None,
) -> Path:
    """Compile the kernels for every architecture, dtype and dims, link the library, and return its path.

    ``output`` is a folder (default: the folder where ``native.find`` looks). ``jobs`` processes compile in parallel. If
    ``jobs`` is above 1, a script that calls this function needs ``if __name__ == "__main__"``. ``cache`` is a folder
    for compiled kernels (default: inside the folder of ``native.find``). ``say`` is called with a line of text at the
    start, for each kernel, and at the end. If the build fails, no library is written, and no process keeps running.

    Raises :class:`OptionError` for an unknown architecture or dtype, and for dims that no kernel fits. Raises
    :class:`ExportError` on other systems than Linux, and if Triton or a C compiler is missing or fails.
    """
    for names, known in ((archs, PRESETS), (dtypes, DTYPES)):
        for name in names:
            if name not in known:
                raise OptionError(f"build: {name!r} is unknown{nearest(name, known)}; expected {', '.join(known)}")
    if not (archs and dims and dtypes):
        raise OptionError("build: expected at least one architecture, one dtype and one pair of widths")
    if sys.platform != "linux":
        raise ExportError(f"build: the library is for Linux, this is {sys.platform}; build it there")
    if importlib.util.find_spec("triton") is None:
        raise ExportError("build: Triton compiles the kernels and is not installed: pip install 'mla-compile[triton]'")
    compiler = _compiler()
    folder = Path(output) if output is not None else default_folder()
    kept = Path(cache) if cache is not None else default_folder() / "cubins"
    try:
        wanted = variants(tuple(archs), tuple(dtypes), tuple(dims))
    except NoPlanError as error:
        raise OptionError(f"build: {error}") from error
    begin = time.perf_counter()
    if say is not None:
        say(_announced(wanted, kept, jobs))
    made = list(_compiled(wanted, kept, jobs, say or (lambda line: None)))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    _link(compiler, wanted, made, _manifest(archs, dims, dtypes, wanted, made), path)
    if say is not None:
        size, seconds = path.stat().st_size / 2**20, time.perf_counter() - begin
        say(f"{path}: {len(made)} kernels, {size:.1f} MiB, {seconds:.0f} s")
    return path


def _compiler() -> list[str]:
    command = (os.environ.get("CC") or "cc").split()
    if shutil.which(command[0]) is None:
        raise ExportError(
            f"build: there is no C compiler {command[0]!r}; install one (gcc or clang) or name it in the environment "
            "variable CC"
        )
    return command


def _announced(wanted: list[Variant], cache: Path, jobs: int) -> str:
    new = sum(not cubins.is_kept(variant, cache) for variant in wanted)
    minutes = -(-new * _KERNEL_S // (60 * jobs))
    archs = ", ".join(dict.fromkeys(variant.arch for variant in wanted))
    took = f"about {minutes} minute{'s' * (minutes != 1)} on {jobs} core{'s' * (jobs != 1)}" if new else "no time"
    return f"{len(wanted)} kernels for {archs}, {len(wanted) - new} of them compiled before: {took}"


def architectures() -> tuple[str, ...]:
    """Return the supported architectures among this machine's GPUs, or all supported architectures if it has none."""
    import torch  # imported on use, because torch is not needed if the caller names an architecture

    majors = {torch.cuda.get_device_capability(i)[0] for i in range(torch.cuda.device_count())}
    return tuple(a for a in ARCHITECTURES if int(a.removeprefix("sm_")) // 10 in majors) or ARCHITECTURES


def _end_with_parent() -> None:
    """Make this process end when its parent ends, for whatever reason."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _one(task: tuple[Variant, Path]) -> tuple[Cubin, bool, float]:
    begin = time.perf_counter()
    cubin, known = cubins.cubin(*task)
    return cubin, known, time.perf_counter() - begin


def _compiled(wanted: list[Variant], cache: Path, jobs: int, say: Say) -> Iterator[Cubin]:
    tasks = [(variant, cache) for variant in wanted]
    if jobs > 1:
        with ProcessPoolExecutor(jobs, get_context("spawn"), _end_with_parent) as pool:
            yield from _told(wanted, pool.map(_one, tasks), say)
    else:
        yield from _told(wanted, map(_one, tasks), say)


def _told(wanted: list[Variant], done: Iterable[tuple[Cubin, bool, float]], say: Say) -> Iterator[Cubin]:
    for i, (variant, (cubin, known, seconds)) in enumerate(zip(wanted, done, strict=True), 1):
        spilled = f", {cubin.spilled} B spilled" if cubin.spilled else ""
        took = "cached" if known else f"{seconds:.1f} s"
        say(f"[{i}/{len(wanted)}] {variant}: {len(cubin.image) >> 10} KiB{spilled}, {took}")
        yield cubin


def _manifest(
    archs: Sequence[str], dims: Sequence[NodeWidths], dtypes: Sequence[str], wanted: list[Variant], made: list[Cubin]
) -> dict[str, object]:
    import triton  # imported on use, because only a build needs Triton

    sources = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        sources.update(path.name.encode() + b"\0" + path.read_bytes())
    return {
        "format": 1,
        "domain": "mla_compile",
        "op": "DecodeAttention",
        "op_version": OP_VERSION,
        "api_version": API_VERSION,
        "version": __version__,
        "triton": triton.__version__,
        "archs": list(archs),
        "dtypes": list(dtypes),
        "dims": [
            {"La": d.La, "Lb": d.Lb, "Lv": d.out, "values": d.Lv is not None, "softcap": d.softcap, "window": d.window}
            for d in dims
        ],
        "masks": ["none", "bool", "float"],
        "kernels": len(wanted),
        "spilled": {str(v): c.spilled for v, c in zip(wanted, made, strict=True) if c.spilled},
        "kernels_sha256": cubins.kernels_sha256(),
        "sources_sha256": sources.hexdigest(),
    }


def _row(variant: Variant, cubin: Cubin, offset: int, number: int) -> str:
    """Return a variant's entry in the host code's table of kernels."""
    dims, fields = variant.dims, {"role": _ROLES[variant.step], "arch": variant.arch.removeprefix("sm_")}
    fields |= dict.fromkeys(
        ("dtype", "query", "La", "Lb", "Lv", "values", "mask", "softcap", "window", "causal", "direct", "sinks"), "ANY"
    )
    fields |= {"max_rows": "ANY", "block_n": "ANY"}
    if variant.step == "attend":
        fields |= {"dtype": _ELEMENTS[variant.dtype], "query": _ELEMENTS[variant.query], "mask": _MASKS[variant.mask]}
        fields |= {name: str(n) for name, n in (("La", dims.La), ("Lb", dims.Lb), ("Lv", dims.out))}
        flags = {"values": dims.Lv is not None, "softcap": dims.softcap, "window": dims.window}
        flags |= {"causal": variant.causal, "direct": variant.direct}
        fields |= {name: str(int(flag)) for name, flag in flags.items()}
    elif variant.step == "scan_mask":
        fields["dtype"] = _ELEMENTS[variant.dtype] if variant.mask == FLOAT else "ORT_BOOL"
        fields |= {"causal": str(int(variant.causal)), "window": str(int(dims.window))}
    elif variant.step == "combine":
        fields |= {"dtype": _ELEMENTS[variant.query], "Lv": str(dims.out), "sinks": str(int(variant.sinks))}
    if variant.step in ("attend", "scan_mask") and variant.tile is not None:
        tile, row = variant.tile, variant.tile.row
        fields |= {"max_rows": str(tile.max_rows) if variant.step == "attend" else "ANY", "smem": str(tile.smem)}
        fields |= {"block_m": str(row.block_m), "block_n": str(row.block_n), "occupancy": str(row.occupancy)}
        fields |= {"t0_us": repr(row.t0_us), "tile_us": repr(row.tile_us)}
        fields |= {"depth": str(depth(row.num_stages, paged=False))}
    fields |= {"name": json.dumps(cubin.name), "offset": str(offset), "bytes": str(len(cubin.image))}
    fields |= {"shared": str(cubin.shared), "threads": str(cubin.threads), "spilled": str(cubin.spilled)}
    fields |= {"count": str(len(variant.arguments())), "arguments": f"arguments_{number}"}
    return "{" + ", ".join(f".{name} = {value}" for name, value in fields.items()) + "}"


def _table(wanted: list[Variant], made: list[Cubin], manifest: dict[str, object]) -> tuple[str, bytes]:
    """Return the text of ``table.c``, and the machine code of all kernels, which ``table.c`` embeds."""
    images, places = bytearray(), {}
    for cubin in made:
        if cubin.image not in places:
            images += bytes(-len(images) % _ALIGNMENT)
            places[cubin.image] = len(images)
            images += cubin.image
    lines = ['#include "kernels.h"', '#include "ort_api.h"', ""]
    for number, variant in enumerate(wanted):
        names = ", ".join(f"A_{name}" for name in variant.arguments())
        lines.append(f"static const uint8_t arguments_{number}[] = {{{names}}};")
    rows = [_row(v, c, places[c.image], i) for i, (v, c) in enumerate(zip(wanted, made, strict=True))]
    lines += ["", "const Kernel mla_kernels[] = {", ",\n".join(f"  {row}" for row in rows), "};"]
    lines += [f"const int mla_kernel_count = {len(rows)};"]
    lines += ["const char mla_manifest[] =", f"  {_quoted(json.dumps(manifest, sort_keys=True))};"]
    section = f".pushsection .rodata; .balign {_ALIGNMENT}; .globl mla_images; .hidden mla_images; mla_images:"
    lines += [f'__asm__("{section} .incbin \\"images.bin\\"; .popsection");', ""]
    return "\n".join(lines), bytes(images)


def _quoted(text: str) -> str:
    """Return ``text`` as C string literals that are short enough for every compiler."""
    pieces = [text[i : i + 2000] for i in range(0, len(text), 2000)]
    return "\n  ".join(json.dumps(piece) for piece in pieces)


def _link(
    compiler: list[str], wanted: list[Variant], made: list[Cubin], manifest: dict[str, object], path: Path
) -> None:
    table, images = _table(wanted, made, manifest)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        Path(folder, "table.c").write_text(table)
        Path(folder, "images.bin").write_bytes(images)
        sources = [str(source) for source in sorted(SOURCES.glob("*.c"))]
        command = [*compiler, *_FLAGS, f"-I{SOURCES}", *sources, "table.c", "-o", NAME, "-ldl", "-lpthread", "-lm"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            reason = next((line for line in lines if "error" in line), lines[-1])
            raise ExportError(f"build: {compiler[0]} failed ({reason}); a C11 compiler for Linux is needed")
        os.replace(Path(folder, NAME), path)


def dims_of_model(directory: str | Path) -> tuple[tuple[NodeWidths, ...], str]:
    """Return the dims and the dtype of a model directory. Raises :class:`ModelFileError` if it cannot be read."""
    path = Path(directory) / "mla_compile.json"
    try:
        manifest = json.loads(path.read_text())
        nodes, dtype = manifest["attention"], str(manifest["dtype"])
        found = [
            NodeWidths(
                n["La"],
                n["Lb"],
                n["Lv"] if n.get("values", n["Lv"] != n["La"]) else None,
                n["softcap"] > 0,
                n["window"] > 0,
            )
            for n in nodes
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelFileError(f"{path} is not the manifest of an export: {type(error).__name__}: {error}") from error
    profile = PROFILES.get(str(manifest.get("profile")))
    if profile is not None and profile.layout == "halves":
        raise ModelFileError(
            f"{directory}: rows in two halves are summed across both, which the CUDA kernels cannot do; the function "
            "in the file is used"
        )
    return tuple(dict.fromkeys(found)), dtype


def _dims(text: str) -> NodeWidths:
    try:
        widths = [int(part) for part in text.split(",")]
    except ValueError:
        widths = []
    if len(widths) not in (2, 3):
        raise OptionError(f"--dims {text!r}: expected La,Lb or La,Lb,Lv, as in 512,64")
    return NodeWidths(widths[0], widths[1], widths[2] if len(widths) == 3 else None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a build with command-line arguments. Return the exit status: 1 after a failure, 130 after an interrupt."""
    parser = argparse.ArgumentParser(
        prog="python -m mla_compile.onnx.build", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--output", metavar="DIR", help=f"where {NAME} is written (default: {default_folder()})")
    parser.add_argument("--arch", nargs="+", help=f"default: this machine's GPU, else {' '.join(ARCHITECTURES)}")
    parser.add_argument("--dims", nargs="+", metavar="La,Lb[,Lv]", help=f"default: {' '.join(map(str, TUNED))}")
    parser.add_argument("--dtype", nargs="+", help=f"default: {' '.join(DTYPES)}")
    parser.add_argument("--model", metavar="DIR", help="take dims and dtype from an exported model")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes that compile")
    given = parser.parse_args(arguments)
    try:
        dims: tuple[NodeWidths, ...] = TUNED
        dtypes = tuple(DTYPES)
        if given.model:
            dims, dtype = dims_of_model(given.model)
            dtypes = (dtype,)
        if given.dims:
            dims = tuple(_dims(text) for text in given.dims)
        build_library(
            given.output,
            archs=given.arch or architectures(),
            dims=dims,
            dtypes=given.dtype or dtypes,
            jobs=given.jobs,
            say=_line,
        )
    except MlaCompileError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("build: interrupted; kernels that were compiled are kept for the next build\n")
        return 130
    return 0


def _line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
