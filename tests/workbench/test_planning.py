"""Floors against the published table, and layouts against each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy

from mla_compile.errors import InputError
from mla_compile.workbench import step_formulas
from mla_compile.workbench.floors import Attention, values
from mla_compile.workbench.machines import machine
from mla_compile.workbench.planning import plan
from mla_compile.workbench.request import AS_STORED, Request
from mla_compile.workbench.step_formulas import expressions
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
    site = Attention(1, H, L=512, R=64)
    given = values(site, {"B": B, "S": 1, "T": T, "E": 2, "P": 1, "C": 1})
    moved, computed = (
        step_formulas.number("replicated", f"attention {w}", given, latent=True) for w in ("bytes", "FLOPs")
    )
    floor = max(moved / H200.bandwidth, computed / H200.peak("bf16"))
    assert floor * 1e6 == pytest.approx(TABLE[B, T, H], rel=0.02)


def test_one_machine_has_one_layout():
    """On one machine without links the formulas of all layouts are the same."""
    P, C, Q = step_formulas.P, step_formulas.C, step_formulas.Q
    for latent in (True, False):
        by_layout = [expressions(layout, latent=latent) for layout in step_formulas.LABELS]
        for name, first in by_layout[0].items():
            values = {P: 1, C: 1, Q: 1, step_formulas.B: 3, step_formulas.G: 2}
            for other in by_layout[1:]:
                assert sympy.simplify(first.subs(values) - other[name].subs(values)) == 0, name


def test_layouts_share_the_work_and_not_the_cache():
    request = Request(context=32768, users=64, tp=8, dcp=4)
    replicated, context, data, experts = plan(V3, H200, request).layouts
    one = plan(V3, H200, replace(request, tp=1, dcp=1)).layouts[0]
    whole = 61 * 576 * 2 * 32768
    assert (replicated.cache_bytes_per_user, context.cache_bytes_per_user, data.cache_bytes_per_user) == (
        whole, whole / 4, whole,
    )  # fmt: skip
    assert (experts.cache_bytes_per_user, experts.cache_memory_s) == (whole, data.cache_memory_s)
    assert experts.weight_bytes == pytest.approx(2 * (V3_WEIGHTS.total - V3_WEIGHTS.experts * 7 / 8))
    for row in (replicated, context, data, experts):
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
        per_machine = row.most_users / (8 if step_formulas.by_user(row.layout) else 1)
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
        share = kept if step_formulas.by_user(row.layout) else kept / 8
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
    replicated, context, data, _ = plan(shared, H200, request).layouts
    one, whole = (plan(model, H200, replace(request, tp=1, dcp=1)).layouts[0] for model in (shared, V3_2))
    assert one.choosing_compute_s == pytest.approx(whole.choosing_compute_s * 21 / 61)
    assert one.cache_bytes_per_user == 2 * 32768 * (61 * 576 + 21 * 128)
    assert replicated.choosing_memory_s == one.choosing_memory_s
    for split in (context, data):
        assert split.choosing_memory_s == pytest.approx(one.choosing_memory_s / 8)
        assert split.choosing_compute_s == pytest.approx(one.choosing_compute_s / 8)
    dense = plan(V3, H200, request).layouts[1]
    lists = 21 * 7 * 64 * 2048 * 8  # for each user, the best of each other machine: a score and an index
    assert context.network_s - dense.network_s == pytest.approx(lists / H200.link_bytes_per_s)


def sent(layout, **values):
    """Bytes that a machine sends for a layer of DeepSeek-V3: in all, and to other nodes."""
    given = {
        "B": 1,
        "D": 7168,
        "A": 2,
        "A_x": 1,
        "k": 8,
        "n": 256,
        "C": 1,
        "Q": 1,
        "H": 128,
        "L": 512,
        "R": 64,
        "M": 0,
        "S": 1,
        "O": 1,
    }
    made = expressions(layout, latent=True)
    found = (made[name].subs({s: (given | values).get(str(s), 0) for s in made[name].free_symbols})
             for name in ("network bytes", "network bytes between nodes"))  # fmt: skip
    return [float(number) for number in found]


def test_tokens_go_to_their_experts_and_to_no_other_machine():
    """64 machines with 256 users each: 8 of 256 experts for each token, in float8 there and in bfloat16 back."""
    everywhere, _ = sent("data", B=64 * 256, P=64)
    to_experts, _ = sent("experts", B=64 * 256, P=64)
    assert everywhere == pytest.approx(2 * 63 * 256 * 7168 * 2) == pytest.approx(462e6, rel=1e-3)
    assert to_experts == pytest.approx(256 * 63 * (1 - (63 / 64) ** 8) * 7168 * 3) == pytest.approx(41e6, rel=0.01)
    # With fewer machines than experts of a token, each of them is sent a token once.
    assert sent("experts", B=4 * 256, P=4)[0] == pytest.approx(256 * 3 * (1 - 0.75**8) * 7168 * 3)


def test_between_nodes_each_node_gets_things_once():
    _, all_reduced = sent("data", B=128, P=16, Q=2)
    assert all_reduced == pytest.approx(2 * 128 * 7168 * 2 / 16)  # all tokens to and from a node, by its 8 machines
    _, to_experts = sent("experts", B=128, P=16, Q=2)
    assert to_experts == pytest.approx(8 * (1 - 0.5**8) * 7168 * 3)
    assert sent("context", B=128, P=16, C=8, Q=2)[1] == 2 * all_reduced  # a context that lies on one node
    exchanged = 128 * 128 * (576 + 512) * 2
    assert sent("context", B=128, P=16, C=16, Q=2)[1] == pytest.approx(2 * all_reduced + exchanged / 2)
    for layout in step_formulas.LABELS:
        assert sent(layout, B=128, P=8)[1] == 0


def test_logits_of_all_columns_reach_every_machine():
    """Where whole users lie on a machine it gets the logits of its own; with all weights of the vocabulary none."""
    request = Request(context=4096, users=32, tp=8)
    without = replace(V3, weights=replace(V3_WEIGHTS, vocabulary=0))
    more = [
        with_them.network_bytes - plain.network_bytes
        for with_them, plain in zip(plan(V3, H200, request).layouts, plan(without, H200, request).layouts, strict=True)
    ]
    logits = 7 / 8 * 32 * 129_280 * 2
    assert more == pytest.approx([logits, logits, logits / 8, 0])


def test_the_slower_of_links_and_network_counts():
    request = Request(context=4096, users=1024, weight_dtype="fp8", cache_dtype="bf16", tp=64)
    slow, fast = (plan(V3, replace(H200, network_bytes_per_s=rate), request).layouts[3] for rate in (50e9, 5e12))
    _, between = sent("experts", B=1024, P=64, Q=8)
    assert slow.network_s == pytest.approx(61 * between / 50e9)
    assert fast.network_s < slow.network_s / 2
    with pytest.raises(InputError, match=r"no network_bytes_per_s, so tp is at most the 8 of a node, got 64"):
        plan(V3, replace(H200, network_bytes_per_s=None), request)
    whole, _ = sent("experts", B=1024, P=64)
    one_node = plan(V3, replace(H200, node_machines=None, network_bytes_per_s=None), request).layouts[3]
    assert one_node.network_s == pytest.approx(61 * whole / H200.link_bytes_per_s)


# Output tokens per second and GPU that SGLang reports for DeepSeek-V3 with inputs of 2,000 tokens on 48 GPUs of a GB200
# NVL72 (https://lmsys.org/blog/2025-09-25-gb200-part-2): attention and experts in bf16 and fp8, and in fp8 and NVFP4.
@pytest.mark.parametrize(("weights", "rows", "published"), [("fp8", "bf16", 9087), ("fp4", "fp8", 13386)])
def test_what_was_published_is_below_the_bound(weights, rows, published):
    request = Request(context=2048, users=48 * 768, weight_dtype=weights, cache_dtype=rows, tp=48)
    layouts = plan(V3, machine("gb200"), request).layouts
    best = max(row.most_tokens_per_s / 48 for row in layouts if row.fits)
    assert published < best < 8 * published
    assert all(row.most_tokens_per_s >= row.tokens_per_s for row in layouts)


def test_heads_that_do_not_divide_are_not_split():
    result = plan(V3, H200, Request(context=4096, users=8, tp=6))
    assert [row.layout for row in result.layouts] == ["data", "experts"]
    assert "tp is 6, which does not divide the 128 heads of an attention: heads stay whole" in result.notes
    without = replace(V3, weights=replace(V3_WEIGHTS, experts=0))
    assert [row.layout for row in plan(without, H200, Request(users=8, tp=6)).layouts] == ["data"]
