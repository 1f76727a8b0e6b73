"""``mla-compile explain`` as a user types it: published sizes, families without a latent, refusals, and bad input."""

from __future__ import annotations

import functools
import json
import math
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mla_compile.cli.app import app
from mla_compile.models import config_file
from mla_compile.models.survey import survey
from mla_compile.passes.decide import judge
from mla_compile.passes.sources import sources
from mla_compile.workbench import bench
from tests.support.explaining import LLAMA, TINY, call, trace_once, write
from tests.support.tiers import also

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"


def test_deepseek_v3(explained_models):
    """671 billion parameters, none of them allocated: what is absorbed, the cache, the cost of a token, the choices."""
    done = call(str(CONFIGS / "deepseek-v3.json"), "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["schema"] == "mla_compile.explain/1"
    assert said["family"] == "MLA"
    assert said["report"]["counts"]["absorbed"] == 2
    (site,) = said["sites"]
    assert site["count"] == 61
    assert site["dims"] == {"H": 128, "L": 512, "R": 64, "N": 128, "V": 128, "Q": 1536, "D": 7168, "A": 0, "G": 1}
    assert {row["kind"]: row["values"] for row in said["cache"]} == {"MHA": 40960, "GQA": 2560, "MQA": 320, "MLA": 576}
    (own,) = [row for row in said["cache"] if row["own"]]
    assert own["bytes"] == [61 * 576 * 2 * T for T in said["contexts"]]
    assert said["cached_by_its_code"][0]["values"] == 576
    (choice,) = said["choices"]
    assert math.ceil(choice["break_even_long"]) == 171
    assert not choice["fold"]
    assert [side["folded"] for side in choice["folds"]] == [1536 * 128 * 512, 128 * 512 * 7168]
    expanded, absorbed = said["costs"]
    # A token more costs every layer 2H(L(N+V)+N+R+V) or 2H(2L+R).
    per_token = [(row["flops"][2] - row["flops"][1]) / (131072 - 32768) / 61 for row in (expanded, absorbed)]
    assert per_token == [33_636_352, 278_528]
    # Without context a token takes two FLOPs per weight it reads.
    assert absorbed["flops"][0] - 61 * 278_528 * 4096 == 2 * said["weights"]["active"]


NAMES = sorted({path.stem for path in CONFIGS.glob("*.json")} - {"deepseek-v4-pro"})  # deepseek-v4-flash is like it


@pytest.mark.parametrize("name", ["deepseek-v3.2", *also("family", *(n for n in NAMES if n != "deepseek-v3.2"))])
def test_all_outputs_show_the_same_figures(explained_models, tmp_path, monkeypatch, name):
    """What a layer reads and its cache holds, by the report, the page, the tables and the plan."""
    once = functools.cache(survey)
    for command in ("explain", "plan"):
        monkeypatch.setattr(f"mla_compile.cli.{command}.survey", once)
    source, page = str(CONFIGS / f"{name}.json"), tmp_path / "page.html"
    said = json.loads(call(source, "--json", "--html", str(page)).stdout)
    text, shown = " ".join(call(source).output.split()), page.read_text()
    sites, cached = said["report"]["sites"], said["cached_by_its_code"]
    layers = sum(site["stands_for"] for site in sites)
    assert f"of {layers} attentions" in text
    assert sum(entry["count"] for entry in cached) == layers
    assert all("-> 0 " not in output for output in (text, shown)), "what reads chosen keys alone costs something"
    rows = [entry["key_heads"] * entry["key_width"] + entry["value_heads"] * entry["value_width"] for entry in cached]
    of_user = [c["count"] * (c["values"] * 1024 + c["window"] * r) for c, r in zip(cached, rows, strict=True)]
    plan = ("plan", source, "--context", "1k", "--users", "1", "--tp", "8", "--json")
    layout = json.loads(CliRunner().invoke(app, plan).stdout)["layouts"][0]
    state = sum(c["count"] * c["state_bytes"] for c in cached)  # and a whole number of rows stands for 1,024 tokens
    assert layout["cache_bytes_per_user"] == 2 * sum(of_user) + state
    waiting = sum(c["count"] * c["waiting_bytes"] * max(0, c["every"] - 1) for c in cached)
    assert layout["most_cache_bytes_per_user"] == layout["cache_bytes_per_user"] + waiting
    assert f"its own code caches {sum(c['count'] * c['values'] for c in cached):,} values per token" in text
    if name.startswith("deepseek-v4"):  # whose heads share rows: nothing is absorbed
        assert {site["code"] for site in sites} == {"shared_rows"}
        return
    (own,) = (row for row in said["cache"] if row["own"])
    (before, read, held) = (
        {site[f"values_{w}"] for site in sites} for w in ("read_before", "read_after", "held_after")
    )
    assert read == held == {own["values"]} == {entry["values"] - entry["besides"] for entry in cached} == set(rows)
    assert own["bytes"] == [layers * own["values"] * 2 * T for T in said["contexts"]]
    (dims,) = (site["dims"] for site in said["sites"])
    assert before == {dims["H"] * (dims["N"] + dims["R"] + dims["V"])}
    assert read == {dims["L"] + dims["R"]}
    (was,), (now,) = before, read
    assert f"attention reads {layers * was:,} -> {layers * now:,} values per key" in text
    assert f"cache holds {layers * now:,} -> {layers * now:,} values per token" in text
    assert f"{now:,} values are read per key and layer instead of {was:,}, {was / now:.3g} times fewer" in shown


@pytest.mark.usefixtures("traced_once")
def test_layers_that_are_not_traced_count_as_those_they_are_like(explained_models):
    """Five layers of two kinds, under a model type that transformers does not know, shown as text."""
    write(TINY)
    done = call(".", "--dtype", "bfloat16")
    assert done.exit_code == 0, done.output
    assert "of 5 layers 2 are traced, one of each kind: layer 0 for 2, layer 2 for 3" in done.output
    assert "model type 'kimi_k2' is read as 'deepseek_v3'" in done.output
    assert "5 sites with H=4 L=20 R=6 N=12 V=10 Q=28 D=48" in done.output
    assert "its own code caches 130 values per token (5 x 26)" in done.output
    assert "fold verdict" in done.output


KINDS = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [16, 16]},
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 4}}},
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 4},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 4},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What is said of the model without a quantization."""
    config = tmp_path_factory.mktemp("plain") / "config.json"
    config.write_text(json.dumps(TINY))
    with pytest.MonkeyPatch.context() as patch:
        trace_once(patch)
        return json.loads(call(str(config), "--json").stdout)


@pytest.fixture
def traced_once(monkeypatch):
    """Models that differ in how their weights are stored alone are traced once."""
    trace_once(monkeypatch)


@pytest.mark.parametrize(
    ("kind", "traced"),
    [
        *((kind, False) for kind in KINDS),
        *also("combination", ("fp8", True), ("awq", True)),
    ],
)
def test_weights_as_a_quantized_checkpoint_stores_them(explained_models, plain, monkeypatch, kind, traced):
    """The verdicts and dims stay, bytes of weights are those of the format, and what is dequantized is said."""
    if not traced:
        trace_once(monkeypatch)
    done = call(write({**TINY, "quantization_config": KINDS[kind]}), "--json")
    said = json.loads(done.stdout)
    assert [said[key] for key in ("family", "sites", "cache", "choices", "weights", "dtype")] == [
        plain[key] for key in ("family", "sites", "cache", "choices", "weights", "dtype")
    ]
    stored = said["stored"]
    assert (plain["stored"], stored["method"]) == (None, kind)
    assert [part["name"] for part in stored["parts"]] == ["attention", "routed experts", "rest"]
    assert sum(part["values"] for part in stored["parts"]) == said["weights"]["total"]
    assert stored["parts"][0]["values"] == 5 * (28 * 48 + 72 * 28 + 26 * 48 + 88 * 20 + 48 * 40 + 28 + 20)
    assert (stored["up"]["layers"], stored["up"]["values"], stored["kept_bytes"]) == (5, 5 * 88 * 20, 5 * 88 * 20 * 2)
    # What an absorbed token reads: stored weights less experts it does not take, W_kc and W_v dequantized.
    experts = stored["parts"][1]["bytes"]
    read = stored["bytes"] - stored["lookup_bytes"] - experts + round(experts * 2 / 6)
    fewer = [[p - s for p, s in zip(a["bytes"], b["bytes"], strict=True)] for a, b in zip(plain["costs"], said["costs"], strict=True)]  # noqa: E501  # fmt: skip
    expanded = 2 * plain["weights"]["active"] - read
    assert fewer == [[expanded] * 3, [expanded - (stored["kept_bytes"] - stored["up"]["bytes"])] * 3]


@pytest.mark.usefixtures("traced_once")
def test_quantized_weights_in_words(explained_models, plain):
    config = write({**TINY, "quantization_config": KINDS["awq"]})
    text = call(config).output
    assert "weights as stored (awq): " in text
    assert "dequantized to be absorbed; kept, W_kc and W_v take 3.52 kB per attention in bf16" in text
    assert json.loads(call(config, "--dtype", "bf16", "--json").stdout)["costs"] == plain["costs"]


@pytest.mark.usefixtures("traced_once")
def test_attention_that_is_not_quantized_has_nothing_to_dequantize(explained_models):
    fields = {**KINDS["compressed-tensors"], "ignore": ["re:.*self_attn.*"]}
    done = call(write({**TINY, "quantization_config": fields}), "--html", "page.html")
    assert done.exit_code == 0, done.output
    assert "kv_b_proj: stored in bf16, absorbed as stored, nothing to dequantize" in done.output
    assert "of weights as stored (compressed-tensors)" in Path("page.html").read_text(encoding="utf-8")


@pytest.fixture
def no_rows_cached(monkeypatch):
    """Latent rows are taken to be no cache, so that there is nothing to save where they are as wide as K and V."""
    for module in (judge, sources):
        monkeypatch.setattr(module, "are_cached", lambda rows: False)


@pytest.mark.usefixtures("explained_models", "no_rows_cached", "traced_once")
def test_what_is_not_absorbed_is_not_dequantized_either():
    wide = {**TINY, "kv_lora_rank": 96, "num_hidden_layers": 2, "quantization_config": KINDS["fp8"]}
    said = json.loads(call(write(wide), "--json").stdout)
    assert (said["family"], said["stored"]["up"], said["stored"]["kept_bytes"]) == ("kept", None, 0)


@pytest.mark.usefixtures("traced_once")
def test_quantized_weights_without_a_latent(explained_models):
    """Nothing is taken apart; the weights count all the same."""
    done = call(write({**LLAMA, "quantization_config": KINDS["awq"]}), "--json")
    assert done.exit_code == 1, done.output
    stored = json.loads(done.stdout)["stored"]
    assert (stored["up"], stored["kept_bytes"]) == (None, 0)
    assert stored["parts"][0]["values"] == 3 * (48 * 48 * 2 + 24 * 48 * 2)


@pytest.mark.usefixtures("traced_once")
def test_a_format_that_is_not_read_is_a_note(explained_models):
    done = call(write({**TINY, "quantization_config": {"quant_method": "quark"}}))
    assert done.exit_code == 0, done.output
    assert "note: quantized with 'quark', which is not read: weights are counted as if they were not" in done.output


@pytest.mark.usefixtures("traced_once")
def test_grouped_heads_are_named_and_nothing_is_absorbed(explained_models):
    done = call(write(LLAMA))
    assert done.exit_code == 1, done.output
    assert "This is GQA, not Multi-head Latent Attention: there is no latent to absorb" in done.output
    assert "mla-compile plan" in done.output
    assert "its own code caches 144 values per token (3 x 48)" in done.output
    assert "Traceback" not in done.output


def test_a_page_does_not_replace_the_config(explained_models):
    before = Path(write(LLAMA)).read_text()
    Path("link").symlink_to("config.json")
    for source, page in (("config.json", "config.json"), (".", "config.json"), ("config.json", "link")):
        done = call(source, "--html", page)
        assert done.exit_code == 2, done.output
        assert "is the model's config, which the page would replace" in " ".join(done.output.split())
    assert Path("config.json").read_text() == before


def test_a_config_with_a_byte_order_mark(explained_models):
    Path("config.json").write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    assert config_file.read("config.json")[0].num_hidden_layers == LLAMA["num_hidden_layers"]


def test_a_refusal_shows_the_line(explained_models):
    done = call("python:explained_models:refused")
    assert done.exit_code == 1, done.output
    assert "refused: nonlinear" in done.output
    assert "explained_models.py:9" in done.output
    assert "return torch.tanh(super().forward(latent))" in done.output
    assert "Nothing is absorbed: the one attention is refused (nonlinear)" in done.output
    assert "Each attention is listed with what stands in the way" in done.output


def test_a_module_with_its_inputs(explained_models):
    done = call("python:explained_models:absorbed", "--json")
    assert done.exit_code == 0, done.output
    dims = {"H": 4, "L": 16, "R": 6, "N": 12, "V": 10, "Q": 32, "D": 32, "A": 0, "G": 1}
    assert json.loads(done.stdout)["sites"][0]["dims"] == dims


def test_what_is_absorbed_in_part_has_no_figures_of_the_whole(explained_models):
    """Neither the cache nor the costs of the side that stays are known, so no table may say anything of them."""
    done = call("python:explained_models:in_part", "--html", "page.html", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["family"], said["report"]["sites"][0]["parts"]) == ("MLA", ["values"])
    assert said["sites"][0]["whole"] is False
    assert (said["cache"], said["costs"], said["choices"]) == ([], [], [])
    (note,) = said["notes"]
    assert note == "1 attention is absorbed in part or by groups of heads, so there are no tables of cache and costs"
    page = Path("page.html").read_text(encoding="utf-8")
    assert "The one attention is decoded in absorbed form, in part." in page
    assert "absorbed are values; keys stay as they were" in page
    assert "K and V are not expanded" not in page
    done = CliRunner().invoke(app, ["plan", "python:explained_models:in_part"])
    assert "in part or by groups of heads (1) are counted as whole ones" in " ".join(done.output.split())


def test_what_is_absorbed_by_hand_is_no_failure(explained_models):
    done = call("python:explained_models:by_hand", "--html", "page.html")
    assert done.exit_code == 1, done.output
    assert "kept: already_absorbed" in done.output
    assert "Nothing needs to be absorbed: the one attention is kept (already_absorbed)" in done.output
    assert "not Multi-head Latent Attention" not in done.output
    page = Path("page.html").read_text(encoding="utf-8")
    assert "Nothing needs to be absorbed" in page
    assert "what stands in the way" not in page
    said = json.loads(call("python:explained_models:by_hand", "--json").stdout)
    assert (said["family"], said["cache"], said["costs"]) == ("absorbed by hand", [], [])


def test_what_is_not_known_of_a_core_alone(explained_models):
    """Queries that come in as they are: nothing tells how wide what projects them is, so folds have no figures."""
    done = call("python:explained_models:alone")
    assert done.exit_code == 0, done.output
    assert "fold verdict: unknown" in done.output
    assert "with both folded" not in done.output
    (choice,) = json.loads(call("python:explained_models:alone", "--json").stdout)["choices"]
    assert (choice["folds"], choice["folded_s"]) == ([], None)


def test_a_module_with_a_cache_of_its_own_is_not_sent_to_plan(explained_models):
    done = call("python:explained_models:heads", "--html", "page.html")
    assert done.exit_code == 1, done.output
    assert "not Multi-head Latent Attention" in done.output
    assert "plan" not in done.output + Path("page.html").read_text(encoding="utf-8")
    done = CliRunner().invoke(app, ["plan", "python:explained_models:heads"])
    assert (done.exit_code, "no attention whose cache is known" in done.output) == (2, True), done.output


@pytest.mark.usefixtures("explained_models", "no_rows_cached", "traced_once")
def test_a_latent_as_wide_as_k_and_v_is_not_called_another_family():
    wide = write({**TINY, "kv_lora_rank": 96, "num_hidden_layers": 2})
    done = call(wide)
    assert done.exit_code == 1, done.output
    assert "kept: cost_latent_wide" in done.output
    assert "Nothing needs to be absorbed: 2 attentions are kept (cost_latent_wide)" in done.output
    assert "not Multi-head Latent Attention" not in done.output
    said = json.loads(call(wide, "--json").stdout)
    assert (said["family"], said["cache"], said["costs"]) == ("kept", [], [])
    assert bench.nothing(survey(wide)).startswith("nothing is absorbed")


def vision(kind: str, architecture: str, **sizes: object) -> dict[str, object]:
    small = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {"model_type": kind, "architectures": [architecture], **(sizes or small)}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (vision("vit", "ViTForImageClassification"), "takes pixel_values"),
        (
            vision("clip", "CLIPModel", text_config=vision("clip_text_model", "")),
            "and a causal language model takes a prompt and a cache",
        ),
        (vision("t5", "T5ForConditionalGeneration", d_model=32, d_ff=40, num_layers=2), "an encoder with a decoder"),
        ("nowhere.json", "there is no file nowhere.json"),
        ("empty", "nor a directory with one"),
        ("{", "cannot be read as JSON"),
        ("[1]", "is JSON, but not an object"),
        ("{}", "has no model_type"),
        ({**LLAMA, "model_type": "lama"}, "did you mean 'llama'"),
        ({**LLAMA, "hidden_size": -48}, "hidden_size is -48, expected a whole number from 1"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({**LLAMA, "num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        ({**TINY, "kv_lora_rank": 1e12}, "kv_lora_rank is 1000000000000.0"),
        ({**TINY, "num_experts_per_tok": 7}, "a token takes 7 experts by the model's config, and there are 6"),
        ({"model_type": "llava", "text_config": {**LLAMA, "vocab_size": 0}}, "text_config: vocab_size is 0"),
        ({**LLAMA, "hidden_size": "many"}, "hidden_size"),
        ({**LLAMA, "quantization_config": "fp8"}, "is 'fp8', expected an object with a quant_method"),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq", "group_size": 0}}, "group_size is 0, expected"),
        ({**LLAMA, "num_attention_heads": 5}, "multiple of the number of attention heads"),
        ({**LLAMA, "model_type": ["llama"]}, "has ['llama'] as its model_type"),
        ({"model_type": "vit"}, "builds no causal language model from a config of type 'vit': it has none"),
        ("python:explained_models", "expected python:MODULE:FUNCTION"),
        ("python:explained_models:missing", "cannot be found"),
        ("python:sys:exit", "raised SystemExit"),
        ("python:explained_models:number", "returned int, expected an nn.Module"),
        ("python:explained_models:bare", "without inputs; return (model, args)"),
        ("python:explained_models:unfit", "Toy does not run on these inputs"),
    ],
)
def test_bad_input_is_one_line(explained_models, source, text):
    Path("empty").mkdir()
    written = isinstance(source, dict) or source[0] in "{["
    done = call(write(source, "given.json") if written else source)
    assert done.exit_code == 2, done.output
    assert text in done.output
    assert "Traceback" not in done.output
    assert len([line for line in done.output.splitlines() if line.startswith("error:")]) == 1


def test_an_unknown_dtype_and_a_missing_library(explained_models, monkeypatch):
    done = call(write(LLAMA), "--dtype", "bf61")
    assert (done.exit_code, "did you mean 'bf16'" in done.output) == (2, True), done.output
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = call(write(LLAMA))
    assert (done.exit_code, 'pip install "mla-compile[demo]"' in done.output) == (2, True), done.output
