"""Servers of a tiny model that answer without compiled code, as their clients meet them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
import torch

from mla_compile.serving.generation import ServedGeneration
from mla_compile.serving.reading import HANDLERS, RequestReader, ServedModel
from mla_compile.serving.server import Server
from mla_compile.serving.settings import Settings
from tests.support import models

PLAIN = {"codegen": "eager", "verify": False}


def settings(folder: Path, **more: Any) -> Settings:
    small = {"page_size": 16, "pages": 32, "max_batch_tokens": 64, "max_requests": 8, "name": "tiny"}
    return Settings(str(folder), **{**small, "device": "cpu", "dtype": "float32", "options": PLAIN, **more})


@contextmanager
def running(server: Server) -> Iterator[str]:
    """The server in a thread, at a free port; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    object.__setattr__(server._settings, "port", port)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.end()
        thread.join(timeout=60)
        assert not thread.is_alive()


def another(server: Server, folder: Path, **more: Any) -> Server:
    """A server with other settings of the model that ``server`` has loaded, which is traced once."""
    made = Server(settings(folder, **more))
    old, new = server.loaded, made.loaded

    def load(*_: Any) -> None:
        new.manager, new.room = old.manager, old.room
        new.generation = ServedGeneration(old.manager, made._settings.timeout)
        (reader, *_) = old.readers.values()
        state = ServedModel("tiny", reader._state.model, reader._state.tokenizer, new.generation)
        new.readers, new.ready = {path: RequestReader(path, state) for path in HANDLERS}, True

    new.load, new.stop = load, lambda: None
    return made


def alone(model: Any, prompt: str, new: int) -> list[str]:
    """The words that ``generate()`` says to a prompt."""
    ids = torch.tensor([[int(word[1:]) for word in prompt.split()]])
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=new, do_sample=False)
    return [f"w{n}" for n in out[0, ids.shape[1] :].tolist()]


def words(length: int, seed: int) -> str:
    """A random prompt."""
    ids = torch.randint(3, models.VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{n}" for n in ids.tolist())


def post(address: str, path: str, body: Any, status: int = 200, **how: Any) -> Any:
    answer = requests.post(f"{address}/v1/{path}", json=body, timeout=60, **how)
    assert answer.status_code == status, answer.text
    return answer


def complete(address: str, prompt: str, new: int = 6, **more: Any) -> list[str]:
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0, **more}
    return post(address, "completions", body).json()["choices"][0]["text"].split()


@contextmanager
def another_client(address: str, model: Any) -> Iterator[None]:
    """Somebody who asks again and again meanwhile, and is told what ``generate()`` says each time."""
    want, stop, wrong, right = alone(model, "w7 w8 w9", 5), threading.Event(), list[Any](), list[Any]()

    def ask() -> None:
        while not stop.is_set():
            said = complete(address, "w7 w8 w9", 5)
            (right if said == want else wrong).append(said)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        stop.set()
        asking.join()
    assert right
    assert not wrong


def until(holds: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def idle(server: Server) -> None:
    """Wait until nothing is generated, not even for a client that has left."""
    until(lambda: not server.loaded.manager.batch_processor.scheduler.active_requests)
