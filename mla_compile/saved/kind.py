"""The conditions under which compiled code is valid, as plain data.

They are the versions, the machine, the options, the model and the traced source files.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import platform
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType

import torch

from mla_compile.errors import ExportError
from mla_compile.saved.facts import name_of, told
from mla_compile.version import __version__

Kind = dict[str, object]
"""A dict of JSON values."""

_INSTRUCTIONS = re.compile(r"^(Features|flags)\s*:(.*)$", re.MULTILINE)
_MATTERS = re.compile(
    r"avx|amx|sse|fma|f16c|bmi|abm|aes|pclmul|gfni|movbe|popcnt|sha|asimd|sve|bf16|i8mm|fp|dotprod|sme"
)
_OF_DATACLASS = ("<string>", "__init__")
"""The file and name of code that a dataclass generates."""
_OURS = Path(__file__).parents[1]
_SHOWN = 3


def of_machine() -> Kind:
    """Describe this machine as far as compiled code depends on it."""
    return {
        "system": f"{platform.system()} {platform.machine()} {' '.join(platform.libc_ver())}".strip(),
        "instructions": _instructions(),
        "threads": torch.get_num_threads(),
    }


def _instructions() -> list[str]:
    capability = [torch.backends.cpu.get_cpu_capability()]
    file = Path("/proc/cpuinfo")
    found = _INSTRUCTIONS.search(file.read_text()) if file.exists() else None
    return capability + sorted(one for one in (found[2].split() if found else ()) if _MATTERS.search(one))


def of_versions() -> Kind:
    """Return the versions of Python and torch, and a digest of this package."""
    digest = hashlib.sha256()
    for file in sorted(_OURS.rglob("*")):
        if file.suffix in (".py", ".cpp", ".h"):
            digest.update(file.read_bytes())
    return {
        "python": f"{platform.python_implementation()} {sys.version}",
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "mla_compile": f"{__version__} {digest.hexdigest()[:16]}",
    }


def of_model(model: torch.nn.Module) -> Kind:
    """Return the classes, names, shapes and dtypes of a model, and the attributes of torch's own modules.

    Dynamo uses such an attribute (the epsilon of a norm) as a constant, and does not guard it.
    """
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {
        "modules": {
            path or "(itself)": _module(module) for path, module in model.named_modules(remove_duplicate=False)
        },
        "tensors": {name: _tensor(tensor) for name, tensor in tensors},
    }


def _module(module: torch.nn.Module) -> str:
    name = name_of(type(module))
    own = vars(module).items() if name.startswith("torch.") else ()
    known = (f"{key}={told(value)}" for key, value in own if not key.startswith("_"))
    return " ".join((name, *known))


def _tensor(tensor: torch.Tensor) -> str:
    grad = ", requires_grad" * tensor.requires_grad
    return f"{type(tensor).__name__} {list(tensor.shape)} {tensor.dtype} {tensor.device}{grad}"


def of_code(traced: Iterable[CodeType]) -> Kind:
    """Return a digest of each traced source file, except torch's and mla_compile's (see :func:`of_versions`).

    Raises :class:`ExportError` for code that another process could not import, such as code of ``__main__``.
    """
    names: set[str] = set()
    for code in traced:
        module = inspect.getmodule(code)
        if module is not None and module.__name__ != "__main__":
            names.add(module.__name__)
        elif not code.co_filename.startswith("<frozen ") and (code.co_filename, code.co_name) != _OF_DATACLASS:
            raise ExportError(f"{code.co_name} ({code.co_filename}) is in no module, and could not be recognised again")
    return {
        name: digest_of_module(name) for name in sorted(names) if name.split(".")[0] not in ("torch", "mla_compile")
    }


def digest_of_module(name: str) -> str:
    """Return the digest of a module's source."""
    try:
        file = inspect.getsourcefile(importlib.import_module(name))
    except (ImportError, TypeError):  # the module is gone, or built into Python
        file = None
    return "no source" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()


def differences(saved: Kind, now: Kind, of: str = "") -> list[str]:
    """Describe how ``now`` differs from ``saved``. Only the first few differences of each part are described."""
    found: list[str] = []
    for name in dict.fromkeys([*saved, *now]):
        before, value, path = saved.get(name), now.get(name), f"{of}{name}"
        if isinstance(before, dict) and isinstance(value, dict):
            inner = differences(before, value, f"{path} ")
            found += inner[:_SHOWN] + [f"{len(inner) - _SHOWN} more of {path}"] * (len(inner) > _SHOWN)
        elif name == "instructions" and isinstance(before, list) and isinstance(value, list):
            if lacking := sorted(set(before) - set(value)):
                found.append(f"the processor lacks {', '.join(lacking)}")
        elif before != value:
            found.append(f"{path}: {_or_none(value)}, saved for {_or_none(before)}")
    return found


def _or_none(value: object) -> str:
    return "none" if value is None else str(value)
