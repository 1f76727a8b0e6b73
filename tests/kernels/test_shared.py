"""The size of a schedule: enough for every plan, on every device."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from mla_compile.kernels import shared
from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.devices import PRESETS
from mla_compile.kernels.hopper import steps as hopper_steps
from mla_compile.kernels.launch import chosen_plan
from mla_compile.kernels.triton import steps


def call(B: int, S: int, T: int, page: int, mask: tuple[int, ...] | None, width: int = 576) -> DecodeCall:
    """A call on meta tensors of ``width`` columns."""

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = meta(B * T // page if page else B, page or T, width)
    given = DecodeCall(meta(B, S, 16, width), rows[..., :-64], rows[..., -64:], scale=1.0)
    given = given._replace(seq_lens=meta(B, dtype=torch.int32))
    if page:
        return given._replace(block_table=meta(B, T // page, dtype=torch.int32))
    return given if mask is None else given._replace(mask=meta(*mask, dtype=torch.bool))


@pytest.mark.parametrize("arch", PRESETS)
def test_the_buffers_of_any_plan_fit(arch: str):
    device, full = PRESETS[arch], 0
    for B, S, T, width in product((1, 2, 37), (1, 4), (64, 1088, 8192), (64 + 64, 576)):
        for page, mask in ((0, (1, 1, 1, T)), (0, (B, 1, 1, T)), (0, (B, 16, S, 1)), (64, None), (0, None)):
            given = call(B, S, T, page, mask, width)
            plan = chosen_plan(given, device)
            buffers = (hopper_steps if plan.kernel == "gluon" else steps).prepared(given, plan, device)
            # As one more buffer would, an end of the layout shows the size of what lies before it.
            end = shared.offsets(buffers | {"end": ((), torch.int64)})["end"]
            assert end <= 8 * shared.elements(given)
            full += end > 0
    assert full > 100


def test_no_device_has_anything_to_prepare_for_lengths_alone():
    assert shared.elements(call(4, 1, 100, 0, None)) == 0
    paged = call(4, 1, 128, 64, None)
    assert shared.elements(paged) > 0
    assert shared.elements(paged._replace(deterministic=True)) == shared.elements(paged._replace(num_splits=2)) == 0


def test_buffers_begin_at_aligned_places_and_do_not_meet():
    buffers: shared.Buffers = {"a": ((3,), torch.int32), "b": ((), torch.int64), "c": ((5, 2), torch.int32)}
    assert shared.offsets(buffers) == {"a": 0, "b": 16, "c": 32}
