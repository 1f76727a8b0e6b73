"""What is seen by looking at a model: layers of each kind, caches, experts, families."""

from __future__ import annotations

import pytest
import torch

from mla_compile.models import config_file, skeleton
from mla_compile.models import survey as surveying
from mla_compile.models.held import tensors_of
from mla_compile.models.survey import survey
from mla_compile.report.explained import explained
from mla_compile.workbench.layouts import attentions
from mla_compile.workbench.machines import machine
from mla_compile.workbench.planning import plan
from mla_compile.workbench.request import Request
from tests.support.explaining import LLAMA, TINY, call, write
from tests.support.models import SPARSE
from tests.support.tiers import full


@full("family")
def test_the_cut_model_says_what_the_whole_one_says(explained_models):
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


def test_experts_that_depend_on_values_are_left_out_and_named(explained_models):
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


def test_code_that_looks_at_values_unless_it_is_traced(explained_models):
    """GPT-2 asks a mask for a value: its prompt runs on fake tensors instead."""
    sizes = {"vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model = survey(write({"model_type": "gpt2", **sizes})).facts
    assert model.family == "MHA"
    assert [(layer.key_heads, layer.values, layer.count) for layer in model.cached] == [(4, 96, 2)]


@full("family")
def test_a_sparse_attention_says_how_many_keys_it_chooses_however_many_that_are(explained_models):
    """100 keys are more than the trace has at first. Two of three layers have an indexer: of 2 heads, 24 wide."""
    family = SPARSE["glm_moe_dsa"]
    found = survey(write({"model_type": "glm_moe_dsa", **family.kwargs, "index_topk": 100}))
    sites = found.report.sites
    assert [(site.chosen, site.choosing_flops) for site in sites] == [(100, 400), (100, None), (100, 400)]
    model = found.facts
    assert [(site.count, site.chosen, site.choosing_flops) for site in model.latent] == [(2, 100, 400), (1, 100, 0)]
    assert [(layer.count, layer.rows, layer.besides) for layer in model.cached] == [(2, 80, 24), (1, 80, 0)]
    assert model.cache_values == 3 * 80 + 2 * 24
    assert "(2 x (80 + 24) + 1 x 80)" in model.own_cache()
    assert model.notes == ("the cache also holds indexer_keys of every token, which are counted",)
    costs = {row.form: row for row in explained(model, "bf16", 2).costs}
    grows = {name: (row.flops[1] - row.flops[0]) / (32768 - 4096) for name, row in costs.items()}
    attention = 2 * 3 * 4 * (2 * 64 + 16)
    assert (grows["sparse"], grows["absorbed"]) == (2 * 400, 2 * 400 + attention)
    assert (costs["sparse"].bytes[1] - costs["sparse"].bytes[0]) / (32768 - 4096) == 2 * 2 * 24


V4_KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
V4 = {
    "model_type": "deepseek_v4", "vocab_size": 97, "hidden_size": 48, "moe_intermediate_size": 24,
    "num_hidden_layers": 3, "head_dim": 16, "num_attention_heads": 4, "q_lora_rank": 16, "num_experts_per_tok": 2,
    "n_routed_experts": 4, "hc_mult": 2, "max_position_embeddings": 4096, "sliding_window": 32, "index_n_heads": 2,
    "index_head_dim": 24, "index_topk": 40, "o_groups": 2, "o_lora_rank": 8, "layer_types": V4_KINDS,
    "mlp_layer_types": ["moe"] * 3, "compress_rate_csa": 4, "compress_rate_hca": 64,
}  # fmt: skip


@full("family")
def test_rows_of_a_window_and_rows_that_stand_for_several_tokens(explained_models):
    """DeepSeek-V4: what is said of a token, and of a window, is what the cache itself holds."""
    model = survey(write(V4)).facts
    assert model.family == "shared rows"
    said = [(c.rows, c.every, c.window, c.besides, c.chosen) for c in model.cached]
    # Of a layer with a window alone transformers keeps keys and values, which are equal.
    assert said == [(32, 0, 31, 0, 0), (16, 4, 31, 6, 40), (16, 64, 31, 0, 0)]
    assert model.cache_values == 16 / 4 + 6 + 16 / 64
    built = skeleton.build(config_file.read("config.json")[0])
    one, two = (skeleton.cached_call(built, n)[0] for n in (1024, 2048))
    held = [
        sum(t.numel() for layer in cache.layers for n, t in tensors_of(layer) if n != "values") for cache in (one, two)
    ]
    assert held[1] - held[0] == 1024 * model.cache_values
    assert sum("which are counted" in note for note in model.notes) == 3
    assert not any("not counted" in note for note in model.notes)
    floors = [site.rows(2048) for site in attentions(model)]
    assert floors == [31, 2048 / 4 + 31, 2048 / 64 + 31]


@full("family")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_plan_counts_what_the_cache_holds_after_any_number_of_tokens(explained_models, dtype):
    """With the tokens of which DeepSeek-V4 has made no row yet, and what rows of neighbours have in common."""
    sizes = {"sliding_window": 128, "compress_rate_hca": 128}
    facts = survey(write(V4 | sizes), dtype).facts
    built = skeleton.build(config_file.read("config.json")[0], {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    most = {}
    for tokens in (1, 5, 127, 128, 131, 1023, 1024):
        cache, _ = skeleton.cached_call(built, tokens)
        # Keys that are values too are one tensor; a count of tokens is none of them.
        own = sum({id(t): t.nbytes for layer in cache.layers for _, t in tensors_of(layer)}.values())
        request = Request(context=tokens, users=1, weight_dtype=dtype, cache_dtype=dtype)
        (row,) = plan(facts, machine("h200"), request).layouts
        assert row.cache_bytes_per_user == own
        assert row.most_cache_bytes_per_user >= max(most.values(), default=0)
        most[tokens] = row.most_cache_bytes_per_user
        assert own <= most[tokens]
        # While 127 tokens wait in one layer and 3 in another, that much is held and no less.
        assert (own == most[tokens]) == (tokens in (1, 127, 1023))
    room = 141e9 * 0.9 - row.weight_bytes
    assert row.most_users == room // most[1024] < room // row.cache_bytes_per_user


@full("family")
def test_layers_that_draft_are_like_the_last_one(explained_models):
    """A projection from two widths and three norms stand before it; the output projection is the model's."""
    model = survey(write(TINY | {"num_nextn_predict_layers": 2})).facts
    assert model.drafting.count == 2
    layer, last = model.drafting.layer, skeleton.build(config_file.read("config.json")[0]).model.layers[-1]
    own = sum(parameter.numel() for parameter in last.parameters())
    assert layer.weights.total == own + 2 * 48 * 48 + 3 * 48
    assert layer.weights.experts == 6 * 3 * 24 * 48
    assert (layer.weights.lookup, layer.weights.vocabulary) == (0, 97)
    assert [(site.count, site.dims) for site in layer.latent] == [(1, model.latent[0].dims)]
    assert [(cached.count, cached.values) for cached in layer.cached] == [(1, model.cached[0].values)]
    assert (layer.width, layer.heads, layer.drafting) == (48, 4, None)
    assert survey(write(TINY | {"num_nextn_predict_layers": 0})).facts.drafting is None


@full("family")
def test_a_layer_that_drafts_has_the_cache_and_the_indexer_of_the_last(explained_models):
    """Of the three layers the last has an indexer of its own."""
    family = SPARSE["glm_moe_dsa"]
    config = {"model_type": "glm_moe_dsa", **family.kwargs, "index_topk": 100, "num_nextn_predict_layers": 1}
    (site,), (cached,) = (d := survey(write(config)).facts.drafting.layer).latent, d.cached
    assert (site.count, site.chosen, site.choosing_flops) == (1, 100, 400)
    assert (cached.count, cached.rows, cached.besides) == (1, 80, 24)


@full("family")
def test_a_last_layer_without_a_cache_that_grows_says_nothing_of_drafting(explained_models):
    """Qwen3-Next's fourth layer attends; its fifth keeps a state."""
    sizes = {
        "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 5, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    last, other = (survey(write({"model_type": "qwen3_next", **sizes, "num_hidden_layers": n})).facts for n in (4, 5))
    assert [(c.count, c.values) for c in last.drafting.layer.cached] == [(1, 64)]
    assert (other.cached, other.drafting) == (last.cached, None)


def test_plain_attention_has_layers_that_draft_too(explained_models, monkeypatch):
    model = survey(write(LLAMA | {"num_nextn_predict_layers": 1}))
    drafting = model.facts.drafting
    monkeypatch.setattr(surveying, "_step_explained", lambda *_: model.report)  # of the same layers
    assert survey(write(LLAMA)).facts.drafting is None
    own = sum(p.numel() for p in skeleton.build(config_file.read("config.json")[0]).model.layers[-1].parameters())
    assert drafting.layer.weights.total == own + 2 * 48 * 48 + 3 * 48  # a projection from two widths, three norms
    assert (drafting.layer.weights.lookup, drafting.layer.weights.vocabulary) == (0, 97)
    assert drafting.layer.latent == ()
    assert [(c.count, c.key_heads, c.values) for c in drafting.layer.cached] == [(1, 2, 48)]


def falcon(**more: object) -> dict[str, object]:
    return {"model_type": "falcon", "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, **more}  # fmt: skip


def test_layers_that_return_tuples(explained_models):
    """Falcon's layers return their hidden states in a tuple; one that is not traced does too."""
    model = survey(write(falcon(multi_query=False, alibi=True))).facts
    assert model.family == "MHA"
    assert [(layer.key_heads, layer.values, layer.count) for layer in model.cached] == [(4, 96, 2)]


def traces_lists_on_meta():
    """Since torch 2.15."""
    try:
        torch.empty(2, device="meta")[[-2]]
    except (NotImplementedError, RuntimeError):
        return False
    return True


def test_an_index_that_is_a_list(explained_models):
    """Where torch does not trace it on the meta device, it is traced in memory that nobody touches."""
    model = survey(write(falcon(multi_query=True, alibi=False))).facts
    assert model.family == "MQA"
    assert [(layer.key_heads, layer.values, layer.count) for layer in model.cached] == [(1, 24, 2)]


@pytest.mark.skipif(traces_lists_on_meta(), reason="this torch traces an index that is a list")
def test_what_torch_does_not_trace_on_the_meta_device(explained_models, monkeypatch):
    """The line is named where there is no memory either."""
    source = write(falcon(multi_query=True, alibi=False))

    def too_much(*_):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(skeleton, "to_untouched_memory", too_much)
    done = call(source)
    assert done.exit_code == 2, done.output
    assert "FalconForCausalLM cannot be captured at falcon/modeling_falcon.py:" in done.output
    assert "[-2]" in done.output
    assert "explain a small model of the same kind that has weights" in done.output
    assert len(done.output.splitlines()) == 1


def test_the_text_part_of_a_config_of_several_parts(explained_models):
    """Also where transformers lists the class of neither."""
    text = {name: value for name, value in TINY.items() if name not in ("model_type", "architectures")}
    text["num_hidden_layers"] = 1
    model = survey(write({"model_type": "mistral3", "text_config": {"model_type": "mistral4", **text}})).facts
    assert model.name == "Mistral4ForCausalLM"
    assert model.family == "MLA"
