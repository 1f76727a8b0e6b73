"""Bytes of quantized checkpoints, summed by hand for small models, and what published configs and broken ones say."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from mla_compile.core.dims import Dims
from mla_compile.errors import InputError
from mla_compile.models import config_file, quantization, skeleton
from mla_compile.models.stored import stored_weights
from mla_compile.models.weights import Tensor, tensors_of
from mla_compile.report.stored import StoredWeights
from tests.support.explaining import TINY
from tests.support.facts import V3_DIMS

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": True}


def compressed(weights: object, form: str = "pack-quantized", **more: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, **more}


def quantized(fields: object, **sizes: object):
    config, _ = config_file.parse({**TINY, **sizes, "quantization_config": fields}, Path("config.json"))
    return quantization.read(config), config


def stored(fields: object, **sizes: object) -> StoredWeights:
    (read, notes), config = quantized(fields, **sizes)
    assert read is not None, notes
    return stored_weights(tensors_of(skeleton.build(config)), read, {})


# The matrices of TINY, outputs by inputs, and how often there are: two dense layers and three of six experts and one.
ATTENTION = [(28, 48), (4 * 18, 28), (26, 48), (4 * 22, 20), (48, 40)]
LINEAR = [(shape, 5) for shape in ATTENTION]
LINEAR += [((56, 48), 4), ((48, 56), 2)]  # dense: gate, up, down
EXPERTS = [((24, 48), 3 * 2 * 6), ((48, 24), 3 * 6)]
SHARED = [((24, 48), 3 * 2), ((48, 24), 3)]
HEAD = [((97, 48), 1)]
# Never quantized: the embedding, routers, norms of the layers (two of hidden states, two of ranks) and the last one.
PLAIN = 97 * 48 + 3 * 6 * 48 + 5 * (48 + 48 + 28 + 20) + 48


def summed(matrices, packed, plain=0, scale=2):
    """Bytes of all matrices, each by ``packed(rows, columns)``, and of values of two bytes."""
    return sum(n * packed(*shape) for shape, n in matrices) + plain * scale


def up(n: float, to: int = 1) -> int:
    return math.ceil(n / to) * to


def int4(rows, columns, group=8, zeros=False, index=0):
    """Eight weights in four bytes; scales of two bytes; zero points along the outputs, packed likewise."""
    groups = up(columns / group)
    return rows * up(columns / 2, 4) + rows * groups * 2 + zeros * groups * up(rows / 2, 4) + index * columns


ALL = LINEAR + EXPERTS + SHARED
HEAD_VALUES = 97 * 48


@pytest.mark.parametrize(
    ("fields", "total"),
    [
        pytest.param(
            {"quant_method": "fp8", "weight_block_size": [16, 32]},
            summed(ALL, lambda r, c: r * c + 4 * up(r / 16) * up(c / 32), PLAIN + HEAD_VALUES),
            id="fp8",
        ),
        pytest.param(
            {"quant_method": "fp8", "weight_block_size": None, "modules_to_not_convert": ["head", "proj"]},
            summed(ALL + HEAD, lambda r, c: r * c + 4, PLAIN),
            id="fp8, a scale for a matrix, a list that does not name the head",
        ),
        pytest.param(
            {"quant_method": "fp8", "weight_block_size": [16, 32], "modules_to_not_convert": ["lm_head", "mlp.experts",
             r"model.layers.\d+.self_attn"]},
            summed(
                LINEAR[5:] + SHARED,
                lambda r, c: r * c + 4 * up(r / 16) * up(c / 32),
                PLAIN + HEAD_VALUES + sum(n * r * c for (r, c), n in LINEAR[:5] + EXPERTS),
            ),
            id="fp8, a list",
        ),
        pytest.param(
            compressed(INT4, ignore=["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                                     r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]),
            summed(EXPERTS, int4, PLAIN + HEAD_VALUES + sum(n * r * c for (r, c), n in LINEAR + SHARED)),
            id="compressed-tensors, int4 experts",
        ),
        pytest.param(
            compressed({**INT4, "symmetric": False, "actorder": "group"}),
            summed(ALL + HEAD, lambda r, c: int4(r, c, zeros=True, index=4), PLAIN),
            id="compressed-tensors, zero points and an order of the inputs",
        ),
        pytest.param(
            compressed({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized", ignore=["lm_head"]),
            summed(ALL, lambda r, c: r * c + 2 * r, PLAIN + HEAD_VALUES),
            id="compressed-tensors, fp8 by output",
        ),
        pytest.param(
            compressed({"num_bits": 4, "type": "float", "group_size": 16}, "nvfp4-pack-quantized", ignore=["lm_head"]),
            summed(ALL, lambda r, c: r * up(c / 2, 4) + r * up(c / 16), PLAIN + HEAD_VALUES),
            id="compressed-tensors, nvfp4",
        ),
        pytest.param(
            {"quant_method": "gptq", "bits": 4, "group_size": 8},
            summed(ALL, lambda r, c: int4(r, c, zeros=True, index=4), PLAIN + HEAD_VALUES),
            id="gptq",
        ),
        pytest.param(
            {"quant_method": "gptq", "bits": 8, "group_size": -1, "lm_head": True},
            summed(ALL + HEAD, lambda r, c: r * c + 2 * r + up(r, 4) + 4 * c, PLAIN),
            id="gptq, whole rows, 8 bits, the head too",
        ),
        pytest.param(
            {"quant_method": "gptq", "bits": 4, "group_size": 8,
             "dynamic": {"-:.*self_attn": {}, r"+:.*\.shared_experts\.": {"bits": 8}}},
            summed(LINEAR[5:] + EXPERTS, lambda r, c: int4(r, c, zeros=True, index=4))
            + summed(SHARED, lambda r, c: r * c + up(c / 8) * (2 * r + up(r, 4)) + 4 * c,
                     PLAIN + HEAD_VALUES + sum(n * r * c for (r, c), n in LINEAR[:5])),
            id="gptq, rules for modules",
        ),
        pytest.param(
            {"quant_method": "awq", "bits": 4, "group_size": 8, "modules_to_not_convert": ["self_attn", "gate"]},
            summed(
                LINEAR[5:] + EXPERTS + SHARED,
                lambda r, c: int4(r, c, zeros=True),
                PLAIN + HEAD_VALUES + sum(n * r * c for (r, c), n in LINEAR[:5]),
            ),
            id="awq",
        ),
        pytest.param(
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            summed(ALL, lambda r, c: r * c + 4 * r, PLAIN + HEAD_VALUES),
            id="bitsandbytes, 8 bits",
        ),
        pytest.param(
            {"load_in_4bit": True, "llm_int8_skip_modules": None, "bnb_4bit_quant_type": "nf4"},
            summed(ALL, lambda r, c: r * c // 2 + 4 * up(r * c / 64), PLAIN + HEAD_VALUES),
            id="bitsandbytes, 4 bits, before quant_method",
        ),
        pytest.param(
            {"quant_method": "bitsandbytes", "_load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            summed(ALL, lambda r, c: r * c // 2 + up(up(r * c / 64) * (1 + 4 / 256)), PLAIN + HEAD_VALUES),
            id="bitsandbytes, 4 bits, scales of 8 bits",
        ),
    ],
)  # fmt: skip
def test_bytes_are_those_of_the_tensors_of_each_format(fields, total):
    counted = stored(fields)
    assert counted.bytes == total
    assert counted.bytes == sum(part.bytes for part in counted.parts)


def test_parts_and_what_is_not_quantized():
    fields = compressed(INT4, ignore=["lm_head", "re:.*self_attn.*"])
    counted = stored(fields)
    experts = counted.part("routed experts")
    assert (experts.values, experts.quantized) == (3 * 6 * 3 * 24 * 48,) * 2
    assert experts.bytes == summed(EXPERTS, int4)
    assert experts.scale_bytes == 2 * experts.values // 8
    assert counted.lookup_bytes == 97 * 48 * 2
    assert {"lm_head", "model.embed_tokens", "model.layers.N.mlp.gate", "model.layers.N.self_attn.kv_b_proj"} <= set(
        counted.unquantized
    )
    assert "model.layers.N.mlp.gate_proj" not in counted.unquantized


def test_a_tied_head_is_not_quantized():
    fields = {"quant_method": "fp8", "modules_to_not_convert": ["none"]}
    tied, apart = stored(fields, tie_word_embeddings=True), stored(fields)
    assert apart.bytes - tied.bytes == 97 * 48 + 4  # the head in fp8, in one block
    assert tied.lookup_bytes == 0


def test_float16_is_what_is_not_quantized():
    """The dtype of the config counts, and of a checkpoint in float32 every plain weight takes four bytes."""
    fields = {"quant_method": "awq", "group_size": 8}
    assert stored(fields, dtype="float16").dtype == "fp16"
    assert stored(fields, dtype="float32").bytes - stored(fields).bytes == 2 * (PLAIN + HEAD_VALUES)


def published(name: str) -> StoredWeights:
    config, _ = config_file.read(str(CONFIGS / f"{name}.json"))
    read, notes = quantization.read(config)
    assert read is not None, notes
    model = skeleton.build(config)
    return stored_weights(tensors_of(model), read, dict.fromkeys(attentions(model), V3_DIMS))


def attentions(model):
    return [f"model.layers.{i}.self_attn" for i in range(model.config.num_hidden_layers)]


def test_deepseek_v3_has_the_size_it_is_published_in():
    """688,586,727,753 bytes of files, which also hold a layer for multi-token prediction: it is summed by hand."""
    counted = published("deepseek-v3")
    D, expert = 7168, 3 * 2048 * 7168
    attention = 1536 * D + 24576 * 1536 + 576 * D + 32768 * 512 + D * 16384
    quantized = attention + 257 * expert
    plain = 256 * D + 2 * D * D + 2 * 129280 * D  # router, projection of two embeddings, copies of table and head
    assert counted.bytes + quantized * (1 + 4 / 128**2) + 2 * plain == pytest.approx(688_586_727_753, rel=1e-4)
    assert counted.arithmetic == "fp8"
    assert counted.up is not None
    assert (counted.up.names, counted.up.layers) == (("kv_b_proj",), 61)
    assert counted.kept_bytes == 61 * 32768 * 512 * 2  # 33.5 MB a layer
    assert counted.read_in_their_place == 61 * (32768 * 512 + 4 * 256 * 4)


# GB of the files of the checkpoint as its makers or hosts round them, less what is not built.
@pytest.mark.parametrize(("name", "gigabytes", "within"), [("kimi-k2-thinking", 594, 1), ("kimi-k2", 1029, 2)])
def test_published_sizes(name, gigabytes, within):
    assert abs(published(name).bytes / 1e9 - gigabytes) <= within


def test_attention_in_bf16_has_nothing_to_dequantize():
    counted = published("kimi-k2-thinking")
    attention = counted.part("attention")
    assert attention.bytes == 2 * attention.values
    assert (counted.kept_bytes, counted.read_in_their_place, counted.arithmetic) == (0, 0, "bf16")


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt'"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "'fp8' (experts in fp4)"),
        (compressed(INT4, "marlin-24"), "'compressed-tensors' (format marlin-24)"),
        (compressed({**INT4, "strategy": "token"}), "'compressed-tensors' (strategy token)"),
    ],
)
def test_what_is_not_read_is_said(fields, kind):
    (read, notes), _ = quantized(fields)
    assert read is None
    assert notes == (f"quantized with {kind}, which is not read: weights are counted as if they were not quantized",)


def test_no_quantization():
    for fields in (None, {}):
        (read, notes), _ = quantized(fields)
        assert (read, notes) == (None, ())


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"bits": 4}, "names no quant_method; the ones read are fp8, compressed-tensors, gptq, awq, bitsandbytes"),
        ({"quant_method": 8}, "quant_method is 8, expected a string"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is [128], expected two whole numbers"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "expected two whole numbers above 0"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "expected a list of names"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["("]}, "which is no regular expression"),
        ({"quant_method": "gptq", "bits": 9}, "bits is 9, expected one of 2, 3, 4, 5, 6, 7, 8"),
        ({"quant_method": "gptq", "group_size": 0}, "group_size is 0, expected a whole number above 0, or -1"),
        ({"quant_method": "gptq", "group_size": True}, "group_size is True"),
        ({"quant_method": "gptq", "dynamic": {"layers": 8}}, "layers is 8, expected an object"),
        ({"quant_method": "awq", "bits": 3}, "bits is 3, expected one of 4"),
        ({"quant_method": "bitsandbytes"}, "expected one of load_in_4bit and load_in_8bit to be true"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": "yes"}, "load_in_4bit is 'yes', expected true or false"),
        ({"quant_method": "compressed-tensors"}, "has no config_groups"),
        (compressed([4]), "weights is [4], expected an object"),
        (compressed(INT4, ignore=["re:("]), "which is no regular expression"),
        ([1], "quantization_config is [1], expected an object with a quant_method"),
    ],
)
def test_a_broken_config_is_refused(fields, text, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, "quantization_config": fields}))
    with pytest.raises(InputError) as error:
        quantization.read(config_file.read(str(path))[0])
    assert text in str(error.value)


def packed(fields: object, rows: int, columns: int) -> int:
    """Bytes of one matrix with all that belongs to it."""
    (read, notes), _ = quantized(fields)
    assert read is not None, notes
    packing = read.packing(Tensor("model.layers.0.linear", (rows, columns), linear=True))
    assert packing is not None
    return sum(packing.sizes(rows, columns))


def bytes_of(state: Mapping[str, torch.Tensor], *few: str) -> int:
    """Bytes of tensors, without those of a few bytes."""
    return sum(t.numel() * t.element_size() for name, t in state.items() if not name.endswith(few))


@pytest.mark.filterwarnings("ignore")
def test_sizes_are_those_of_tensors_that_bitsandbytes_makes():
    layers = pytest.importorskip("bitsandbytes").nn
    plain = nn.Linear(128, 72, bias=False).state_dict()
    few = ("quant_map", "quant_state.bitsandbytes__nf4", "weight_format")
    for made, fields in (
        (layers.Linear4bit(128, 72, bias=False, quant_type="nf4", compress_statistics=False), {"load_in_4bit": True}),
        (layers.Linear8bitLt(128, 72, bias=False, has_fp16_weights=False), {"load_in_8bit": True}),
    ):
        made.load_state_dict(plain)
        assert bytes_of(made.to("cpu").state_dict(), *few) == packed(fields, 72, 128)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("form", "weights"),
    [
        ("pack-quantized", {**INT4, "group_size": 32}),
        ("pack-quantized", {**INT4, "group_size": 32, "symmetric": False}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]}),
        ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
        ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    ],
)
def test_sizes_are_those_of_tensors_that_compressed_tensors_makes(form, weights):
    schemes = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    model = nn.Sequential(nn.Linear(128, 72, bias=False)).to(torch.bfloat16)
    group = {"targets": ["Linear"], "weights": weights}
    schemes.apply_quantization_config(model, schemes.QuantizationConfig(config_groups={"group_0": group}, format=form))
    compressors.ModelCompressor.from_pretrained_model(model, form).compress_model(model)
    assert bytes_of(model.state_dict(), "weight_shape", "global_scale") == packed(compressed(weights, form), 72, 128)


def test_keys_and_values_from_weights_of_their_own_are_counted_together():
    """W_kc and W_v are two matrices here; a matrix of another shape beside them is not taken for one."""
    (read, _), _ = quantized({"quant_method": "fp8", "modules_to_not_convert": ["v_up"]})
    shapes = {"k_up": (4 * 12, 20), "v_up": (4 * 10, 20), "q_up": (4 * 18, 20)}
    tensors = [Tensor(f"attention.{name}", shape, linear=True) for name, shape in shapes.items()]
    counted = stored_weights(tensors, read, {"attention": Dims(H=4, L=20, R=6, N=12, V=10)})
    assert counted.up is not None
    assert (counted.up.names, counted.up.layers, counted.up.values) == (("k_up", "v_up"), 1, 4 * 22 * 20)
    assert counted.up.bytes == (48 * 20 + 4) + 2 * 40 * 20


def test_the_text_part_of_a_config_says_it_for_the_model():
    text = {**TINY, "model_type": "mistral4", "quantization_config": {"quant_method": "awq"}}
    config, _ = config_file.parse({"model_type": "mistral3", "text_config": text}, Path("config.json"))
    read, _ = quantization.read(config)
    assert read is not None
    assert read.method == "awq"


def test_the_up_projection_behind_the_latent_is_the_later_of_two_alike():
    """With a rank of the query as wide as the latent, and R = V, its up-projection has the same shape."""
    (read, _), _ = quantized({"quant_method": "fp8", "modules_to_not_convert": ["q_b"]})
    tensors = [Tensor(f"attention.{name}", (4 * 22, 20), linear=True) for name in ("q_b", "kv_b")]
    counted = stored_weights(tensors, read, {"attention": Dims(H=4, L=20, R=10, N=12, V=10)})
    assert counted.up is not None
    assert (counted.up.names, counted.up.bytes) == (("kv_b",), 88 * 20 + 4)
