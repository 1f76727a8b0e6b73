"""A tiny model with a word for each token, and servers of it that answer without compiled code."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

for package in ("fastapi", "openai", "prometheus_client", "tokenizers", "uvicorn"):
    pytest.importorskip(package, reason="pip install mla-compile[server]")

import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

from mla_compile.serving.generation import Generation
from mla_compile.serving.reading import HANDLERS, Reader, State
from mla_compile.serving.server import Server
from mla_compile.serving.settings import Settings
from tests.support import models

PLAIN = {"codegen": "eager", "verify": False}


@pytest.fixture(scope="session")
def model() -> Any:
    made = models.build("deepseek_v3", num_hidden_layers=1, tie_word_embeddings=False)
    made.generation_config.eos_token_id = made.config.eos_token_id = None
    return made


@pytest.fixture(scope="session")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served")
    model.save_pretrained(made)

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(models.VOCAB)}, "w3"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(made)
    return made


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


@pytest.fixture(scope="session")
def served(folder: Path) -> Iterator[tuple[Any, str]]:
    """A server that is ready, and its address; its 32 pages of 16 tokens hold 512."""
    from tests.support.server import Server, running, settings

    server = Server(settings(folder))
    server.load()
    with running(server) as address:
        yield server, address


def another(server: Server, folder: Path, **more: Any) -> Server:
    """A server with other settings of the model that ``server`` has loaded, which is traced once."""
    made = Server(settings(folder, **more))
    old, new = server.loaded, made.loaded

    def load() -> None:
        new.manager, new.room = old.manager, old.room
        new.generation = Generation(old.manager, made._settings.timeout)
        (reader, *_) = old.readers.values()
        state = State("tiny", reader._state.model, reader._state.tokenizer, new.generation)
        new.readers, new.ready = {path: Reader(path, state) for path in HANDLERS}, True

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
