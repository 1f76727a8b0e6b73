"""What is read in PTX: the Hopper kernel's fences and barriers, as compiled, and with each of them taken out."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from benchmarks.gpu import compiled as shown
from benchmarks.gpu import offline
from benchmarks.gpu.ptx import between_ctas, protocol
from mla_compile.kernels.hopper.steps import clusters
from mla_compile.kernels.launch import chosen_plan
from tests.support.tiers import also, full

STORE, FENCE, BARRIER = "st.shared.v4.b32 [%r1], {%r2};", "fence.proxy.async.shared::cta;", "bar.sync 0, 128;"
PRODUCT = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1};"
ARRIVE = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];"
COPY = "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;"
LANDED = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];"
WAIT = "mbarrier.try_wait.parity.shared.b64 complete, [%r1], %r2;"


@pytest.mark.parametrize("store", [STORE, STORE.replace(".v4", "::cta.v4")])  # Triton 3.8 writes the latter
def test_stores_a_fence_and_a_barrier_before_what_reads_them(store):
    whole = [store, FENCE, BARRIER, ARRIVE, PRODUCT]
    assert protocol("\n".join(whole)) == ({"arrive": 1, "product": 1, "landed": 0}, [])
    assert protocol("\n".join([store, BARRIER, PRODUCT]))[1] == ["product 1: stores without a fence"]
    assert protocol("\n".join([store, FENCE, PRODUCT]))[1] == ["product 1: a fence without a barrier"]
    for access in ("ld.shared.b32 %r1, [%r2];", "@%p1 st.global.b32 [ %rd1 + 0 ], { %r1 };"):
        assert protocol("\n".join([access, ARRIVE]))[1] == ["arrive 1: no barrier since the last access"]


def test_a_fence_between_a_wait_for_copied_rows_and_what_reads_them():
    assert protocol("\n".join([COPY, LANDED, WAIT, FENCE, PRODUCT])) == ({"arrive": 0, "product": 1, "landed": 1}, [])
    unseen = ["product 1: a wait for copied rows without a fence"]
    assert protocol("\n".join([COPY, LANDED, WAIT, PRODUCT]))[1] == unseen
    assert protocol("\n".join([COPY, LANDED, FENCE, WAIT, PRODUCT]))[1] == unseen
    assert protocol("\n".join([WAIT, PRODUCT]))[1] == []  # what TMA brings
    for wrong in (f"@%p1 {LANDED}", LANDED.replace(".noinc", "")):
        assert protocol("\n".join([COPY, wrong]))[1] == [
            "landed 1: not every thread arrives, or one that is counted twice"
        ]


def test_what_is_owed_on_one_path_is_owed():
    branch = ["@%p1 bra \t$L__BB0_2;", STORE, FENCE, "$L__BB0_2:"]
    assert protocol("\n".join([*branch, BARRIER, PRODUCT]))[1] == []
    assert protocol("\n".join([*branch, PRODUCT]))[1] == ["product 1: a fence without a barrier"]
    loop = ["$L__BB0_1:", PRODUCT, STORE, FENCE, BARRIER, "@%p1 bra \t$L__BB0_1;", "ret;"]
    assert protocol("\n".join(loop))[1] == []
    loop.remove(BARRIER)
    assert protocol("\n".join(loop))[1] == ["product 1: a fence without a barrier"]
    assert protocol("\n".join(["bra.uni \t$L__BB0_9;", STORE, "$L__BB0_9:", PRODUCT]))[1] == []


def test_what_ctas_have_to_do_with_each_other():
    copy = "cp.async.bulk.tensor.3d.shared::{}.global.mbarrier::complete_tx::bytes{} [%r1], [%rd1, {{%r2}}], [%r3];"
    alone, shared = copy.format("cta", ""), copy.format("cluster", ".multicast::cluster")
    remote = ARRIVE.replace("::cta", "::cluster")
    assert set(between_ctas("\n".join([alone, ARRIVE, BARRIER])).values()) == {0}
    found = between_ctas("\n".join([alone, shared, shared, remote, ARRIVE, "barrier.cluster.wait.aligned;"]))
    assert found == {"shared": 2, "alone": 1, "remote": 1, "met": 1}


def test_every_committed_row_is_shown_and_counted_in_the_summary():
    rows = shown.rows()
    assert len(rows) == sum(len(run["rows"]) for run in shown.runs())
    assert {row["card"] for row in rows} == set(shown.CARDS)
    counted = [line.split(" | ")[2] for line in shown.summary().splitlines() if line.startswith(("| sm_", "| gfx"))]
    assert sum(map(int, counted)) == len({(r["card"], r["kernel"]) for r in rows if r["registers"] is not None})


@full("combination")
def test_a_kernel_whose_ctas_do_not_wait_for_each_other_breaks_its_budget(monkeypatch):
    """What Triton 3.7 makes of a cluster: copies for both, and each CTA's barriers for itself."""
    pytest.importorskip("triton.experimental.gluon")
    if not clusters():
        pytest.skip("this Triton has no barriers between CTAs")
    (case,) = (c for c in offline.cases() if c.label == "Hopper, bf16, 1 split, cluster of 2")
    assert offline.measure(case)["broken"] == []
    real = offline.ptx.between_ctas
    monkeypatch.setattr(
        offline.ptx, "between_ctas", lambda text: real(text.replace("shared::cluster.b64", "shared::cta.b64"))
    )
    (why,) = offline.measure(case)["broken"]
    assert "'remote': 0" in why


# `benchmarks.gpu.offline --check`, which CI runs, asks the same of every kernel that has changed.
OTHERS = ["Hopper, bf16, page 64, scheduled", "Hopper, bf16, page 64, list", "Hopper, fp8"]
OTHERS += ["Hopper, bf16, no rope, mask", "Hopper, bf16, no rope, list, 1 split"]
if clusters():
    OTHERS.append("Hopper, bf16, mask, cluster of 2")
COMPILED = ["Hopper, bf16, mask", *also("combination", *OTHERS)]


@pytest.fixture(scope="module", params=COMPILED)
def compiled(request) -> tuple[offline.Case, str]:
    """A case and its PTX."""
    pytest.importorskip("triton.experimental.gluon")
    (case,) = (c for c in offline.cases() if c.label == request.param)
    text: str = offline.compiled(case, case.step()[0]).asm["ptx"]
    return case, text


def test_the_hopper_kernel_keeps_its_protocol(compiled):
    case, text = compiled
    counts, wrong = protocol(text)
    assert wrong == []
    arrives, landed = offline.arrives(case, case.step()[1])
    assert counts == {"arrive": arrives, "product": sum(offline.seesaw(case).values()), "landed": landed}


def test_every_fence_and_every_barrier_before_an_arrive_is_needed(compiled):
    """Taken out one at a time: each is missed."""
    case, text = compiled
    kernel = case.kernel
    lines = text.splitlines()
    fences = [i for i, line in enumerate(lines) if "fence.proxy.async" in line]
    arrives = [i for i, line in enumerate(lines) if re.search(r"@%p\d+ mbarrier\.arrive\.shared", line)]
    barriers = [max(i for i in range(at) if "bar.sync" in lines[i]) for at in arrives]
    if kernel == "mla_seesaw":
        assert len(fences) >= 9  # the barriers' own, the query, P and the zeroed rows of both consumers
        assert len(barriers) == 12
    elif kernel == "mla_seesaw_fp8":
        assert len(fences) >= 8  # no rows are zeroed; the producer's three beside the consumers' own
        assert len(barriers) == 15
        del fences[0]  # that of the barriers' own is for TMA, of which there is none
    else:
        # No rows are zeroed; of both consumers four waits in the loop (three without rope) and one behind it.
        assert len(fences) >= (15 if case.rope else 13)
        assert len(barriers) == 13
    for index in (*fences, *barriers):
        assert protocol("\n".join(lines[:index] + lines[index + 1 :]))[1], f"{index + 1}: {lines[index]}"


def test_cases_are_planned_as_a_launch_plans_them():
    every = list(offline.cases())
    assert len({(case.arch, case.label) for case in every}) == len(every)
    (masked,) = (c for c in every if (c.arch, c.label) == ("sm_90", "bf16, 128 rows, mask"))
    call, found = masked.call(), masked.step()[1]
    assert found == chosen_plan(call, masked.device, gluon=False)
    assert (found.block_m, found.block_n) == (64, 64)  # a mask of tokens alone is not read in the loop


def test_amd_tiles_fit_its_lds():
    for case in offline.cases():
        if case.arch in offline.AMD and case.cache != "float32":
            assert case.step()[1].smem <= case.device.smem


@pytest.fixture
def committed():
    """A case, and the row that would have been committed of it."""
    pytest.importorskip("triton")
    case = next(c for c in offline.cases() if c.arch == "sm_90" and c.label == "bf16, 16 rows")
    step, chosen, _ = offline.described(case)
    row = {
        "arch": case.arch, "kernel": case.label, "absent": "", "tile": f"{chosen.block_m}x{chosen.block_n}",
        "warps": 4, "stages": 3, "planned": chosen.smem, "shared": chosen.smem, "registers": 128, "spills": [0, 0],
        "mma": {"mma.sync": 1}, "wgmma": {}, "serialised": False, "digest": offline.digest(case, step), "broken": [],
    }  # fmt: skip
    return case, row


def known(case, row):
    return offline.known(case, {(case.arch, case.label): row})


def test_a_row_made_of_the_same_is_not_compiled_and_held_to_the_budgets_of_today(committed):
    case, row = committed
    assert known(case, row) == row
    assert known(case, {**row, "spills": [4000, 4000]})["broken"] == ["spills [4000, 4000], at most 0"]


@pytest.mark.parametrize("change", [{"digest": "0"}, {"digest": None}, {"registers": None}, {"absent": "no tile fits"}])
def test_what_is_made_of_something_else_is_compiled(committed, change):
    case, row = committed
    if "absent" in change:  # a case that had no kernel then
        row = {"arch": case.arch, "kernel": case.label, "absent": "no tile fits", "broken": [], "registers": None}
    assert known(case, {**row, **change}) is None
    assert offline.known(case, {}) is None


def test_a_digest_tells_constants_options_and_compilers_apart(committed, monkeypatch):
    case, row = committed
    step = offline.described(case)[0]
    other = [
        offline.digest(case, replace(step, options={**step.options, "num_warps": 16})),
        offline.digest(case, replace(step, constants={**step.constants, next(iter(step.constants)): "other"})),
        offline.digest(replace(case, arch="sm_80"), step),
    ]
    import triton

    monkeypatch.setattr(triton, "__version__", "0.0.0")
    other.append(offline.digest(case, step))
    assert len({row["digest"], *other}) == 5


def test_committed_results_are_those_of_the_kernels_as_they_are():
    """Otherwise every run of CI compiles again what has changed, for each version of Triton."""
    triton = pytest.importorskip("triton")
    path = offline.RESULTS / f"offline_triton_{triton.__version__}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    if not rows or not all("digest" in row or row["absent"] for row in rows):  # CI compiles with two versions
        pytest.skip(f"rows of Triton {triton.__version__} are committed without digests, or not at all")
    committed = {(row["arch"], row["kernel"]): row for row in rows}
    stale = [f"{c.arch} {c.label}" for c in offline.cases() if offline.known(c, committed) is None]
    assert stale == [], "`python -m benchmarks.gpu.offline --changed` brings the results up to date"


def test_a_share_is_compiled_although_nothing_changed(committed, monkeypatch):
    case, row = committed
    assert offline._known([case], [row], "") == [row]
    assert offline._known([case], [row], "1/1") == []
    assert offline._known([case], [row], "2/2") == [row]


def test_a_share_is_of_what_has_not_changed():
    with pytest.raises(SystemExit):
        offline.main(["--check", "--share", "1/2"])
