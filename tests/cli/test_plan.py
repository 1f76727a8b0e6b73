"""``mla-compile plan`` as a user types it: text, JSON, plots, and bad input."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mla_compile.cli.app import app
from mla_compile.models.survey import Survey
from mla_compile.report.report import Report
from mla_compile.workbench.machines import machine
from tests.support.explaining import trace_once
from tests.support.facts import GROUPED, V3, V3_MTP
from tests.support.tiers import also

SMALL = {
    "model_type": "minicpm3", "vocab_size": 97, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": 28,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 10,
}  # fmt: skip
CUSTOM = {"memory_bytes": 32e9, "bytes_per_s": 1e12, "flops_per_s": {"bf16": 1e14}}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The command on V3's sizes, without tracing them in every test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "mla_compile.cli.plan.survey",
        lambda source, *_: Survey({"v3": V3, "v3_mtp": V3_MTP, "grouped": GROUPED}[source], Report(())),
    )
    return tmp_path


def call(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


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
    assert [row["fits"] for row in said["layouts"]] == [False] * 4
    assert all(math.isfinite(row["step_s"]) for row in said["layouts"])


def test_what_does_not_fit_has_no_floors_but_a_number_of_gpus_on_which_it_fits(here):
    done = call("v3", "--tp", "8", "--users", "32")
    assert done.exit_code == 1
    assert "floor of a decode step" not in done.output
    assert "32 users of 131,072 tokens fit from --tp 16 on" in done.output
    assert call("v3", "--tp", "16", "--users", "32").exit_code == 0
    many = call("v3", "--tp", "16", "--users", "100000", "--context", "1m").output
    assert "100,000 users of 1,048,576 tokens fit on no number of GPUs up to 1,024; at most " in many
    (most,) = re.findall(r"give --users (\d+)", many)
    assert call("v3", "--tp", "16", "--users", most, "--context", "1m").exit_code == 0
    assert call("v3", "--tp", "16", "--users", str(int(most) + 1), "--context", "1m").exit_code == 1


def test_drafts_and_prompts_as_text_and_as_json(here):
    asked = ("v3_mtp", "--context", "8k", "--users", "64", "--dtype", "fp8", "--tp", "8", "--draft-tokens", "2",
             "--acceptance", "0.5", "--prompt", "6k", "--output", "1k")  # fmt: skip
    done = call(*asked, "--formulas")
    assert done.exit_code == 0, done.output
    for text in (
        "of it drafting", "tokens of a user per step", "1.75", "prompts of 6,144 tokens", "floor of 64 prompts",
        "first token of one alone", "1,024 tokens for each prompt", "one more layer with 11.61 billion weights",
        "attention FLOPs of prompts = ", "S tokens per user in a pass",
    ):  # fmt: skip
        assert text in done.output
    done = call(*asked, "--json")
    said = json.loads(done.stdout)
    assert said["schema"] == "mla_compile.plan/1"
    assert {name: said["request"][name] for name in ("draft_tokens", "acceptance", "prompt", "output")} == {
        "draft_tokens": 2, "acceptance": 0.5, "prompt": 6144, "output": 1024,
    }  # fmt: skip
    for row in said["layouts"]:
        assert row["tokens_per_step"] == 1.75
        assert 0 < row["drafting_s"] < row["step_s"]
        assert row["served_tokens_per_s"] < row["most_served_tokens_per_s"] < row["most_tokens_per_s"]
        assert row["prefill"]["first_token_s"] < row["prefill"]["step_s"]
    plain = json.loads(call("v3", "--dtype", "fp8", "--tp", "8", "--json").stdout)
    assert [row["served_tokens_per_s"] for row in plain["layouts"]] == [None] * 4
    assert "of it drafting" not in call("v3", "--dtype", "fp8", "--tp", "8").output


def test_the_whole_way_from_a_config(tmp_path, monkeypatch):
    trace_once(monkeypatch)  # test_weights_as_the_config_stores_them has the same model
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    done = call(str(path), "--gpu", "cpu", "--context", "4k", "--users", "2", "--json")
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["layouts"]
    assert row["cache_bytes_per_user"] == 3 * 26 * 2 * 4096


def test_weights_as_the_config_stores_them(tmp_path, monkeypatch):
    """Quantized ones take less, W_kc and W_v a little more beside them; a dtype that is typed counts alone."""
    trace_once(monkeypatch)
    path = tmp_path / "config.json"
    fields = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    path.write_text(json.dumps(SMALL | {"quantization_config": fields}))
    done = call(str(path), "--gpu", "cpu", "--context", "4k", "--users", "2", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["request"]["weight_dtype"], said["request"]["cache_dtype"]) == ("as stored", "bf16")
    matrices = [(28, 48), (72, 28), (26, 48), (88, 20), (48, 40), (56, 48), (56, 48), (48, 56)]
    plain = 3 * (2 * 48 + 28 + 20) + 48 + (1 if SMALL.get("tie_word_embeddings", True) else 2) * 97 * 48
    stored = 3 * sum(r * c + 4 * r for r, c in matrices) + 2 * plain
    assert said["stored"]["bytes"] == stored
    assert said["stored"]["kept_bytes"] == 3 * 88 * 20 * 2
    assert said["layouts"][0]["weight_bytes"] == pytest.approx(stored + 3 * 88 * 20 * 2)
    text = call(str(path), "--gpu", "cpu", "--context", "4k").output
    assert "weights as stored (bitsandbytes)" in text
    assert "kv_b_proj: stored as int8 with a scale for an output, dequantized to be absorbed; kept, W_kc" in text
    typed = json.loads(call(str(path), "--gpu", "cpu", "--context", "4k", "--dtype", "fp8", "--json").stdout)
    assert (typed["stored"], typed["request"]["weight_dtype"]) == (None, "fp8")
    path.write_text(json.dumps(SMALL | {"quantization_config": {"quant_method": "quark"}}))
    done = call(str(path), "--gpu", "cpu", "--context", "4k")
    assert "note: quantized with 'quark', which is not read: weights are counted as if" in done.output
    path.write_text(json.dumps(SMALL | {"quantization_config": {"quant_method": "gptq", "bits": "four"}}))
    done = call(str(path), "--gpu", "cpu")
    assert done.exit_code == 2, done.output
    assert "quantization_config: bits is 'four', expected one of 2, 3, 4, 5, 6, 7, 8" in done.output


@pytest.mark.parametrize(
    "text", [json.dumps(CUSTOM), "memory_bytes: 32e9\nbytes_per_s: 1.0e+12\nflops_per_s: {bf16: 1e14}"]
)
def test_a_machine_of_ones_own(here, text):
    name = "mine.json" if text[0] == "{" else "mine.yaml"
    Path(name).write_text(text)
    alone = dict.fromkeys(("link_bytes_per_s", "node_machines", "network_bytes_per_s"))
    want = replace(machine("h100"), **CUSTOM, **alone, name="", source="")
    assert replace(machine(name), name="", source="") == want
    assert call("grouped", "--gpu", name).exit_code == 1  # 141 GB of weights


PROMPTS = ("--prompt", "64k", "--output", "1k")


@pytest.mark.parametrize(("suffix", "prompts"), [("svg", PROMPTS), *also("combination", ("svg", ()), ("png", ()))])
def test_a_plot(here, suffix, prompts):
    """Its contexts are shorter than the prompt, too."""
    pytest.importorskip("matplotlib")
    done = call("v3", "--dtype", "fp8", "--tp", "8", *prompts, "--plot", f"plan.{suffix}")
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
        (("v3", "--gpu", "half.json"), "node_machines is 0.5, expected a whole number from 1"),
        (("v3", "--gpu", "misspelt.json"), "there is no field 'bytes_per_sec' (did you mean 'bytes_per_s'?)"),
        (("v3", "--context", "0"), "context is '0'"),
        (("v3", "--context=-4k"), "context is '-4k'"),
        (("v3", "--context", "1000000000000"), "from 1 to 134,217,728"),
        (("v3", "--users", "some"), "users is 'some'"),
        (("v3", "--users", "1" * 5000), "users is"),
        (("v3", "--tp", "64", "--gpu", "node.json"), "has no network_bytes_per_s, so tp is at most the 8 of a node"),
        (("v3", "--tp", "8", "--dcp", "3"), "dcp is 3, expected a divisor of tp, which is 8"),
        (("v3", "--gpu", "cpu", "--tp", "2"), "has no link_bytes_per_s"),
        (("v3", "--dtype", "fp6"), "dtype is 'fp6', expected one of fp32, bf16, fp16, fp8, fp4"),
        (("v3", "--cache-dtype", "fp4"), "cache-dtype is 'fp4', expected one of fp32, bf16, fp16, fp8"),
        (("v3", "--cache-dtype", "int3"), "cache-dtype is 'int3'"),
        (("v3", "--draft-tokens", "some"), "draft-tokens is 'some', expected a whole number from 0 to 64"),
        (("v3", "--draft-tokens=-1"), "draft-tokens is '-1'"),
        (("v3", "--draft-tokens", "65"), "draft-tokens is '65'"),
        (("v3", "--acceptance", "1.5"), "acceptance is 1.5, expected a probability from 0 to 1"),
        (("v3", "--acceptance", "nan"), "acceptance is nan"),
        (("v3", "--prompt", "0"), "prompt is '0'"),
        (("v3", "--prompt", "256k"), "prompt is 262144, expected from 1 to the 131,072 tokens of context"),
        (("v3", "--output", "0"), "output is '0'"),
        (("v3", "--reserve", "1"), "reserve is 1.0"),
        (("v3", "--reserve", "nan"), "reserve is nan"),
        (("v3", "--plot", "plan.pdf"), "neither .svg nor .png"),
        (("v3", "--plot", "nowhere/plan.svg"), "is not a directory to write plan.svg to"),
        (("v3", "--plot", "folder.svg"), "folder.svg is a directory, expected the name of a file"),
    ],
)
def test_bad_input_is_one_line(here, arguments, text):
    for name, content in {
        "broken.yaml": "{a: [",
        "broken.json": "{",
        "list.yaml": "- 1",
        "deep.yaml": "[" * 600,
        "partial.json": '{"bytes_per_s": 1e12}',
        "negative.json": json.dumps(CUSTOM | {"bytes_per_s": -1}),
        "node.json": json.dumps(CUSTOM | {"link_bytes_per_s": 1e11, "node_machines": 8}),
        "half.json": json.dumps(CUSTOM | {"node_machines": 0.5}),
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
