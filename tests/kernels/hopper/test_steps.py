"""Which calls the Hopper kernel takes, and what it launches for them."""

from dataclasses import replace

import pytest
import torch

from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.devices import PRESETS
from mla_compile.kernels.hopper import steps as hopper_steps
from mla_compile.kernels.launch import chosen_plan
from mla_compile.kernels.plan import plan
from mla_compile.kernels.triton import schedule
from tests.support import schedules

H200 = PRESETS["sm_90"]
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
LIST = torch.zeros(1, 1, 1, dtype=torch.int32, device="meta").expand(3, 2, 9)


def call(
    B=3, S=2, H=20, T=200, page=0, L=512, R=64, dtype=BF16, query=None, row=None, pages=None, lengths=True, rope=None,
    **more,
):  # fmt: skip
    """Meta tensors; ``row`` and ``pages`` are the cache's strides, ``rope`` is the dtype of one with its own.

    ``R`` 0: there is no rope.
    """

    def empty(*shape, of=torch.int32):
        return torch.empty(shape, dtype=of, device="meta")

    rows = page or T
    outer = B * -(-T // page) if page else B
    row = row or L + R
    cache = torch.empty_strided(
        (outer, rows, L + R), (rows * row if pages is None else pages, row, 1), dtype=dtype, device="meta"
    )
    beside = (cache[..., L:] if rope is None else empty(outer, rows, R, of=rope)) if R else None
    return DecodeCall(
        empty(B, S, H, L + R, of=query or dtype), cache[..., :L], beside, scale=0.1, causal=True,
        block_table=empty(B, -(-T // page)) if page else None, seq_lens=empty(B) if page or lengths else None, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"page": 16},
        {"page": 48},
        {"page": 64, "pages": 64 * 576 * 5},  # layers side by side
        {"row": 640},
        {"dtype": FP16},
        {"query": FP32},
        {"B": 1, "pages": 7},  # a stride that is never used
        {"sinks": torch.zeros(20)},
        {"softcap": 1.0, "window": 5},
        {"R": 0, "window": 128, "sinks": torch.zeros(20)},
        {"R": 0, "page": 16, "dtype": FP16},
        {"R": 0, "mask": torch.ones(3, 1, 1, 200, dtype=torch.bool)},
        {"R": 0, "indices": LIST, "sinks": torch.zeros(20)},
        {"page": 64, "window": 500},
        {"indices": LIST, "softcap": 1.0, "window": 5},
        {"mask": torch.ones(1, 1, 1, 200, dtype=torch.bool)},
        {"mask": torch.ones(3, 1, 1, 200, dtype=torch.bool), "lengths": False},
        {"dtype": FP8, "query": BF16, "kv_scale": torch.ones(())},
        {"dtype": FP8, "query": FP16, "kv_scale": torch.ones(()), "page": 1},
        {"dtype": FP8, "query": FP32, "kv_scale": torch.ones(3, 200), "row": 656},
        {"dtype": FP8, "query": BF16, "kv_scale": torch.ones(3, 200, 4), "rope": BF16},
        {"dtype": FP8, "query": FP32, "kv_scale": torch.ones(13, 16, 8), "rope": BF16, "page": 16, "B": 1},
        {"dtype": FP8, "query": FP32, "kv_scale": torch.ones(()), "rope": BF16},
        {"dtype": FP8, "query": BF16, "kv_scale": torch.ones(3, 200, 4), "rope": BF16, "indices": LIST},
        {"dtype": FP8, "query": FP16, "kv_scale": torch.ones(()), "indices": LIST},
        {"indices": LIST},
        {"indices": LIST, "page": 1},
        {"indices": LIST, "page": 64, "pages": 64 * 576 * 5},
        {"indices": LIST, "query": FP32, "sinks": torch.zeros(20)},
        {"indices": LIST, "mask": torch.ones(3, 1, 2, 200, dtype=torch.bool)},
        {"indices": LIST, "mask": torch.ones(1, 1, 1, 200, dtype=torch.bool).expand(3, 20, 2, 200)},
        {
            "indices": LIST[:1].expand(1 << 16, 2, 9),
            "B": 1 << 16,
        },  # more requests than a grid's other axes have room for
    ],
)
def test_takes(given):
    assert hopper_steps.suits(call(**given), H200)


@pytest.mark.parametrize(
    "given",
    [
        {"page": 8},
        {"L": 256},
        {"R": 32},
        {"R": 0, "L": 576},
        {"R": 0, "row": 516},
        {"R": 0, "values": torch.empty(3, 200, 512, dtype=BF16, device="meta")},  # of another tensor than the keys
        {"R": 0, "dtype": FP8, "query": BF16, "kv_scale": torch.ones(3, 200)},
        {"R": 0, "dtype": FP8, "query": BF16, "kv_scale": torch.ones(()), "indices": LIST},
        {"row": 580},  # rows off a 16-byte step
        {"pages": 0},  # one cache expanded over the batch
        {"dtype": FP32},
        {"dtype": FP16, "query": FP32},
        {"mask": torch.ones(1, 1, 2, 200, dtype=torch.bool)},  # a query token each
        {"mask": torch.ones(1, 20, 1, 200, dtype=torch.bool)},
        {"mask": torch.zeros(1, 1, 1, 200)},  # additive
        {"dtype": FP8, "query": FP32, "kv_scale": torch.ones(())},  # its products are in float16
        {"dtype": FP8, "query": BF16, "kv_scale": torch.ones(()), "row": 584},
        {"dtype": FP8, "query": BF16, "kv_scale": torch.ones(()), "L": 256},
        {"dtype": FP8, "query": BF16, "kv_scale": torch.ones(3, 200, 16), "rope": BF16},
        {"dtype": FP8, "query": FP16, "kv_scale": torch.ones(()), "rope": FP16},
        {"dtype": FP8, "query": FP16, "kv_scale": torch.ones(3, 200, 4), "rope": FP16},
        {"dtype": FP8, "query": FP32, "kv_scale": torch.ones(()), "indices": LIST},
        {"dtype": FP8, "query": FP16, "kv_scale": torch.ones(()), "rope": FP16, "indices": LIST},
        {"B": 1 << 16},
        {"page": 16, "B": 1 << 15, "T": 1 << 20},  # 2^31 pages, more than there are coordinates
        {"indices": LIST, "row": 580},
        {"indices": LIST, "pages": 0},
        {"indices": LIST, "dtype": FP16, "query": FP32},
        {"indices": LIST, "L": 256},
        {"indices": LIST, "mask": torch.zeros(3, 1, 2, 200)},
        {"indices": LIST, "mask": torch.ones(3, 20, 1, 200, dtype=torch.bool)},
        {"indices": LIST[..., :0]},
    ],
)
def test_leaves_to_the_portable_kernel(given):
    assert not hopper_steps.suits(call(**given), H200)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "sm_120"])
def test_is_for_hopper_only(arch):
    assert not hopper_steps.suits(call(), PRESETS[arch])


def planned(given, **how):
    z = given.sizes
    how |= {"masked": given.mask is not None, "mask_bytes": 0}
    return plan(
        B=z.B, S=z.S, H=z.H, L=z.L, R=z.R, T=z.T, query_dtype=given.query.dtype, cache_dtype=given.latent.dtype,
        device=H200, page_size=z.page or None, **how,
    )  # fmt: skip


def test_scratch_of_a_schedule_holds_every_piece():
    given = call(page=64, B=40, S=1, H=128, T=9000)
    chosen = planned(given)
    assert hopper_steps.scheduled(given, chosen)
    shapes = {name: shape for name, (shape, _) in hopper_steps.scratch(given, chosen, H200).items()}
    count = schedule.partitions(H200.sms, 128)
    assert shapes["items"] == (count + 1, 2)
    assert shapes["part"][0] == schedules.reference([9000] * 40, 9000, count).slots
    assert not hopper_steps.scheduled(given, planned(given, deterministic=True))
    assert not hopper_steps.scheduled(given, planned(given, splits=3))


@pytest.mark.parametrize(("sms", "blocks"), [(132, 17), (128, 17), (127, 16)])
def test_each_partition_and_the_end_of_the_last_are_cut(sms, blocks):
    """Eight of them by a block; 64 query rows have a partition for each SM."""
    pytest.importorskip("triton.experimental.gluon")
    given, device = call(page=64, B=40, S=1, H=64, T=9000), replace(H200, sms=sms)
    cut, *_ = hopper_steps.steps(given, planned(given), device)
    assert (cut.name, cut.scalars["partitions"], cut.grid) == ("cut", sms, (blocks, 1, 1))


def test_a_window_beyond_all_tokens_is_a_number_of_32_bits():
    pytest.importorskip("triton.experimental.gluon")
    for window, seen in ((5, 6), (2**31 - 3, 2**31 - 2), (2**31, 2**31 - 1)):  # by two query tokens
        given = call(H=64, window=window)
        attention = next(s for s in hopper_steps.steps(given, planned(given), H200) if s.name == "mla_seesaw")
        assert attention.scalars["reach"] == seen


def test_steps_name_only_buffers_that_exist():
    pytest.importorskip("triton.experimental.gluon")
    tensors = {"query", "latent", "rope", "table", "lengths", "sinks", "mask", "kv_scale", "indices"}
    mask = torch.ones(3, 1, 1, 200, dtype=torch.bool, device="meta")
    for given in (
        call(page=32, H=64),
        call(T=5000, H=64),
        call(H=64, sinks=torch.zeros(64)),
        call(H=64, mask=mask),
        call(H=64, mask=mask[:1], lengths=False),
        call(H=64, page=64, softcap=2.0, window=9),
        call(H=64, page=64, R=0, sinks=torch.zeros(64)),
        call(H=64, R=0, indices=LIST),
        call(H=64, page=8, dtype=FP8, query=BF16, kv_scale=torch.ones(())),
        call(H=64, dtype=FP8, query=BF16, kv_scale=torch.ones(3, 200), mask=mask, window=9),
        call(H=64, dtype=FP8, query=BF16, kv_scale=torch.ones(3, 200, 4), mask=mask, rope=BF16),
        call(H=64, dtype=FP8, query=BF16, kv_scale=torch.ones(3, 200, 4), rope=BF16, indices=LIST),
        call(H=64, page=8, dtype=FP8, query=BF16, kv_scale=torch.ones(()), indices=LIST),
        call(H=64, dtype=FP8, query=BF16, kv_scale=torch.ones(3, 200), indices=LIST, mask=mask),
    ):
        for scheduled in (False, True):
            chosen = replace(planned(given), scheduled=scheduled)
            buffers = tensors | set(hopper_steps.scratch(given, chosen, H200))
            for step in hopper_steps.steps(given, chosen, H200):
                assert set(step.buffers.values()) <= buffers
                assert set(step.buffers) | set(step.scalars) | set(step.constants) == set(step.fn.arg_names)


@pytest.mark.parametrize(("barriers", "held"), [(3, False), (9, False), (3, True), (9, True)])
def test_forms_are_the_plans(barriers, held):
    pytest.importorskip("triton.experimental.gluon")
    of_list, of_fp8 = call(H=64, indices=LIST), call(H=64, dtype=FP8, query=BF16, kv_scale=torch.ones(()))
    for given, columns in ((call(H=64, page=64), 256), (call(H=64, page=16), 64), (of_list, None), (of_fp8, None)):
        chosen = replace(planned(given, splits=2), barriers=barriers, held=held)
        attention = next(s for s in hopper_steps.steps(given, chosen, H200) if s.name.startswith("mla_seesaw"))
        assert attention.constants["HELD"] is held
        if columns is not None:  # rows that TMA brings
            parts = 4 if barriers == 9 else 1
            assert attention.constants["PARTS"] == parts
            assert attention.boxes["latent"].block[2] == min(columns, 256 // parts)
            assert attention.constants["REGS"] == (240 if held else 232)


def test_rows_without_rope_have_none_to_hold():
    given = call(H=64, page=64, R=0)
    chosen = chosen_plan(given, H200)
    assert (chosen.kernel, chosen.held) == ("gluon", False)
    own = chosen_plan(given, H200, replace(chosen, barriers=9, held=True))
    assert (own.barriers, own.held, own.smem) == (9, False, chosen.smem)
    assert chosen_plan(call(H=64, page=64), H200, own).smem == own.smem  # P has the memory that rope would take


def test_two_ctas_share_copies_where_both_have_query_rows(monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    monkeypatch.setattr(hopper_steps, "clusters", lambda: True)

    def ctas(given, cluster=2):
        chosen = replace(planned(given, splits=2), cluster=cluster)
        attention = next(s for s in hopper_steps.steps(given, chosen, H200) if s.name.startswith("mla_seesaw"))
        number = attention.options.get("num_ctas", 1)
        assert attention.grid[0] * number == -(-given.sizes.S * given.sizes.H // 64) or given.indices is not None
        assert ("cga_layout=[[0, 0, 0]]" in attention.types.get("latent", "")) == (number == 2)
        return number

    assert ctas(call(H=64, page=64)) == ctas(call(H=50, page=16)) == ctas(call(H=128)) == 2  # of two tokens
    assert ctas(call(H=64, page=64), cluster=1) == 1
    assert ctas(call(H=32, page=64)) == ctas(call(H=96, page=64)) == 1  # one of the two would have no rows
    assert ctas(call(H=64, indices=LIST)) == 1  # whose rows are not brought by TMA
    assert ctas(call(H=64, dtype=FP8, query=BF16, kv_scale=torch.ones(()))) == 1
    monkeypatch.setattr(hopper_steps, "clusters", lambda: False)
    assert ctas(call(H=64, page=64)) == 1


def test_the_table_says_which_form_is_planned(monkeypatch):
    from mla_compile.kernels import plan as planning

    row = planning.starting_row("half", 64, planning.RowLayout(512, 64, 0, 2, 2, True), H200, "gluon")
    monkeypatch.setattr(planning, "starting_row", lambda *_, **__: replace(row, barriers=9, held=True, cluster=2))
    planning.plan.cache_clear()
    chosen = planned(call(H=64, page=64))
    planning.plan.cache_clear()
    assert (chosen.kernel, chosen.barriers, chosen.held, chosen.cluster) == ("gluon", 9, True, 2)


def test_a_mask_is_listed_first():
    pytest.importorskip("triton.experimental.gluon")
    from mla_compile.kernels.hopper import producer_gluon
    from mla_compile.kernels.triton import tiles_triton

    for name in ("TILE", "WORD", "COUNT"):
        assert getattr(producer_gluon, f"LIST_{name}").value == getattr(tiles_triton, name).value
    mask = torch.ones(3, 1, 1, 200, dtype=torch.bool, device="meta")
    for given, lists in ((call(H=64, mask=mask), 3), (call(H=64, mask=mask[:1], lengths=False), 1)):
        chosen = replace(planned(given), splits=2)
        *before, attention, _ = hopper_steps.steps(given, chosen, H200)
        assert [step.name for step in before] == ["scan_mask", "list_tiles"]
        assert all(step.constants.get("BLOCK_N", 64) == 64 for step in before)
        assert hopper_steps.scratch(given, chosen, H200)["work"] == ((6, lists, 4), torch.int64)
        assert (attention.scalars["work_b"], attention.scalars["plane"]) == (4 if lists > 1 else 0, 4 * lists)
        assert attention.buffers["work"] == "work"
        assert not hopper_steps.scheduled(given, replace(chosen, scheduled=True))  # lengths do not say what is visible
