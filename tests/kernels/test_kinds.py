"""Calls of different numbers of tokens that are launched alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_compile.errors import InputError
from mla_compile.kernels import launch
from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.devices import PRESETS, Device
from mla_compile.kernels.hopper import runner as hopper_runner
from mla_compile.kernels.kinds import LARGEST, grown, rounded
from tests.support.fake_driver import FakeDriver

B, WIDTH = 2, 40


def rows(T: int, dense: bool) -> Tensor:
    """[B,T,L+R]: requests behind each other, or a view of a larger buffer."""
    return torch.zeros(B, T if dense else 3000, WIDTH, dtype=torch.bfloat16)[:, :T]


def call(T: int, dense: bool = False, **changed: Any) -> DecodeCall:
    x = rows(T, dense)
    given = DecodeCall(torch.zeros(B, 1, 4, WIDTH, dtype=torch.bfloat16), x[..., :32], x[..., 32:], scale=0.5)
    return given._replace(**changed)


def test_tokens_are_rounded_up_by_an_eighth_at_most():
    for T in (*range(2, 5000), LARGEST - 1, LARGEST):
        assert T <= rounded(T) <= max(T + 63, T * 9 / 8)
        assert rounded(rounded(T)) == rounded(T)
    assert len({rounded(T) for T in range(2, LARGEST)}) == 8 + 8 + 8 * 10


@pytest.mark.parametrize("dense", [False, True])
def test_a_growing_cache_is_a_handful_of_kinds(dense: bool, driver: FakeDriver):
    tokens = range(1000, 1300)
    for T in tokens:
        assert launch.launch(call(T, dense)) is not None
    # Of requests behind each other, those of even T begin at multiples of 16 elements: two kinds of each.
    assert len(launch._kinds) == len({rounded(T) for T in tokens}) * (1 + dense)
    attends = [given for _, _, given in driver.launched if "latent_b" in given]
    assert [a["T"] for a in attends] == [*tokens]
    assert [a["latent_b"] for a in attends] == [WIDTH * (T if dense else 3000) for T in tokens]
    assert [a["rope_b"] for a in attends] == [a["latent_b"] for a in attends]


@pytest.mark.parametrize("groups", [(), (4,)])
@pytest.mark.parametrize("dense", [False, True])
def test_scales_of_tokens_grow_with_them(dense: bool, groups: tuple[int, ...], driver: FakeDriver):
    """A model's own float8 cache is a kind of call, not one of each token."""

    def quantized(T: int) -> DecodeCall:
        room = torch.zeros(B, T if dense else 3000, 32, dtype=torch.uint8).view(torch.float8_e4m3fn)
        scales = torch.ones(B, room.shape[1], *groups)[:, :T]
        return call(T, dense, latent=room[:, :T], rope=rows(T, dense)[..., 32:], kv_scale=scales)

    tokens = range(1010, 1050)
    for T in tokens:
        assert launch.launch(quantized(T)) is not None
    assert len(launch._kinds) == len({rounded(T) for T in tokens}) * (1 + dense) == 2 * (1 + dense)
    attends = [given for _, _, given in driver.launched if "latent_b" in given]
    width = (groups or (1,))[0]
    assert [a["scale_b"] for a in attends] == [width * (T if dense else 3000) for T in tokens]
    whole = quantized(1100)
    assert whole.kv_scale is not None
    with pytest.raises(InputError, match=r"kv_scale is \[2, 1099"):
        launch.launch(whole._replace(kv_scale=whole.kv_scale[:, 1:]))


def test_a_call_of_sizes_seen_before_is_one_look_up(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch):
    for T in (1000, 1001, 1000):
        launch.launch(call(T))
    monkeypatch.setattr(launch, "grown", None)
    launch.launch(call(1001))
    assert [given["T"] for _, _, given in driver.launched if "latent_b" in given] == [1000, 1001, 1000, 1001]


@pytest.mark.usefixtures("driver")
def test_a_known_kind_still_refuses_rows_of_other_tokens():
    launch.launch(call(1000))
    for name, tokens in (("rope", 1001), ("rope", 999)):
        with pytest.raises(InputError, match=f"T of rope is {tokens}, expected 1000"):
            launch.launch(call(1000, **{name: rows(tokens, dense=False)[..., 32:]}))


EXACT: list[dict[str, Any]] = [
    {"mask": torch.ones(1, 1, 1, 300, dtype=torch.bool)},
    {"kv_scale": torch.ones(B, 300, 4, 1)},
    {"block_table": torch.zeros(B, 1, dtype=torch.int32)},
    {"latent": torch.empty_strided((B, 300, 32), (0, 1 << 23, 1), device="meta")},
    {"values": torch.empty_strided((B, 300, 32), (0, 1, 1 << 26), device="meta")},
    {"latent": torch.zeros(B, 1, 32), "rope": torch.zeros(B, 1, 8)},
    {"latent": torch.zeros(B, 1, 300, 32)},
    {"rope": torch.zeros(300, 8)},
]


@pytest.mark.parametrize("changed", EXACT, ids=",".join)
def test_where_more_than_scalars_follows_from_the_tokens_every_number_is_a_kind(changed: dict[str, Any]):
    assert grown(call(300)) is not None
    assert grown(call(300, kv_scale=torch.ones(()))) is not None
    assert grown(call(300, **changed)) is None


def test_strides_that_do_not_follow_from_the_tokens_tell_kinds_apart():
    def form(T: int, outer: int) -> Any:
        x = torch.empty_strided((B, T, WIDTH), (outer, WIDTH, 1), device="meta")
        found = grown(call(300)._replace(latent=x[..., :32], rope=x[..., 32:]))
        assert found is not None
        return found[:2]

    assert form(300, 300 * WIDTH) == form(302, 302 * WIDTH) != form(301, 301 * WIDTH)
    assert form(300, 24000) == form(301, 24000) != form(300, 24016)
    assert form(300, 24000) != form(300, 300 * WIDTH)
    # Rows that overlap: a distance of 0 or 1 is a constant of the kernel.
    assert len({form(300, outer) for outer in (0, 1, 2, 300 * WIDTH)}) == 4


@pytest.mark.parametrize(("dense", "R"), [(False, 64), (True, 64), (True, 0)])
def test_the_copy_engine_is_told_the_tokens_there_are(
    dense: bool, R: int, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
):
    """A box of more tokens would read past the end of the cache."""
    launched: list[list[Any]] = []
    monkeypatch.setattr(Device, "of", lambda _: PRESETS["sm_90"])
    monkeypatch.setattr(hopper_runner, "compiled", lambda *_: "a kernel")
    monkeypatch.setattr(hopper_runner, "bind", lambda *_: lambda _, arguments: launched.append(arguments))
    monkeypatch.setattr(hopper_runner, "descriptor", lambda box, address: (box, address))
    for T in (300, 310, 319):
        row, count = 512 + R, 2 if R else 1
        room = torch.zeros(B, T if dense else 400, row, dtype=torch.bfloat16)[:, :T]
        query = torch.zeros(B, 1, 64, row, dtype=torch.bfloat16)
        launch.launch(DecodeCall(query, room[..., :512], room[..., 512:] if R else None, scale=0.5, num_splits=1))
        boxes = [x for x in launched[-1] if isinstance(x, tuple)]
        assert [box.shape for box, _ in boxes] == [(B, T, 512), (B, T, 64)][:count]
        assert [box.strides for box, _ in boxes] == [(row * (T if dense else 400), row, 1)] * count
        assert [address for _, address in boxes] == [room.data_ptr(), room.data_ptr() + 1024][:count]
        assert T in launched[-1]
    assert len(launch._kinds) == 1
