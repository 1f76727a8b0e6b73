"""The native kernels as other processors get them: without the newest instructions, and on ARM in an emulator."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mla_compile.kernels import index, linear, packed, reference
from mla_compile.kernels.call import DecodeCall, IndexCall
from mla_compile.kernels.cpu import decode, native
from tests.support import emulator
from tests.support.cpu_cases import TOLERANCE, Case, check
from tests.support.lists import lists
from tests.support.tiers import also

SETS: dict[str, tuple[str, ...]] = {"AVX2": ("-mavx2", "-mfma", "-mf16c"), "SSE2": ("-march=x86-64",), "NEON": ()}


@pytest.fixture(scope="module", params=["AVX2", *also("family", "SSE2"), "NEON"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> native.Library:
    folder: Path = tmp_path_factory.mktemp("native")
    if request.param == "NEON":
        if not emulator.available():
            pytest.skip(f"no {emulator.COMPILER} and {emulator.EMULATOR} here")
        return emulator.library(folder)
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("no C++ compiler for x86 here")
    if request.param == "AVX2" and "AVX2" not in torch.backends.cpu.get_cpu_capability().replace("512", "2"):
        pytest.skip("this processor has no AVX2")
    (folder / "kernels.cpp").write_text(native.source())
    flags = ("-std=c++20", "-O1", "-fopenmp", "-shared", "-fPIC", *native.FLAGS, *SETS[request.param])
    made = subprocess.run(
        [compiler, *flags, "kernels.cpp", "-o", "kernels.so"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return native.library_of(ctypes.CDLL(str(folder / "kernels.so")))


@pytest.fixture(autouse=True)
def used(built: native.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: built)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention(dtype: torch.dtype):
    check(Case(B=2, S=3, H=5, T=300, dtype=dtype, causal=True))
    check(Case(H=130, T=700, L=37, R=5, Lv=21, dtype=dtype))
    check(Case(B=2, H=16, T=1500, L=256, R=32, dtype=dtype, lengths=(0, 1400)))
    check(Case(H=64, T=130, L=512, R=0, dtype=dtype))


def test_float8_rows_sinks_a_soft_cap_and_lists():
    g = torch.Generator().manual_seed(0)
    packed = torch.randn(2, 230, 48, generator=g).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 230, generator=g) + 0.5
    query, rope = torch.randn(2, 2, 5, 56, generator=g), torch.randn(2, 230, 8, generator=g)
    more = {"scale": 0.2, "sinks": torch.randn(5, generator=g), "softcap": 3.0, "indices": lists(2, 2, 230, 60)}
    call = DecodeCall(query, packed, rope, kv_scale=scales, **more)
    assert decode.suits(call)
    out, _ = decode.decode_attention(call)
    wide = (packed.double() * scales.double()[..., None], rope.double())
    want, _ = reference.decode_attention(DecodeCall(query.double(), *wide, **more))
    assert (out - want).norm() <= TOLERANCE[torch.float32][0] * want.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_and_the_scores_of_an_indexer(dtype: torch.dtype):
    g = torch.Generator().manual_seed(0)
    for rows, (O, K) in enumerate([(130, 96), (65, 2051), (5, 4200), (64, 33)], start=1):  # noqa: E741
        x, weight = (torch.randn(n, K, generator=g).to(dtype) for n in (rows, O))
        got, want = linear.run(x, weight).double(), F.linear(x.double(), weight.double())
        assert (got - want).norm() <= TOLERANCE[dtype][0] * want.norm()
    keys = torch.randn(2, 300, 32, generator=g).to(dtype)
    query, weights = torch.randn(2, 3, 20, 32, generator=g).to(dtype), torch.randn(2, 3, 20, generator=g)
    scores = index.run(IndexCall(query, keys, weights, 0.3))
    exact = reference.index_scores(IndexCall(query.double(), keys.double(), weights.double(), 0.3))
    assert (scores - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("zeros", [False, True])
def test_products_with_codes(zeros: bool):
    g = torch.Generator().manual_seed(0)
    for rows, (O, K, width) in enumerate([(33, 192, 32), (20, 128, 64), (5, 96, 96), (66, 64, 32)], start=1):  # noqa: E741
        x, scales = torch.randn(rows, K, generator=g).bfloat16(), torch.rand(O, K // width, generator=g).bfloat16()
        x[0, 3] = 1e5  # hides the block's other numbers from 16-bit integers: there is a second term
        codes = torch.randint(-8, 8, (O, K), generator=g, dtype=torch.int8)
        codes[:, 3] = 0
        points = torch.randint(-8, 8, scales.shape, generator=g, dtype=torch.int8) if zeros else None
        if points is not None:
            points[:, 0] = 0
        exact = (codes.view(O, -1, width) - (0 if points is None else points[..., None])) * scales[..., None].double()
        want = F.linear(x.double(), exact.view(O, K))
        for words in (None, packed.pack(codes, scales, points)):
            got = linear.run(x, codes, None, linear.FEW, scales, points, words)
            # Packed codes are stored plus 8, so that float32 sums have held 8e5.
            bound = TOLERANCE[torch.bfloat16][0] if words is None else 0.1
            assert (got.double() - want).norm() <= bound * want.norm(), (rows, words is None)
        part, most = x[:, : K - 5], codes[:, : K - 5]
        want = F.linear(part.double(), most.double())
        assert (linear.run(part, most).double() - want).norm() <= TOLERANCE[torch.bfloat16][0] * want.norm()
