"""What a launch is made of. Tensors on the meta device: shapes, strides and dtypes are all it depends on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.devices import PRESETS
from mla_compile.kernels.plan import Plan
from mla_compile.kernels.triton.steps import scratch, steps

FP8 = torch.float8_e4m3fn
PLAN = Plan("triton", 16, 32, 4, 3, 4, None, 0)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call(**changed: Any) -> DecodeCall:
    rows = meta(8, 4096, 576)
    return DecodeCall(meta(8, 1, 16, 576), rows[..., :512], rows[..., 512:], scale=0.1)._replace(**changed)


def constants(step: Any) -> dict[str, Any]:
    return {name: value for name, value in step.constants.items() if name.isupper()}


def test_steps_of_a_plain_call():
    pytest.importorskip("triton")
    attend, combine = steps(call(), PLAN, PRESETS["sm_90"])
    assert (attend.grid, combine.grid) == ((1, 4, 8), (128, 2, 1))
    off = (
        "WIDE",
        "NORMALIZE",
        "CAUSAL",
        "WINDOW",
        "SOFTCAP",
        "MASK_ROWS",
        "TOKEN_SCALE",
        "ROPE_SCALED",
        "DIRECT",
        "PDL",
        "WARPGROUPS",
    )
    assert not any(attend.constants[name] for name in off)
    for absent in ("values", "table", "lengths", "work", "mask", "sinks", "kv_scale"):
        assert attend.constants[absent] is None
    # The row's stride is known to the compiler, the batch's is a multiple of 16.
    assert attend.constants["latent_t"] == 576
    assert "latent_b" in attend.aligned
    fn, signature, _, attributes, options = attend.source()
    assert list(signature) == fn.arg_names
    assert signature["latent"] == "*bf16"
    assert signature["latent_b"] == "i32"
    assert options == {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
    assert attributes[(fn.arg_names.index("latent"),)] == [["tt.divisibility", 16]]
    assert set(scratch(call(), PLAN, PRESETS["sm_90"])) == {"out", "lse", "part", "part_lse"}
    assert [s.name for s in steps(call(), replace(PLAN, splits=1), PRESETS["sm_90"])] == ["attend"]


def test_steps_tell_calls_apart():
    pytest.importorskip("triton")

    def attend(**changed: Any) -> dict[str, Any]:
        return constants(next(s for s in steps(call(**changed), PLAN, PRESETS["sm_90"]) if s.name == "attend"))

    plain = attend()
    for changed, differs in (
        ({"window": 3}, {"WINDOW"}),
        ({"softcap": 3.0}, {"SOFTCAP"}),
        ({"causal": True}, set()),  # one query token: causality hides nothing
        ({"mask": meta(8, 1, 1, 4096, dtype=torch.bool)}, set()),  # all of it is in the list
        ({"mask": meta(8, 16, 1, 4096, dtype=torch.bool)}, {"MASK_ROWS"}),
        ({"values": meta(8, 4096, 100)}, {"V", "BLOCK_V"}),
    ):
        got = attend(**changed)
        assert {name for name in got if got[name] != plain[name]} == differs, changed


def test_products_of_warpgroups_are_hoppers():
    """sm_80 and sm_120 have none, sm_100 others; less than 64 rows or 4 warps are multiplied by warps."""
    pytest.importorskip("triton")
    tile = replace(PLAN, block_m=64, num_warps=8)
    plans = [(tile, arch) for arch in ("sm_80", "sm_90", "sm_100", "sm_120")]
    plans += [(replace(tile, block_m=32), "sm_90"), (replace(tile, num_warps=2), "sm_90")]
    found = [steps(call(), plan, PRESETS[arch])[0].constants["WARPGROUPS"] for plan, arch in plans]
    assert found == [False, True, False, False, False, False]


@pytest.mark.parametrize("far", ["rows", "columns", "near"])
def test_offsets_are_64_bit_where_they_may_pass_2_to_the_31(far: str):
    """The kernels multiply int32 numbers where this says so; test_decode_triton.py runs the other case."""
    pytest.importorskip("triton")
    T = 1 << 16
    if far == "rows":
        latent = meta(1, T, 1 << 16)[..., :512]
    elif far == "columns":
        latent = meta(1, 512, 1 << 23).transpose(1, 2)
    else:
        latent = meta(1, T, (1 << 15) - 16)[..., :512]
    (attend,) = steps(DecodeCall(meta(1, 1, 16, 512), latent, scale=1.0), replace(PLAN, splits=1), PRESETS["sm_90"])
    assert attend.constants["WIDE"] == (far != "near")


def test_fp8_goes_as_bits_where_the_gpu_cannot_convert():
    pytest.importorskip("triton")
    rows = meta(8, 4096, 576, dtype=FP8)
    fp8 = call(latent=rows[..., :512], rope=rows[..., 512:], kv_scale=meta(dtype=torch.float32))
    kinds = {name: steps(fp8, PLAN, PRESETS[name])[0].types["latent"] for name in ("sm_80", "sm_86", "sm_89", "sm_90")}
    assert kinds == {"sm_80": "*u8", "sm_86": "*u8", "sm_89": "*fp8e4nv", "sm_90": "*fp8e4nv"}


def test_scratch_depends_on_sizes_only():
    """CUDA graphs: a launch of the same shapes takes the same buffers, whatever the lengths and the mask hold."""
    mask = torch.zeros(8, 1, 1, 4096, dtype=torch.bool)
    sizes = scratch(call(mask=mask), PLAN, PRESETS["sm_90"])
    assert sizes["work"] == ((6, 8, 128), torch.int64)
    assert scratch(call(mask=mask[:1]), PLAN, PRESETS["sm_90"])["work"] == ((6, 1, 128), torch.int64)
    assert scratch(call(mask=~mask), PLAN, PRESETS["sm_90"]) == sizes
