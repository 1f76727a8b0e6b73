"""Model directories that cannot be used are refused before ONNX Runtime sees them, and the error says why."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from mla_compile.errors import MlaCompileError, ModelFileError
from mla_compile.onnx import engine
from mla_compile.onnx.files import check_files
from mla_compile.onnx.manifest import Manifest
from mla_compile.onnx.session import Session
from tests.support import onnx_toy as toy


@pytest.fixture(autouse=True)
def _no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a session was made of files that should have been refused")

    monkeypatch.setattr(engine, "open_graph", refuse)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return toy.build(tmp_path / "model", prefill=True)


@pytest.mark.parametrize("name", ["decode.onnx", "prefill.onnx", "weights.bin"])
def test_missing_truncated_and_changed_files(model: Path, name: str):
    path = model / name
    content = path.read_bytes()
    manifest = Manifest.read(model)

    path.write_bytes(content[:-1])
    with pytest.raises(ModelFileError, match=rf"{name} has {len(content) - 1} bytes, expected {len(content)}"):
        check_files(model, manifest, quick=True)

    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ModelFileError, match=rf"{name} was changed after the export: its SHA-256 is"):
        Session(model)

    path.unlink()
    with pytest.raises(ModelFileError, match=rf"{name} is missing, expected a file of {len(content)} bytes"):
        Session(model, verify_files=False)

    path.write_bytes(content)
    check_files(model, manifest)


def test_quick_reads_no_content_of_weights(model: Path):
    weights = model / "weights.bin"
    content = weights.read_bytes()
    weights.write_bytes(bytes(len(content)))
    check_files(model, Manifest.read(model), quick=True)


def test_a_link_out_of_the_directory_is_refused(model: Path, tmp_path: Path):
    outside = tmp_path / "outside.bin"
    (model / "weights.bin").rename(outside)
    os.symlink(outside, model / "weights.bin")
    with pytest.raises(ModelFileError, match=r"weights\.bin is a link to .*outside\.bin, expected a file in"):
        Session(model)


def _external(**entries: str | None) -> Callable[[onnx.TensorProto], None]:
    def change(tensor: onnx.TensorProto) -> None:
        said = {entry.key: entry.value for entry in tensor.external_data} | entries
        del tensor.external_data[:]
        for key, value in said.items():
            if value is not None:
                tensor.external_data.add(key=key, value=value)

    return change


def _twice(tensor: onnx.TensorProto) -> None:
    tensor.external_data.add(key="location", value="../secret")


@pytest.mark.parametrize("place", ["initializer", "attribute", "function", "subgraph"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_external(location="/etc/passwd"), r"keeps its data in '/etc/passwd', expected weights\.bin"),
        (_external(location="../weights.bin"), r"keeps its data in '\.\./weights\.bin'"),
        (_external(location="decode.onnx"), r"keeps its data in 'decode\.onnx'"),
        (_external(location=None), "keeps its data in ''"),
        (_external(offset="1000000"), r"takes \d+ bytes at 1000000 of weights\.bin"),
        (_external(length="4"), "takes 4 bytes at .*, expected at least"),
        (_external(length="-4"), "has the external length '-4', expected a number"),
        (_external(length=None), "has the external length ''"),
        (_external(offset="٣"), "has the external offset"),
        (_twice, "describes its external data twice"),
        (lambda tensor: setattr(tensor, "data_type", 99), "has element type 99"),
    ],
)
def test_external_data_anywhere_else_is_refused(
    tmp_path: Path, place: str, change: Callable[[onnx.TensorProto], None], says: str
):
    """Wherever in the graph the tensor is: its author may not be us."""
    model = toy.build(tmp_path / "model")
    decode = onnx.load(model / "decode.onnx", load_external_data=False)
    tensor = onnx.TensorProto()
    tensor.CopyFrom(decode.graph.initializer[0])
    change(tensor)
    node = onnx.helper.make_node("Constant", [], ["unused"], value=tensor)
    if place == "initializer":
        decode.graph.initializer.append(tensor)
    elif place == "attribute":
        decode.graph.node.append(node)
    elif place == "function":
        decode.functions.append(onnx.helper.make_function("x", "F", [], ["unused"], [node], decode.opset_import))
    else:
        branch = onnx.helper.make_graph([node], "branch", [], [])
        decode.graph.node.append(onnx.helper.make_node("If", ["c"], [], then_branch=branch, else_branch=branch))
    (model / "decode.onnx").write_bytes(decode.SerializeToString())
    toy.write_manifest(
        model, graphs={"decode": "decode.onnx"}, profile="portable", dtype="float32", caches=toy.caches()
    )
    for verify in (True, False):
        with pytest.raises(ModelFileError, match=says):
            Session(model, verify_files=verify)


def test_a_graph_that_is_no_onnx(model: Path):
    (model / "decode.onnx").write_bytes(b"\xff" * 100)
    toy.write_manifest(
        model, graphs={"decode": "decode.onnx"}, profile="portable", dtype="float32", caches=toy.caches()
    )
    with pytest.raises(ModelFileError, match=r"decode\.onnx is not an ONNX model"):
        Session(model)


@pytest.mark.parametrize(("profile", "runs"), [("genai", "onnxruntime-genai"), ("ort-paged", "onnxruntime-gpu")])
def test_profiles_of_other_programs_are_refused(tmp_path: Path, profile: str, runs: str):
    model = toy.build(tmp_path / "model")
    toy.edit(model, toy.put("profile", to=profile))
    with pytest.raises(ModelFileError, match=rf"of profile '{profile}', expected portable or inplace; .*{runs}"):
        Session(model)


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_a_package_that_is_not_installed_is_named(model: Path, monkeypatch: pytest.MonkeyPatch, missing: str):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        MlaCompileError, match=rf"needs {missing}, which is not installed: pip install \"mla-compile\[onnx"
    ):
        Session(model)
