"""Providers, devices, and whether a native library is registered."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime
import pytest

from mla_compile.errors import ModelFileError, OptionError
from mla_compile.onnx import engine
from mla_compile.onnx.engine import Decision
from mla_compile.onnx.manifest import AttentionNode
from mla_compile.onnx.session import Session
from tests.support import onnx_toy as toy


def test_bfloat16_on_a_cpu_says_what_to_do(tmp_path: Path):
    model = toy.build(tmp_path / "model", dtype="bfloat16")
    decode = onnx.load(model / "decode.onnx", load_external_data=False)
    decode.graph.node.append(onnx.helper.make_node("Erf", ["logits"], ["unused"]))
    decode.graph.output[0].name = "unused"
    (model / "decode.onnx").write_bytes(decode.SerializeToString())
    fields = {"graphs": {"decode": "decode.onnx"}, "profile": "portable", "caches": toy.caches("bfloat16")}
    toy.write_manifest(model, dtype="bfloat16", **fields)
    with pytest.raises(ModelFileError, match="little in bfloat16: export with float32, or run on CUDA"):
        Session(model)


def test_providers_by_name_and_by_short_name(tmp_path: Path):
    model = toy.build(tmp_path / "model")
    for name in ("cpu", "CPUExecutionProvider", ("CPU", {})):
        assert Session(model, providers=[name]).providers == ("CPUExecutionProvider",)
    with pytest.raises(OptionError, match=r"provider 'gpu' is not in this onnxruntime .*it has .*CPUExecutionProvider"):
        Session(model, providers=["gpu"])
    with pytest.raises(OptionError, match="providers is empty"):
        Session(model, providers=[])
    with pytest.raises(OptionError, match="prefill_chunk is 0"):
        Session(model, prefill_chunk=0)


def test_a_provider_that_does_not_start_is_left_out_or_an_error():
    cuda = [("CUDAExecutionProvider", {}), ("CPUExecutionProvider", {})]
    started = SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])
    ort = SimpleNamespace(InferenceSession=lambda *_, **__: started, capi=onnxruntime.capi)
    assert engine.working(ort, cuda, required=False) == cuda[1:]
    with pytest.raises(ModelFileError, match="CUDAExecutionProvider does not start on this machine"):
        engine.working(ort, cuda, required=True)


NODE = AttentionNode(4, 64, 16, 64, None, False, 0.0, 0)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """The module that knows native libraries, with answers to choose."""
    library = tmp_path / "libattention.so"
    library.write_bytes(b"")
    fake = SimpleNamespace(path=library, refusal=None, asked=[])
    fake.find = lambda: fake.path
    fake.inspect = lambda path: f"library {path.name}"
    fake.usable = lambda *question, device: fake.asked.append((*question, device)) or fake.refusal
    monkeypatch.setattr(engine, "native", fake)
    return fake


def _decide(tmp_path: Path, library: Any = "auto", attention: tuple = (NODE,)) -> Decision:
    manifest = SimpleNamespace(attention=attention, dtype="float32")
    return engine.decide(manifest, ("CUDAExecutionProvider",), engine.OrtDevice("cuda", 3), "1.31.1", library)


def test_a_library_is_registered_where_it_can_be_used(tmp_path: Path, native: SimpleNamespace):
    decision = _decide(tmp_path)
    assert decision.library == native.path
    assert native.asked == [("library libattention.so", (NODE,), "float32", ("CUDAExecutionProvider",), "1.31.1", 3)]
    native.refusal = "it is slower than the function"
    assert _decide(tmp_path) == Decision(None, "libattention.so was left out: it is slower than the function")
    native.path = None
    assert _decide(tmp_path) == Decision(None, "none was found")
    assert _decide(tmp_path, None) == Decision(None, "none was wanted")
    assert _decide(tmp_path, attention=()) == Decision(None, "the model has no attention node")


def test_a_library_that_was_named_must_be_usable(tmp_path: Path, native: SimpleNamespace):
    assert _decide(tmp_path, native.path).library == native.path
    native.refusal = "no kernel for window"
    with pytest.raises(ModelFileError, match=r"libattention\.so cannot be used here: no kernel for window"):
        _decide(tmp_path, native.path)
    with pytest.raises(ModelFileError, match=r"native library .*nothing\.so is missing"):
        _decide(tmp_path, tmp_path / "nothing.so")


def test_a_damaged_library_that_was_only_found_is_left_out(tmp_path: Path, native: SimpleNamespace):
    def damaged(path: Path) -> None:
        raise ModelFileError("no library of ours")

    native.inspect = damaged
    assert _decide(tmp_path).reason == "libattention.so was left out: no library of ours"
    with pytest.raises(ModelFileError, match="no library of ours"):
        _decide(tmp_path, native.path)


def test_a_library_that_does_not_load_is_our_error(tmp_path: Path, native: SimpleNamespace):
    with pytest.raises(ModelFileError, match=r"libattention\.so does not load"):
        engine.options_with(onnxruntime, None, Decision(native.path, ""))
