"""Classes around a model with a latent, called as their users call them: encoders, image-text models, pipelines."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor, nn

import mla_compile
from tests.support import models
from tests.support.tiers import full

H, L, N, V, D, WORDS = 4, 16, 8, 6, 24, 50


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.down, self.out = nn.Linear(D, H * N), nn.Linear(D, L), nn.Linear(H * V, D)
        self.k, self.v = nn.Linear(L, H * N, bias=False), nn.Linear(L, H * V, bias=False)

    def forward(self, x: Tensor, rows: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (self.q(x), self.k(rows), self.v(rows)))
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, D), nn.ModuleList([Attention()])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer(x, layer.down(x))
        return x


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, D), nn.Linear(D, WORDS)
        self.layers, self.crosses = nn.ModuleList([Attention()]), nn.ModuleList([Attention()])

    def forward(self, ids: Tensor, memory: Tensor, past: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        x, kept = self.words(ids), []
        for i, (layer, cross) in enumerate(zip(self.layers, self.crosses, strict=True)):
            rows = layer.down(x) if past is None else torch.cat([past[i], layer.down(x)], 1)
            kept.append(rows)
            x = x + layer(x, rows)
            x = x + cross(x, cross.down(memory))
        return self.head(x), kept


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()

    @torch.no_grad()
    def generate(self, ids: Tensor, steps: int) -> Tensor:
        memory, token, past = self.encoder(ids), ids[:, :1], None
        tokens = []
        for _ in range(steps):
            logits, past = self.decoder(token, memory, past)
            token = logits[:, -1:].argmax(-1)
            tokens.append(token)
        return torch.cat(tokens, 1)


def test_an_encoder_and_a_decoder_are_told_apart() -> None:
    torch.manual_seed(0)
    model, ids = EncoderDecoder().eval(), torch.randint(WORDS, (2, 40))
    fast = mla_compile.optimize(model, codegen="eager")
    assert torch.equal(fast.generate(ids, 4), model.generate(ids, 4))
    report = fast.mla_report
    absorbed = {site.where.module for site in report.sites if site.verdict == "absorbed"}
    assert absorbed == {"decoder.layers.0", "decoder.crosses.0"}
    assert "of 3 attentions" in report.summary()
    assert f"the cache holds {L} -> {L} values per token" in report.summary()


TEXT = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 56, "moe_intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 20,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 10, "max_position_embeddings": 128,
    "first_k_dense_replace": 1, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None, "head_dim": 18, "hc_mult": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "out_hidden_size": 48, "patch_size": 14, "pos_emb_height": 4, "pos_emb_width": 4,
}  # fmt: skip
TOP = {
    "projection_hidden_size": 32, "image_token_id": 90, "video_token_id": 91, "image_token_index": 90,
    "vision_start_token_id": 92, "vision_end_token_id": 93,
}  # fmt: skip
AUTO = {"text_config": transformers.DeepseekV3Config, "vision_config": transformers.PixtralVisionConfig}


@torch.no_grad()
def scale_by_fan_in(model: nn.Module) -> None:
    """Weights that keep activations near 1, so that attention is far from uniform."""
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_().div_(weight.shape[-1] ** 0.5)
    model.requires_grad_(False)


def known(config: type, sizes: dict[str, object]) -> dict[str, object]:
    """Those of ``sizes`` that a config has."""
    names = {name for one in config.__mro__ for name in vars(one).get("__annotations__", ())}
    return {name: value for name, value in sizes.items() if name in names}


@full("family")
@pytest.mark.parametrize("name", ["Kimi_K25", "MistralLarge4", "HYV4VL"])
def test_image_text_models_of_transformers_read_text(name: str) -> None:
    made = getattr(transformers, f"{name}Config", None)
    if made is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    parts = {}
    for part, sizes in (("text_config", dict(TEXT)), ("vision_config", VISION)):
        config = made.sub_configs[part]
        config = AUTO[part] if config is transformers.AutoConfig else config
        if name == "HYV4VL" and part == "text_config":
            sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}
        parts[part] = config(**known(config, sizes))
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(made(**parts, **known(made, TOP))).eval()
    scale_by_fan_in(model)
    fast = mla_compile.optimize(model, codegen="eager")
    ids = torch.randint(3, 90, (1, 10))
    tokens, products = [], []
    for one in (model, fast, fast):
        with torch.profiler.profile(with_flops=True) as profile:
            tokens.append(one.generate(ids, max_new_tokens=3, do_sample=False).tolist())
        kinds = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
        products.append(sum(event.flops for event in profile.key_averages() if event.key in kinds))
    assert tokens[0] == tokens[1] == tokens[2]
    assert fast.mla_report.absorbed
    assert products[2] < products[0]


@full("family")
def test_a_pipeline_and_a_classifier() -> None:
    model = models.build("deepseek_v2", num_hidden_layers=1)
    vocabulary = {f"w{i}": i for i in range(90)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2")
    fast = mla_compile.optimize(model, codegen="eager")
    said = [
        transformers.pipeline("text-generation", model=one, tokenizer=tokenizer)(
            "w5 w6 w7", max_new_tokens=4, do_sample=False
        )
        for one in (model, fast)
    ]
    assert said[0] == said[1]
    assert fast.mla_report.absorbed
    labels = transformers.DeepseekV2ForSequenceClassification(model.config).eval()
    scale_by_fan_in(labels)
    fast = mla_compile.optimize(labels, codegen="eager", forms="absorbed")
    ids = torch.randint(3, 90, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(fast(ids).logits, labels(ids).logits, rtol=1e-4, atol=1e-4)
    assert fast.mla_report.absorbed
