"""Which calls over float8 rows the Hopper kernel takes, what is launched for them, and what that makes it compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_compile.kernels import launch
from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.devices import PRESETS, Device
from mla_compile.kernels.hopper import runner as hopper_runner
from mla_compile.kernels.hopper import steps as hopper_steps
from mla_compile.kernels.triton import runner
from tests.support.fake_driver import FakeDriver
from tests.support.gluon_fp8_cases import FP8_SOURCE
from tests.support.gluon_list_cases import run_step
from tests.support.lists import lists as random_lists

H200 = PRESETS["sm_90"]
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
NAN = 0x7F


def call(B: int = 2, S: int = 2, H: int = 20, T: int = 150, **changed: Any) -> DecodeCall:
    """A call over a contiguous cache with room behind its rows and beside them."""
    g = torch.Generator().manual_seed(0)
    room = torch.full((B, T + 7, 640), NAN, dtype=torch.uint8)
    room[:, :T, 32:608] = torch.randn(B, T, 576, generator=g).to(FP8).view(torch.uint8)
    rows = room.view(FP8)[:, :T, 32:608]
    query = torch.randn(B, H, S, 576, generator=g).to(BF16).transpose(1, 2)
    given = DecodeCall(query, rows[..., :512], rows[..., 512:], kv_scale=torch.tensor(0.5), scale=0.07)
    return given._replace(causal=True, num_splits=1)._replace(**changed)


def paged(page: int, layers: int, **changed: Any) -> DecodeCall:
    """The same over pages of several layers, side by side, with a scale for each token."""
    g = torch.Generator().manual_seed(1)
    lens = torch.tensor([150, 70], dtype=torch.int32)
    count = [-(-int(n) // page) for n in lens]
    pool = torch.full((sum(count) + 1, layers, page, 576), NAN, dtype=torch.uint8)
    pool[:, -1] = torch.randn(len(pool), page, 576, generator=g).to(FP8).view(torch.uint8)
    table = torch.full((2, max(count) + 1), -1, dtype=torch.int32)
    order = torch.randperm(sum(count), generator=g).int()
    for b, pages in enumerate(order.split(count)):
        table[b, : count[b]] = pages
    rows, scales = pool.view(FP8)[:, -1], torch.rand(len(pool), page, layers, generator=g)[..., 0]
    given = call(latent=rows[..., :512], rope=rows[..., 512:], block_table=table, seq_lens=lens, kv_scale=scales)
    return given._replace(**changed)


def rows_656(page: int = 0, layers: int = 1, groups: int = 4, **changed: Any) -> DecodeCall:
    """A call over rows as FlashMLA's of 656 bytes, all views of one buffer; with pages, of several layers."""
    g = torch.Generator().manual_seed(4)
    given = paged(page, 1) if page else call()
    outer, inner = given.latent.shape[:2]
    room = inner if page else inner + 7
    start = 512 + 4 * groups
    memory = torch.full((outer, layers, room, start + 128), 0xFF, dtype=torch.uint8)  # NaN, whatever it is read as
    rows = memory[:, -1, :inner]
    rows[..., :512] = given.latent.view(torch.uint8)
    latent, rope = rows[..., :512].view(FP8), rows[..., start:].view(BF16)
    kv_scale = rows[..., 512:start].view(torch.float32)
    kv_scale.copy_(torch.rand(kv_scale.shape, generator=g) + 0.1)
    rope.copy_(torch.randn(rope.shape, generator=g))
    if groups == 4:
        size = room * 656
        assert latent.stride() == (layers * size, 656, 1)
        assert kv_scale.stride() == (layers * size // 4, 164, 1)
        assert rope.stride() == (layers * size // 2, 328, 1)
    return given._replace(latent=latent, rope=rope, kv_scale=kv_scale)._replace(**changed)


def listed(given: DecodeCall, k: int = 70, **changed: Any) -> DecodeCall:
    """The same with lists of keys."""
    B, S = given.query.shape[:2]
    return given._replace(indices=random_lists(B, S, 150, k))._replace(**changed)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(5)) + 0.1


def mask(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.5


CALLS = {
    "one scale": call(),
    "sinks": call(sinks=torch.linspace(-1, 3, 20)),
    "scales of tokens": call(kv_scale=torch.rand(150, 2, generator=torch.Generator().manual_seed(3)).T),
    "float32 query, scales of tokens": call(kv_scale=torch.rand(2, 150), query=call().query.float()),
    "soft-cap, window, splits": call(softcap=3.0, window=70, num_splits=2),
    "pages of two layers": paged(16, 2, num_splits=2),
    "pages of a row": paged(1, 1),
    "656 bytes": rows_656(),
    "656 bytes, pages": rows_656(64, sinks=torch.linspace(-1, 3, 20)),
    "656 bytes, pages of two layers, splits": rows_656(16, 2, num_splits=2),
    "656 bytes, float32 query, soft-cap, window": rows_656(query=call().query.float(), softcap=3.0, window=70),
    "672 bytes, pages of a row": rows_656(1, groups=8),
    "scales of groups far apart": rows_656(kv_scale=scales(4, 2, 150).permute(1, 2, 0)),
    "scales of groups, the same for all requests": rows_656(kv_scale=scales(150, 2).expand(2, 150, 2)),
    "rope in bfloat16, one scale": call(rope=call().rope.to(BF16)),
    "rope in bfloat16, scales of tokens": rows_656(16, kv_scale=paged(16, 2).kv_scale),
    "lists": listed(call()),
    "lists, scales of tokens, splits": listed(paged(16, 2), num_splits=2),
    "lists, scales of tokens, mask": listed(call(kv_scale=scales(2, 150), mask=mask(2, 1, 2, 150))),
    "lists, 656 bytes": listed(rows_656()),
    "lists, 656 bytes, pages": listed(rows_656(64, sinks=torch.linspace(-1, 3, 20))),
    "lists, 656 bytes, pages of two layers": listed(rows_656(64, 2), num_splits=2, softcap=3.0, window=70),
    "lists, 656 bytes, pages of a row": listed(rows_656(1), query=call().query.float()),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_step_makes_the_kernel_compute_the_call(name: str):
    """Its own arguments, in the simulator: strides, offsets and flags, not only their names."""
    pytest.importorskip("triton.experimental.gluon")
    given = CALLS[name]
    assert hopper_steps.suits(given, H200)
    step = run_step(given, H200, FP8_SOURCE, 5e-3, DTYPE="bf16")  # a float32 query is rounded to that
    assert step.name == ("mla_seesaw_fp8" if given.indices is None else "mla_seesaw_fp8_lists")


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
        (call(), "mla_seesaw_fp8"),
        (call(query=call().query.half()), "mla_seesaw_fp8"),
        (paged(1, 2), "mla_seesaw_fp8"),
        (call(kv_scale=torch.rand(2, 150), query=call().query.float()), "mla_seesaw_fp8"),
        (call(latent=call().latent[:, ::2], rope=call().rope[:, ::2]), "mla_seesaw_fp8"),
        (call(query=call().query.float()), "attend"),  # its products are in float16
        (call(rope=call().rope.to(BF16)), "mla_seesaw_fp8"),
        (call(rope=call().rope.half(), query=call().query.half()), "attend"),  # rows times scales may exceed float16
        (rows_656(64, num_splits=1), "mla_seesaw_fp8"),
        (rows_656(64, query=call().query.float()), "mla_seesaw_fp8"),
        (rows_656(kv_scale=torch.ones(2 * 150 * 4 + 1)[1:].view(2, 150, 4)), "mla_seesaw_fp8"),  # scales off a step
        (rows_656(groups=1), "attend"),  # rows of 644 bytes, and rope off a 16-byte step
        (rows_656(groups=16), "attend"),  # a group is half of a piece
        (call(H=8), "attend"),
        (listed(call()), "mla_seesaw_fp8_lists"),
        (listed(call(query=call().query.half())), "mla_seesaw_fp8_lists"),
        (listed(call(query=call().query.float())), "attend"),
        (listed(paged(1, 2)), "mla_seesaw_fp8_lists"),
        (listed(rows_656(64)), "mla_seesaw_fp8_lists"),
        (listed(rows_656(mask=mask(2, 1, 2, 150))), "mla_seesaw_fp8_lists"),
        (listed(rows_656(groups=1)), "attend"),
        (listed(call(query=call(H=16).query)), "attend"),
        (call(latent=torch.zeros(2, 150, 520, dtype=FP8)[..., 8:]), "attend"),  # off a 16-byte step
    ],
    ids=[
        "one scale", "float16", "pages of a row", "float32 query, scales", "every other row", "float32 query",
        "rope in bfloat16", "rope in float16", "656 bytes", "656 bytes, float32 query", "656 bytes, scales off a step",
        "644 bytes", "16 groups", "few heads", "lists", "lists, float16", "lists, float32 query",
        "lists, pages of a row", "lists, 656 bytes", "lists, 656 bytes, mask", "lists, 644 bytes", "lists, few heads",
        "off a step",
    ],
)  # fmt: skip
def test_which_kernel_runs(given: DecodeCall, kernel: str, taken: list[str]):
    pytest.importorskip("triton.experimental.gluon")
    assert launch.launch(given) is not None
    assert taken == [kernel]


def test_a_mask_and_a_ragged_batch_are_prepared(taken: list[str]):
    pytest.importorskip("triton.experimental.gluon")
    assert launch.launch(call(mask=mask(2, 1, 1, 150))) is not None
    assert taken == ["scan_mask", "list_tiles", "mla_seesaw_fp8"]
    taken.clear()
    assert launch.launch(paged(64, 1, num_splits=0)) is not None
    assert taken == ["cut", "mla_seesaw_fp8", "combine_slots"]
    taken.clear()
    assert launch.launch(rows_656(64, num_splits=0)) is not None
    assert taken == ["cut", "mla_seesaw_fp8", "combine_slots"]


def told(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, calls: list[DecodeCall]) -> list[dict[str, Any]]:
    """What each of some calls tells the one kernel that is bound for all."""
    launched: list[list[Any]] = []
    monkeypatch.setattr(Device, "of", lambda _: H200)
    monkeypatch.setattr(hopper_runner, "compiled", lambda *_: "a kernel")
    monkeypatch.setattr(hopper_runner, "bind", lambda *_: lambda _, arguments: launched.append(arguments))
    for given in calls:
        assert launch.launch(given) is not None
    assert len(launch._kinds) == 1
    from mla_compile.kernels.hopper.fp8_gluon import mla_seesaw_fp8 as fn

    return [dict(zip(fn.arg_names, arguments, strict=True)) for arguments in launched]


TOKENS = (100, 101, 128)


@pytest.mark.parametrize("lists", [False, True])
def test_a_growing_cache_is_told(lists: bool, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton.experimental.gluon")
    calls = []
    for T in TOKENS:
        rows = torch.zeros(2, T, 576, dtype=torch.uint8).view(FP8)
        given = call(latent=rows[..., :512], rope=rows[..., 512:])
        calls.append(given._replace(indices=torch.zeros(2, 2, T, dtype=torch.int32)) if lists else given)
    found = told(driver, monkeypatch, calls)
    assert [a["T"] for a in found] == list(TOKENS)
    assert [a["latent_b"] for a in found] == [a["rope_b"] for a in found] == [576 * T for T in TOKENS]
    assert [a["entries"] for a in found] == (list(TOKENS) if lists else [0, 0, 0])


def test_rows_of_bytes_are_told_in_elements(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton.experimental.gluon")
    calls, tokens = [], (100, 102, 128)
    for T in tokens:
        rows = torch.zeros(2, T, 656, dtype=torch.uint8)
        latent, rope = rows[..., :512].view(FP8), rows[..., 528:].view(BF16)
        calls.append(call(latent=latent, rope=rope, kv_scale=rows[..., 512:528].view(torch.float32)))
    found = told(driver, monkeypatch, calls)
    for name, size in (("latent_b", 656), ("rope_b", 328), ("scale_b", 164)):
        assert [a[name] for a in found] == [size * T for T in tokens]
