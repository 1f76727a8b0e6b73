"""A launch up to the driver, which records it instead of running it (tests/support/fake_driver.py)."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_compile.errors import InputError
from mla_compile.kernels import checks, launch
from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.devices import PRESETS, Device
from mla_compile.kernels.plan import NoPlanError
from mla_compile.kernels.triton import runner
from tests.support.fake_driver import FakeDriver


def test_without_triton_one_line_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    launch.available.cache_clear()
    with caplog.at_level(logging.WARNING, logger="mla_compile.kernels"):
        assert not launch.available()
        assert not launch.available()
    launch.available.cache_clear()
    (record,) = caplog.records
    assert "runs the reference" in record.message


def on_gpu(*shape: int, **changed: Any) -> Any:
    """What is asked of a tensor on a GPU."""
    told = {"is_cuda": True, "dtype": torch.bfloat16, "device": "cuda", "numel": lambda: math.prod(shape)}
    return SimpleNamespace(**{**told, **changed})


def said_to_be(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is installed, and the GPU has this capability."""
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: name == "triton")
    monkeypatch.setattr(Device, "of", lambda _: replace(PRESETS["sm_90"], capability=capability))
    launch.available.cache_clear()


@pytest.mark.parametrize(
    ("rows", "capability", "read"),
    [
        ({}, (7, 5), False),
        ({}, (8, 0), True),
        ({}, (9, 0), True),
        ({"dtype": torch.float64}, (9, 0), False),
        ({"is_cuda": False}, (9, 0), False),
    ],
)
def test_rows_on_gpus_from_sm_80_on_are_read(
    rows: dict[str, Any], capability: tuple[int, int], read: bool, monkeypatch: pytest.MonkeyPatch
):
    said_to_be(capability, monkeypatch)
    assert launch.reads(on_gpu(2, 9, 40, **rows)) is read
    launch.available.cache_clear()


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({}, True),
        ({"block_table": on_gpu(1, 1)}, True),
        ({"block_table": on_gpu(2, 0)}, False),
        ({"query": on_gpu(2, 0, 4, 40)}, False),
        ({"latent": on_gpu(2, 0, 32)}, False),
        ({"query": on_gpu(2, 1, 4, 40, is_cuda=False)}, False),
    ],
)
def test_calls_with_something_to_compute_are_taken(
    changed: dict[str, Any], taken: bool, monkeypatch: pytest.MonkeyPatch
):
    said_to_be((9, 0), monkeypatch)
    given = {"query": on_gpu(2, 1, 4, 40), "latent": on_gpu(2, 9, 32), **changed}
    assert launch.suits(DecodeCall(**given, scale=0.5)) is taken
    launch.available.cache_clear()


def small(**changed: Any) -> DecodeCall:
    rows = torch.zeros(2, 300, 40, dtype=torch.bfloat16)
    given = DecodeCall(torch.zeros(2, 1, 4, 40, dtype=torch.bfloat16), rows[..., :32], rows[..., 32:], scale=0.5)
    return given._replace(**changed)


def launched(call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor]:
    """What a launch returns for a call that a plan was found for."""
    done = launch.launch(call)
    assert done is not None
    return done


def test_a_launch_passes_every_argument_in_its_place(driver: FakeDriver):
    given = small(mask=torch.ones(2, 1, 1, 300, dtype=torch.bool), sinks=torch.zeros(4), num_splits=3)
    out, lse = launched(given)
    assert (out.shape, out.dtype, lse.shape) == ((2, 1, 4, 32), torch.bfloat16, (2, 1, 4))
    assert [grid for grid, *_ in driver.launched] == [(1, 2, 1), (2, 1, 1), (1, 3, 2), (8, 1, 1)]
    assert {stream for _, stream, _ in driver.launched} == {7}
    scan, listing, attend, combine = (arguments for *_, arguments in driver.launched)
    assert given.mask is not None
    assert given.sinks is not None
    assert (attend["query"], attend["latent"]) == (given.query.data_ptr(), given.latent.data_ptr())
    assert attend["rope"] == attend["latent"] + 64
    assert (scan["mask"], attend["mask"]) == (given.mask.data_ptr(), None)
    assert scan["work"] == listing["work"] == attend["work"]
    assert (combine["out"], combine["lse"]) == (out.data_ptr(), lse.data_ptr())
    assert (combine["part"], combine["part_lse"]) == (attend["out"], attend["lse"])
    assert (combine["sinks"], attend["sinks"]) == (given.sinks.data_ptr(), None)
    assert attend["scale"] == pytest.approx(0.5 * 1.4426950408889634)
    assert (attend["H"], attend["T"], attend["latent_b"], attend["latent_t"]) == (4, 300, 12000, 40)


def test_a_kind_of_call_is_checked_and_compiled_once(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch):
    checked: list[DecodeCall] = []
    monkeypatch.setattr(checks, "check", checked.append)
    for _ in range(3):
        launched(small())
    assert (len(checked), len(driver.launched)) == (1, 3)
    compiled = dict(runner._compiled)
    for tokens, kinds in ((302, 1), (400, 2)):  # planned anew where there are many more; always the same kernel
        rows = torch.zeros(2, tokens, 40, dtype=torch.bfloat16)
        launched(small(latent=rows[..., :32], rope=rows[..., 32:]))
        assert len(checked) == kinds
        assert runner._compiled.keys() == compiled.keys()
    launched(small(causal=True))
    assert runner._compiled.keys() >= compiled.keys()
    launched(small(query=torch.zeros(2, 1, 40, 4, dtype=torch.bfloat16).transpose(2, 3)))
    assert driver.launched[-1][2]["query_h"] == 40


def test_wrong_arguments_are_not_remembered(driver: FakeDriver):
    for _ in range(2):
        with pytest.raises(InputError, match="H of sinks is 3, expected 4"):
            launch.launch(small(sinks=torch.zeros(3)))
    assert not driver.launched


def masked(**changed: Any) -> DecodeCall:
    return small(mask=torch.ones(2, 1, 1, 300, dtype=torch.bool), num_splits=3, **changed)


def test_a_call_with_a_schedule_launches_attention_only(driver: FakeDriver):
    first = masked()
    schedule = launch.schedule(first)
    scan, listing = (arguments for *_, arguments in driver.launched)
    assert scan["work"] == listing["work"] == schedule.data_ptr()
    for _ in range(2):
        driver.launched.clear()
        launched(first._replace(schedule=schedule))
        attend, combine = (arguments for *_, arguments in driver.launched)
        assert attend["work"] == schedule.data_ptr()
        assert combine["part"] == attend["out"]


def test_a_schedule_of_a_call_without_anything_to_prepare_is_empty(driver: FakeDriver):
    assert launch.schedule(small(seq_lens=torch.full((2,), 9, dtype=torch.int32))).numel() == 0
    assert not driver.launched


def test_schedules_that_do_not_fit_are_refused(driver: FakeDriver):
    call = masked()
    schedule = launch.schedule(call)
    driver.launched.clear()
    moved = torch.zeros(schedule.numel() + 1, dtype=torch.int64)[1:]
    with pytest.raises(InputError, match="schedule is not aligned to 16 bytes"):
        launch.launch(call._replace(schedule=moved))
    with pytest.raises(InputError, match="plan and schedule"):
        launch.launch(call._replace(schedule=schedule), launch.chosen_plan(call, PRESETS["sm_90"]))
    assert not driver.launched


class Recorder:
    """Stands for compiling: a launch leaves the name of its step, and the addresses of its buffers."""

    def __init__(self) -> None:
        self.launched: dict[str, dict[str, int]] = {}

    def launch_of(self, step: Any, places: dict[str, int], _: int) -> Any:
        def go(_: int, addresses: list[int]) -> None:
            self.launched[step.name] = {name: addresses[places[name]] for name in step.buffers.values()}

        return go


@pytest.fixture
def hopper(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(Device, "of", lambda _: PRESETS["sm_90"])
    monkeypatch.setattr(runner, "launch_of", recorder.launch_of)
    monkeypatch.setattr(launch.hopper_runner, "launch_of", recorder.launch_of)
    return recorder


def ragged(off: int = 0) -> DecodeCall:
    """A call that the Hopper kernel takes, unless its rows begin ``off`` elements further on."""
    rows = torch.zeros(12 * 64 * 576 + 8, dtype=torch.bfloat16)[off:][: 12 * 64 * 576].view(12, 64, 576)
    query, lens = torch.zeros(3, 1, 64, 576, dtype=torch.bfloat16), torch.full((3,), 70, dtype=torch.int32)
    table = torch.zeros(3, 4, dtype=torch.int32)
    return DecodeCall.paged(query, rows[..., :512], rows[..., 512:], table, lens, scale=0.5)


def test_a_schedule_holds_the_cut_of_a_ragged_batch(hopper: Recorder):
    schedule = launch.schedule(ragged())
    (cut,) = hopper.launched.values()
    sizes = {"items": 8 * 133, "shift": 12, "first": 12, "count": 12}
    assert all(cut[name] % 16 == 0 for name in sizes)
    ends = sorted((cut[name], cut[name] + size) for name, size in sizes.items())
    assert ends[0][0] == schedule.data_ptr()
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    assert ends[-1][1] <= schedule.data_ptr() + 8 * schedule.numel()
    hopper.launched.clear()
    launched(ragged()._replace(schedule=schedule))
    assert [*hopper.launched] == ["mla_seesaw", "combine_slots"]
    assert {name: hopper.launched["mla_seesaw"][name] for name in ("items", "shift")} == {
        name: cut[name] for name in ("items", "shift")
    }
    assert {name: hopper.launched["combine_slots"][name] for name in ("first", "count")} == {
        name: cut[name] for name in ("first", "count")
    }


@pytest.mark.parametrize("off", [0, 1])
def test_a_layer_that_runs_another_kernel_prepares_itself(off: int, hopper: Recorder):
    """The Hopper kernel's lists are of 64 keys, the portable one's of fewer."""
    paged = ragged(off)
    assert paged.rope is not None
    layer = DecodeCall(paged.query, paged.latent[:3], paged.rope[:3], scale=0.5)
    layer = layer._replace(mask=torch.ones(3, 1, 1, 64, dtype=torch.bool))
    schedule = launch.schedule(layer)
    assert [*hopper.launched] == ["scan_mask", "list_tiles"]
    hopper.launched.clear()
    launched(layer._replace(schedule=schedule))
    assert [*hopper.launched] == (["mla_seesaw"] if off == 0 else ["scan_mask", "list_tiles", "attend"])


@pytest.mark.parametrize("why", ["rows off a 16-byte step", "does not compile"])
@pytest.mark.usefixtures("driver")
def test_the_portable_kernel_takes_over_from_hoppers(why: str, monkeypatch: pytest.MonkeyPatch):
    taken: list[str] = []
    monkeypatch.setattr(Device, "of", lambda _: PRESETS["sm_90"])
    monkeypatch.setattr(runner, "launch_of", lambda step, *_: taken.append(step.name) or (lambda *_: None))
    monkeypatch.setattr(launch.hopper_runner, "launch_of", lambda step, *_: taken.append(step.name))
    off = why != "does not compile"
    rows = torch.zeros(2, 300, 584, dtype=torch.bfloat16)[..., off : 576 + off]
    query = torch.zeros(2, 1, 64, 576, dtype=torch.bfloat16)
    launched(DecodeCall(query, rows[..., :512], rows[..., 512:], scale=0.5, num_splits=1))
    assert taken == (["attend"] if off else ["mla_seesaw", "attend"])


@pytest.mark.usefixtures("driver")
def test_rows_too_wide_for_the_device_are_left_to_the_reference(caplog: pytest.LogCaptureFixture):
    launch._say_once.cache_clear()
    wide = small(latent=torch.zeros(2, 3, 8192, dtype=torch.bfloat16), rope=None)
    wide = wide._replace(query=torch.zeros(2, 1, 4, 8192, dtype=torch.bfloat16))
    with caplog.at_level(logging.WARNING, logger="mla_compile.kernels"):
        assert launch.launch(wide) is None
        assert launch.launch(wide) is None
    (record,) = caplog.records
    assert "runs the reference: plan: rows of 8192+0 columns" in record.message
    with pytest.raises(NoPlanError):
        launch.chosen_plan(wide, PRESETS["sm_80"])
