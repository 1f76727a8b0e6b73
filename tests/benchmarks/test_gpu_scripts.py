"""The GPU benchmarks walk through every section without a GPU, and survive what they say they survive."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import cases, common, correctness, fit, kernels_bench, peers, run_all, timing, tune
from benchmarks.gpu.cases import Shape, problem
from benchmarks.gpu.common import Case, OutOfTimeError, Run, SkipError, Store, counted
from mla_compile.kernels import plan as planning
from mla_compile.kernels import tiles, tuned
from mla_compile.kernels.devices import PRESETS, Pace
from tests.support.tiers import full

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
PATIENCE = 3600.0
"""Seconds after which something is taken to hang. No test takes so long, and none fails sooner on a busy machine."""
FLOORS = ("copy", "read", "matmul bfloat16", "empty graph")


def command(out: Path, *more: str) -> list[str]:
    """A dry run as a user types it."""
    return [sys.executable, str(ROOT / "benchmarks" / "gpu" / "run_all.py"), "--dry-run", "--out", str(out), *more]


def ran(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """It, run to its end from another folder, with as much time as a busy machine may need."""
    whole = command(out, "--budget", str(PATIENCE), *more)
    return subprocess.run(whole, cwd=out.parent, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)


def sections(out: Path) -> dict[str, Any]:
    return json.loads(out.read_text())["sections"]


def statuses(out: Path, section: str) -> dict[str, str]:
    return {key: row["status"] for key, row in sections(out)[section]["rows"].items()}


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """The results of a dry run of the cheapest sections in this process, its exit status, and what it printed."""

    def here(self: run_all.Command, section: str, first: bool, end: float) -> None:
        self.run_of(section, first).cases(self.cases[section])

    out, said = tmp_path_factory.mktemp("near") / "gpu.json", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(run_all.Command, "supervise", here)
        asked = ["--dry-run", "--sections", "correctness,kernels", "--budget", str(PATIENCE), "--out", str(out)]
        status = run_all.main(asked)
    return out, status, said.getvalue()


def test_a_dry_run_checks_and_measures_the_kernels(near):
    """Its processes and the other sections: the whole dry run."""
    out, status, said = near
    assert status == 0, said
    assert [line.split(":")[0] for line in said.splitlines() if " rows, about " in line] == [
        "correctness, first", "floors, first", "kernels, first", "correctness", "kernels",
    ]  # fmt: skip
    assert {name: section["status"] for name, section in sections(out).items()} == {
        "correctness": "complete", "floors": "complete", "kernels": "complete", "consan": "pending",
    }  # fmt: skip
    assert statuses(out, "floors") == dict.fromkeys(FLOORS, "ok")
    checks = list(statuses(out, "correctness").values())
    assert checks.count("ok") > 40
    assert set(checks) == {"ok", "skipped"}
    kernels = sections(out)["kernels"]["rows"]
    assert len(kernels) > 4
    assert {row["status"] for row in kernels.values()} == {"ok"}
    kernel = next(iter(kernels.values()))
    assert {"median", "low", "high", "TBps", "TFLOPs", "over_floor"} <= set(kernel["triton"])
    assert "flashinfer is not installed" in kernel["absent"]["flashinfer"]
    assert all(f"\n{key[:57]}" in said for key in kernels), "the table that is printed last"
    assert said.splitlines()[-1].startswith("written to")
    assert [path.name for path in out.parent.iterdir()] == ["gpu.json"]


@full("command")
def test_a_dry_run_walks_through_every_section_and_the_cheap_part_of_all_comes_first(tmp_path):
    """Each section says beforehand what it takes."""
    out = tmp_path / "gpu.json"
    done = ran(out, "--patience", str(PATIENCE))
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(out.read_text())
    assert data["about"]["gpu"] is None
    assert data["about"]["dry_run"]
    states = {name: section["status"] for name, section in data["sections"].items()}
    assert states == dict.fromkeys(run_all.STANDING, "complete")
    rows = {name: section["rows"] for name, section in data["sections"].items()}
    assert len(rows["correctness"]) > 40
    assert sum(row["status"] == "ok" for row in rows["correctness"].values()) > 40
    kernel = next(iter(rows["kernels"].values()))
    assert {"median", "low", "high", "TBps", "TFLOPs", "over_floor"} <= set(kernel["triton"])
    assert "flashinfer is not installed" in kernel["absent"]["flashinfer"]
    assert done.stdout.splitlines()[-1].startswith("written to")
    assert [path.name for path in out.parent.iterdir()] == ["gpu.json"]
    assert [line.split(":")[0] for line in done.stdout.splitlines() if " rows, about " in line] == [
        "correctness, first", "floors, first", "kernels, first", "models, first",
        "correctness", "kernels", "onnx", "tests", "consan",
    ]  # fmt: skip


def test_results_of_another_file_are_taken_over_and_nothing_is_run_again(near, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_all.Command, "supervise", lambda *_: pytest.fail("a process was started"))
    again = tmp_path / "again.json"
    assert run_all.main(["--dry-run", "--sections", "floors", "--out", str(again), "--resume", str(near[0])]) == 0
    before, after = sections(near[0]), sections(again)
    assert before["floors"]["rows"] == after["floors"]["rows"]
    assert before["kernels"]["rows"] == after["kernels"]["rows"]
    assert " rows, about " not in capsys.readouterr().out


@full("command")
def test_rows_that_die_hang_and_fail_cost_themselves_and_the_next_command_goes_on(tmp_path):
    out = tmp_path / "gpu.json"
    faults = [f"--inject={key}={fault}" for key, fault in zip(FLOORS, ("die", "hang", "context"), strict=False)]
    done = ran(out, "--sections", "floors", "--patience", "10", *faults)
    assert done.returncode == 1, done.stdout + done.stderr
    assert statuses(out, "floors") == dict(zip(FLOORS, ("died", "unfinished", "failed", "ok"), strict=True))
    rows = sections(out)["floors"]["rows"]
    assert rows["copy"]["error"] == "the process died with status -9"
    assert rows["read"]["error"] == "no result for 10 s"
    assert "2 rows to do" in sections(out)["floors"]["note"]
    ran(out, "--sections", "floors")
    assert statuses(out, "floors") == dict(zip(FLOORS, ("ok", "ok", "failed", "ok"), strict=True))
    assert sections(out)["floors"]["rows"]["empty graph"] == rows["empty graph"]


def begun(out: Path, *more: str, end: float = 0.0) -> run_all.Command:
    """A command that has only looked at what there is to do."""
    store = Store(out)
    store.data["about"] = {**common.machine(CPU), "dry_run": True, "run": 1}
    return run_all.Command(run_all.parse(["--dry-run", "--out", str(out), *more]), store, end)


def test_a_spent_time_is_not_a_failure(tmp_path, monkeypatch):
    out = tmp_path / "gpu.json"
    made = begun(out, "--sections", "floors", end=time.monotonic() + PATIENCE)
    record = made.store.record

    def recorded(section: str, key: str, row: dict[str, Any]) -> None:
        record(section, key, row)
        made.end = 0.0  # the time is spent as soon as a row has begun, however long its process took to start

    monkeypatch.setattr(made.store, "record", recorded)
    row = {"status": "started", "run": 1, "of": made.run_of("floors").digest(made.cases["floors"][0])}
    text = json.dumps(["floors", "copy", row]).encode() + b"\n"
    sleeper = "import os, time; os.write({}, {!r}); time.sleep(1e6)"
    monkeypatch.setattr(
        run_all.Command, "_worker", lambda *given: [sys.executable, "-c", sleeper.format(given[-1], text)]
    )
    made.supervise("floors", True, time.monotonic() + PATIENCE)
    made.close("floors")
    assert statuses(out, "floors") == {"copy": "unfinished"}
    assert sections(out)["floors"]["rows"]["copy"]["error"] == "its time was spent"
    assert not sections(out)["floors"]["rows"]["copy"]["hung"]
    assert sections(out)["floors"]["status"] == "unfinished"


def _processes_that_name(out: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and str(out).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def _until(true: Any) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


@full("command")
def test_a_command_that_is_killed_leaves_its_rows_and_no_process(tmp_path):
    out = tmp_path / "gpu.json"
    process = subprocess.Popen(
        command(out, "--sections", "floors", "--inject", "read=hang", "--patience", str(PATIENCE)),
        cwd=tmp_path, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    _until(lambda: out.exists() and sections(out)["floors"]["rows"].get("read", {}).get("status") == "started")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _until(lambda: not _processes_that_name(out))
    assert statuses(out, "floors") == {"copy": "ok", "read": "started"}
    kept = sections(out)["floors"]["rows"]["copy"]
    assert {path.name for path in tmp_path.iterdir()} <= {"gpu.json", "gpu.json.part"}
    assert ran(out, "--sections", "floors").returncode == 0
    assert statuses(out, "floors") == dict.fromkeys(FLOORS, "ok")
    assert sections(out)["floors"]["rows"]["copy"] == kept


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_all.main([]) == run_all.NO_GPU
    assert "no CUDA device" in capsys.readouterr().out


def test_no_time_left_stops_cleanly(tmp_path, capsys):
    out = tmp_path / "gpu.json"
    assert run_all.main(["--dry-run", "--budget", "0", "--out", str(out)]) == run_all.NOT_FINISHED
    assert {s["status"] for s in sections(out).values()} == {"unfinished"}
    assert "at most 0 s" in capsys.readouterr().out


# What is to do.


def run_of(path: Path, **how: Any) -> Run:
    store = Store(path)
    store.data["about"] = {"host": {"torch": "2"}, "triton": "3", "gpu": {"name": "H200"}, "run": 2}
    return Run(store, "s", CPU, **how)


def test_new_rows_come_first_then_unfinished_ones_then_those_that_died(tmp_path):
    run = run_of(tmp_path / "r.json")
    listed = [Case(key, dict) for key in ("died", "unfinished", "now", "ok", "failed", "other", "started", "new")]
    for case in listed[:-1]:
        status = {"now": "died", "other": "ok"}.get(case.key, case.key)
        row = {"status": status, "of": run.digest(case), "run": 1 + (case.key == "now")}
        run.store.record("s", case.key, row | ({"of": "before"} if case.key == "other" else {}))
    assert [case.key for case in run.todo(listed)] == ["other", "new", "unfinished", "started", "died"]


def test_rows_of_other_sources_cards_versions_and_tiles_are_measured_anew(tmp_path):
    def digest(of: str = "", sources: tuple[str, ...] = ("mla_compile/kernels",), **about: Any) -> str:
        run = run_of(tmp_path / "r.json", sources=sources)
        run.store.data["about"] |= about
        return run.digest(Case("a", dict, of=of))

    same = digest(date="tomorrow", run=9)
    assert same == digest()
    others = [digest("tile"), digest(sources=("mla_compile/passes",)), digest(gpu={"name": "H100"}), digest(triton="4")]
    assert len({same, *others}) == 5


def test_a_tuned_table_changes_only_the_rows_whose_tile_it_changes(monkeypatch, tmp_path):
    def plans() -> dict[str, str]:
        planning.plan.cache_clear()
        run = run_of(tmp_path / "r.json")
        return {case.key: run.digest(case) for case in kernels_bench.cases(run)}

    before, rows = plans(), tuned.table()
    changed = next(
        r for r in rows if r.suits(16, paged=True) and r.cache == "half" and r.capability == (8, 0) and r.paged
    )
    other = tuned.TunedTile(**{**changed.__dict__, "block_n": 2 * changed.block_n})
    monkeypatch.setattr(tiles, "table", lambda: tuple(other if row == changed else row for row in rows))
    after = plans()
    planning.plan.cache_clear()
    anew = {key for key in before if before[key] != after[key]}
    assert anew
    assert all(" h16 " in key for key in anew)
    # b4 kv45118 h16 s4 has 64 rows; lists have the tiles of a cache in one piece.
    assert sum(" h16 " in key and " k2048" not in key for key in before) == len(anew) + 1


def test_kernels_that_hang_or_die_bar_themselves(tmp_path):
    made = begun(tmp_path / "gpu.json", "--sections", "correctness,kernels")
    store = made.store
    assert made.lost("correctness") == made.lost("kernels") == frozenset()
    store.record("correctness", "gluon: a", {"status": "unfinished", "hung": True, "run": 1})
    assert made.lost("correctness") == frozenset()
    assert made.lost("kernels") == {"gluon"}
    store.record("correctness", "gluon splits: b", {"status": "died", "run": 1})
    store.record("correctness", "triton: c", {"status": "unfinished", "hung": False, "run": 1})
    assert made.lost("correctness") == made.lost("kernels") == {"gluon"}
    run = made.run_of("correctness")
    assert run.without == {"gluon"}
    assert [c.key for c in run.todo([Case("gluon: d", dict), Case("triton: d", dict)])] == ["triton: d"]
    store.record("kernels", "b1", {"status": "unfinished", "hung": True, "run": 1, "at": "flex"})
    assert made.lost("kernels") == {"gluon", "flex"}
    store.data["about"]["run"] = 2  # the next command tries again
    assert made.lost("correctness") == frozenset()


@pytest.mark.parametrize("going", [False, True])
def test_nothing_is_timed_when_a_check_fails(tmp_path, going):
    made = begun(tmp_path / "gpu.json", *["--keep-going"] * going)
    made.store.record("correctness", "gluon: wrong", {"status": "failed", "error": "off by 1"})
    said = "" if going else "nothing is timed: 1 checks failed, gluon: wrong first"
    assert made.gate("kernels").startswith(said)
    assert bool(made.gate("kernels")) != going
    assert made.gate("tests") == ""


def test_what_comes_first_on_an_h200_fits_one_command_of_ten_minutes(monkeypatch, tmp_path):
    monkeypatch.setattr(planning.Device, "of", staticmethod(lambda device: PRESETS["sm_90"]))
    need = {}
    for name, section in run_all.SECTIONS.items():
        run = run_of(tmp_path / "r.json", first=True)
        seconds = [case.seconds for case in run.todo(section.cases(run))]
        need[name] = run_all.START + sum(seconds) / min(8, max(1, section.workers * 8)) if seconds else 0.0
    assert all(need[name] > 0 for name in ("correctness", "floors", "kernels", "models", "tiles", "tune"))
    assert sum(need[name] for name in run_all.STANDING) < 0.7 * 540
    assert all(need[name] == 0 for name in ("onnx", "tests", "consan"))


def test_a_spent_section_leaves_the_rest_for_the_next_run(tmp_path):
    run = run_of(tmp_path / "r.json", end=time.monotonic() + PATIENCE)
    with pytest.raises(OutOfTimeError):
        run.cases([Case("too long", dict, 2 * PATIENCE), Case("short", dict, 0.1)])
    assert list(run.store.rows("s")) == ["short"]


def test_a_case_that_raises_is_a_row_and_the_next_one_runs(tmp_path):
    def bad() -> dict:
        raise ValueError("too small\nmore")

    def skipped() -> dict:
        raise SkipError("no such peer")

    run = run_of(tmp_path / "r.json")
    run.cases([Case("bad", bad), Case("skipped", skipped), Case("good", lambda: {"x": 1})])
    rows = json.loads((tmp_path / "r.json").read_text())["sections"]["s"]["rows"]
    assert rows["bad"]["error"] == "ValueError: too small"
    assert rows["skipped"]["reason"] == "no such peer"
    assert rows["good"]["x"] == 1
    assert counted(rows) == "1 failed, 1 skipped, 1 ok"
    assert run.store.failures("s") == ["bad"]


def test_a_file_that_cannot_be_read_is_begun_anew(tmp_path):
    out = tmp_path / "r.json"
    out.write_text('{"about": {}, "sec')
    assert "cannot be read" in Store(out).note


def test_a_kernel_of_ours_that_fails_is_left_out_and_the_others_are_timed(tmp_path, monkeypatch):
    run = run_of(tmp_path / "r.json", dry=True)
    for key, name in (("copy", "bytes_per_s"), ("matmul bfloat16", "flop_per_s")):
        run.store.record("floors", key, {"status": "ok", name: 1e12})
    shape = Shape(B=1, kv=70, H=2)
    real = kernels_bench.kernels_for(shape, CPU, {})
    monkeypatch.setattr(kernels_bench, "kernels_for", lambda *_: {**real, "gluon": real["triton"]})
    run.without = frozenset({"sdpa"})
    run.current = ("b1", {"status": "started"})
    told: list[str] = []
    monkeypatch.setattr(run.store, "record", lambda _, key, row: told.append(row["at"]))
    row = kernels_bench.measure(run, kernels_bench.Pool(run, [shape]), shape)
    assert row["status"] == "failed"
    assert "gluon: RuntimeError: the Hopper kernel did not compile here" in row["error"]
    assert "gluon" not in row
    assert row["triton"]["median"] > 0
    assert row["absent"]["sdpa"] == "hung or died in an earlier row"
    assert told[-4:] == ["triton", "gluon", "triton", ""]  # right or wrong, captured, timed in turns


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


def test_sparse_peers_are_given_places_in_the_cache(tmp_path):
    package = tmp_path / "flash_mla"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import torch\n"
        "def get_mla_metadata(*a, **k): return k, None\n"
        "def flash_mla_sparse_fwd(q, kv, indices, scale):\n"
        "    at = indices[:, 0].long()\n"
        "    score = torch.einsum('shd,skd->shk', q.double(), kv[at, 0].double()) * scale\n"
        "    weight = score.masked_fill(at[:, None] < 0, -torch.inf).softmax(-1)\n"
        "    return torch.einsum('shk,skd->shd', weight, kv[at, 0, :512].double()).to(q.dtype), None\n"
        "def flash_mla_with_kvcache(q, k_cache, table, lens, width, meta, splits, *, softmax_scale, is_fp8_kvcache,\n"
        "                           indices):\n"
        "    assert meta == {'num_heads_q': 64, 'is_fp8_kvcache': True, 'topk': 30}\n"
        "    rows = k_cache.flatten(0, 2)\n"
        "    scales = rows[:, 512:528].view(torch.float32).repeat_interleave(128, -1)\n"
        "    latent = rows[:, :512].float() * scales\n"
        "    kv = torch.cat([latent, rows[:, 528:].view(torch.bfloat16).float()], -1)[:, None]\n"
        "    out = flash_mla_sparse_fwd(q[:, 0].float(), kv, indices, softmax_scale)[0]\n"
        "    return out[:, None].to(q.dtype), None\n"
    )
    shape = Shape(B=2, kv=70, H=64, k=30)
    posed = problem(shape, CPU, seed=4, indices=cases.lists(shape, 30, CPU))
    posed.kv.nan_to_num_()
    truth = posed.truth()[0]
    plain = Shape(B=2, kv=70, H=64)
    assert torch.allclose(truth, cases.Problem(plain, *list(vars(posed).values())[1:]).truth()[0])
    try:
        got = peers.flashmla_sparse(posed, str(tmp_path))()
        assert (got - truth).norm() < 0.01 * truth.norm()
        with pytest.raises(SkipError, match="rows of 656 bytes only"):
            peers.flashmla_fp8(posed, str(tmp_path))
        packed = Shape(B=2, kv=70, H=64, k=30, cache=cases.FP8, groups=4)
        bytes_of_it = cases.stored(packed, posed.kv.float())
        posed = cases.Problem(packed, posed.query, bytes_of_it, posed.table, posed.lens, posed.options)
        got, truth = peers.flashmla_fp8(posed, str(tmp_path))(), posed.truth()[0]
        assert (got - truth).norm() < 0.01 * truth.norm()
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("flash_mla")
    for name, listed in (("flashmla", shape), ("flashmla sparse", plain), ("flashinfer", shape)):
        with pytest.raises(SkipError, match="lists of keys"):
            peers.where_timed(name, listed)
    peers.where_timed("sglang", shape)
    peers.where_timed("flashmla fp8", packed)
    with pytest.raises(SkipError, match="takes no rows of bytes"):
        peers.where_timed("sglang", packed)


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


@full("command")
def test_tiles_are_checked_and_timed_and_the_rest_of_the_table_is_kept(tmp_path, capsys):
    out = tmp_path / "gpu.json"
    done = ran(out, "--sections", "tune")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(sections(out)) >= {"tiles", "tune"}
    before = tuned.TABLE.read_text()
    assert tune.main([str(out), "--write"]) == 0
    assert tuned.TABLE.read_text() == before  # of a dry run
    assert "half-16 paged" in capsys.readouterr().out
    new = tuned.table(tmp_path / "tuned.json")
    old = tuned.table()
    changed = [row for row in new if row not in old]
    assert {row.paged for row in changed} == {True, False}
    assert all(row.capability == (8, 0) for row in changed)
    assert {row for row in new if row.capability != (8, 0)} == {row for row in old if row.capability != (8, 0)}


def test_the_fastest_tile_of_a_class_has_its_times(tmp_path):
    store = Store(tmp_path / "r.json")
    for key, us, more in (("16x32 w4 s3", 9.0, {"t0_us": 1}), ("16x64 w4 s3", 7.0, {"t0_us": 2}), ("16x16", 8.0, {})):
        store.record("tune", f"half-16 paged {key}", {"status": "ok", "us": us, **more})
    store.record("tune", "half-16 contiguous 16x16", {"status": "ok", "us": 1.0, "t0_us": 1})
    assert tune.best(store, "half-16 paged")["us"] == 7.0
    assert tune.best(store, "half-32 paged") is None
    assert tune.main([str(tmp_path / "none.json")]) == 1


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


def h200(path: Path) -> Store:
    store = Store(path)
    gpu = {"name": "NVIDIA H200", "capability": [9, 0]}
    store.data["about"] = {"gpu": gpu, "host": {"torch": "2", "date": "2026-01-02"}, "dry_run": False, "run": 1}
    return store


def test_measured_times_go_into_the_table(tmp_path):
    store = h200(tmp_path / "r.json")
    tile = {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 3, "paged": True}
    times = {"us": 9.0, "t0_us": 2.5, "lone_us": 1.4, "full_us": 0.9}
    store.record("tune", "half-16 paged 16x64 w4 s3", {"status": "ok", "tile": tile, **times})
    store.record("tune", "gluon: 24 rows", {"status": "ok", "gluon_us": 5.0, "triton_us": 6.0})
    store.record("tune", "gluon: 16 rows", {"status": "skipped", "reason": "no time"})
    store.record("tune", "gluon: float8, 8 rows", {"status": "ok", "gluon_us": 5.0, "triton_us": 6.0})
    rows = tune.rewritten(store)
    (new,) = (r for r in rows if r.get("provenance", "").startswith("measured on NVIDIA H200"))
    assert (new["block_n"], new["tile_us"], new["paged"]) == (64, 0.9, True)
    assert {r["cache"]: r["min_rows"] for r in rows if r["kernel"] == "gluon"} == {"half": 24, "float8": 8}
    tune.write(tmp_path / "tuned.json", rows)
    assert any(r.min_rows == 24 for r in tuned.table(tmp_path / "tuned.json"))


def test_what_tune_prints_has_the_fit_and_the_threshold(tmp_path, capsys):
    store = h200(tmp_path / "r.json")
    want = Pace(1.9, 0.021, 0.6)
    for index, tile in enumerate(measured(want, 0.3, 0.0)):
        row = {"tile": {"block_m": 16, "block_n": 32, "num_warps": 4, "num_stages": 3, "paged": True}, "TBps": 1.0}
        row |= {"us": 9.0 + index, "TFLOPs": 1.0, "t0_us": 1.0, "links": tile.links, "depth": tile.depth}
        row |= {"status": "ok", "lone_us": tile.lone, "full_us": tile.full}
        store.record("tune", f"half-16 paged {index}", row)
    store.record("tune", "half-16 paged slower", {"status": "ok", "us": 99.0})  # was never the fastest: no such times
    for rows, gluon in ((16, 7.0), (20, 5.0), (64, 5.0)):
        store.record("tune", f"gluon: {rows} rows", {"status": "ok", "gluon_us": gluon, "triton_us": 6.0})
    assert tune.main([str(store.path)]) == 0
    said = capsys.readouterr().out
    assert "Pace(latency=1.9" in said
    assert "fits with an error of 0.0%" in said
    assert "min_rows of the Hopper kernel: 20" in said


def test_the_fastest_form_of_the_hopper_kernel_becomes_the_tables(tmp_path, capsys):
    store = h200(tmp_path / "r.json")
    took = {"9 barriers": 4.5, "held query": 4.9, "9 barriers, held query": 4.6}
    for form, rows in itertools.product(took, tune.FORM_ROWS):
        assert tune.best_form(store, "half") is None  # not all of them were measured
        row = {"status": "ok", "form_us": took[form], "gluon_us": 5.0}
        store.record("tune", f"gluon: {form}, {rows} rows", row)
    store.record("tune", "gluon: 64 rows", {"status": "ok", "gluon_us": 5.0, "triton_us": 6.0})
    for rows, us in zip(tune.FORM_ROWS, (5.1, 4.9, 5.0), strict=True):
        row = {"status": "ok", "form_us": us, "gluon_us": 5.0}
        store.record("tune", f"gluon: float8, held query, {rows} rows", row)
    by_kind = {row["cache"]: row for row in tune.rewritten(store) if row["kernel"] == "gluon"}
    assert (by_kind["half"]["barriers"], by_kind["half"]["held"]) == (9, False)
    assert (by_kind["float8"]["barriers"], by_kind["float8"]["held"]) == (3, False)  # no gain is no reason
    assert tune.main([str(store.path)]) == 0
    assert "9 barriers: 0.900 of the time without" in capsys.readouterr().out


def test_two_ctas_are_the_tables_where_they_are_faster_than_the_same_form_alone(tmp_path):
    store = h200(tmp_path / "r.json")
    took = {"9 barriers": 4.5, "held query": 5.0, "9 barriers, held query": 5.0}
    for form, rows in itertools.product(took, tune.FORM_ROWS):
        row = {"status": "ok", "form_us": took[form], "gluon_us": 5.0}
        store.record("tune", f"gluon: {form}, {rows} rows", row)
    for with_9, cluster in ((4.3, 2), (4.49, 1), (4.6, 1)):
        for form, us in (("cluster of 2", 4.0), ("9 barriers, cluster of 2", with_9)):
            store.record("tune", f"gluon: {form}, 128 rows", {"status": "ok", "form_us": us, "gluon_us": 5.0})
        assert tune.best_form(store, "half") == {"barriers": 9, "held": False, "cluster": cluster}
    for form, rows in itertools.product(took, tune.FORM_ROWS):
        store.record("tune", f"gluon: {form}, {rows} rows", {"status": "ok", "form_us": 5.0, "gluon_us": 5.0})
    assert tune.best_form(store, "half") == {"barriers": 3, "held": False, "cluster": 2}  # 4.0 in place of 5.0
    assert tune.form_ratios(store, "half")["cluster of 2"] == pytest.approx(0.8)


@pytest.mark.parametrize("clusters", [True, False])
def test_both_kernels_are_checked_then_timed_by_query_rows(clusters, tmp_path, monkeypatch):
    """As on an H200, over the reference: only rows whose check is right are timed."""
    monkeypatch.setattr(tune.hopper_steps, "clusters", lambda: clusters)
    assert not any(case.key.startswith(tune.BESIDE) for case in tune.tiles(run_of(tmp_path / "r.json", dry=True)))
    monkeypatch.setattr(planning.Device, "of", staticmethod(lambda device: PRESETS["sm_90"]))
    monkeypatch.setattr(tune, "not_replaced", lambda kernel: None)
    store = h200(tmp_path / "r.json")
    for section in (tune.tiles, tune.tune):
        run = Run(store, section.__name__, CPU, dry=True)
        listed = [case for case in section(run) if case.key.startswith(tune.BESIDE)]
        keys = [f"gluon: {kind}{rows} rows" for kind in ("", "float8, ", "no rope, ") for rows in tune.HOPPER_ROWS]
        both, forms = listed[: len(keys)], listed[len(keys) :]
        assert [case.key for case in both] == keys
        assert all(common.kernel_of(case.key) == "gluon" and "kernel='triton'" in case.of for case in both)
        pairs = [case for case in forms if "cluster=2" in case.of]
        assert [case.key for case in pairs] == [f"gluon: {form}, 128 rows" for form in tune.SHARED if clusters]
        assert len(forms) - len(pairs) == len(tune.FORM_ROWS) * sum(map(len, tune.KIND_FORMS.values()))
        assert all("barriers=9" in case.of or "held=True" in case.of for case in forms if case not in pairs)
        run.cases([*listed[:2], forms[0]])
        store.rows("tiles")["gluon: 8 rows"]["status"] = "failed"
    assert set(tune.compared(store)) == {4}
    assert {"form_us", "gluon_us"} <= set(store.rows("tune")["gluon: 9 barriers, 32 rows"])
    assert store.rows("tune")["gluon: 8 rows"]["reason"] == "its check is failed"


def test_a_left_padded_cache_is_a_masked_call_for_both_kernels(monkeypatch):
    monkeypatch.setattr(planning.Device, "of", staticmethod(lambda device: PRESETS["sm_90"]))
    masked = [(shape, lens) for name, shape, lens in kernels_bench.uneven(False) if name.startswith("left-padded")]
    assert masked
    for shape, lens in masked:
        option = kernels_bench.masks(shape, lens, CPU)
        assert option["mask"].flatten(1).sum(1).tolist() == list(lens)
        assert set(cases.kernels_for(shape, CPU, option)) == {"triton", "gluon"}


def test_lists_for_many_heads_are_checked_and_timed_in_both_kernels(monkeypatch):
    monkeypatch.setattr(planning.Device, "of", staticmethod(lambda device: PRESETS["sm_90"]))
    for _, shape, _ in kernels_bench.with_lists(False):
        both = {"triton", "gluon"} if shape.H > 16 else {"triton"}
        assert set(cases.kernels_for(shape, CPU, {})) == both
    for _, shape, _ in kernels_bench.without_rope(False):
        assert {"triton", "gluon"} <= set(cases.kernels_for(shape, CPU, {}))
    run = SimpleNamespace(dry=False, device=CPU)
    keys = [case.key for case in correctness.cases(run)]  # type: ignore[arg-type]
    for what in ("graph replay, lists", "repeated, lists", "lists h128", "lists, mask h128"):
        assert {f"triton: {what}", f"gluon: {what}"} <= set(keys), what
    for what in ("softcap h128", "window h128", "lists, sinks, softcap, window h128"):
        assert {f"triton: {what}", f"gluon: {what}"} <= set(keys), what
    for what in ("512+0, sinks, window h128", "512+0, mask with holes h128", "lists, 512+0, sinks h128"):
        assert {f"triton: {what}", f"gluon: {what}"} <= set(keys), what
    for what in ("added mask", "mask of heads"):  # which the Hopper kernel leaves to the other one
        assert not [key for key in keys if key.startswith("gluon: lists") and what in key]
    listed = [key for key in keys if key.startswith("gluon: lists of")]
    assert len(listed) == len(correctness.LISTED["k"]) * 2 * 4


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
