"""``mla-compile explain`` as a user types it: published sizes, families without a latent, refusals, and bad input."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mla_compile.cli.app import app
from mla_compile.models import config_file, skeleton
from mla_compile.models.survey import survey
from mla_compile.models.weights import weights_of
from mla_compile.workbench import bench

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"
# Billions of parameters as published, all and per token, with the precision they are published in.
PUBLISHED = {
    "deepseek-v2-lite": (15.7, 0.1, 2.4, 0.1),
    "deepseek-v3": (671.0, 0.5, 37.0, 1.0),
    "glm-4.7-flash": (30.0, 1.0, 3.0, 0.7),
    "kimi-k2": (1026.0, 15.0, 32.0, 0.7),
    "longcat-flash": (560.0, 2.0, 27.0, 1.0),
    "minicpm3-4b": (4.07, 0.05, 4.07, 0.05),
    "mistral-small-4": (119.0, 1.0, 6.0, 0.5),
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY = {
    "model_type": "kimi_k2",  # not one of transformers: read by its architecture
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
}
FACTORY = """
import torch
import torch.nn.functional as F
from torch import nn
from tests.support.toy import Toy, decode_inputs

class Up(nn.Linear):
    def forward(self, latent):
        return torch.tanh(super().forward(latent))

class Squashed(Toy):
    def __init__(self):
        super().__init__()
        self.up = Up(self.up.in_features, self.up.out_features)

def refused():
    return Squashed(), decode_inputs()

class Loud(Toy):
    def forward(self, x, rows):
        print("a line of the model's")
        return super().forward(x, rows)

def absorbed():
    print("a line of their own")
    return Loud(), decode_inputs(cached=300)

class Core(nn.Module):
    def __init__(self, squash):
        super().__init__()
        self.k_up, self.v_up, self.squash = nn.Linear(24, 44), nn.Linear(24, 40), squash

    def forward(self, q, latent):  # the queries and the latent come from outside
        k, v = (f(latent).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.k_up, self.v_up))
        return F.scaled_dot_product_attention(q, self.squash(k), v)

def in_part():
    return Core(torch.tanh), (torch.randn(1, 4, 1, 11), torch.randn(1, 90, 24))

def alone():
    return Core(nn.Identity()), (torch.randn(1, 4, 1, 11), torch.randn(1, 90, 24))

class Heads(nn.Linear):
    def forward(self, x):
        return F.scaled_dot_product_attention(*super().forward(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4))

def heads():
    return Heads(32, 96), (torch.randn(1, 5, 32),)

def bare():
    return Toy()

def number():
    return 3

def unfit():
    return Toy(), (torch.randn(2, 1, 32), torch.randn(19, 22))
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "explained_models.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "explained_models", raising=False)
    return tmp_path


def call(*arguments: str):
    return CliRunner().invoke(app, ["explain", *arguments])


def write(config: object, name: str = "config.json") -> str:
    Path(name).write_text(config if isinstance(config, str) else json.dumps(config))
    return name


def test_deepseek_v3(here):
    """671 billion parameters, none of them allocated: what is absorbed, the cache, the cost of a token, the choices."""
    done = call(str(CONFIGS / "deepseek-v3.json"), "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["schema"] == "mla_compile.explain/1"
    assert said["family"] == "MLA"
    assert said["report"]["counts"]["absorbed"] == 2
    (site,) = said["sites"]
    assert site["count"] == 61
    assert site["dims"] == {"H": 128, "L": 512, "R": 64, "N": 128, "V": 128, "Q": 1536, "D": 7168}
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


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_of_the_published_configs(name):
    """The models built from the configs have as many parameters as their makers say, in all and per token."""
    total, within, active, active_within = PUBLISHED[name]
    config, _ = config_file.read(str(CONFIGS / f"{name}.json"))
    weights = weights_of(skeleton.build(config))
    assert abs(weights.total / 1e9 - total) <= within
    # Makers count the input embedding or leave it out.
    assert min(abs((weights.active + lookup) / 1e9 - active) for lookup in (0, weights.lookup)) <= active_within


def test_every_config_is_one_of_a_model_somebody_published():
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(PUBLISHED)
    assert all(json.loads(path.read_text())["_source"] for path in CONFIGS.glob("*.json"))


def test_layers_that_are_not_traced_count_as_those_they_are_like(here):
    """Five layers of two kinds, under a model type that transformers does not know, shown as text."""
    write(TINY)
    done = call(".", "--dtype", "float32")
    assert done.exit_code == 0, done.output
    assert "of 5 layers 2 are traced, one of each kind: layer 0 for 2, layer 2 for 3" in done.output
    assert "model type 'kimi_k2' is read as 'deepseek_v3'" in done.output
    assert "5 sites with H=4 L=20 R=6 N=12 V=10 Q=28 D=48" in done.output
    assert "its own code caches 130 values per token (5 x 26)" in done.output
    assert "fold verdict" in done.output


def test_the_cut_model_says_what_the_whole_one_says(here):
    model = survey(write(TINY)).facts
    config, _ = config_file.read("config.json")
    whole = skeleton.build(config)
    cache, left_out = skeleton.cached_call(whole)
    assert not left_out
    import mla_compile

    report = mla_compile.explain(
        whole, input_ids=torch.zeros(1, 1, dtype=torch.long, device="meta"), past_key_values=cache
    )
    assert [s.verdict for s in report.sites] == ["absorbed"] * sum(site.count for site in model.latent)
    assert {s.dims for s in report.sites} == {s.dims for s in model.sites}
    assert sum(layer.keys.shape[3] + layer.values.shape[3] for layer in cache.layers) == model.cache_values


def test_experts_that_depend_on_values_are_left_out_and_named(here):
    """LongCat loops over the experts that were hit: it has a decode step all the same; empty experts weigh nothing."""
    sizes = {
        "num_layers": 2, "vocab_size": 97, "hidden_size": 48, "ffn_hidden_size": 56, "expert_ffn_hidden_size": 24,
        "num_attention_heads": 4, "n_routed_experts": 6, "zero_expert_num": 3, "moe_topk": 3, "kv_lora_rank": 20,
        "q_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 10, "head_dim": 6,
    }  # fmt: skip
    model = survey(write({"model_type": "longcat_flash", **sizes})).facts
    assert sum(site.count for site in model.latent if site.absorbed) == 4
    assert model.cache_values == 4 * 26
    assert any("left out of the trace" in note and "experts" in note for note in model.notes)
    assert model.weights.experts == 2 * 6 * 3 * 24 * 48
    assert model.weights.expert_top_k == 2


def test_grouped_heads_are_named_and_nothing_is_absorbed(here):
    done = call(write(LLAMA))
    assert done.exit_code == 1, done.output
    assert "is GQA, not Multi-head Latent Attention" in done.output
    assert "mla-compile plan" in done.output
    assert "its own code caches 144 values per token (3 x 48)" in done.output
    assert "Traceback" not in done.output


def test_code_that_looks_at_values_unless_it_is_traced(here):
    """GPT-2 asks a mask for a value: its prompt runs on fake tensors instead."""
    sizes = {"vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model = survey(write({"model_type": "gpt2", **sizes})).facts
    assert model.family == "MHA"
    assert [(layer.key_heads, layer.values, layer.count) for layer in model.cached] == [(4, 96, 2)]


def falcon(**more: object) -> dict[str, object]:
    return {"model_type": "falcon", "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, **more}  # fmt: skip


def test_layers_that_return_tuples(here):
    """Falcon's layers return their hidden states in a tuple; one that is not traced does too."""
    model = survey(write(falcon(multi_query=False, alibi=True))).facts
    assert model.family == "MHA"
    assert [(layer.key_heads, layer.values, layer.count) for layer in model.cached] == [(4, 96, 2)]


def test_what_torch_does_not_trace_on_the_meta_device(here, monkeypatch):
    """An index that is a list: it is traced in memory that nobody touches, or the line is named where there is none."""
    source = write(falcon(multi_query=True, alibi=False))
    model = survey(source).facts
    assert model.family == "MQA"
    assert [(layer.key_heads, layer.values, layer.count) for layer in model.cached] == [(1, 24, 2)]

    def too_much(*_):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(skeleton, "to_untouched_memory", too_much)
    done = call(source)
    assert done.exit_code == 2, done.output
    assert "FalconForCausalLM cannot be captured at falcon/modeling_falcon.py:" in done.output
    assert "[-2]" in done.output
    assert "explain a small model of the same kind that has weights" in done.output
    assert len(done.output.splitlines()) == 1


def test_the_text_part_of_a_config_of_several_parts(here):
    """Also where transformers lists the class of neither."""
    text = {name: value for name, value in TINY.items() if name not in ("model_type", "architectures")}
    model = survey(write({"model_type": "mistral3", "text_config": {"model_type": "mistral4", **text}})).facts
    assert model.name == "Mistral4ForCausalLM"
    assert model.family == "MLA"


def test_a_page_does_not_replace_the_config(here):
    before = Path(write(LLAMA)).read_text()
    Path("link").symlink_to("config.json")
    for source, page in (("config.json", "config.json"), (".", "config.json"), ("config.json", "link")):
        done = call(source, "--html", page)
        assert done.exit_code == 2, done.output
        assert "is the model's config, which the page would replace" in " ".join(done.output.split())
    assert Path("config.json").read_text() == before


def test_a_config_with_a_byte_order_mark(here):
    Path("config.json").write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    assert config_file.read("config.json")[0].num_hidden_layers == LLAMA["num_hidden_layers"]


def test_a_refusal_shows_the_line(here):
    done = call("python:explained_models:refused")
    assert done.exit_code == 1, done.output
    assert "refused: nonlinear" in done.output
    assert "explained_models.py:9" in done.output
    assert "return torch.tanh(super().forward(latent))" in done.output
    assert "nothing is absorbed; the report above says what stands in the way" in done.output


def test_a_module_with_its_inputs(here):
    done = call("python:explained_models:absorbed", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["sites"][0]["dims"] == {"H": 4, "L": 16, "R": 6, "N": 12, "V": 10, "Q": 32, "D": 32}


def test_what_is_absorbed_in_part_has_no_figures_of_the_whole(here):
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


def test_what_is_not_known_of_a_core_alone(here):
    """Queries that come in as they are: nothing tells how wide what projects them is, so folds have no figures."""
    done = call("python:explained_models:alone")
    assert done.exit_code == 0, done.output
    assert "fold verdict: not known here" in done.output
    assert "with both folded" not in done.output
    (choice,) = json.loads(call("python:explained_models:alone", "--json").stdout)["choices"]
    assert (choice["folds"], choice["folded_s"]) == ([], None)


def test_a_module_with_a_cache_of_its_own_is_not_sent_to_plan(here):
    done = call("python:explained_models:heads", "--html", "page.html")
    assert done.exit_code == 1, done.output
    assert "not Multi-head Latent Attention" in done.output
    assert "plan" not in done.output + Path("page.html").read_text(encoding="utf-8")
    done = CliRunner().invoke(app, ["plan", "python:explained_models:heads"])
    assert (done.exit_code, "no attention whose cache is known" in done.output) == (2, True), done.output


def test_a_latent_as_wide_as_k_and_v_is_not_called_another_family(here):
    wide = write({**TINY, "kv_lora_rank": 96, "num_hidden_layers": 2})
    done = call(wide)
    assert done.exit_code == 1, done.output
    assert "kept: cost_latent_wide" in done.output
    assert "nothing is absorbed, because nothing would be saved" in done.output
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
        ("empty", "no directory with one"),
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
def test_bad_input_is_one_line(here, source, text):
    (here / "empty").mkdir()
    written = isinstance(source, dict) or source[0] in "{["
    done = call(write(source, "given.json") if written else source)
    assert done.exit_code == 2, done.output
    assert text in done.output
    assert "Traceback" not in done.output
    assert len([line for line in done.output.splitlines() if line.startswith("error:")]) == 1


def test_an_unknown_dtype_and_a_missing_library(here, monkeypatch):
    done = call(write(LLAMA), "--dtype", "bf61")
    assert (done.exit_code, "did you mean 'bf16'" in done.output) == (2, True), done.output
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = call(write(LLAMA))
    assert (done.exit_code, 'pip install "mla-compile[demo]"' in done.output) == (2, True), done.output
