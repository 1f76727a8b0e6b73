"""Sessions against the same model in numpy: caches, masks, positions, providers, native libraries."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from mla_compile.errors import InputError, MlaCompileError, ModelFileError, OptionError
from mla_compile.onnx import engine
from mla_compile.onnx.engine import Decision
from mla_compile.onnx.generation import generate
from mla_compile.onnx.manifest import AttentionNode
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


def test_a_state_does_not_hold_what_the_prefill_graph_was_bound_to(tmp_path: Path):
    state, _ = Session(toy.build(tmp_path / "model", prefill=True)).prefill([[1, 2, 3]])
    assert not state.bindings


def test_a_cache_in_place_is_one_buffer(tmp_path: Path):
    session = Session(toy.build(tmp_path / "model", "inplace"))
    state, _ = session.prefill([[1, 2, 3, 4]], capacity=20)
    latent, rope, fixed = state.caches
    addresses = [cache._buffer.data_ptr() for cache in (latent, rope)]
    rows = [latent._buffer.numpy()[:, :4].copy(), rope._buffer.numpy()[:, :, :4].copy()]
    for token in range(16):
        session.step(state, [token])
    assert [cache._buffer.data_ptr() for cache in (latent, rope)] == addresses
    assert state.capacity == latent.capacity == rope.capacity == 20
    np.testing.assert_array_equal(latent._buffer.numpy()[:, :4], rows[0])
    np.testing.assert_array_equal(rope._buffer.numpy()[:, :, :4], rows[1])
    weights = toy.weights()["embed"]
    positions = np.arange(4, 20, dtype=np.float32)[:, None]
    np.testing.assert_allclose(latent._buffer.numpy()[0, 4:], weights[:16] * np.cos(positions * 0.7), atol=1e-5)
    assert not fixed.in_place


@pytest.mark.parametrize("batch", [1, 3])
def test_buffers_that_are_too_short_double_and_keep_their_rows(tmp_path: Path, batch: int):
    session = Session(toy.build(tmp_path / "model", "inplace"))
    tokens = [list(prompt) for prompt in PROMPTS[:batch]]
    state, _ = session.prefill(tokens)
    capacities = {state.capacity}
    for step in range(40):
        before = state.caches[0]._buffer.numpy()[:, : state.length].copy()
        for ids in tokens:
            ids.append(step % toy.VOCAB)
        logits = session.step(state, [step % toy.VOCAB] * batch)
        np.testing.assert_array_equal(state.caches[0]._buffer.numpy()[:, : before.shape[1]], before)
        capacities.add(state.capacity)
        np.testing.assert_allclose(logits[0], toy.logits(tokens[0])[-1], rtol=0, atol=1e-4)
    first = min(capacities)
    assert sorted(capacities) == [first * 2**n for n in range(len(capacities))]
    assert len(capacities) > 2


def test_unused_rows_of_a_buffer_are_not_read(tmp_path: Path):
    session = Session(toy.build(tmp_path / "model", "inplace"))
    state, logits = session.prefill([[4, 5, 6]], capacity=30)
    state.caches[0]._buffer.update_inplace(
        np.concatenate([state.caches[0]._buffer.numpy()[:, :3], np.full((1, 27, toy.WIDTH), np.nan, np.float32)], 1)
    )
    tokens = [4, 5, 6]
    for _ in range(10):
        tokens.append(int(logits[0].argmax()))
        logits = session.step(state, tokens[-1:])
    assert tokens[3:] == toy.greedy([4, 5, 6], 10)


@pytest.mark.parametrize("profile", PROFILES)
def test_memory_of_many_steps_is_flat(tmp_path: Path, profile: str):
    """The state holds one set of caches, however many steps made it: nothing of earlier steps is kept."""
    session = Session(toy.build(tmp_path / "model", profile, width=1024, prefill=True))
    state, _ = session.prefill([[1] * 64], capacity=400)
    for _ in range(50):
        session.step(state, [2])
    gc.collect()
    before = _resident()
    for _ in range(200):
        session.step(state, [2])
    gc.collect()
    rows = 200 * 1024 * 4
    kept_by_each_step = 200 * 150 * 1024 * 4
    assert _resident() - before < 8 * rows + kept_by_each_step / 8


def _resident() -> int:
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_states_of_one_session_do_not_meet(session: Session):
    first, logits = session.prefill([[1, 2, 3]])
    session.prefill([[30, 31]])
    second, _ = session.prefill([[9, 9, 9, 9]])
    session.step(second, [4])
    np.testing.assert_allclose(session.step(first, [4])[0], toy.logits([1, 2, 3, 4])[-1], atol=1e-4)
    np.testing.assert_allclose(logits[0], toy.logits([1, 2, 3])[-1], atol=1e-4)


def test_steps_that_cannot_be_made_leave_the_state_as_it_was(tmp_path: Path):
    session = Session(toy.build(tmp_path / "model", max_position=4))
    state, _ = session.prefill([[1, 2, 3]])
    for tokens, says in (([1, 2], "expected 1 whole numbers"), ([1.0], "are float64"), ([37], "expected ids from 0")):
        with pytest.raises(InputError, match=says):
            session.step(state, tokens)
    np.testing.assert_allclose(session.step(state, [4])[0], toy.logits([1, 2, 3, 4])[-1], atol=1e-4)
    with pytest.raises(InputError, match="already holds 4 tokens of a row"):
        session.step(state, [5])


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
    import mla_compile.onnx as package

    monkeypatch.setitem(sys.modules, "mla_compile.onnx.native", fake)
    monkeypatch.setattr(package, "native", fake, raising=False)
    return fake


def _decide(tmp_path: Path, library: Any = "auto", attention: tuple = (NODE,)) -> Decision:
    manifest = SimpleNamespace(attention=attention, dtype="float32")
    return engine.decide(manifest, ("CUDAExecutionProvider",), engine.Device("cuda", 3), "1.31.1", library)


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


def test_importing_brings_neither_onnx_nor_onnxruntime():
    code = (
        "import sys, mla_compile.onnx.session, mla_compile.onnx.generation, mla_compile.cli.run\n"
        "print(sorted({'onnx', 'onnxruntime', 'fastapi'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.stdout.strip() == "[]", out.stderr


def test_every_error_is_of_the_family():
    assert issubclass(ModelFileError, MlaCompileError)
