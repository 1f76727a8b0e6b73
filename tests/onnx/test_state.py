"""States: caches in place or handed over, and what they hold."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import pytest

from mla_compile.errors import InputError
from mla_compile.onnx.session import Session
from tests.support import onnx_toy as toy

PROMPTS = [[3, 5, 7], [1, 2, 3, 4, 5, 6, 7], [9]]


PROFILES = ("portable", "inplace")


@pytest.fixture(params=PROFILES)
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Session:
    return Session(toy.build(tmp_path / "model", request.param))


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
        # float32 over forty steps, logits up to 7: 1.2e-4 was seen.
        np.testing.assert_allclose(logits[0], toy.logits(tokens[0])[-1], rtol=0, atol=3e-4)
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
