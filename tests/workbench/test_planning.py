"""Floors against the published table, and layouts against each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy

from mla_compile.errors import InputError
from mla_compile.workbench import planning
from mla_compile.workbench.machines import machine
from mla_compile.workbench.planning import AS_STORED, Attention, Request, expressions, floor_seconds, plan
from tests.support.facts import GROUPED, V3, V3_2, V3_STORED, V3_WEIGHTS

H200 = machine("h200")


# Floors in microseconds of one decode attention on an H200 in bfloat16, R = heads; (batch, tokens, R): floor.
# They were computed with 4.3 TB/s and 790 TFLOP/s and are given to three digits.
TABLE = {
    (1, 131072, 16): 35.1,
    (1, 131072, 128): 46.2,
    (8, 8192, 16): 17.6,
    (8, 8192, 256): 46.2,
    (8, 32768, 64): 70.5,
    (32, 4096, 16): 35.4,
    (32, 4096, 64): 36.2,
    (32, 4096, 128): 46.2,
    (32, 32768, 256): 739,
    (64, 8192, 32): 142,
    (64, 131072, 16): 2248,
    (128, 1024, 16): 36.2,
    (128, 1024, 64): 39.3,
    (128, 1024, 256): 92.4,
    (128, 8192, 64): 285,
    (128, 131072, 64): 4499,
    (128, 131072, 128): 5915,
    (128, 131072, 256): 11830,
}


@pytest.mark.parametrize(("B", "T", "H"), TABLE)
def test_floors_are_those_of_the_table(B, T, H):
    floor = floor_seconds(Attention(1, H, L=512, R=64), H200, B=B, T=T)
    assert floor * 1e6 == pytest.approx(TABLE[B, T, H], rel=0.02)


def test_one_machine_has_one_layout():
    """On one machine without links the formulas of the three layouts are the same."""
    P, C = planning.P, planning.C
    for latent in (True, False):
        by_layout = [expressions(layout, latent) for layout in planning.LABELS]
        for name, first in by_layout[0].items():
            values = {P: 1, C: 1, planning.B: 3, planning.G: 2}
            for other in by_layout[1:]:
                assert sympy.simplify(first.subs(values) - other[name].subs(values)) == 0, name


def test_layouts_share_the_work_and_not_the_cache():
    request = Request(context=32768, users=64, tp=8, dcp=4)
    replicated, context, data = plan(V3, H200, request).layouts
    one = plan(V3, H200, replace(request, tp=1, dcp=1)).layouts[0]
    whole = 61 * 576 * 2 * 32768
    assert (replicated.cache_bytes_per_user, context.cache_bytes_per_user, data.cache_bytes_per_user) == (
        whole, whole / 4, whole,
    )  # fmt: skip
    for row in (replicated, context, data):
        assert row.attention_compute_s == pytest.approx(one.attention_compute_s / 8)
    # A latent row has no heads to split: every machine reads all of the cache, unless tokens or users are split.
    assert replicated.cache_memory_s > 0.8 * one.cache_memory_s
    assert context.cache_memory_s < 0.3 * one.cache_memory_s
    assert data.cache_memory_s == pytest.approx(one.cache_memory_s / 8)
    heads = 61 * 128 * (1536 * 192 + 512 * 256 + 128 * 7168)
    assert V3.head_values == heads
    assert data.weight_bytes - replicated.weight_bytes == pytest.approx(heads * 2 * 7 / 8)


def test_users_that_fit_fill_the_memory():
    request = Request(context=131072, users=1, weight_dtype="fp8", cache_dtype="bf16", tp=8)
    for row in plan(V3, H200, request).layouts:
        per_machine = row.most_users / (8 if row.layout == "data" else 1)
        room = 141e9 * 0.9 - row.weight_bytes
        assert per_machine * row.cache_bytes_per_user <= room < (per_machine + 1) * row.cache_bytes_per_user


def test_experts_that_are_read_grow_with_the_users():
    """One user reads the active weights; very many read all of them."""
    quick = plan(V3, H200, Request(context=1, users=1)).layouts[0]
    assert quick.weight_memory_s * H200.bandwidth == pytest.approx(2 * V3_WEIGHTS.active)
    many = plan(V3, H200, Request(context=1, users=10**4)).layouts[0]
    assert many.weight_memory_s * H200.bandwidth == pytest.approx(2 * (V3_WEIGHTS.total - V3_WEIGHTS.lookup))
    assert many.bottleneck == "arithmetic of weights"


def test_weights_as_stored_and_what_absorbing_keeps_beside_them():
    """W_kc and W_v of 33.5 MB a layer lie beside the stored weights, and are read in the place of those."""
    model = replace(V3, stored=V3_STORED)
    request = Request(context=1, users=10**4, weight_dtype=AS_STORED)
    (row,) = plan(model, H200, request).layouts
    kept, replaced = 61 * 2 * 2**24, 61 * (2**24 + 2**12)
    assert row.weight_bytes == pytest.approx(V3_STORED.bytes + kept)
    read = V3_STORED.bytes - 2 * V3_WEIGHTS.lookup + kept - replaced
    assert row.weight_memory_s * H200.bandwidth == pytest.approx(read)
    fp8, bf16 = (plan(model, H200, replace(request, weight_dtype=dtype)).layouts[0] for dtype in ("fp8", "bf16"))
    assert row.weight_compute_s == fp8.weight_compute_s == bf16.weight_compute_s / 2
    assert fp8.weight_bytes == V3_WEIGHTS.total
    assert plan(model, H200, request).to_dict()["stored"]["kept_bytes"] == kept
    assert plan(model, H200, replace(request, weight_dtype="fp8")).stored is None


def test_dequantized_weights_are_split_along_the_heads():
    model = replace(V3, stored=V3_STORED)
    plain = replace(V3_STORED, up=None)
    request = Request(context=1, users=8, weight_dtype=AS_STORED, tp=8)
    kept = 61 * 2 * 2**24
    for row, without in zip(
        plan(model, H200, request).layouts, plan(replace(V3, stored=plain), H200, request).layouts, strict=True
    ):
        share = kept if row.layout == "data" else kept / 8
        assert row.weight_bytes - without.weight_bytes == pytest.approx(share)


def test_weights_as_stored_of_a_model_that_does_not_say():
    with pytest.raises(InputError, match="nothing says how the weights of V3 are stored"):
        plan(V3, H200, Request(weight_dtype=AS_STORED))


def test_grouped_heads_are_split_as_far_as_they_go():
    """Eight key heads on eight machines are split; on sixteen, two machines hold the same head."""
    whole = 80 * 2 * 8 * 128 * 2 * 4096
    for tp, part in ((1, whole), (8, whole / 8), (16, whole / 8)):
        row = plan(GROUPED, H200, Request(context=4096, users=8, tp=tp)).layouts[0]
        assert row.cache_bytes_per_user == part
    step = plan(GROUPED, H200, Request(context=131072, users=8, tp=8)).layouts[0]
    assert step.attention_compute_s == pytest.approx(8 * 80 * 131072 * 2 * 64 * 256 / 8 / H200.peak("bf16"))


def test_a_model_without_a_growing_cache_is_refused():
    with pytest.raises(InputError, match="nothing to plan"):
        plan(replace(V3, latent=(), cached=()), H200, Request())


def test_sparse_attention_reads_what_was_chosen_and_its_indexer_everything():
    request = Request(context=131072, users=32)
    (row,), (dense,) = (plan(model, H200, request).layouts for model in (V3_2, V3))
    (short,) = plan(V3_2, H200, replace(request, context=2048)).layouts
    (as_short,) = plan(V3, H200, replace(request, context=2048)).layouts
    assert row.attention_s == short.attention_s == as_short.attention_s  # 2,048 tokens, whatever the context
    assert row.cache_bytes_per_user == 61 * 2 * 131072 * (576 + 128)
    assert dense.cache_bytes_per_user == 61 * 2 * 131072 * 576
    assert row.choosing_memory_s == pytest.approx(61 * 32 * 131072 * 256 / H200.bandwidth)
    assert row.choosing_compute_s == pytest.approx(61 * 32 * 131072 * 2 * 64 * 129 / H200.peak("bf16"))
    assert row.step_s == pytest.approx(dense.step_s - dense.attention_s + row.attention_s + row.choosing_memory_s)
    assert dense.choosing_memory_s == dense.choosing_compute_s == 0
    longer = plan(V3_2, H200, replace(request, context=2**20, users=256)).layouts[0]
    assert longer.bottleneck == "choosing keys: reading"
    assert longer.attention_s == pytest.approx(8 * row.attention_s)


def test_a_context_shorter_than_the_choice_is_attended_to_whole():
    request = Request(context=512, users=8)
    assert plan(V3_2, H200, request).layouts[0].attention_s == plan(V3, H200, request).layouts[0].attention_s


def test_indexers_are_shared_by_layers_but_not_by_heads():
    """Of 61 layers 21 have an indexer. Machines that split the heads of an attention each do all that chooses."""
    (all_sites,), (all_cached,) = V3_2.latent, V3_2.cached
    shared = replace(
        V3_2,
        latent=(replace(all_sites, count=21), replace(all_sites, count=40, choosing_flops=0, choosing_bytes=0)),
        cached=(replace(all_cached, count=21), replace(all_cached, count=40, besides=0)),
    )
    request = Request(context=32768, users=64, tp=8, dcp=8)
    replicated, context, data = plan(shared, H200, request).layouts
    one, whole = (plan(model, H200, replace(request, tp=1, dcp=1)).layouts[0] for model in (shared, V3_2))
    assert one.choosing_compute_s == pytest.approx(whole.choosing_compute_s * 21 / 61)
    assert one.cache_bytes_per_user == 2 * 32768 * (61 * 576 + 21 * 128)
    assert replicated.choosing_memory_s == one.choosing_memory_s
    for split in (context, data):
        assert split.choosing_memory_s == pytest.approx(one.choosing_memory_s / 8)
        assert split.choosing_compute_s == pytest.approx(one.choosing_compute_s / 8)
    dense = plan(V3, H200, request).layouts[1]
    lists = 21 * 7 / 8 * 64 * 2048 * 8  # of each user's list, the part that others chose: a score and an index
    assert context.network_s - dense.network_s == pytest.approx(lists / H200.link_bytes_per_s)
