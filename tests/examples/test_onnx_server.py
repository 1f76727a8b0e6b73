"""The example server: answers, streams, batches, limits and errors, in process."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support import onnx_toy as toy
from tests.support.tiers import full

if TYPE_CHECKING:  # onnxruntime and fastapi are imported by the tests that run
    from fastapi.testclient import TestClient

    from mla_compile.onnx.session import Session

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "onnx_server.py"


@functools.cache
def _server() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("onnx_server", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["onnx_server"] = module  # where FastAPI looks up the types of arguments
    spec.loader.exec_module(module)
    return module


def _session(folder: Path) -> Session:
    from mla_compile.onnx.session import Session

    return Session(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.build(tmp_path_factory.mktemp("onnx") / "model", "inplace", max_position=512, prefill=True)


@pytest.fixture
def session(folder: Path) -> Session:
    """A session of the test's own, whose methods it may replace."""
    return _session(folder)


@contextmanager
def _client(session: Session, **limits: int) -> Iterator[TestClient]:
    from fastapi.testclient import TestClient

    server = _server()
    with TestClient(server.create_app(session, server.Limits(**limits))) as client:
        yield client


@pytest.fixture
def client(session: Session) -> Iterator[TestClient]:
    with _client(session) as client:
        yield client


class Gate:
    """Stops a session before each step until it is opened, and counts the rows of each batch."""

    def __init__(self, session: Session) -> None:
        self.open, self.batches = threading.Event(), []
        prefill, step = session.prefill, session.step

        def counted(prompts: Any, **options: Any) -> Any:
            self.batches.append(len(prompts))
            return prefill(prompts, **options)

        def gated(*arguments: Any) -> Any:
            assert self.open.wait(30)
            return step(*arguments)

        session.prefill, session.step = counted, gated


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def _ask(client: TestClient, prompt: list[int], count: int = 8, **options: Any) -> Any:
    return client.post("/v1/completions", json={"prompt_ids": prompt, "max_new_tokens": count, **options})


def _events(text: str) -> list[Any]:
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def test_a_completion(client: TestClient):
    answer = _ask(client, [3, 5, 7])
    assert answer.status_code == 200
    assert answer.json() == {
        "token_ids": toy.greedy([3, 5, 7], 8),
        "finish_reason": "length",
        "usage": {"prompt_tokens": 3, "new_tokens": 8},
    }
    one = _ask(client, [3, 5, 7], temperature=1.5, top_k=9, top_p=0.9, seed=4).json()
    two = _ask(client, [3, 5, 7], temperature=1.5, top_k=9, top_p=0.9, seed=4).json()
    assert one == two
    assert one["token_ids"] != answer.json()["token_ids"]


def test_a_stream_gives_a_token_per_event(client: TestClient):
    answer = _ask(client, [3, 5, 7], stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *tokens, outcome = _events(answer.text)
    assert [event["token_id"] for event in tokens] == toy.greedy([3, 5, 7], 8)
    assert outcome == {"finish_reason": "length", "usage": {"prompt_tokens": 3, "new_tokens": 8}}


def test_eos_is_a_reason_to_stop(tmp_path: Path):
    full = toy.greedy([1, 2, 3], 12)
    expected = full[: full.index(full[3]) + 1]
    with _client(_session(toy.build(tmp_path / "model", eos_token_ids=(full[3],)))) as client:
        answer = _ask(client, [1, 2, 3], 12).json()
    assert (answer["token_ids"], answer["finish_reason"]) == (expected, "stop")


def test_health_and_model(client: TestClient):
    assert client.get("/health").json() == {"status": "ok", "waiting": 0}
    model = client.get("/v1/model").json()
    assert (model["profile"], model["vocab_size"], model["max_position"]) == ("inplace", toy.VOCAB, 512)
    assert model["providers"] == ["CPUExecutionProvider"]
    assert model["library"] == "no native library: the model has no attention node"
    assert model["limits"]["waiting"] == 32


def test_requests_that_wait_run_as_one_batch(session: Session):
    gate = Gate(session)
    prompts = [[n, n + 1] * (n % 3 + 1) for n in range(1, 8)]
    with _client(session, batch=4) as client, ThreadPoolExecutor(8) as pool:
        first = pool.submit(_ask, client, [9], 5)
        _until(lambda: gate.batches == [1])
        rest = [pool.submit(_ask, client, prompt, 4 + row) for row, prompt in enumerate(prompts)]
        _until(lambda: client.get("/health").json()["waiting"] == 7)
        gate.open.set()
        assert first.result().json()["token_ids"] == toy.greedy([9], 5)
        for row, (prompt, answer) in enumerate(zip(prompts, rest, strict=True)):
            assert answer.result().json()["token_ids"] == toy.greedy(prompt, 4 + row)
    assert gate.batches == [1, 4, 3]


def test_too_many_waiting_requests_are_turned_away(session: Session):
    gate = Gate(session)
    with _client(session, waiting=2) as client, ThreadPoolExecutor(4) as pool:
        first = pool.submit(_ask, client, [9])
        _until(lambda: gate.batches == [1])
        rest = [pool.submit(_ask, client, [9]) for _ in range(2)]
        _until(lambda: client.get("/health").json()["waiting"] == 2)
        answer = _ask(client, [9])
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.json() == {"error": {"status": 429, "message": "2 requests are waiting; try again later"}}
        gate.open.set()
        assert {future.result().status_code for future in (first, *rest)} == {200}


def test_a_client_that_leaves_a_stream_frees_its_row(session: Session):
    """Starlette ends the iterator of a response whose client is gone; the worker sees it at its next step."""
    import asyncio

    gate = Gate(session)
    gate.open.set()

    async def leave() -> tuple[list[str], int]:
        server = _server()
        worker = server.Worker(session, server.Limits())
        worker.start()
        job = server.Job([3, 5, 7], 500, server.Sampling())
        worker.submit(job)
        events = server._events(session, job)
        seen = [await anext(events) for _ in range(2)]
        await events.aclose()
        assert job.cancelled.is_set()
        other = server.Job([1], 3, server.Sampling())
        worker.submit(other)
        tokens = [token async for token in other.tokens()]
        assert tokens == toy.greedy([1], 3)
        await asyncio.to_thread(worker.stop)
        return seen, job.events.qsize()

    seen, more = asyncio.run(leave())
    assert [json.loads(event[6:])["token_id"] for event in seen] == toy.greedy([3, 5, 7], 2)
    assert more < 490


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({}, 422, "prompt_ids: Field required"),
        ({"prompt_ids": []}, 422, "prompt_ids: List should have at least 1 item"),
        ({"prompt_ids": "1,2"}, 422, "prompt_ids: Input should be a valid list"),
        ({"prompt_ids": [1, "2"]}, 422, "prompt_ids.1: Input should be a valid integer"),
        ({"prompt_ids": [1, 2.5]}, 422, "prompt_ids.1: Input should be a valid integer"),
        ({"prompt_ids": [1], "max_new_tokens": 0}, 422, "max_new_tokens: Input should be greater than or equal to 1"),
        ({"prompt_ids": [1], "colour": 1}, 422, "colour: Extra inputs are not permitted"),
        ({"prompt_ids": [37]}, 400, "prompt 0 holds 37, expected ids from 0 to 36"),
        ({"prompt_ids": [1 << 80]}, 400, "expected ids from 0 to 36"),
        ({"prompt_ids": [1], "temperature": -1}, 400, "temperature is -1.0, expected 0"),
        ({"prompt_ids": [1], "top_p": 2}, 400, "top_p is 2.0, expected more than 0 and at most 1"),
        ({"prompt_ids": [1], "max_new_tokens": 65}, 400, "max_new_tokens is 65, at most 64 are given"),
        ({"prompt_ids": [1] * 501}, 400, "prompt_ids has 501 tokens, at most 500 are taken"),
        ({"prompt_ids": [1] * 500, "max_new_tokens": 14}, 400, "max_new_tokens may be at most 13"),
        ({"prompt_ids": [1] * 5000}, 413, "the body has more than 4000 bytes"),
    ],
)
def test_wrong_requests_get_a_reason(session: Session, body: dict, status: int, says: str):
    with _client(session, new_tokens=64, prompt_tokens=500, body_bytes=4000) as client:
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["status"] == status
        assert says in answer.json()["error"]["message"]
        assert "Traceback" not in answer.text


def test_what_is_no_json_or_no_path_gets_json_too(client: TestClient):
    for answer, status in (
        (client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"}), 422),
        (client.get("/v1/completions"), 405),
        (client.get("/nothing"), 404),
    ):
        assert answer.status_code == status
        assert answer.json()["error"]["status"] == status


def test_a_body_without_a_length_is_counted(session: Session):
    with _client(session, body_bytes=1000) as client:
        answer = client.post("/v1/completions", content=(b" " * 100 for _ in range(100)))
        assert answer.status_code == 413


def test_a_failing_model_is_an_error_of_its_batch_only(session: Session):
    real = session.prefill

    def overflow(prompts: Any, **options: Any) -> Any:
        state, logits = real(prompts, **options)
        return state, np.where(prompts[0][0] == 13, np.float32(np.nan), logits)

    session.prefill = overflow
    with _client(session) as client:
        answer = _ask(client, [13])
        assert answer.status_code == 500
        assert "the model's logits for row 0 hold nan" in answer.json()["error"]["message"]
        (event,) = _events(_ask(client, [13], stream=True).text)
        assert event["error"]["status"] == 500
        assert _ask(client, [3, 5, 7]).json()["token_ids"] == toy.greedy([3, 5, 7], 8)

        session.prefill = lambda *_, **__: 1 / 0
        answer = _ask(client, [3])
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "internal error; the server's log has more"
        assert client.get("/health").status_code == 200


def test_shutting_down_answers_those_who_wait(session: Session):
    gate = Gate(session)
    with _client(session, batch=1) as client, ThreadPoolExecutor(4) as pool:
        running, waiting = pool.submit(_ask, client, [9], 50), None
        _until(lambda: gate.batches == [1])
        waiting = pool.submit(_ask, client, [9], 50)
        worker = client.app.state.worker
        _until(lambda: worker.waiting == 1)
        stop = pool.submit(worker.stop)
        _until(lambda: not worker.alive)
        assert _ask(client, [9]).status_code == 503
        assert client.get("/health").status_code == 503
        gate.open.set()
        stop.result()
        for answer in (running.result(), waiting.result()):
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == "the server is shutting down"


def test_main_says_what_is_wrong_with_a_model(tmp_path: Path):
    with pytest.raises(SystemExit, match=r"^error: .*mla_compile\.json is missing"):
        _server().main(tmp_path)


@full("command")
def test_the_program_says_what_is_wrong_with_a_model(tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1])}  # of a checkout that is not installed
    out = subprocess.run(
        [sys.executable, EXAMPLE, tmp_path], env=environment, capture_output=True, text=True, check=False
    )
    assert out.returncode == 1
    assert out.stderr.startswith("error: ")
    assert "mla_compile.json is missing" in out.stderr
