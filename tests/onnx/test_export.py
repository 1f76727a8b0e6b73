"""Models of transformers exported to ONNX, and run as a user runs them: the same tokens as ``generate()``."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

import mla_compile
from mla_compile import ExportError, InputError, OptionError
from mla_compile.capture import causal_lm
from mla_compile.onnx import Session, artifact, convert, export, generate, lm_export
from mla_compile.onnx.exported import DTYPES
from tests.support import models
from tests.support.tiers import also, full
from tests.support.toy import Toy, decode_inputs

STEPS = 12
EVERYTHING = os.environ.get("MLA_ONNX") == "all"


def and_others(first: str, *others: str) -> list[Any]:
    """A family by default, and others besides: all that there are, where everything is asked for."""
    return [first, *also("family", *((name for name in models.FAMILIES if name != first) if EVERYTHING else others))]


# Rows alone, and layers with a state; indexers: test_export_sparse.py.
PORTABLE = and_others("minicpm3", "deepseek_v3", "kimi_linear")
IN_PLACE = and_others("minicpm3")


@functools.cache
def built(family: str, *, half: bool) -> Any:
    """Of ``minicpm3``, the default tier's, there is one layer."""
    one = {"num_hidden_layers": 1}
    return models.build(family, **({"dtype": torch.float16} | one if half else one if family == "minicpm3" else {}))


@contextlib.contextmanager
def converting_once(model: Any, kept: dict[Any, Any]) -> Iterator[None]:
    """Traces a model and translates its graph once for all profiles of an opset, which differ in what follows."""

    def traced(lm: Any, **how: Any) -> Any:
        key = (model, *sorted(how.items()))
        if key not in kept:
            kept[key] = causal_lm.export_program(lm, **how)
        return kept[key]

    def converted(program: Any, options: Any, opset: int) -> Any:
        return once((program, repr(replace(options, verify=False)), opset), convert.convert, program, options, opset)

    def converted_prompt(program: Any, opset: int) -> Any:
        return once((program, opset), convert.convert_prompt, program, opset)

    def once(key: Any, function: Any, *args: Any) -> Any:
        if key not in kept:
            kept[key] = function(*args)
        return replace(kept[key], model=kept[key].model.clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_export, "export_program", traced)
        patch.setattr(lm_export, "convert", converted)
        patch.setattr(lm_export, "convert_prompt", converted_prompt)
        yield


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Exports each model once: ``exported(family, profile, **options)`` is its directory, the model and the result."""
    root, kept = tmp_path_factory.mktemp("exported"), {}

    @functools.cache
    def export(family: str, profile: str = "portable", **options: Any) -> tuple[Path, Any, Any]:
        name = "_".join((family, profile, *map(str, options.values())))
        model, options = built(family, half=options.pop("half", False)), {"verify": False} | options
        with converting_once(model, kept):
            return root / name, model, mla_compile.export_onnx(model, root / name, profile=profile, **options)

    return export


def check_tokens(directory: Path, model: Any, _: Any = None, **how: Any) -> None:
    session = Session(directory, providers=["cpu"], **how)
    for batch, pad in ((1, 0), (3, 3)):
        inputs = models.prompt(batch, pad=pad)
        expected, _ = models.greedy(model, inputs, STEPS)
        prompts = [
            ids[mask.bool()].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        ]
        assert generate(session, prompts, max_new_tokens=STEPS) == expected.tolist()


@pytest.mark.parametrize("family", PORTABLE)
def test_portable_graphs_give_the_tokens_of_generate(exported, family):
    directory, model, _ = exported(family)
    check_tokens(directory, model)
    nodes = onnx.load(directory / "decode.onnx", load_external_data=False).graph.node
    told = models.FAMILIES[family]
    site = ["IndexScores", "ListedAttention"] if "indexer" in told.traits else ["DecodeAttention"]
    assert [n.op_type for n in nodes if n.domain] == site * (1 if family == "minicpm3" else told.mla_sites)


@pytest.mark.parametrize("family", ["minicpm3", *also("family", "deepseek_v3")])
def test_genai_generates_the_same_tokens(exported, family):
    """onnxruntime-genai runs the directory as it is; rows are halved, and verified without it.

    Two operators ask for the length of one layer: both once got the same name.
    """
    directory, model, done = exported(family, "genai", verify=True)
    assert done.verification.equal_tokens == done.verification.tokens == 14
    graph = onnx.load(directory / "model.onnx", load_external_data=False).graph
    shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.input}
    assert shapes["past_key_values.0.value"] == ["batch", 1, "past", 40]
    genai = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    inputs = models.prompt(1, 7, 0)
    expected, _ = models.greedy(model, inputs, STEPS)
    loaded = genai.Model(str(directory))
    parameters = genai.GeneratorParams(loaded)
    parameters.set_search_options(max_length=7 + STEPS, do_sample=False)
    generator = genai.Generator(loaded, parameters)
    generator.append_tokens(inputs["input_ids"].numpy().astype(np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    assert list(generator.get_sequence(0))[7:] == expected[0].tolist()


@full("family")  # than the model of test_export_sparse.py
@pytest.mark.parametrize("family", IN_PLACE)
def test_caches_in_place_give_the_tokens_of_generate(exported, family):
    """The decode graph reads the prompt too."""
    check_tokens(*exported(family, "inplace", prefill=False))


@full("combination")
def test_a_prompts_graph_writes_in_place_too(exported):
    directory, model, _ = exported("minicpm3", "inplace")
    assert (directory / "prefill.onnx").exists()
    check_tokens(directory, model)


def test_the_decode_graph_alone_reads_prompts(exported):
    check_tokens(*exported("minicpm3"), load_prefill=False)


@full("family")
def test_half_precision_keeps_queries_in_float32(exported):
    directory, model, _ = exported("deepseek_v3", half=True)
    session = Session(directory, providers=["cpu"])
    inputs = models.prompt(2)
    prompts = [ids[m.bool()].tolist() for ids, m in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    _, logits = session.prefill(prompts)
    with torch.no_grad():
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
        expected = model(**inputs, position_ids=positions).logits[:, -1].float().numpy()
    assert np.abs(logits - expected).max() < 2e-2 * np.abs(expected).max()
    (node, *_) = [n for n in onnx.load(directory / "decode.onnx", load_external_data=False).graph.node if n.domain]
    assert session.manifest.dtype == "float16"
    assert node.op_type == "DecodeAttention"


@full("family")
def test_bfloat16_is_verified_before_its_translation(tmp_path):
    """ONNX Runtime cannot run it here; torch runs the program that it is a translation of."""
    model = models.build("minicpm3", num_hidden_layers=1)
    done = mla_compile.export_onnx(model, tmp_path / "m", dtype="bfloat16", prefill=False)
    assert "before its translation (ONNX Runtime has no bfloat16 operators" in str(done.verification)
    assert 0 < done.verification.error < 5e-2
    assert done.verification.tokens == 14
    assert next(model.parameters()).dtype == torch.float32
    caches = onnx.load(tmp_path / "m" / "decode.onnx", load_external_data=False).graph.input[3:]
    assert {c.type.tensor_type.elem_type for c in caches} == {onnx.TensorProto.BFLOAT16}


def test_names_are_for_people_and_nothing_of_this_machine_is_in_a_file(exported):
    directory, *_ = exported("minicpm3")
    for name in ("decode.onnx", "prefill.onnx"):
        model = onnx.load(directory / name, load_external_data=False)
        inputs = [v.name for v in model.graph.input]
        assert inputs == [
            "input_ids", "attention_mask", "position_ids", "past_latent.0", "past_k_rope.0",
        ]  # fmt: skip
        assert [v.name for v in model.graph.output] == ["logits", *(n.replace("past", "present") for n in inputs[3:])]
        dims = [d.dim_param or d.dim_value for d in model.graph.input[3].type.tensor_type.shape.dim]
        assert dims == ["batch", "past", 64]
        text = (directory / name).read_bytes()
        assert b"site-packages" not in text
        assert str(Path.home()).encode() not in text
        assert str(Path(mla_compile.__file__).parent).encode() not in text
    decode = onnx.load(directory / "decode.onnx", load_external_data=False)
    said = {entry.key: entry.value for entry in decode.metadata_props}
    assert said["mla_compile.profile"] == "portable"
    assert said["mla_compile.op_version"] == "1"
    assert said["mla_compile.weights_sha256"] == hashlib.sha256((directory / "weights.bin").read_bytes()).hexdigest()
    assert json.loads(said["mla_compile.attention"])[0]["L"] == 64
    names = {v.name for v in decode.graph.initializer}
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight.transposed" in names
    assert {n for n in names if n.endswith((".w_kc", ".w_q_w_kc"))}
    assert {n for n in names if n.endswith((".w_v", ".w_v_w_o"))}


@full("family")  # than the program of test_program_export.py
def test_the_same_model_gives_the_same_bytes(tmp_path):
    model = models.build("minicpm3", num_hidden_layers=1)
    for directory in ("once", "again"):
        mla_compile.export_onnx(model, tmp_path / directory, verify=False)
    for name in ("decode.onnx", "prefill.onnx", "weights.bin", "mla_compile.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "once" / name).read_bytes(), name


def test_files_pass_the_checker_and_share_their_weights(exported):
    directory, model, _ = exported("minicpm3")
    for name in ("decode.onnx", "prefill.onnx"):
        onnx.checker.check_model(str(directory / name), full_check=True)
    total = sum(p.numel() * 4 for p in model.parameters())
    assert (directory / "weights.bin").stat().st_size < 1.5 * total


@full("family")  # than the program and the command that are exported in other files
def test_export_says_how_it_was_verified_and_leaves_the_model_alone(tmp_path):
    model = models.build("deepseek_v3")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    experts = model.get_experts_implementation()
    model.train()
    said = []
    done = mla_compile.export_onnx(model, tmp_path / "m", progress=said.append)
    assert model.training
    assert model.get_experts_implementation() == experts
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert done.verification.equal_tokens == done.verification.tokens == 28
    assert done.verification.error < 1e-5
    assert done.report.sites[0].verdict == "absorbed"
    assert "28 of 28 greedy tokens equal" in (tmp_path / "m" / "report.txt").read_text()
    assert (tmp_path / "m" / "report.json").exists()
    assert "comparing with the original" in said
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@full("family")  # than the programs of test_program_export.py
def test_work_in_place_follows_what_is_used(exported):
    """Only as many rows of a buffer are read as are in use: what lies behind them may be anything."""
    directory, *_ = exported("minicpm3", "inplace", prefill=False)
    session = ort.InferenceSession(str(directory / "decode.onnx"), providers=["CPUExecutionProvider"])
    ids = np.arange(5, 12, dtype=np.int64)[None]
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(7, dtype=np.int64)[None]}
    results = []
    for capacity, rest in ((7, 0.0), (64, np.nan)):
        caches = {v.name: np.full([1, capacity, v.shape[2]], rest, np.float32) for v in session.get_inputs()[3:]}
        results.append(session.run(["logits"], {**feeds, **caches})[0])
    assert np.array_equal(*results)


@full("family")
def test_a_model_of_more_than_two_gigabytes(tmp_path):
    """More than one protobuf can hold: exported, checked by path, loaded, run."""
    model = models.build(
        "minicpm3", hidden_size=2048, vocab_size=141000, num_hidden_layers=1, tie_word_embeddings=False
    )
    mla_compile.export_onnx(model, tmp_path / "m", verify=False, prefill=False)
    assert (tmp_path / "m" / "weights.bin").stat().st_size > 2**31
    onnx.checker.check_model(str(tmp_path / "m" / "decode.onnx"), full_check=True)
    inputs = models.prompt(1, 9, 0)
    expected, _ = models.greedy(model, inputs, 4)
    del model
    session = Session(tmp_path / "m", providers=["cpu"])
    assert generate(session, inputs["input_ids"].tolist(), max_new_tokens=4) == expected.tolist()
    (tmp_path / "m" / "weights.bin").unlink()  # pytest keeps folders of earlier runs


class TestBadInput:
    @full("command")  # tests/cli/test_input.py
    def test_a_model_without_latent_attention(self, tmp_path):
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            pad_token_id=0,
        ))  # fmt: skip
        with pytest.raises(ExportError, match="nothing to export: not_mla"):
            mla_compile.export_onnx(model, tmp_path / "m")
        assert not any(tmp_path.iterdir())

    def test_no_model(self, tmp_path):
        with pytest.raises(InputError, match="got int"):
            mla_compile.export_onnx(3, tmp_path / "m")

    def test_a_module_that_is_no_language_model(self, tmp_path):
        with pytest.raises(InputError, match=r"Linear.forward takes no input_ids"):
            mla_compile.export_onnx(torch.nn.Linear(2, 2), tmp_path / "m")

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"profile": "portabel"}, "did you mean 'portable'"),
            ({"dtype": "int8"}, "expected one of float32, float16, bfloat16"),
            ({"fold": "sometimes"}, "expected one of auto, never, always"),
        ],
    )
    def test_options_that_do_not_exist(self, tmp_path, options, text):
        with pytest.raises(OptionError, match=text):
            mla_compile.export_onnx(torch.nn.Linear(2, 2), tmp_path / "m", **options)

    def test_a_target_that_is_there_is_kept(self, tmp_path):
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "mine").write_text("precious")
        model = torch.nn.Linear(2, 2)
        with pytest.raises(ExportError, match="exists; pass overwrite=True"):
            mla_compile.export_onnx(model, tmp_path / "m")
        with pytest.raises(ExportError, match="files that no export wrote"):
            mla_compile.export_onnx(model, tmp_path / "m", overwrite=True)
        assert (tmp_path / "m" / "mine").read_text() == "precious"
        for name in ("report.json", "weights.bin"):
            (tmp_path / "m" / name).write_text("")
        with artifact.staged(tmp_path / "m", overwrite=True) as stage:
            (stage / "weights.bin").write_text("new")
        assert [p.name for p in (tmp_path / "m").iterdir()] == ["weights.bin"]
        assert [p.name for p in tmp_path.iterdir()] == ["m"]

    def test_a_failure_keeps_what_was_to_be_replaced(self, tmp_path):
        (tmp_path / "m").mkdir()
        for name in ("mine", "report.json", "weights.bin"):
            (tmp_path / "m" / name).write_text("precious")
        with pytest.raises(InputError):
            mla_compile.export_onnx(torch.nn.Linear(2, 2), tmp_path / "m", overwrite=True)
        assert (tmp_path / "m" / "mine").read_text() == "precious"
        assert [p.name for p in tmp_path.iterdir()] == ["m"]

    def test_a_path_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ExportError, match="cannot be written"):
            mla_compile.export_onnx(torch.nn.Linear(2, 2), tmp_path / "file" / "m")
        with pytest.raises(ExportError, match="is a file, and a model is a directory"):
            mla_compile.export_onnx(torch.nn.Linear(2, 2), tmp_path / "file", overwrite=True)

    def test_weights_on_the_meta_device(self, tmp_path):
        model = models.build("minicpm3", num_hidden_layers=1).to("meta")
        with pytest.raises(ExportError, match="meta device; load the weights"):
            mla_compile.export_onnx(model, tmp_path / "m")

    def test_weights_of_several_ranks(self, tmp_path):
        model = models.build("minicpm3")
        weight = model.model.layers[1].self_attn.o_proj.weight
        weight._local_tensor, weight.placements = weight.data, ()  # what a DTensor is known by
        with pytest.raises(ExportError, match=r"its weight model\.layers\.1\.self_attn\.o_proj\.weight is a DTensor"):
            mla_compile.export_onnx(model, tmp_path / "out")
        assert not list(tmp_path.iterdir())

    def test_a_dtype_that_onnx_models_do_not_have(self, tmp_path):
        with pytest.raises(ExportError, match=r"weights are torch.float64; pass dtype"):
            mla_compile.export_onnx(models.build("minicpm3", dtype=torch.float64, num_hidden_layers=1), tmp_path / "m")

    @full("combination")  # of experts that are unrolled and a graph that differs
    @pytest.mark.parametrize("how", [{"dtype": "bfloat16"}, {"profile": "ort-paged"}], ids=["bfloat16", "paged"])
    def test_a_program_that_leaves_out_an_expert_is_not_written(self, tmp_path, monkeypatch, how):
        """Loops over experts are unrolled on the word that verification follows, also where ONNX Runtime cannot run."""
        from mla_compile.capture import causal_lm, unroll
        from mla_compile.onnx import lm_export

        class Wrong(unroll.UnrolledExperts):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                every = func is torch.Tensor.unbind and args[0] is self._every
                made = super().__torch_function__(func, types, args, kwargs)
                return made[1:] if every else made

        def export_program(lm, **options):
            return causal_lm.export_program(lm, **options | {"experts": "eager"})

        monkeypatch.setattr(lm_export, "export_program", export_program)
        model = models.build("deepseek_v3", num_hidden_layers=1, first_k_dense_replace=0)
        if how == {"dtype": "bfloat16"}:
            done = mla_compile.export_onnx(model, tmp_path / "m", prefill=False, **how)
            assert done.verification.error < 5e-2
        monkeypatch.setattr(causal_lm, "UnrolledExperts", Wrong)
        with pytest.raises(ExportError, match=r"differs from the original by .* nothing was written"):
            mla_compile.export_onnx(model, tmp_path / "n", prefill=False, **how)
        assert not (tmp_path / "n").exists()

    def test_a_graph_that_differs_is_not_written(self, tmp_path, monkeypatch):
        from mla_compile.onnx import bake

        right = bake._constant

        def wrong(program, weight, order, counts):
            node, names = right(program, weight, order, counts)
            fold = program.folds[-1]
            program.folds[-1] = type(fold)(fold.placeholder, lambda live: 1.1 * fold.compute(live), fold.weights)
            return node, names

        monkeypatch.setattr(bake, "_constant", wrong)
        with pytest.raises(ExportError, match=r"differs from the program by .* nothing was written"):
            mla_compile.export_onnx(Toy().eval(), tmp_path / "m", example_inputs=decode_inputs(), prefill=False)
        assert not any(tmp_path.iterdir())


def test_weights_of_all_dtypes_that_an_export_knows_may_be_in_one_model():
    weights = nn.ParameterList([torch.zeros(1, dtype=dtype) for dtype in DTYPES.values()])
    assert export._cast(weights, None) is weights
    weights.append(torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ExportError, match=r"weights are .*float64"):
        export._cast(weights, None)
