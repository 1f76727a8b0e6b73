"""Find the native library of the ONNX operator, read its manifest, and decide whether a session should use the library.

A registered operator replaces the function in the model's file. ONNX Runtime cannot fall back to the function, so a
node that the library cannot run would raise an error. Therefore a library is registered only if it covers every node of
a model. On a CPU, no library is registered, because the function is faster than the library's plain kernel.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla_compile.core import trusted
from mla_compile.errors import ModelFileError
from mla_compile.kernels.devices import PRESETS
from mla_compile.onnx.manifest import OP_VERSION

API_VERSION = 21  # of ONNX Runtime's C interface, present in 1.21 and newer
NAME = "libmla_compile_onnx.so"
VARIABLE = "MLA_COMPILE_ONNX_LIBRARY"
_FORMAT = 1
_HEADER = 64  # bytes of the ELF header
_MACHINES = {"x86_64": 62, "amd64": 62, "aarch64": 183, "arm64": 183}  # e_machine in ELF
_REBUILD = "build it again: python -m mla_compile.onnx.build"


@dataclass(frozen=True)
class OperatorLibrary:
    """A library that was loaded. ``manifest``: the library's description of its contents."""

    path: Path
    manifest: Mapping[str, Any]
    _loaded: ctypes.CDLL = field(repr=False, compare=False)

    def device(self, index: int = 0) -> str | None:
        """Return a CUDA device's architecture, such as ``sm_90``; ``None`` if the device or the driver is missing."""
        found = int(self._loaded.mla_compile_onnx_device(index))
        return None if found < 0 else f"sm_{found}"


def default_folder() -> Path:
    """Return the folder in which a build puts the library, and in which sessions look for it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mla_compile" / "onnx"


def find() -> Path | None:
    """Return the library in ``MLA_COMPILE_ONNX_LIBRARY`` or in the default folder; ``None`` if there is none.

    Raises :class:`ModelFileError` if the variable names a file that does not exist.
    """
    named = os.environ.get(VARIABLE)
    if named:
        if not Path(named).is_file():
            raise ModelFileError(f"{VARIABLE} names {named}, which is not a file; correct it or leave it out")
        return Path(named)
    path = default_folder() / NAME
    return path if path.is_file() else None


def inspect(path: str | Path) -> OperatorLibrary:
    """Load a library and read its manifest. Loading runs code of the library, so only inspect files that you trust.

    Raises :class:`ModelFileError` if the file is missing, is not a library of this package, is for another platform, or
    may have been written by another user.
    """
    path = Path(path).absolute()
    if (told := trusted.refusal(path)) is not None:
        raise ModelFileError(f"native library {told}")
    _check_platform(path)
    try:
        loaded = trusted.load(path)
    except OSError as error:
        raise ModelFileError(f"native library {path} does not load: {error}") from error
    try:
        manifest_of, device_of = loaded.mla_compile_onnx_manifest, loaded.mla_compile_onnx_device
        _ = loaded.RegisterCustomOps
    except AttributeError:
        raise ModelFileError(f"{path} is a library, but not one of mla_compile's ONNX operator; {_REBUILD}") from None
    manifest_of.restype, manifest_of.argtypes = ctypes.c_char_p, []
    device_of.restype, device_of.argtypes = ctypes.c_int, [ctypes.c_int]
    try:
        manifest = json.loads(manifest_of())
        known = (manifest["format"], manifest["domain"], manifest["op"]) == (_FORMAT, "mla_compile", "DecodeAttention")
    except (TypeError, ValueError, KeyError) as error:
        raise ModelFileError(
            f"native library {path} has a manifest that cannot be read ({error}); {_REBUILD}"
        ) from error
    if not known:
        raise ModelFileError(f"native library {path} is of format {manifest['format']}, expected {_FORMAT}; {_REBUILD}")
    return OperatorLibrary(path, manifest, loaded)


def _check_platform(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER)
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise ModelFileError(f"native library {path} cannot be read: {error}") from error
    if sys.platform != "linux":
        raise ModelFileError(f"native library {path} is for Linux, this is {sys.platform}; leave it out")
    if len(head) < _HEADER or head[:4] != b"\x7fELF":
        raise ModelFileError(f"{path} is not a shared library; {_REBUILD}")
    bits, machine = head[4] * 32, struct.unpack("<H" if head[5] == 1 else ">H", head[18:20])[0]
    expected = _MACHINES.get(platform.machine().lower())
    if bits != 64 or (expected is not None and machine != expected):
        raise ModelFileError(
            f"native library {path} is for another processor (ELF machine {machine}), this is {platform.machine()}; "
            f"{_REBUILD}"
        )
    # The section table is at the end of the file. Loading a truncated file would crash the process.
    table, entry, entries = (*struct.unpack("<Q", head[40:48]), *struct.unpack("<HH", head[58:62]))
    if table + entry * entries > size:
        raise ModelFileError(f"native library {path} is cut off at {size} bytes; copy it again, or {_REBUILD}")


def usable(
    library: OperatorLibrary,
    manifest_attention: Iterable[object],
    dtype: str,
    providers: Sequence[str],
    ort_version: str,
    *,
    device: int = 0,
) -> str | None:
    """Return ``None`` if the library should be registered for a model, otherwise the reason why not.

    ``manifest_attention``: the entries of ``attention`` in the model's manifest, as mappings or as objects with equally
    named attributes. ``dtype``: the model's dtype. ``providers``: the session's providers. ``device``: the number of
    the session's CUDA device.
    """
    has = library.manifest
    if "CUDAExecutionProvider" not in providers:
        return "the session has no CUDAExecutionProvider, and on a CPU the model's own function is faster"
    minor = has["api_version"]
    if _release(ort_version) < (1, minor):
        return f"it needs onnxruntime 1.{minor}, this is {ort_version}"
    if has["op_version"] != OP_VERSION:
        return f"it has version {has['op_version']} of the operator, models need {OP_VERSION}"
    if dtype not in has["dtypes"]:
        return f"it has kernels for {', '.join(has['dtypes'])}, the model is {dtype}"
    for node in manifest_attention:
        problem = _not_covered(node, has["dims"])
        if problem:
            return problem
    arch = library.device(device)
    if arch is None:
        return f"there is no CUDA device {device}"
    if not _runs_on(arch, has["archs"]):
        return f"it has kernels for {', '.join(has['archs'])}, the device is {arch}"
    return None


def _runs_on(arch: str, built: Sequence[str]) -> bool:
    """Whether the library's machine code runs on ``arch``.

    Machine code for architectures up to sm_89 also runs on later architectures of the same generation. From sm_90 on,
    code runs only on its own architecture. If several versions of the code run, the library uses the newest, whose
    tiles must fit the device's shared memory.
    """
    numbers, number = sorted(int(name.removeprefix("sm_")) for name in built), int(arch.removeprefix("sm_"))
    earlier = [n for n in numbers if n // 10 == number // 10 and n <= number and (n == number or number < 90)]
    if not earlier:
        return False
    latest = PRESETS.get(f"sm_{earlier[-1]}")
    return latest is None or PRESETS.get(arch, latest).smem >= latest.smem


def _not_covered(node: object, dims: Iterable[Mapping[str, object]]) -> str | None:
    get = node.get if isinstance(node, Mapping) else lambda name, default=None: getattr(node, name, default)
    if get("value_width"):
        return f"a node sums {get('value_width')} columns across latent and rope, which its kernels cannot do"
    softcap, window = get("softcap", 0) > 0, get("window", 0) > 0
    values = bool(get("values", get("Lv") != get("La")))
    needed = {"La": get("La"), "Lb": get("Lb"), "Lv": get("Lv"), "values": values, "softcap": softcap, "window": window}
    if any(all(one[name] == value for name, value in needed.items()) for one in dims):
        return None
    features = "".join(f", {name}" for name, on in (("softcap", softcap), ("window", window)) if on)
    return f"it has no kernel for La+Lb = {get('La')}+{get('Lb')}, Lv = {get('Lv')}{features}; build it with --model"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
