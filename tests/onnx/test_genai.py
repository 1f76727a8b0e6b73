"""Profile ``genai``: the same tokens under onnxruntime-genai."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import mla_compile
from mla_compile import ExportError
from tests.support import models


@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3"])
def test_genai_generates_the_same_tokens(tmp_path, family):
    """onnxruntime-genai runs the directory as it is."""
    genai = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    model = models.build(family)
    mla_compile.export_onnx(model, tmp_path / "m", profile="genai", verify=False)
    inputs = models.prompt(1, 7, 0)
    expected, _ = models.greedy(model, inputs, 24)
    loaded = genai.Model(str(tmp_path / "m"))
    parameters = genai.GeneratorParams(loaded)
    parameters.set_search_options(max_length=7 + 24, do_sample=False)
    generator = genai.Generator(loaded, parameters)
    generator.append_tokens(inputs["input_ids"].numpy().astype(np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    assert list(generator.get_sequence(0))[7:] == expected[0].tolist()


def test_genai_halves_rows_and_verifies_without_genai(tmp_path):
    done = mla_compile.export_onnx(models.build("deepseek_v3"), tmp_path / "m", profile="genai")
    assert done.verification.equal_tokens == done.verification.tokens == 14
    graph = onnx.load(tmp_path / "m" / "model.onnx", load_external_data=False).graph
    shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.input}
    assert shapes["past_key_values.1.value"] == ["batch", 1, "past", 40]
    with pytest.raises(ExportError, match="one row of latent and rotary key per layer"):
        mla_compile.export_onnx(models.build("deepseek_v32"), tmp_path / "n", profile="genai")
