"""Profile ``genai``: the same tokens under onnxruntime-genai."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import pytest

import mla_compile
from mla_compile import ExportError
from tests.support import models
from tests.support.tiers import also, full


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Exports each model once: ``exported(family)`` is its directory, the model, the result."""
    root = tmp_path_factory.mktemp("genai")

    @functools.cache
    def export(family):
        # One layer by default, whose length two operators ask for: both once got the same name.
        model = models.build(family, num_hidden_layers=1 if family == "minicpm3" else 2)
        return root / family, model, mla_compile.export_onnx(model, root / family, profile="genai")

    return export


@pytest.mark.parametrize("family", ["minicpm3", *also("family", "deepseek_v3")])
def test_genai_generates_the_same_tokens(exported, family):
    """onnxruntime-genai runs the directory as it is; rows are halved, and verified without it."""
    directory, model, done = exported(family)
    assert done.verification.equal_tokens == done.verification.tokens == 14
    graph = onnx.load(directory / "model.onnx", load_external_data=False).graph
    shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.input}
    assert shapes["past_key_values.0.value"] == ["batch", 1, "past", 40]
    genai = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    inputs = models.prompt(1, 7, 0)
    expected, _ = models.greedy(model, inputs, 24)
    loaded = genai.Model(str(directory))
    parameters = genai.GeneratorParams(loaded)
    parameters.set_search_options(max_length=7 + 24, do_sample=False)
    generator = genai.Generator(loaded, parameters)
    generator.append_tokens(inputs["input_ids"].numpy().astype(np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    assert list(generator.get_sequence(0))[7:] == expected[0].tolist()


@full("family")
def test_rows_of_another_kind_have_no_form_in_genai(tmp_path):
    with pytest.raises(ExportError, match="one row of latent and rotary key per layer"):
        mla_compile.export_onnx(models.build("deepseek_v32", num_hidden_layers=1), tmp_path / "n", profile="genai")
