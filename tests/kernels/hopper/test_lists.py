"""What is launched for lists of keys on Hopper: its arguments, its scratch, and what they make the kernel compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_compile.kernels import launch
from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.devices import PRESETS, Device
from mla_compile.kernels.hopper import lists
from mla_compile.kernels.hopper import runner as hopper_runner
from mla_compile.kernels.hopper import steps as hopper_steps
from mla_compile.kernels.launch import chosen_plan
from mla_compile.kernels.triton import runner
from tests.support.fake_driver import FakeDriver
from tests.support.gluon_list_cases import run_step
from tests.support.lists import lists as random_lists

H200 = PRESETS["sm_90"]


def call(B: int = 2, S: int = 3, H: int = 20, T: int = 300, k: int = 100, **changed: Any) -> DecodeCall:
    """A call over a contiguous cache with room behind its rows."""
    g = torch.Generator().manual_seed(0)
    room = torch.full((B, T + 7, 640), torch.nan, dtype=torch.bfloat16)
    room[:, :T, 32:608] = torch.randn(B, T, 576, generator=g).bfloat16()
    rows = room[:, :T, 32:608]
    query = torch.randn(B, H, S, 576, generator=g).bfloat16().transpose(1, 2)
    given = DecodeCall(query, rows[..., :512], rows[..., 512:], indices=random_lists(B, S, T, k), scale=0.07)
    return given._replace(causal=True, num_splits=1)._replace(**changed)


def paged(page: int, layers: int, **changed: Any) -> DecodeCall:
    """The same over pages of several layers, side by side; past a request's length the table names none."""
    g = torch.Generator().manual_seed(1)
    lens = torch.tensor([300, 130], dtype=torch.int32)
    count = [-(-int(n) // page) for n in lens]
    pool = torch.full((sum(count) + 1, layers, page, 576), torch.nan, dtype=torch.bfloat16)
    pool[:, -1] = torch.randn(len(pool), page, 576, generator=g).bfloat16()
    table = torch.full((2, max(count) + 1), -1, dtype=torch.int32)
    order = torch.randperm(sum(count), generator=g).int()
    for b, pages in enumerate(order.split(count)):
        table[b, : count[b]] = pages
    rows = pool[:, -1]
    return call(latent=rows[..., :512], rope=rows[..., 512:], block_table=table, seq_lens=lens)._replace(**changed)


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.5


def without_rope(given: DecodeCall, **changed: Any) -> DecodeCall:
    """The same over rows that are keys and values at once."""
    return given._replace(query=given.query[..., :512], rope=None)._replace(**changed)


CALLS = {
    "contiguous": call(),
    "contiguous, float32 query": call(query=call().query.float()),
    "lengths, sinks": call(seq_lens=torch.tensor([300, 20], dtype=torch.int32), sinks=torch.linspace(-1, 3, 20)),
    "splits": call(num_splits=3),
    "soft-cap, window": call(softcap=3.0, window=120),
    "mask of tokens": call(mask=mask(2, 1, 3, 300)),
    "mask of keys": call(mask=mask(1, 1, 1, 300)),
    "mask of requests, expanded": call(mask=mask(2, 1, 1, 300).expand(2, 20, 3, 300)),
    "pages in one piece": paged(64, 1),
    "pages of two layers": paged(16, 2, num_splits=2),
    "pages of a row": paged(1, 2),
    "no rope, sinks, window": without_rope(call(), sinks=torch.linspace(-1, 3, 20), window=120),
    "no rope, pages of two layers, splits": without_rope(paged(16, 2), num_splits=2),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_step_makes_the_kernel_compute_the_call(name: str):
    """Its own arguments, in the simulator: strides, offsets and flags, not only their names."""
    pytest.importorskip("triton.experimental.gluon")
    run_step(CALLS[name], H200)


def test_what_is_launched():
    pytest.importorskip("triton.experimental.gluon")
    given = call(H=80, num_splits=2)
    assert hopper_steps.suits(given, H200)
    found = chosen_plan(given, H200)
    assert (found.kernel, found.splits, found.scheduled) == ("gluon", 2, False)
    attention, combine = hopper_steps.steps(given, found, H200)
    assert [attention.name, combine.name] == ["mla_seesaw_lists", "combine"]
    assert attention.grid == (2 * 6, 2, 1)
    assert combine.grid[0] == 2 * 3 * 80
    scratch = hopper_steps.scratch(given, found, H200)
    assert set(scratch) == {"out", "lse", "part", "part_lse", "places", "words"}
    assert scratch["part"][0] == (2, 2, 240, 512)
    names = {"query", "latent", "rope", "indices"}
    assert set(attention.buffers.values()) == names | {"part", "part_lse", "places", "words"}
    assert not hopper_steps.prepared(given, found, H200)


@pytest.mark.parametrize(
    ("given", "causal", "page"),
    [
        (call(S=1), False, 0),  # the last token sees all keys
        (call(S=2), True, 0),
        (call(causal=False), False, 0),
        (paged(16, 2), True, 16),
        (paged(16, 1), True, 0),  # rows are equally spaced: places are not divided into page and row
    ],
)
def test_what_a_kernel_is_compiled_for(given: DecodeCall, causal: bool, page: int):
    pytest.importorskip("triton.experimental.gluon")
    attention = hopper_steps.steps(given, chosen_plan(given, H200), H200)[0]
    assert (attention.constants["CAUSAL"], attention.constants["PAGE"]) == (causal, page)
    assert attention.constants["LIST_PAGE"] == given.sizes.page


def test_scratch_has_room_for_every_list_of_a_kind():
    assert lists.scratch(call(k=100))["places"][0] == (2, 3, 2, 64)
    assert lists.scratch(call(T=2300, k=2048))["words"][0] == (2, 3, 32, 2)
    assert lists.scratch(call(T=2300, k=2049))["words"][0] == (2, 3, 36, 2)  # as 2,304 entries


@pytest.fixture
def taken(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is launched, on a card that is said to be an H200."""
    found: list[str] = []

    def launch_of(step: Any, *_: Any) -> Any:
        return lambda *_: found.append(step.name)

    monkeypatch.setattr(Device, "of", lambda _: H200)
    monkeypatch.setattr(runner, "launch_of", launch_of)
    monkeypatch.setattr(hopper_runner, "launch_of", launch_of)
    return found


@pytest.mark.parametrize(
    ("given", "kernel"),
    [
        (call(), "mla_seesaw_lists"),
        (paged(16, 2), "mla_seesaw_lists"),
        (paged(1, 1), "mla_seesaw_lists"),
        (call(mask=mask(2, 1, 3, 300)), "mla_seesaw_lists"),
        (call(softcap=2.0, window=9), "mla_seesaw_lists"),
        (without_rope(call()), "mla_seesaw_lists"),
        (call(H=16), "attend"),
        (call(mask=torch.zeros(2, 1, 1, 300)), "attend"),
        (call(latent=torch.zeros(2, 300, 577, dtype=torch.bfloat16)[..., 1:513]), "attend"),  # off a 16-byte step
    ],
    ids=[
        "contiguous",
        "pages",
        "single rows",
        "mask",
        "soft-cap, window",
        "no rope",
        "few heads",
        "added mask",
        "off a step",
    ],
)
def test_which_kernel_runs(given: DecodeCall, kernel: str, taken: list[str]):
    pytest.importorskip("triton.experimental.gluon")
    assert launch.launch(given) is not None
    assert taken == [kernel]
    taken.clear()
    assert launch.launch(given._replace(schedule=launch.schedule(given))) is not None
    assert taken == [kernel]


def test_lists_of_a_growing_cache_are_told(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton.experimental.gluon")
    launched: list[list[Any]] = []
    monkeypatch.setattr(Device, "of", lambda _: H200)
    monkeypatch.setattr(hopper_runner, "compiled", lambda *_: "a kernel")
    monkeypatch.setattr(hopper_runner, "bind", lambda *_: lambda _, arguments: launched.append(arguments))
    room = torch.zeros(2, 400, 576, dtype=torch.bfloat16)
    for T in (100, 101, 120, 128):
        rows = room[:, :T]
        assert launch.launch(call(T=T, k=T, latent=rows[..., :512], rope=rows[..., 512:])) is not None
    assert len(launch._kinds) == 1
    from mla_compile.kernels.hopper.list_gluon import mla_seesaw_lists as fn

    told = [dict(zip(fn.arg_names, arguments, strict=True)) for arguments in launched]
    assert [a["T"] for a in told] == [a["entries"] for a in told] == [100, 101, 120, 128]
    assert {a["latent_b"] for a in told} == {a["rope_b"] for a in told} == {576 * 400}
    assert [a["indices_b"] for a in told] == [3 * T for T in (100, 101, 120, 128)]
