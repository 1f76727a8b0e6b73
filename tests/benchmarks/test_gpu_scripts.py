"""The GPU benchmarks walk through every section without a GPU, and do with results, failures and time what they say."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import cases, common, correctness, fit, peers, run_all, timing, tune
from benchmarks.gpu.cases import Shape, problem
from benchmarks.gpu.common import OutOfTimeError, Run, SkipError, Store, counted
from mla_compile.kernels import plan as planning
from mla_compile.kernels import tuned
from mla_compile.kernels.devices import PRESETS, Pace

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The results of ``--dry-run`` as a user runs it, from another folder."""
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    script = ROOT / "benchmarks" / "gpu" / "run_all.py"
    done = subprocess.run(
        [sys.executable, str(script), "--dry-run", "--out", str(out)],
        cwd=out.parent, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return out, done


def test_dry_run_walks_through_every_section(dry):
    out, done = dry
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(out.read_text())
    assert data["about"]["gpu"] is None
    assert data["about"]["dry_run"]
    assert data["about"]["sources"]
    states = {name: section["status"] for name, section in data["sections"].items()}
    assert states == {**dict.fromkeys(run_all.SECTIONS, "complete"), "consan": "skipped"}
    rows = {name: section["rows"] for name, section in data["sections"].items()}
    assert len(rows["correctness"]) > 40
    assert sum(row["status"] == "ok" for row in rows["correctness"].values()) > 40
    kernel = next(iter(rows["kernels"].values()))
    assert {"median", "low", "high", "TBps", "TFLOPs", "over_floor"} <= set(kernel["triton"])
    assert "flashinfer is not installed" in kernel["absent"]["flashinfer"]
    assert done.stdout.splitlines()[-1].startswith("written to")


def test_resumed_rows_are_kept_and_not_run_again(dry, tmp_path, monkeypatch):
    out, _ = dry
    same = json.loads(out.read_text())["about"]["sources"]
    monkeypatch.setattr(common, "sources_hash", lambda: same)  # whatever is being edited meanwhile
    again = tmp_path / "again.json"
    arguments = ["--dry-run", "--sections", "floors", "--out", str(again), "--resume", str(out)]
    assert run_all.main(arguments) == 0
    before, after = (json.loads(path.read_text())["sections"] for path in (out, again))
    assert before["floors"]["rows"] == after["floors"]["rows"]
    assert before["kernels"] == after["kernels"]


def test_results_of_other_sources_are_not_resumed(tmp_path):
    old = tmp_path / "old.json"
    store = Store(old, {"sources": "before"})
    store.record("floors", "copy", {"status": "ok"})
    fresh = Store(tmp_path / "new.json", {"sources": "after"}, old)
    assert "of other sources (before, now after)" in fresh.note
    assert fresh.data["sections"] == {}


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for script in (run_all, tune):
        assert script.main([]) == run_all.NO_GPU
        assert "no CUDA device" in capsys.readouterr().out


def test_no_time_left_stops_cleanly(tmp_path, capsys):
    out = tmp_path / "gpu.json"
    assert run_all.main(["--dry-run", "--budget", "0", "--out", str(out)]) == 0
    assert {s["note"] for s in json.loads(out.read_text())["sections"].values()} == {"no time left"}
    assert "no time left" in capsys.readouterr().out


def test_a_spent_section_leaves_the_rest_for_resume(tmp_path):
    run = Run(Store(tmp_path / "r.json"), "s", CPU, end=time.monotonic() - 1)
    with pytest.raises(OutOfTimeError):
        run.cases([("a", dict)])
    assert run.store.rows("s") == {}


@pytest.mark.parametrize(("going", "kernels"), [([], "skipped"), (["--keep-going"], "complete")])
def test_nothing_is_timed_when_a_check_fails(monkeypatch, tmp_path, going, kernels):
    def wrong(run: Run) -> None:
        run.cases([("gluon: wrong", lambda: {"status": "failed", "error": "off by 1"})])

    monkeypatch.setattr(correctness, "section", wrong)
    out = tmp_path / "gpu.json"
    arguments = ["--dry-run", "--sections", "correctness,floors,kernels", "--out", str(out), *going]
    assert run_all.main(arguments) == 1
    sections = json.loads(out.read_text())["sections"]
    assert sections["kernels"]["status"] == kernels
    if not going:
        assert "nothing is timed: gluon failed a check" in sections["kernels"]["note"]


def test_a_case_that_raises_is_a_row_and_the_next_one_runs(tmp_path):
    def bad() -> dict:
        raise ValueError("too small\nmore")

    def skipped() -> dict:
        raise SkipError("no such peer")

    run = Run(Store(tmp_path / "r.json"), "s", CPU)
    run.cases([("bad", bad), ("skipped", skipped), ("good", lambda: {"x": 1})])
    rows = json.loads((tmp_path / "r.json").read_text())["sections"]["s"]["rows"]
    assert rows["bad"]["error"] == "ValueError: too small"
    assert rows["skipped"]["reason"] == "no such peer"
    assert rows["good"]["x"] == 1
    assert counted(rows) == "1 failed, 1 skipped, 1 ok"
    assert run.store.failures("s") == ["bad"]


def test_a_worker_that_hangs_is_killed_and_its_row_marked(tmp_path):
    store = Store(tmp_path / "r.json")
    store.record("correctness", "gluon: hangs", {"status": "started"})
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    assert run_all.watch(sleeper, store.path, time.monotonic() + 60, patience=0.3) == "no result for 0 s"
    assert sleeper.returncode != 0
    assert store.bury("correctness", "hung") == ["gluon: hangs"]
    assert run_all.blocked_kernels(store) == {"gluon"}


def test_a_worker_is_supervised_to_its_end(tmp_path):
    """What runs on a GPU in a process of its own, here on the CPU: the parent sees the worker's rows."""
    out = tmp_path / "gpu.json"
    args = run_all.parse(["--dry-run", "--sections", "floors", "--out", str(out)])
    Store(out, {"sources": "x"}).write()
    run_all.supervise(args, "floors", 60)
    store = Store(out, resume=out)
    assert store.section("floors")["status"] == "complete"
    assert len(store.rows("floors")) == 4


def test_several_workers_share_a_section_and_their_rows_are_merged(tmp_path):
    out = tmp_path / "gpu.json"
    args = run_all.parse(["--dry-run", "--sections", "floors", "--out", str(out)])
    store = Store(out, {"sources": "x"})
    store.record("floors", "copy", {"status": "ok", "kept": True})
    run_all.supervise(args, "floors", 60, workers=2)
    merged = Store(out, resume=out)
    assert merged.section("floors")["status"] == "complete"
    assert len(merged.rows("floors")) == 4
    assert merged.rows("floors")["copy"]["kept"]
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]


def test_unfinished_rows_of_a_stopped_run_are_run_again(tmp_path):
    store = Store(tmp_path / "r.json", {"sources": "x"})
    store.record("floors", "copy", {"status": "started"})
    again = Store(tmp_path / "r.json", {"sources": "x"}, store.path)
    again.forget_unfinished()
    assert again.rows("floors") == {}


# Peers.


def test_a_peer_given_by_path_is_imported_from_there(tmp_path):
    package = tmp_path / "flash_mla"
    package.mkdir()
    (package / "__init__.py").write_text(
        "def get_mla_metadata(*a): return a, None\n"
        "def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, meta, splits, *, "
        "softmax_scale, causal):\n"
        "    return q[..., :head_dim_v] * 0, None\n"
    )
    posed = problem(Shape(B=1, kv=70, H=2), CPU, seed=4)
    try:
        call = peers.flashmla(posed, str(tmp_path))
        assert call().shape == (1, 1, 2, 512)
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("flash_mla")


def test_a_single_file_of_a_large_project_runs_over_stand_ins(tmp_path):
    pytest.importorskip("triton")
    file = tmp_path / "triton_decode_attention.py"
    file.write_text(
        "from vllm.platforms import current_platform\n"
        "from vllm.triton_utils import tl, triton\n"
        "assert not current_platform.is_rocm()\n"
        "def decode_attention_fwd(q, k, v, o, lse, table, lens, logits, splits, scale, page_size=1, is_mla=False):\n"
        "    assert is_mla and logits.shape[2] == splits and v.shape[-1] == o.shape[-1]\n"
        "    o.fill_(page_size)\n"
    )
    before = set(sys.modules)
    try:
        out = peers.vllm(problem(Shape(B=1, kv=70, H=2), CPU, seed=5), str(file))()
    finally:
        for name in set(sys.modules) - before:
            if name.startswith(("vllm", "peer_")):
                del sys.modules[name]
    assert out.shape == (1, 1, 2, 512)
    assert (out == 64).all()


def test_absent_and_unsuitable_peers_say_why():
    posed = problem(Shape(B=1, kv=70, H=2, S=2), CPU, seed=6)
    for make, path, said in (
        (peers.flashinfer, None, "flashinfer is not installed"),
        (peers.flashmla, "/nowhere", "/nowhere does not exist"),
        (peers.flex, None, "needs a GPU"),
    ):
        with pytest.raises(SkipError, match=said):
            make(posed, path)
    with pytest.raises(SkipError, match="expanded cache would take"):
        peers.sdpa(
            problem(Shape(B=1, kv=70, H=2), CPU, 7).__class__(Shape(B=512, kv=1 << 20, H=128), *[posed.query] * 4), None
        )
    with pytest.raises(SystemExit):
        run_all.parse(["--peer", "unknown=/tmp"])


def test_expanded_attention_runs_with_lengths():
    posed = problem(Shape(B=2, kv=20, H=2, S=2), CPU, seed=8, how="varied")
    assert peers.sdpa(posed, None)().shape == (2, 2, 2, 128)


# Tuning.


def test_tune_walks_through_a_class_and_keeps_the_rest_of_the_table(tmp_path, capsys):
    out = tmp_path / "tune.json"
    before = tuned.TABLE.read_text()
    assert tune.main(["--dry-run", "--classes", "half-16", "--out", str(out)]) == 0
    assert tuned.TABLE.read_text() == before
    assert "half-16 paged" in capsys.readouterr().out
    new = tuned.table(tmp_path / "tuned.json")
    old = tuned.table()
    changed = [row for row in new if row not in old]
    assert {row.paged for row in changed} <= {True, False}
    assert all(row.capability == (8, 0) and row.max_rows == 16 for row in changed)
    assert len(new) == len(old)


def test_candidates_fit_and_begin_with_the_present_table():
    for name, device in PRESETS.items():
        found = list(tune.candidates("half", 16, True, device))
        assert len(found) > 5, name
        known = [r for r in tuned.table() if r.capability <= device.capability and r.paged is not False]
        assert (found[0].block_m, found[0].block_n) in {(r.block_m, r.block_n) for r in known}
        for tile in found:
            planning.check(tile.plan(), L=512, R=64, cache_dtype=torch.bfloat16, device=device, paged=True)


def measured(of: Pace, units: float, noise: float, seed: int = 0) -> list[fit.Tile]:
    """Tiles as the formula has them, some of which the SM's units hold up."""
    draw = random.Random(seed)
    tiles = []
    for links in (37, 38, 40, 44, 20):
        for depth in (1, 2, 3):
            lone = max(links * of.link + of.step, of.latency / depth, units) * draw.uniform(1 - noise, 1 + noise)
            tiles.append(fit.Tile(links, depth, lone, max(0.7 * lone, units)))
    return tiles


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("want", [Pace(1.9, 0.021, 0.6), Pace(3.1, 0.03, 0.4)], ids=str)
def test_a_pace_is_fitted_to_what_was_measured(want: Pace, noise: float):
    found, error = fit.pace(measured(want, 0.3, noise), PRESETS["sm_90"].pace)
    assert error <= noise + 1e-3
    for t in measured(want, 0.3, 0.0):
        times = [max(t.links * p.link + p.step, p.latency / t.depth) for p in (found, want)]
        assert times[0] == pytest.approx(times[1], rel=1e-3 + 2 * noise)
    if not noise:
        assert found == pytest.approx(want, rel=2e-2)


def test_what_was_not_measured_stays():
    now = Pace(1.0, 0.0188, 0.54)
    chained = [fit.Tile(38, depth, 1.4, 0.9) for depth in (1, 2)]
    found, error = fit.pace(chained, now)
    assert found == pytest.approx((1.0, 0.0188, 1.4 - 38 * 0.0188), abs=1e-3)
    assert error < 1e-3
    with pytest.raises(ValueError, match="none tells how long a block waits"):
        fit.pace([fit.Tile(40, 1, 3.5, 3.5)], now)


def test_the_least_rows_of_the_hopper_kernel():
    def row(gluon: float, triton: float) -> dict[str, float]:
        return {"gluon_us": gluon, "triton_us": triton}

    found = {8: row(9, 5), 16: row(6, 7), 24: row(8, 7), 32: row(6, 7), 64: row(6, 9)}
    assert tune.least_rows(found) == 32  # not 16: at 24 the portable one is faster
    assert tune.least_rows({64: row(9, 8)}) is None
    assert tune.least_rows({}) is None


def test_measured_times_go_into_the_table(tmp_path):
    store = common.Store(tmp_path / "tune.json")
    best = {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3, "paged": True}
    store.record("tune", "half-16 paged", {"status": "ok", "best": best, "t0_us": 2.5, "lone_us": 1.4, "full_us": 0.9})
    store.record("hopper", "24", {"status": "ok", "gluon_us": 5.0, "triton_us": 6.0})
    store.record("hopper", "16", {"status": "skipped", "reason": "no time"})
    rows = tune.rewritten(store, PRESETS["sm_90"], "measured on a test")
    (new,) = (r for r in rows if r.get("provenance") == "measured on a test")
    assert (new["block_n"], new["tile_us"], new["paged"]) == (64, 0.9, True)
    assert [r["min_rows"] for r in rows if r["kernel"] == "gluon"] == [24]
    tune.write(tmp_path / "tuned.json", rows)
    assert any(r.min_rows == 24 for r in tuned.table(tmp_path / "tuned.json"))


def test_timing_with_events_and_graphs(monkeypatch):
    """The GPU's branch of the clock over stand-ins: order, counts, and a call that cannot be captured."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def elapsed_time(self, other: object) -> float:
            return 2.0

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    class Stream:
        def wait_stream(self, other: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda s: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda g: contextlib.nullcontext())
    clock = timing.Clock(CPU)
    clock.cuda = True
    monkeypatch.setattr(clock, "flush", lambda: log.append("flush"))
    replay, captured = clock.captured(lambda: log.append("call") or "result")
    assert captured
    assert log == ["call"] * 3
    log.clear()
    assert replay() == "result"
    log.clear()
    assert clock.seconds({"a": replay}, rounds=5, budget=9.0) == {"a": [2e-3] * 5}
    assert log == ["flush", "event", "replay", "event"] * 5

    calls = iter(range(9))

    def reads_back() -> int:
        if next(calls) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return 7

    plain, captured = clock.captured(reads_back)
    assert not captured
    assert plain() == 7


def test_timing_on_the_cpu_reports_every_call():
    clock = timing.Clock(CPU)
    seconds = clock.seconds({"a": lambda: None, "b": lambda: None}, rounds=4, budget=0.0)
    assert {name: len(found) for name, found in seconds.items()} == {"a": 3, "b": 3}
    assert set(timing.spread(seconds["a"])) == {"median", "best", "low", "high", "p10", "p90", "count"}
    assert cases.lengths(Shape(B=1, kv=9, H=1), "zeros", torch.Generator()).tolist() == [0]
