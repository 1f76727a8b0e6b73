"""Compile one kernel of a native library, and check that the host code will launch the kernel correctly."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mla_compile.errors import ExportError
from mla_compile.kernels import devices
from mla_compile.kernels.devices import PRESETS
from mla_compile.onnx.variants import TUNED, Variant

_HIDDEN = 2  # Triton appends two addresses to a kernel's parameters: global scratch and profile scratch
_BITS = {"i32": 32, "i64": 64, "fp32": 32}
# Kind of mask -> the most bytes of registers that a thread may spill in a kernel of tuned dims. If there is no mask,
# sm_90 spills at most 16 bytes. Masks that differ between rows (bool, float) need additional registers, so their limit
# is higher. Only calls with few query tokens have such masks.
SPILLED = {"none": 128, "listed": 128, "bool": 768, "float": 768}


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel.

    ``shared``: bytes of shared memory per block. ``threads``: threads per block. ``spilled``: bytes of registers that a
    thread spills, or -1 if unknown.
    """

    name: str
    shared: int
    threads: int
    spilled: int
    image: bytes


@lru_cache(maxsize=1)
def kernels_sha256() -> str:
    """Return a hash of the source files of all Triton kernels. These files import only each other."""
    digest = hashlib.sha256()
    for path in sorted((Path(devices.__file__).parent / "triton").glob("*_triton.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def key(variant: Variant) -> str:
    """Return the name of a compiled kernel in a cache: a hash of everything that the kernel depends on."""
    import triton

    fn, *rest = variant.source()
    text = "\0".join([kernels_sha256(), str(triton.__version__), variant.arch, fn.__name__, *map(str, rest)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def cubin(variant: Variant, cache: Path | None) -> tuple[Cubin, bool]:
    """Return the compiled kernel, and whether it came from ``cache``. If ``cache`` is None, no cache is used.

    Raises :class:`ExportError` if Triton cannot compile the kernel, if a kernel of tuned dims spills more than
    :data:`SPILLED` allows, or if the host code would launch the kernel incorrectly.
    """
    made, known = _cached(variant, cache)
    if variant.dims in TUNED and made.spilled > SPILLED[variant.mask]:
        raise ExportError(
            f"build: {variant} spills {made.spilled} bytes of registers per thread, expected at most "
            f"{SPILLED[variant.mask]}; use another Triton, from 3.6 to 3.7"
        )
    return made, known


def is_kept(variant: Variant, cache: Path) -> bool:
    """Whether the compiled kernel is in ``cache``."""
    return all((cache / key(variant)).with_suffix(suffix).exists() for suffix in (".cubin", ".json"))


def _cached(variant: Variant, cache: Path | None) -> tuple[Cubin, bool]:
    if cache is None:
        return _compiled(variant), False
    image = cache / f"{key(variant)}.cubin"
    about = image.with_suffix(".json")
    if is_kept(variant, cache):
        return Cubin(image=image.read_bytes(), **json.loads(about.read_text())), True
    made = _compiled(variant)
    cache.mkdir(parents=True, exist_ok=True)
    facts = {name: value for name, value in asdict(made).items() if name != "image"}
    # The facts are written last, so if their file exists, the image is complete.
    for path, content in ((image, made.image), (about, json.dumps(facts).encode())):
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.write_bytes(content)
        os.replace(draft, path)
    return made, False


def _compiled(variant: Variant) -> Cubin:
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn, signature, constants, attributes, options = variant.source()
    if type(fn).__name__ != "JITFunction":
        raise ExportError("build: Triton interprets kernels in this process; unset TRITON_INTERPRET")
    target = GPUTarget("cuda", int(variant.arch.removeprefix("sm_")), 32)
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True  # saves two thirds of the bytes, and hides paths of this machine
        try:
            made = triton.compile(ASTSource(fn, signature, constants, attributes), target=target, options=options)
        except Exception as error:  # compilers raise many errors; each means that this kernel cannot be built here
            raise ExportError(f"build: Triton {triton.__version__} does not compile {variant}: {error}") from error
    passed = [signature[name] for name in fn.arg_names if signature[name] != "constexpr"]
    problem = wrong_launch(made.asm["ptx"], passed, made.metadata, options["num_warps"], PRESETS[variant.arch].smem)
    if problem:
        raise ExportError(
            f"build: Triton {triton.__version__} compiles {variant} to a kernel that the library would launch wrongly: "
            f"{problem}; use a Triton from 3.6 to 3.7"
        )
    return Cubin(
        made.metadata.name,
        int(made.metadata.shared),
        32 * int(options["num_warps"]),
        _spilled(made.asm["cubin"]),
        made.asm["cubin"],
    )


def wrong_launch(ptx: str, passed: list[str], metadata: Any, num_warps: int, smem: int) -> str | None:
    """Return why the host code would launch a compiled kernel incorrectly; None if the kernel is as expected.

    ``passed``: the types of the arguments in order (``*bf16``, ``i32``, ``i64``, ``fp32``). After them, the kernel may
    have only the two scratch addresses that Triton appends. The host code allocates no scratch, so the kernel must not
    need any.
    """
    entry = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)", ptx, re.DOTALL)
    if entry is None or entry[1] != metadata.name:
        return f"its entry is {entry[1] if entry else 'missing'}, expected {metadata.name}"
    has = [int(bits) for bits in re.findall(r"\.param\s+\.[a-z]+(\d+)", entry[2])]
    expected = [_BITS.get(kind, 64) for kind in passed] + [64] * _HIDDEN
    if has != expected:
        return f"its parameters have {has} bits, expected {expected}"
    for name in ("global_scratch_size", "profile_scratch_size"):
        if getattr(metadata, name, 0):
            return f"{name} is {getattr(metadata, name)}, expected 0"
    for name, value in (("num_ctas", 1), ("launch_cooperative_grid", False), ("launch_pdl", False)):
        if getattr(metadata, name, value) != value:
            return f"{name} is {getattr(metadata, name)}, expected {value}"
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", ptx)
    if threads is None or int(threads[1]) != 32 * num_warps:
        return f"it is for {threads[1] if threads else 'an unknown number of'} threads, expected {32 * num_warps}"
    if metadata.shared > smem:
        return f"it takes {metadata.shared} bytes of shared memory, the architecture has {smem}"
    return None


def _spilled(image: bytes) -> int:
    """Return the bytes of registers that each thread spills; -1 if Triton came without cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(image)
        try:
            done = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True)
        except (OSError, subprocess.SubprocessError):
            return -1
    stack = re.search(r"STACK:(\d+)", done.stdout)
    return int(stack[1]) if stack else -1
