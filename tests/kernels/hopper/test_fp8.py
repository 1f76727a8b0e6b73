"""Which calls over float8 rows the Hopper kernel takes, what is launched for them, and what that makes it compute."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from mla_compile.kernels import launch, reference
from mla_compile.kernels.call import TENSORS, DecodeCall
from mla_compile.kernels.devices import PRESETS, Device
from mla_compile.kernels.hopper import runner as hopper_runner
from mla_compile.kernels.hopper import steps as hopper_steps
from mla_compile.kernels.hopper.step import GluonStep
from mla_compile.kernels.launch import chosen_plan
from mla_compile.kernels.triton import runner
from mla_compile.kernels.triton.steps import BUFFERS
from tests.support.fake_driver import FakeDriver
from tests.support.gluon_cases import merged
from tests.support.gluon_fp8_cases import FP8_SOURCE
from tests.support.gluon_list_cases import pointer_to
from tests.support.gluon_machine import load
from tests.support.gluon_simulator import Pointer

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
}


@pytest.mark.parametrize("name", CALLS)
def test_a_step_makes_the_kernel_compute_the_call(name: str):
    """Its own arguments, in the simulator: strides, offsets and flags, not only their names."""
    pytest.importorskip("triton.experimental.gluon")
    given = CALLS[name]
    plan = chosen_plan(given, H200)
    assert hopper_steps.suits(given, H200)
    step = next(s for s in hopper_steps.steps(given, plan, H200, least=0) if isinstance(s, GluonStep))
    assert step.name == "mla_seesaw_fp8"
    module, machine = load(FP8_SOURCE)
    tensors = dict(zip(BUFFERS, given[:TENSORS], strict=True))
    kinds = {BF16: "bf16", torch.float32: "fp32"}
    made = {}
    for buffer, (shape, dtype) in hopper_steps.scratch(given, plan, H200).items():
        made[buffer] = Pointer(np.full(math.prod(shape), np.nan, np.float32), kinds[dtype])
    pointers = made | {
        n: words(tensors[n]) if n in ("latent", "rope") else pointer_to(tensors[n])
        for n in step.buffers.values()
        if n not in made
    }
    arguments = step.arguments(pointers) | {"DTYPE": "bf16"}
    machine.launch(module.mla_seesaw_fp8, step.grid, 0, **arguments)
    want, want_lse = reference.decode_attention(given._replace(query=given.query.double()))
    B, M = want.shape[0], want.shape[1] * want.shape[2]
    out, lse = made["out"].data.reshape(B, M, 512), made["lse"].data.reshape(B, M)
    if plan.splits > 1:
        part = made["part"].data.reshape(plan.splits, B, M, 512)
        part_lse = made["part_lse"].data.reshape(plan.splits, B, M)
        for b in range(B):
            out[b], lse[b] = merged(part[:, b], part_lse[:, b], None)
    want = want.double().numpy().reshape(out.shape)
    assert np.abs(lse - want_lse.numpy().reshape(lse.shape)).max() < 5e-3  # a float32 query is rounded to bf16
    assert np.linalg.norm(out - want) <= 8e-3 * np.linalg.norm(want)


def words(x: torch.Tensor) -> Pointer:
    """Where a tensor begins: of float8, in its memory as int32."""
    if x.dtype != FP8:
        return pointer_to(x)
    memory = x.as_strided((x.untyped_storage().nbytes(),), (1,), 0)
    return Pointer(memory.view(torch.uint8).numpy().view(np.int32), "int32", x.storage_offset() // 4)


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
        (call(rope=call().rope.to(BF16)), "attend"),  # a scale that rope does not have
        (call(H=8), "attend"),
        (call(indices=torch.zeros(2, 2, 9, dtype=torch.int32)), "attend"),
        (call(latent=torch.zeros(2, 150, 520, dtype=FP8)[..., 8:]), "attend"),  # off a 16-byte step
    ],
    ids=[
        "one scale", "float16", "pages of a row", "float32 query, scales", "every other row", "float32 query",
        "rope in half precision", "few heads", "lists", "off a step",
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


def test_a_growing_cache_is_told(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton.experimental.gluon")
    launched: list[list[Any]] = []
    monkeypatch.setattr(Device, "of", lambda _: H200)
    monkeypatch.setattr(hopper_runner, "compiled", lambda *_: "a kernel")
    monkeypatch.setattr(hopper_runner, "bind", lambda *_: lambda _, arguments: launched.append(arguments))
    for T in (100, 101, 128):
        rows = torch.zeros(2, T, 576, dtype=torch.uint8).view(FP8)
        assert launch.launch(call(latent=rows[..., :512], rope=rows[..., 512:])) is not None
    assert len(launch._kinds) == 1
    from mla_compile.kernels.hopper.fp8_gluon import mla_seesaw_fp8 as fn

    told = [dict(zip(fn.arg_names, arguments, strict=True)) for arguments in launched]
    assert [a["T"] for a in told] == [100, 101, 128]
    assert [a["latent_b"] for a in told] == [a["rope_b"] for a in told] == [576 * T for T in (100, 101, 128)]
