"""The manifest: read back as written, and a wrong field is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mla_compile.errors import ModelFileError
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
    toy.edit(model, toy.put("attention", to=[node]))
    (read,) = Manifest.read(model).attention
    assert vars(read) == node


def test_a_field_of_a_later_release_is_left_alone(model: Path):
    toy.edit(model, toy.put("colour", to="green"))
    assert Manifest.read(model).profile == "portable"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda content: content.pop("dtype"), "dtype is missing"),
        (toy.put("dtype", to="int8"), "dtype is 'int8', expected one of float32, float16, bfloat16"),
        (toy.put("dtype", to=["float32"]), r"dtype is \['float32'\], expected one of"),
        (toy.put("format", to=2), "format is 2, expected at most 1; a newer mla-compile wrote it"),
        (toy.put("op_version", to=7), "op_version is 7, expected at most 1"),
        (toy.put("format", to=True), "format is True, expected a whole number"),
        (toy.put("profile", to="fast"), "profile is 'fast', expected one of portable, inplace"),
        (toy.put("minimum_onnxruntime", to="new"), "minimum_onnxruntime is 'new', expected a version"),
        (toy.put("vocab_size", to=0), "vocab_size is 0, expected a whole number of at least 1"),
        (toy.put("vocab_size", to=9.5), "vocab_size is 9.5, expected a whole number"),
        (toy.put("pad_token_id", to=toy.VOCAB), "pad_token_id is 37, expected token ids from 0 to 36"),
        (toy.put("eos_token_ids", to=[1, -1]), "eos_token_ids is .*, expected token ids"),
        (toy.put("eos_token_ids", to=["1"]), "eos_token_ids is .*, expected a list of whole numbers"),
        (toy.put("decode_query", to=2), "decode_query is 2, expected 1 or null"),
        (toy.put("graphs", to={}), r"graphs is \[\], expected a graph named decode"),
        (
            toy.put("graphs", "decode", to="../decode.onnx"),
            "graphs names the file '../decode.onnx', expected a name without",
        ),
        (toy.put("graphs", "decode", to="/etc/passwd"), "graphs names the file '/etc/passwd', expected a name without"),
        (toy.put("graphs", "decode", to="other.onnx"), r"files is .*, expected an entry for other\.onnx"),
        (toy.put("files", "a/b", to={"bytes": 1, "sha256": "0" * 64}), "files names the file 'a/b'"),
        (toy.put("files", "weights.bin", "sha256", to="ABC"), "files.weights.bin.sha256 is 'ABC', expected 64"),
        (toy.put("files", "weights.bin", "bytes", to=-1), "files.weights.bin.bytes is -1"),
        (toy.put("files", "weights.bin", to=3), "files.weights.bin is 3, expected an object"),
        (toy.put("caches", to={}), "caches is {}, expected a list"),
        (toy.put("caches", 0, "axis", to=2), r"caches\[0\].shape is .*, expected .* null at the token axis"),
        (toy.put("caches", 0, "axis", to=None), r"caches\[0\].shape is .* with axis None and grows True"),
        (toy.put("caches", 2, "shape", to=[1, 12]), r'caches\[2\].shape is .*, expected "batch"'),
        (toy.put("caches", 0, "grows", to="yes"), r"caches\[0\].grows is 'yes', expected true or false"),
        (toy.put("caches", 1, "past", to="past_latent.0"), "caches is 'past_latent.0 twice', expected each name once"),
        (toy.put("weights_sha256", to=None), "weights_sha256 is None, expected 64 hexadecimal digits"),
    ],
)
def test_a_wrong_field_is_named(model: Path, change: Callable[[dict], Any], says: str):
    toy.edit(model, change)
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
