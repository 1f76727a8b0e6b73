"""Saves and loads the kernels that Inductor's CPU code calls. Each kernel is an extension module.

Inductor looks up an extension module by compiler, flags and cache location. A folder uses keys of source and argument
types instead, so that the machine that loads the folder needs no compiler.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mla_compile.errors import ModelFileError
from mla_compile.saved.instead import instead

_PLACE = "TORCHINDUCTOR_CACHE_DIR"


def key_of(argument_types: list[str], source: str) -> str:
    """Return the key under which a folder holds a kernel."""
    return hashlib.sha256("\0".join([*argument_types, source]).encode()).hexdigest()[:32]


@contextmanager
def noting(found: dict[str, Path], folder: Path) -> Iterator[None]:
    """Within the block, record in ``found``, by key, the file of each kernel that Inductor's code loads.

    Inductor uses ``folder`` as its cache within the block. If ``folder`` is empty, all code is loaded anew, except for
    kernels that this process has compiled.
    """
    from torch._inductor.async_compile import AsyncCompile

    load = AsyncCompile.cpp_pybinding

    def loading(self: Any, argument_types: list[str], source: str) -> object:
        made = load(self, argument_types, source)
        kernel = made.result() if hasattr(made, "result") else made
        found[key_of(argument_types, source)] = Path(kernel.__self__.__file__)
        return kernel

    with _calling(loading, folder):
        yield


@contextmanager
def given(files: Mapping[str, Path], folder: Path) -> Iterator[None]:
    """Within the block, take kernels from ``files`` by their keys, and let Inductor write into ``folder``.

    Raises :class:`ModelFileError` within the block for a missing kernel.
    """

    def loading(_: object, argument_types: list[str], source: str) -> Callable[..., None]:
        key = key_of(argument_types, source)
        if key not in files:
            raise ModelFileError("code of the folder calls a kernel that is not in it")
        return _kernel(key, files[key])

    with _calling(loading, folder):
        yield


@contextmanager
def _calling(loading: Callable[..., object], folder: Path) -> Iterator[None]:
    from torch._inductor.async_compile import AsyncCompile

    before = os.environ.get(_PLACE)
    os.environ[_PLACE] = str(folder)
    try:
        with instead(AsyncCompile, "cpp_pybinding", loading):
            yield
    finally:
        if before is None:
            del os.environ[_PLACE]
        else:
            os.environ[_PLACE] = before


def _kernel(key: str, file: Path) -> Callable[..., None]:
    """Load a kernel as ``CppPythonBindingsCodeCache`` does."""
    name = f"mla_compile_saved_{key}.kernel"
    if name not in sys.modules:
        address: object = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
        os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    kernel: Callable[..., None] = sys.modules[name].kernel
    return kernel
