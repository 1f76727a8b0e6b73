"""Model directories that cannot be used are refused before ONNX Runtime sees them, and the error says why."""

from __future__ import annotations

import json
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
from mla_compile.onnx.manifest import Manifest, check_onnxruntime
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


def _edit(model: Path, change: Callable[[dict], Any]) -> None:
    path = model / "mla_compile.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _set(*keys: str | int, to: Any) -> Callable[[dict], None]:
    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = to

    return change


def test_a_manifest_is_read_back_as_it_was_written(model: Path):
    manifest = Manifest.read(model)
    assert manifest.caches == toy.caches()
    assert manifest.graphs == {"decode": "decode.onnx", "prefill": "prefill.onnx"}
    assert manifest.to_json() == (model / "mla_compile.json").read_text()
    assert Manifest.from_dict(json.loads(manifest.to_json())) == manifest
    check_files(model, manifest)


def test_attention_nodes_are_read_back(tmp_path: Path):
    node = {"H": 4, "La": 64, "Lb": 0, "Lv": 64, "mask": None, "sinks": True, "softcap": 0.5, "window": 0}
    node |= {"values": False, "value_width": 0}
    model = toy.build(tmp_path / "model")
    _edit(model, _set("attention", to=[node]))
    (read,) = Manifest.read(model).attention
    assert vars(read) == node


def test_a_field_of_a_later_release_is_left_alone(model: Path):
    _edit(model, _set("colour", to="green"))
    assert Manifest.read(model).profile == "portable"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda content: content.pop("dtype"), "dtype is missing"),
        (_set("dtype", to="int8"), "dtype is 'int8', expected one of float32, float16, bfloat16"),
        (_set("dtype", to=["float32"]), r"dtype is \['float32'\], expected one of"),
        (_set("format", to=2), "format is 2, expected at most 1; a newer mla-compile wrote it"),
        (_set("op_version", to=7), "op_version is 7, expected at most 1"),
        (_set("format", to=True), "format is True, expected a whole number"),
        (_set("profile", to="fast"), "profile is 'fast', expected one of portable, inplace"),
        (_set("minimum_onnxruntime", to="new"), "minimum_onnxruntime is 'new', expected a version"),
        (_set("vocab_size", to=0), "vocab_size is 0, expected a whole number of at least 1"),
        (_set("vocab_size", to=9.5), "vocab_size is 9.5, expected a whole number"),
        (_set("pad_token_id", to=toy.VOCAB), "pad_token_id is 37, expected token ids from 0 to 36"),
        (_set("eos_token_ids", to=[1, -1]), "eos_token_ids is .*, expected token ids"),
        (_set("eos_token_ids", to=["1"]), "eos_token_ids is .*, expected a list of whole numbers"),
        (_set("decode_query", to=2), "decode_query is 2, expected 1 or null"),
        (_set("graphs", to={}), r"graphs is \[\], expected a graph named decode"),
        (
            _set("graphs", "decode", to="../decode.onnx"),
            "graphs names the file '../decode.onnx', expected a name without",
        ),
        (_set("graphs", "decode", to="/etc/passwd"), "graphs names the file '/etc/passwd', expected a name without"),
        (_set("graphs", "decode", to="other.onnx"), r"files is .*, expected an entry for other\.onnx"),
        (_set("files", "a/b", to={"bytes": 1, "sha256": "0" * 64}), "files names the file 'a/b'"),
        (_set("files", "weights.bin", "sha256", to="ABC"), "files.weights.bin.sha256 is 'ABC', expected 64"),
        (_set("files", "weights.bin", "bytes", to=-1), "files.weights.bin.bytes is -1"),
        (_set("files", "weights.bin", to=3), "files.weights.bin is 3, expected an object"),
        (_set("caches", to={}), "caches is {}, expected a list"),
        (_set("caches", 0, "axis", to=2), r"caches\[0\].shape is .*, expected .* null at the token axis"),
        (_set("caches", 0, "axis", to=None), r"caches\[0\].shape is .* with axis None and grows True"),
        (_set("caches", 2, "shape", to=[1, 12]), r'caches\[2\].shape is .*, expected "batch"'),
        (_set("caches", 0, "grows", to="yes"), r"caches\[0\].grows is 'yes', expected true or false"),
        (_set("caches", 1, "past", to="past_latent.0"), "caches is 'past_latent.0 twice', expected each name once"),
        (_set("weights_sha256", to=None), "weights_sha256 is None, expected 64 hexadecimal digits"),
    ],
)
def test_a_wrong_field_is_named(model: Path, change: Callable[[dict], Any], says: str):
    _edit(model, change)
    with pytest.raises(ModelFileError, match=rf"mla_compile\.json: {says}"):
        Session(model)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff\xfe", "[" * 100_000], ids=range(5))
def test_a_manifest_that_is_no_object_is_refused(model: Path, text: str):
    (model / "mla_compile.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelFileError, match=r"mla_compile\.json"):
        Session(model)


def test_a_directory_that_is_none(model: Path, tmp_path: Path):
    with pytest.raises(ModelFileError, match=r"nothing is not a directory; expected one that `mla-compile"):
        Session(tmp_path / "nothing")
    (model / "mla_compile.json").unlink()
    with pytest.raises(ModelFileError, match=r"mla_compile\.json is missing"):
        Session(model)


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
    with pytest.raises(ModelFileError, match=r"weights\.bin is a link to .*outside\.bin, expected a file that lies in"):
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
    _edit(model, _set("profile", to=profile))
    with pytest.raises(ModelFileError, match=rf"of profile '{profile}', expected portable or inplace; .*{runs}"):
        Session(model)


def test_an_old_onnxruntime_is_refused(tmp_path: Path):
    model = toy.build(tmp_path / "model", minimum_onnxruntime="99.1")
    with pytest.raises(ModelFileError, match=r'is installed, this portable model needs 99\.1 .*"onnxruntime>=99\.1"'):
        Session(model)


@pytest.mark.parametrize("installed", ["1.20", "1.20.0", "1.20.1", "1.31.1", "2.0", "1.20.0+cu12", "1.100"])
def test_versions_are_compared_as_numbers(tmp_path: Path, installed: str):
    manifest = Manifest.read(toy.build(tmp_path / "model"))
    check_onnxruntime(manifest, installed)
    with pytest.raises(ModelFileError, match=r"onnxruntime 1\.9\.9 is installed"):
        check_onnxruntime(manifest, "1.9.9")


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_a_package_that_is_not_installed_is_named(model: Path, monkeypatch: pytest.MonkeyPatch, missing: str):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        MlaCompileError, match=rf"needs {missing}, which is not installed: pip install \"mla-compile\[onnx"
    ):
        Session(model)
