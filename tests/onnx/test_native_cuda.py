"""The CUDA side of the native library without a GPU: what it launches, and what comes out of it.

tests/support/onnx_fakes.c stands in for the driver and for ONNX Runtime; the launches are run in Triton's interpreter.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from mla_compile.kernels.devices import PRESETS
from mla_compile.kernels.plan import plan
from mla_compile.onnx import native
from mla_compile.onnx.variants import DTYPES, TUNED
from tests.support import interpreter, onnx_native_cases
from tests.support.onnx_native_cases import ELEMENTS, SMALL, Case, copied, make
from tests.support.tiers import also

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@pytest.fixture(scope="module")
def fake(folder: Path) -> Path:
    return onnx_native_cases.fakes(folder)


@pytest.fixture(scope="module")
def hollow(folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        return onnx_native_cases.hollow_library(folder / "small", SMALL, patch)


@pytest.fixture(scope="module")
def tuned(folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        return onnx_native_cases.hollow_library(folder / "tuned", TUNED, patch)


@pytest.fixture(scope="session")  # the process is that of tests/kernels/triton too
def pool() -> Iterator[ProcessPoolExecutor]:
    with interpreter.worker() as started:
        yield started


WHAT = {
    "one token": (Case(), "attend"),
    "one split": (Case(sms=1, B=3, C=600), "attend"),
    "few rows without lse": (Case(lse=False, sms=1), "attend"),
    "causal tokens": (Case(S=3, causal=True, H=3), "attend"),
    "tokens without an order": (Case(S=3, H=3), "attend"),
    "splits": (Case(C=1100, B=1), "attend combine"),
    "lengths": (Case(lens=(70, 0), sms=1), "attend"),
    "lengths beyond the capacity": (Case(lens=(700, 33), S=2, causal=True), "attend"),
    "sinks": (Case(sinks=True, lens=(0, 50)), "attend combine"),
    "sinks of tokens without an order": (Case(sinks=True, S=3, H=3), "attend combine"),
    "a mask of tokens": (Case(mask="bool B11T"), "scan_mask list_tiles attend"),
    "a mask of tokens, all requests": (Case(mask="bool 111T", S=2), "scan_mask list_tiles attend"),
    "a mask of tokens, causal": (Case(mask="bool B11T", S=3, causal=True), "scan_mask list_tiles attend"),
    "a mask of query rows": (Case(mask="bool B1ST", S=3), "scan_mask list_tiles attend combine"),
    "a mask of heads and rows": (Case(mask="bool BHST", S=2, causal=True), "scan_mask list_tiles attend combine"),
    "a mask of heads, one token": (Case(mask="bool 1H1T"), "scan_mask list_tiles attend combine"),
    "an added mask of heads": (Case(mask="float BH1T", S=2), "scan_mask list_tiles attend combine"),
    "an added mask": (Case(mask="float B11T"), "scan_mask list_tiles attend combine"),
    "an added mask of rows": (Case(mask="float 1HST", S=2, causal=True), "scan_mask list_tiles attend combine"),
    "unused capacity": (Case(mask="bool B11T", C=90, T=61), "scan_mask list_tiles attend"),
    "a mask and lengths": (Case(mask="bool 11ST", lens=(64, 5), S=2), "scan_mask list_tiles attend combine"),
    "widths of no 16": (Case(dims=SMALL[1], S=2), "attend"),
    "no rope": (Case(dims=SMALL[2]), "attend"),
    "values": (Case(dims=SMALL[3], C=1100), "attend combine"),
    "soft-cap and window": (Case(dims=SMALL[4], S=2, H=3), "attend"),
    "soft-cap, window, causal": (Case(dims=SMALL[4], S=2, H=3, causal=True), "attend"),
    "soft-cap, window, mask": (Case(dims=SMALL[4], S=2, mask="bool B1ST"), "scan_mask list_tiles attend combine"),
    "float16": (Case(dtype=F16, C=130), "attend"),
    "bfloat16": (Case(dtype=BF16, H=20), "attend"),
    "float32 query beside float16": (Case(dtype=F16, query=F32, H=7), "attend"),
    "float32 query beside bfloat16, staged": (Case(dtype=BF16, query=F32, H=40, C=600), "attend combine"),
    "widths that the model does not say": (Case(static_shapes=False), "attend"),
    "sm_80": (Case(arch="sm_80", dtype=BF16, H=33, mask="bool B11T"), "scan_mask list_tiles attend"),
    "sm_100": (Case(arch="sm_100", dtype=BF16, query=F32, H=40), "attend"),
}  # fmt: skip
OTHERS = (  # whose features are among those of the others
    "one token",
    "tokens without an order",
    "lengths",
    "a mask of tokens",
    "a mask of query rows",
    "a mask of heads, one token",
    "an added mask",
    "a mask and lengths",
    "soft-cap and window",
    "soft-cap, window, causal",
    "bfloat16",
)


@pytest.mark.parametrize("name", [*(n for n in WHAT if n not in OTHERS), *also("combination", *OTHERS)])
def test_launches_and_results(name, hollow, fake, pool):
    case, launches = WHAT[name]
    seen = pool.submit(onnx_native_cases.check, hollow, fake, SMALL, case).result(timeout=300)
    assert seen == launches.split()


class Question(ctypes.Structure):
    """The sizes of a call, and what register.c answers about its plan."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "arch", "multiprocessors", "smem", "query", "dtype", "causal", "has_values", "has_sinks", "has_lens",
            "mask",
        )),
        ("bandwidth", ctypes.c_double), ("softcap", ctypes.c_double),
        *((name, ctypes.c_int64) for name in (
            "window", "B", "S", "H", "T", "La", "Lb", "Lv", "mask_b", "mask_h", "mask_s",
        )),
        *((name, ctypes.c_int32) for name in ("block_m", "block_n", "threads", "direct")),
        *((name, ctypes.c_int64) for name in ("splits", "lists", "scratch")),
    )  # fmt: skip


MASKS = {"none": 0, "listed": 0, "bool": 1, "float": None}  # bytes of it that the loop reads; None: its dtype's


QUERIES = (1, 1), (1, 16), (1, 24), (1, 64), (1, 128), (3, 40)
TOKENS = 0, 1, 255, 1000, 8192, 70_000, 131_072
SIZES = [*itertools.product(DTYPES.values(), TUNED, (1, 3, 16, 64, 300), QUERIES, TOKENS, (None, 3.3e12))]


@pytest.mark.singly
@pytest.mark.parametrize("step", [17, *also("draws", 5)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("mask", MASKS)
def test_plans_are_those_of_the_python_planner(arch, mask, step, tuned):
    """``step``: every so many-th call; 17 goes through every pair of sizes."""
    library = ctypes.CDLL(str(tuned))
    device = PRESETS[arch]
    for dtype, of, B, (S, H), T, bandwidth in SIZES[::step]:
        q = Question(
            arch=int(arch.removeprefix("sm_")), multiprocessors=device.sms, smem=device.smem,
            query=ELEMENTS[dtype], dtype=ELEMENTS[dtype], bandwidth=bandwidth or 0.0,
            B=B, S=S, H=H, T=T, La=of.La, Lb=of.Lb, Lv=of.out,
        )  # fmt: skip
        if mask != "none":
            q.mask, q.mask_b = ELEMENTS[dtype if mask == "float" else torch.bool], T
            q.mask_s = q.mask_h = 0 if mask == "listed" else max(T, 1)
        assert library.mla_compile_onnx_plan(ctypes.byref(q)), (of, dtype, B, S, H, T)
        read = dtype.itemsize if MASKS[mask] is None else MASKS[mask]
        want = plan(
            B=B, S=S, H=H, L=of.La, R=of.Lb, T=T, query_dtype=dtype, cache_dtype=dtype,
            device=type(device)(device.name, device.capability, device.sms, device.smem, bandwidth),
            masked=mask != "none", mask_bytes=read, gluon=False,
        )  # fmt: skip
        got = (q.block_m, q.block_n, q.threads, q.splits)
        assert got == (want.block_m, want.block_n, 32 * want.num_warps, want.splits), (of, B, S, H, T)
        assert q.direct == (want.splits == 1 and mask in ("none", "listed"))


def test_sizes_beyond_the_kernels_have_no_plan(tuned):
    library = ctypes.CDLL(str(tuned))
    usual = {"arch": 90, "multiprocessors": 132, "smem": 227 * 1024, "query": 16, "dtype": 16}
    usual |= {"B": 1, "S": 1, "H": 16, "T": 4096, "La": 512, "Lb": 64, "Lv": 512}
    assert library.mla_compile_onnx_plan(ctypes.byref(Question(**usual)))
    for change in (
        {"B": 70_000}, {"T": 4_000_000}, {"S": 1 << 28}, {"La": 513}, {"Lv": 256}, {"Lb": 0, "La": 384}, {"arch": 86},
        {"softcap": 1.0}, {"window": 8}, {"has_values": 1}, {"query": 10}, {"La": (1 << 32) + 512},
        {"B": 60_000, "mask": 9, "mask_b": 1, "T": 400_000},
    ):  # fmt: skip
        assert not library.mla_compile_onnx_plan(ctypes.byref(Question(**{**usual, **change}))), change


def test_scratch_is_given_back_also_when_a_launch_fails(hollow, fake, tmp_path):
    to, case = copied(hollow, fake, tmp_path / "new"), Case(C=1100, B=1, sinks=True)
    assert to.run(case, make(case), times=3) is None
    assert to.machine.allocated == to.machine.freed == 3
    to.machine.fail_launch = 1
    said = to.run(case, make(case))
    assert said == "11: mla_compile.DecodeAttention: launching a kernel failed: a fake's error (CUDA error 701)"
    assert to.machine.allocated == to.machine.freed == 4
    assert to.machine.statuses == 0


def test_kernels_are_loaded_when_a_node_is_made_and_shared_by_nodes(hollow, fake, tmp_path):
    to, case = copied(hollow, fake, tmp_path / "new"), Case(mask="bool B11T")
    assert to.machine.initialised == 1
    assert to.run(case, make(case), times=0) is None  # made, never run
    loaded = to.machine.loads
    assert loaded > 8
    assert to.run(case, make(case), times=1, capture=True) is None  # nothing left to load under capture
    assert to.run(replace(case, S=3, H=2), make(replace(case, S=3, H=2))) is None
    assert to.machine.loads == loaded
    assert to.machine.initialised == 1


def test_a_capture_that_would_have_to_load_is_refused_and_one_after_a_run_is_not(hollow, fake, tmp_path):
    to, case = copied(hollow, fake, tmp_path / "new"), Case(static_shapes=False)
    said = to.run(case, make(case), capture=True)
    assert said is not None
    assert "run the model once with these shapes before the capture" in said
    assert to.run(case, make(case), times=2, capture=True) is None
    assert to.machine.loads == 1


def test_unaligned_tensors_are_refused(hollow, fake, tmp_path):
    to, case = copied(hollow, fake, tmp_path / "new"), Case()
    made = make(case)
    made.tensors["latent"] = torch.zeros(2 * 70 * 64 + 1)[1:].view(2, 70, 64)
    assert "not a multiple of 16 bytes" in str(to.run(case, made))


def test_nothing_is_launched_for_nothing(hollow, fake, tmp_path):
    to = copied(hollow, fake, tmp_path / "new")
    for case in (Case(B=0), Case(S=0)):
        assert to.run(case, make(case)) is None
        assert to.machine.launches == 0
    case = Case(C=0)
    assert to.run(case, make(case)) is None  # zeros are written for queries without a key
    assert to.machine.launches == 1


def test_on_the_default_stream_scratch_comes_from_the_allocator_itself(hollow, fake, tmp_path):
    to, case = copied(hollow, fake, tmp_path / "new"), Case(sinks=True)
    assert to.run(case, make(case), stream=0) is None
    assert to.machine.allocated == to.machine.freed == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"arch": 75}, "no kernels for sm_75"),
        ({"arch": 103}, "no kernels for sm_103; build it again with --arch sm_103"),
        ({"arch": 120}, "no kernels for sm_120"),
        ({"arch": 86, "smem": 20 * 1024}, "bytes of shared memory, the device has 20480"),
    ],
)
def test_other_devices_are_refused(change, text, hollow, fake, tmp_path):
    to, case = copied(hollow, fake, tmp_path / "new"), Case()
    for name, value in change.items():
        setattr(to.machine, name, value)
    assert text in str(to.run(case, make(case)))
    assert to.machine.statuses == 0


def test_kernels_for_sm_80_run_on_later_devices_of_its_generation(hollow, fake, tmp_path):
    to, case = copied(hollow, fake, tmp_path / "new"), Case(dtype=BF16)
    to.machine.arch, to.machine.smem = 89, 99 * 1024
    assert to.run(case, make(case)) is None
    assert onnx_native_cases.known(SMALL)[to.machine.launch[0].kernel].arch == "sm_80"


def test_dims_that_are_not_there_are_refused_when_the_node_is_made(hollow, fake, tmp_path):
    to = copied(hollow, fake, tmp_path / "new")
    wide = Case(dims=replace(SMALL[0], La=128))
    for case, attributes in (
        (wide, {}),
        (Case(), {"softcap": 1.0}),
        (Case(), {"window": 3}),
        (Case(), {"value_width": 80}),
    ):
        said = to.run(case, make(case), times=0, **attributes)
        assert said is not None
        assert said.startswith("9: mla_compile.DecodeAttention: this library has no kernel for sm_90, float32 query")
    other = Case()
    made = make(other)
    made.tensors["mask"] = torch.zeros(2, 1, 1, 70, dtype=F16)
    assert "mask is float16 beside float32 rows" in str(to.run(other, made, times=0))


def test_without_a_driver_or_a_device_the_reason_is_told(hollow, tmp_path, fake):
    to = copied(hollow, fake, tmp_path / "new")
    copy = tmp_path / "lone.so"
    copy.write_bytes(hollow.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLA_COMPILE_LIBCUDA", str(tmp_path / "nothing.so"))
        library = native.inspect(copy)
        assert library.device() is None
        to.library = ctypes.CDLL(str(copy))
        case = Case()
        assert "missing on this machine: libcuda.so.1" in str(to.run(case, make(case)))


def test_an_older_onnxruntime_gets_nothing_and_no_error(hollow, fake, tmp_path):
    to = copied(hollow, fake, tmp_path / "new")
    assert to.register(20) == 0
    assert to.register(21) == 10
    assert to.register(31) == 10


def test_usable_looks_at_the_device(hollow, fake, tmp_path):
    copied(hollow, fake, tmp_path / "new")
    library = native.inspect(tmp_path / "new" / hollow.name)
    node = {"La": 64, "Lb": 16, "Lv": 64, "mask": "bool", "sinks": False, "softcap": 0.0, "window": 0}
    cuda = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert library.device(0) == "sm_90"
    assert library.device(1) is None
    assert native.usable(library, [node], "float16", cuda, "1.31.1") is None
    assert native.usable(library, [node], "float16", cuda, "1.31.1", device=1) == "there is no CUDA device 1"
    windows = {**node, "La": 48, "Lv": 48, "softcap": 3.0, "window": 5}
    assert native.usable(library, [node, windows], "float16", cuda, "1.31.1") is None
    assert "window" in str(native.usable(library, [{**node, "window": 5}], "float16", cuda, "1.31.1"))
