"""Sessions against the same model in numpy: prompts, masks, positions, failures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from mla_compile.errors import MlaCompileError, ModelFileError
from mla_compile.onnx.generation import generate
from mla_compile.onnx.session import Session
from tests.support import onnx_toy as toy

PROMPTS = [[3, 5, 7], [1, 2, 3, 4, 5, 6, 7], [9]]


PROFILES = ("portable", "inplace")


LOGITS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-1}  # absolute; the largest logit is about 15


@pytest.fixture(params=PROFILES)
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Session:
    return Session(toy.build(tmp_path / "model", request.param))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("prefill", "decode_query"), [(False, None), (True, None), (False, 1), (True, 1)])
def test_batches_of_different_lengths_give_the_tokens_of_each_prompt(
    tmp_path: Path, profile: str, dtype: str, prefill: bool, decode_query: int | None
):
    model = toy.build(tmp_path / "model", profile, dtype=dtype, prefill=prefill, decode_query=decode_query)
    session = Session(model)
    expected = [toy.greedy(prompt, 24, dtype) for prompt in PROMPTS]
    assert len({tuple(row) for row in expected}) == 3
    assert generate(session, PROMPTS, max_new_tokens=24) == expected
    assert [generate(session, [prompt], max_new_tokens=24)[0] for prompt in PROMPTS] == expected


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_logits_are_those_of_the_whole_sequence(tmp_path: Path, profile: str, dtype: str):
    session = Session(toy.build(tmp_path / "model", profile, dtype=dtype))
    tokens = [list(prompt) for prompt in PROMPTS]
    state, logits = session.prefill(tokens)
    for step in range(30):
        assert logits.dtype == np.float32
        assert logits.shape == (3, toy.VOCAB)
        for row, ids in enumerate(tokens):
            np.testing.assert_allclose(logits[row], toy.logits(ids, dtype)[-1], rtol=0, atol=LOGITS[dtype])
        new = [(7 * step + 11 * row) % toy.VOCAB for row in range(3)]
        for ids, token in zip(tokens, new, strict=True):
            ids.append(token)
        logits = session.step(state, new)
    assert state.length == 37
    assert state.positions.tolist() == [33, 37, 31]


def test_long_generations_of_a_batch(session: Session):
    """Long enough that the mask's own buffer grows twice."""
    assert generate(session, PROMPTS, max_new_tokens=140) == [toy.greedy(prompt, 140) for prompt in PROMPTS]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_prompts_in_pieces_are_the_same_prompts(tmp_path: Path, profile: str, chunk: int):
    session = Session(toy.build(tmp_path / "model", profile, prefill=True), prefill_chunk=chunk)
    assert generate(session, PROMPTS, max_new_tokens=9) == [toy.greedy(prompt, 9) for prompt in PROMPTS]


def test_the_prefill_graph_reads_prompts_and_may_be_left_out(tmp_path: Path):
    model = toy.build(tmp_path / "model", prefill=True)
    ran = []
    for load in (True, False):
        session = Session(model, load_prefill=load)
        real = session._run
        session._run = lambda graph, *rest, real=real: ran.append(graph) or real(graph, *rest)
        assert generate(session, [[1, 2, 3]], max_new_tokens=3) == [toy.greedy([1, 2, 3], 3)]
    assert ran == ["prefill", "decode", "decode", "decode", "decode", "decode"]


def test_a_failure_of_onnxruntime_is_ours_and_leaves_the_state_as_it_was(session: Session):
    state, _ = session.prefill([[1, 2, 3]])
    embed = session.manifest.vocab_size + 5
    with pytest.raises(ModelFileError, match=r"onnxruntime failed in .*decode\.onnx"):
        session._run("decode", state, np.array([[embed]]), np.array([[1]]))
    np.testing.assert_allclose(session.step(state, [4])[0], toy.logits([1, 2, 3, 4])[-1], atol=1e-4)


def test_a_graph_that_is_not_the_manifests(tmp_path: Path):
    model = toy.build(tmp_path / "model")
    fields = {"graphs": {"decode": "decode.onnx"}, "profile": "portable", "caches": toy.caches()}
    toy.write_manifest(model, dtype="float16", **fields)
    with pytest.raises(ModelFileError, match=r"of its outputs, logits is tensor\(float\), expected tensor\(float16\)"):
        Session(model)
    toy.write_manifest(model, dtype="float32", **(fields | {"caches": toy.caches()[:2]}))
    with pytest.raises(ModelFileError, match=r"of its inputs, past_state\.0 is tensor\(float\), expected none of that"):
        Session(model)


def test_a_graph_that_onnxruntime_does_not_load(tmp_path: Path):
    model = toy.build(tmp_path / "model")
    decode = onnx.load(model / "decode.onnx", load_external_data=False)
    decode.graph.node[0].op_type = "NoSuchOp"
    (model / "decode.onnx").write_bytes(decode.SerializeToString())
    toy.write_manifest(
        model, graphs={"decode": "decode.onnx"}, profile="portable", dtype="float32", caches=toy.caches()
    )
    with pytest.raises(ModelFileError, match=r"cannot load .*decode\.onnx with CPUExecutionProvider: .*NoSuchOp"):
        Session(model)


def test_every_error_is_of_the_family():
    assert issubclass(ModelFileError, MlaCompileError)
