"""``mla-compile plan``: floors against the published table, layouts against each other, and bad input."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import sympy
from typer.testing import CliRunner

from mla_compile.cli.app import app
from mla_compile.core.dims import Dims
from mla_compile.errors import InputError
from mla_compile.models.survey import Survey
from mla_compile.report.facts import CachedLayers, Facts, LatentSites, Weights
from mla_compile.report.report import Report
from mla_compile.workbench import planning
from mla_compile.workbench.machines import machine
from mla_compile.workbench.planning import Attention, Request, expressions, floor_seconds, plan

V3_DIMS = Dims(H=128, L=512, R=64, N=128, V=128, Q=1536, D=7168)
V3_WEIGHTS = Weights(671_026_404_352, 926_679_040, 653_908_770_816, 256, 8.0)
V3 = Facts(
    "V3", "MLA", (), (LatentSites(V3_DIMS, 61, absorbed=True),), (CachedLayers(1, 512, 1, 64, 61),), V3_WEIGHTS,
    heads=128, width=7168,
)  # fmt: skip
GROUPED = Facts(
    "Grouped", "GQA", (), (), (CachedLayers(8, 128, 8, 128, 80),), Weights(70_553_706_496, 1_050_673_152),
    heads=64, width=8192,
)  # fmt: skip
H200 = machine("h200")
CUSTOM = {"memory_bytes": 32e9, "bytes_per_s": 1e12, "flops_per_s": {"bf16": 1e14}}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The command on V3's sizes, without tracing them in every test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "mla_compile.cli.plan.survey", lambda source: Survey({"v3": V3, "grouped": GROUPED}[source], Report(()))
    )
    return tmp_path


def call(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


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


def test_grouped_heads_are_split_as_far_as_they_go():
    """Eight key heads on eight machines are split; on sixteen, two machines hold the same head."""
    whole = 80 * 2 * 8 * 128 * 2 * 4096
    for tp, part in ((1, whole), (8, whole / 8), (16, whole / 8)):
        row = plan(GROUPED, H200, Request(context=4096, users=8, tp=tp)).layouts[0]
        assert row.cache_bytes_per_user == part
    step = plan(GROUPED, H200, Request(context=131072, users=8, tp=8)).layouts[0]
    assert step.attention_compute_s == pytest.approx(8 * 80 * 131072 * 2 * 64 * 256 / 8 / H200.peak("bf16"))


@pytest.mark.parametrize("name", ["h200", "h100", "a100", "b200", "cpu"])
def test_every_machine_has_figures_and_says_where_they_are_from(name):
    known = machine(name)
    assert known.source
    assert known.memory_bytes > 1e10
    assert known.peak("fp8") >= known.peak("bf16") >= known.peak("fp32")


def test_a_request_as_text_and_as_json(here):
    done = call(
        "v3", "--gpu", "h200", "--context", "128k", "--users", "64", "--dtype", "fp8", "--tp", "8", "--formulas"
    )
    assert done.exit_code == 0, done.output
    for text in ("data-parallel", "floor of a decode step", "bottleneck", "NVLink", "attention bytes = ", "letters: "):
        assert text in done.output
    done = call("v3", "--tp", "8", "--users", "1", "--json")
    assert done.exit_code == 1, done.output  # 1.3 TB of weights in bf16 do not fit on eight
    said = json.loads(done.stdout)
    assert said["schema"] == "mla_compile.plan/1"
    assert [row["fits"] for row in said["layouts"]] == [False] * 3
    assert all(math.isfinite(row["step_s"]) for row in said["layouts"])


def test_the_whole_way_from_a_config(tmp_path):
    config = {
        "model_type": "minicpm3", "vocab_size": 97, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": 28,
        "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 10,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    done = call(str(path), "--gpu", "cpu", "--context", "4k", "--users", "2", "--json")
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["layouts"]
    assert row["cache_bytes_per_user"] == 3 * 26 * 2 * 4096


@pytest.mark.parametrize(
    "text", [json.dumps(CUSTOM), "memory_bytes: 32e9\nbytes_per_s: 1.0e+12\nflops_per_s: {bf16: 1e14}"]
)
def test_a_machine_of_ones_own(here, text):
    name = "mine.json" if text[0] == "{" else "mine.yaml"
    Path(name).write_text(text)
    assert replace(machine(name), name="", source="") == replace(machine("h100"), **CUSTOM, link_bytes_per_s=None, name="", source="")  # noqa: E501  # fmt: skip
    assert call("grouped", "--gpu", name).exit_code == 1  # 141 GB of weights


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_plot(here, suffix):
    pytest.importorskip("matplotlib")
    done = call("v3", "--dtype", "fp8", "--tp", "8", "--plot", f"plan.{suffix}")
    assert done.exit_code == 0, done.output
    start = (here / f"plan.{suffix}").read_bytes()[:200]
    assert b"<svg" in (here / "plan.svg").read_bytes() if suffix == "svg" else start[1:4] == b"PNG"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("v3", "--gpu", "h20"), "there is no machine 'h20' (did you mean 'h200'?)"),
        (("v3", "--gpu", "missing.yaml"), "missing.yaml cannot be read"),
        (("v3", "--gpu", "broken.yaml"), "broken.yaml is not YAML"),
        (("v3", "--gpu", "broken.json"), "broken.json is not JSON"),
        (("v3", "--gpu", "list.yaml"), "does not describe a machine: expected the fields"),
        (("v3", "--gpu", "deep.yaml"), "deep.yaml is not YAML"),
        (("v3", "--gpu", "partial.json"), "missing memory_bytes, flops_per_s"),
        (("v3", "--gpu", "negative.json"), "bytes_per_s is -1, expected a number above 0"),
        (("v3", "--gpu", "misspelt.json"), "there is no field 'bytes_per_sec' (did you mean 'bytes_per_s'?)"),
        (("v3", "--context", "0"), "context is '0'"),
        (("v3", "--context=-4k"), "context is '-4k'"),
        (("v3", "--context", "1000000000000"), "from 1 to 134,217,728"),
        (("v3", "--users", "some"), "users is 'some'"),
        (("v3", "--users", "1" * 5000), "users is"),
        (("v3", "--tp", "3"), "tp is 3, which does not divide the 128 heads"),
        (("v3", "--tp", "8", "--dcp", "3"), "dcp is 3, expected a divisor of tp, which is 8"),
        (("v3", "--gpu", "cpu", "--tp", "2"), "has no link_bytes_per_s"),
        (("v3", "--dtype", "fp4"), "dtype is 'fp4', expected one of fp32, bf16, fp16, fp8"),
        (("v3", "--cache-dtype", "int3"), "cache-dtype is 'int3'"),
        (("v3", "--reserve", "1"), "reserve is 1.0"),
        (("v3", "--reserve", "nan"), "reserve is nan"),
        (("v3", "--plot", "plan.pdf"), "neither .svg nor .png"),
        (("v3", "--plot", "nowhere/plan.svg"), "no directory to write plan.svg to"),
        (("v3", "--plot", "folder.svg"), "folder.svg is a directory, expected the name of a file"),
    ],
)
def test_bad_input_is_one_line(here, arguments, text):
    for name, content in {
        "broken.yaml": "{a: [",
        "broken.json": "{",
        "list.yaml": "- 1",
        "deep.yaml": "[" * 5000,
        "partial.json": '{"bytes_per_s": 1e12}',
        "negative.json": json.dumps(CUSTOM | {"bytes_per_s": -1}),
        "misspelt.json": json.dumps(CUSTOM | {"bytes_per_sec": 1}),
    }.items():
        Path(name).write_text(content)
    Path("folder.svg").mkdir()
    done = call(*arguments)
    assert done.exit_code == 2, done.output
    assert text in done.output
    assert "Traceback" not in done.output


def test_a_config_that_is_not_there():
    done = call("nowhere.json")
    assert (done.exit_code, "there is no file nowhere.json" in done.output) == (2, True), done.output


@pytest.mark.parametrize(
    ("library", "arguments", "text"),
    [
        ("matplotlib", ("--plot", "plan.svg"), 'pip install "mla-compile[plot]"'),
        ("yaml", ("--gpu", "mine.yaml"), 'pip install "mla-compile[demo]"'),
    ],
)
def test_a_missing_extra_is_named(here, monkeypatch, library, arguments, text):
    Path("mine.yaml").write_text("{}")
    monkeypatch.setitem(sys.modules, library, None)
    done = call("v3", *arguments)
    assert (done.exit_code, text in done.output) == (2, True), done.output


def test_a_model_without_a_growing_cache_is_refused():
    with pytest.raises(InputError, match="nothing to plan"):
        plan(replace(V3, latent=(), cached=()), H200, Request())
