"""Quantized models as ``from_pretrained`` loads them from files that the libraries' own tools write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from mla_compile import explain, optimize
from mla_compile.core.wrapped import OwnForward
from tests.support import checkpoints
from tests.support.checkpoints import CHANNEL, FLOAT8, INT4, INT8, TOKEN
from tests.support.models import prompt
from tests.support.tiers import also, full

pytest.importorskip("accelerate", reason="transformers loads quantized models with it")

FAST: dict[str, Any] = {"codegen": "eager", "lowering": "aten", "strict": True}
ATTENTION, UP = "re:.*self_attn.*", "re:.*kv_b_proj"

INT4_ALL = (INT4, None, [])
INT4_EXPERTS = (INT4, None, [ATTENTION])
FLOAT8_ALL = ({**FLOAT8, **CHANNEL}, {**FLOAT8, **TOKEN}, [])
INT8_ALL = ({**INT8, **CHANNEL}, {**INT8, **TOKEN}, [])
INT8_LESS = ({**INT8, **CHANNEL}, {**INT8, **TOKEN}, [UP])


@pytest.mark.parametrize(
    ("weights", "rows", "ignore"),
    [
        pytest.param(*INT4_ALL, id="int4"),
        *also("family", FLOAT8_ALL, INT4_EXPERTS, INT8_ALL, INT8_LESS),
    ],
)
def test_compressed_tensors(weights: Any, rows: Any, ignore: list[str], tmp_path: Path) -> None:
    """The first call unpacks the model by a hook that removes itself, and wraps forwards; the second is as good."""
    pytest.importorskip("compressed_tensors")
    model = checkpoints.compressed_tensors(tmp_path, weights, rows, ignore)
    fast = optimize(model, **FAST)
    with torch.inference_mode():
        report = explain(model, **prompt(), forms="absorbed")
    assert [str(site.code) for site in report.sites] == ["absorbed"]
    got = steps(fast)
    assert {str(site.code) for site in fast.mla_report.sites} == {"cost_prefill", "absorbed"}
    want = steps(model)
    # Rounded rows: a difference in the last place may be a whole step, and the up-projection's are not rounded.
    torch.testing.assert_close(got, want, rtol=0, atol=(1e-4 if rows is None else 0.2) * want.std().item())
    assert rows is not None or torch.equal(got.argmax(-1), want.argmax(-1))
    assert not model._forward_pre_hooks
    assert not hasattr(model.model.layers[0].mlp.gate_proj, "weight_packed")


@full("family")
def test_compressed_tensors_of_a_model_with_parameters_of_its_own(tmp_path: Path) -> None:
    """Its hook wraps the forward of every module that holds parameters: here, of the optimized copy itself."""
    pytest.importorskip("compressed_tensors")
    model = checkpoints.compressed_tensors(tmp_path, *INT4_ALL, kind=Scaled)
    model.gain.data.fill_(2)
    fast = optimize(model, **FAST)
    got = steps(fast)
    assert {str(site.code) for site in fast.mla_report.sites} == {"cost_prefill", "absorbed"}
    assert isinstance(vars(fast)["forward"], OwnForward)
    torch.testing.assert_close(got, steps(model), rtol=1e-4, atol=1e-4)


class Scaled(transformers.DeepseekV3ForCausalLM):
    """The model itself holds a parameter."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gain = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        done = super().forward(*args, **kwargs)
        done.logits = done.logits * self.gain
        return done


def bitsandbytes(**settings: Any) -> Callable[[Path], nn.Module]:
    def made(folder: Path) -> nn.Module:
        pytest.importorskip("bitsandbytes")
        return checkpoints.quantized(folder, transformers.BitsAndBytesConfig(**settings))

    return made


def torchao(name: str, **settings: Any) -> Callable[[Path], nn.Module]:
    def made(folder: Path) -> nn.Module:
        quantization = pytest.importorskip("torchao.quantization")
        given = {key: quantization.PerGroup(32) if "granularity" in key else value for key, value in settings.items()}
        config = transformers.TorchAoConfig(getattr(quantization, name)(**given))
        return checkpoints.quantized(folder, config, family="minicpm3")

    return made


def quanto(weights: str) -> Callable[[Path], nn.Module]:
    def made(folder: Path) -> nn.Module:
        pytest.importorskip("optimum.quanto", reason="optimum-quanto is not among the test requirements")
        return checkpoints.quantized(folder, transformers.QuantoConfig(weights=weights))

    return made


def packed_by_gptqmodel(make: Callable[[Path], nn.Module]) -> Callable[[Path], nn.Module]:
    def made(folder: Path) -> nn.Module:
        pytest.importorskip("gptqmodel", reason="gptqmodel is not among the test requirements")
        return make(folder)

    return made


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
# bitsandbytes' int8 kernel for a CPU takes rows of three axes at most, and transformers expands K and V of four.
INT8_BUT_UP = {"load_in_8bit": True, "llm_int8_skip_modules": ["kv_b_proj", "lm_head"]}
EXACT, HALF, ROUNDED = 1e-4, 3e-2, 0.2  # the last two: a kernel that computes in 16 bits; rows that are rounded


@pytest.mark.filterwarnings("ignore")  # libraries warn of each other, and of files that they left
@pytest.mark.parametrize(
    ("make", "close"),
    [
        *also(
            "family",
            (bitsandbytes(**NF4), HALF),
            (bitsandbytes(**NF4, bnb_4bit_use_double_quant=True), HALF),
            (bitsandbytes(**INT8_BUT_UP), ROUNDED),
            (torchao("Int8WeightOnlyConfig", version=2), EXACT),
            (torchao("Float8WeightOnlyConfig"), EXACT),
            (torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=32), EXACT),
            (torchao("Int8DynamicActivationInt8WeightConfig", version=2), ROUNDED),
            (torchao("Int8DynamicActivationIntxWeightConfig", weight_dtype=torch.int4, weight_granularity=32), ROUNDED),
            (checkpoints.float8_blocks, 2 * HALF),
            (quanto("int8"), EXACT),
            (quanto("int4"), EXACT),
            (quanto("float8"), EXACT),
            (packed_by_gptqmodel(checkpoints.gptq), HALF),
            (packed_by_gptqmodel(checkpoints.awq), HALF),
        ),
    ],
)
def test_others(make: Callable[[Path], nn.Module], close: float, tmp_path: Path) -> None:
    """The optimized model is called before the original is, so that it meets the weights as they were loaded."""
    model = make(tmp_path)
    with torch.no_grad():
        assert [str(site.code) for site in explain(model, **prompt(), forms="absorbed").sites] == ["absorbed"]
    fast = optimize(model, **FAST)
    got = steps(fast)
    codes = {str(site.code) for site in fast.mla_report.sites}
    assert "absorbed" in codes <= {"absorbed", "cost_prefill"}
    want = steps(model)
    torch.testing.assert_close(got, want, rtol=0, atol=close * want.std().item())
    assert close == ROUNDED or torch.equal(got.argmax(-1), want.argmax(-1))


def steps(model: nn.Module) -> Tensor:
    """Logits of a prompt's last token and of given tokens after it, in float32 [B,tokens,vocabulary]."""
    inputs, cache, found = prompt(), None, []
    ids = inputs["input_ids"]
    with torch.no_grad():  # quanto's tensors cannot be made under inference_mode
        for given in (ids, ids[:, :1], ids[:, 1:2]):
            done = model(given, past_key_values=cache, use_cache=True)
            cache = done.past_key_values
            found.append(done.logits[:, -1].float())
    return torch.stack(found, 1)
