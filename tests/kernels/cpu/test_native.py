"""The native CPU kernel: how it is built, what happens where it cannot be, and that its two ways agree."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.cpu import native as cpu_native
from tests.support.cpu_cases import Case, check


def test_the_paths_agree_on_a_cache_of_several_tiles(library: cpu_native.Library):
    call = DecodeCall(**Case(T=5000, H=40, L=256, R=32).tensors(), scale=0.2)
    results = [cpu_native.decode_attention(replace(library, amx=amx), call)[0] for amx in (0, 2 * library.amx)]
    assert (results[0] - results[-1]).norm() <= 1e-5 * results[0].norm()


@pytest.mark.parametrize("float16", [False, True])
@pytest.mark.parametrize("amx", [False, True])
def test_what_the_compiler_and_the_machine_have(float16: bool, amx: bool):
    entry = SimpleNamespace()
    built: Any = SimpleNamespace(
        mla_decode_attention=entry, mla_index_scores=entry, mla_few_rows=entry, _name="kernels.so",
        mla_features=lambda: float16 + 2 * amx,
    )  # fmt: skip
    library = cpu_native.library_of(built)
    assert (library.float16, library.amx) == (float16, int(amx))
    for dtype, taken in ((torch.float32, True), (torch.float16, float16), (torch.float64, False)):
        assert cpu_native.takes(library, torch.zeros(1), torch.zeros(1, dtype=dtype), None) is taken


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the test make the attempt to build that a process makes once."""
    cpu_native._load_once.cache_clear()
    yield
    monkeypatch.undo()
    cpu_native._load_once.cache_clear()


@pytest.mark.usefixtures("untried")
def test_a_failed_build_is_told_once_and_changes_no_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken() -> None:
        raise RuntimeError("no compiler here\nand many more lines")

    monkeypatch.setattr(cpu_native, "_build", broken)
    with caplog.at_level(logging.INFO):
        check(Case())
        check(Case(T=300, H=16))
    (record,) = [r for r in caplog.records if r.name == cpu_native.__name__]
    assert record.getMessage().endswith("(RuntimeError: no compiler here)")


@pytest.mark.usefixtures("untried")
def test_a_compiler_that_fails_is_a_failed_build(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    broken = tmp_path / "broken.cpp"
    broken.write_text("#error broken on purpose\n")
    monkeypatch.setattr(cpu_native, "SOURCE", broken)
    check(Case())
    (record,) = [r for r in caplog.records if r.name == cpu_native.__name__]
    assert "broken on purpose" in record.getMessage()
    assert cpu_native.load() is None


@pytest.mark.usefixtures("untried")
def test_the_native_kernel_can_be_switched_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLA_COMPILE_NATIVE", "0")
    monkeypatch.setattr(cpu_native, "_build", lambda: pytest.fail("tried to build"))
    check(Case())


def test_the_native_source_is_one_text():
    assert '#include "' not in cpu_native.source()


@pytest.mark.usefixtures("untried")
def test_a_cached_library_is_built_again_where_it_is_cut_and_refused_where_others_write(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    """With a library of nothing but its entries, so that building takes no time."""
    names = ("mla_decode_attention", "mla_index_scores", "mla_few_rows", "mla_features")
    source = tmp_path / "small.cpp"
    source.write_text("".join(f'extern "C" long {name}(const char*) {{ return 0; }}\n' for name in names))
    monkeypatch.setattr(cpu_native, "SOURCE", source)
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))

    def again() -> cpu_native.Library | None:
        cpu_native._load_once.cache_clear()
        return cpu_native.load()

    assert again() is not None
    (built,) = folder.rglob("*.main.so")
    whole = built.read_bytes()
    built.unlink()  # a loaded file that is cut would end this process, too
    built.write_bytes(whole[:1000])
    os.utime(built, (1, 1))
    assert again() is not None
    assert built.read_bytes() == whole
    folder.chmod(0o777)
    assert again() is None
    (record,) = [r for r in caplog.records if r.name == cpu_native.__name__]
    assert f"everybody may write to {folder}" in record.getMessage()
    folder.chmod(0o700)
    source.write_text(source.read_text().replace(names[2], "mla_other"))
    assert again() is None, "it lacks a symbol"
    assert names[2] in [r for r in caplog.records if r.name == cpu_native.__name__][-1].getMessage()
