"""A tiny model with a word for each token, and a server of it, made once."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support import models

_NEEDED = ("fastapi", "openai", "prometheus_client", "tokenizers", "uvicorn")  # pip install mla-compile[server]
collect_ignore_glob = ["test_*.py"] if any(find_spec(name) is None for name in _NEEDED) else []


@pytest.fixture(scope="session")
def model() -> Any:
    made = models.build("deepseek_v3", num_hidden_layers=1, tie_word_embeddings=False)
    made.generation_config.eos_token_id = made.config.eos_token_id = None
    return made


@pytest.fixture(scope="session")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served")
    model.save_pretrained(made)

    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(models.VOCAB)}, "w3"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="session")
def served(folder: Path) -> Iterator[tuple[Any, str]]:
    """A server that is ready, and its address; its 32 pages of 16 tokens hold 512."""
    from tests.support.server import Server, running, settings

    server = Server(settings(folder))
    server.load()
    with running(server) as address:
        yield server, address
