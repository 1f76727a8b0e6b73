"""The three ways to compute a call on CPU: the native kernel with and without AMX, and torch's operators."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest

from mla_compile.kernels.cpu import native as cpu_native


@pytest.fixture
def library() -> cpu_native.Library:
    """The native kernel; skips the test where there is no compiler for it, and fails where there is one."""
    library = cpu_native.load()
    if library is None:
        compilers = (os.environ.get("CXX"), "g++", "clang++")
        if os.environ.get("MLA_COMPILE_NATIVE") == "0" or not any(c and shutil.which(c) for c in compilers):
            pytest.skip("no native kernel here: no C++ compiler, or switched off")
        pytest.fail("there is a C++ compiler, and the native kernel was not built; the log has the reason")
    return library


@pytest.fixture(params=["tiles", "vectors", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Sends every call of the op through one of the ways to compute it."""
    used = None
    if request.param != "torch":
        library = request.getfixturevalue("library")
        if request.param == "tiles" and not library.amx:
            pytest.skip("this machine has no AMX")
        used = replace(library, amx=2 if request.param == "tiles" else 0)
    monkeypatch.setattr(cpu_native, "load", lambda: used)
    return request.param
