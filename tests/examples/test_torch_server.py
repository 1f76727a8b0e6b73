"""The example server for PyTorch, in process: requests one by one and many at once, streams, and wrong ones."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from fastapi.testclient import TestClient

pytest.importorskip("openai", reason="transformers serve needs openai: pip install mla-compile[server]")
tokenizers = pytest.importorskip("tokenizers")

from transformers import PreTrainedTokenizerFast  # noqa: E402

from tests.support import models  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "torch_server.py"
pytestmark = pytest.mark.filterwarnings("ignore")  # of the server's dependencies


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str, TestClient]]:
    """A tiny model, the folder with it and a tokenizer that has a word for each token, and a client of its server."""
    folder = tmp_path_factory.mktemp("model")
    model = models.build("deepseek_v3", num_hidden_layers=1)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(models.VOCAB)}, "w3"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    spec = importlib.util.spec_from_file_location("example_torch_server", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    from transformers.cli.serving import model_manager

    before = model_manager.ModelManager
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.Server, "run", lambda self: None)  # nothing is listened on
        server = module.start(str(folder), "eager", device="cpu", dtype="float32", cb_num_blocks=32, cb_block_size=16)
    try:
        # Within the client all requests share one event loop, as in a server: transformers answers a batch through one.
        with TestClient(server.server.config.app, raise_server_exceptions=False) as client:
            yield model, str(folder), client
    finally:
        server._generation_state.shutdown()
        server._model_manager.shutdown()
        model_manager.ModelManager = before


def _post(client: TestClient, path: str, body: dict[str, Any], status: int = 200) -> str:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.text


def _prompt(length: int, seed: int) -> str:
    ids = torch.randint(3, models.VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{n}" for n in ids.tolist())


def _alone(model: Any, prompt: str, new: int) -> str:
    ids = torch.tensor([[int(word[1:]) for word in prompt.split()]])
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=new, do_sample=False)
    return " ".join(f"w{n}" for n in out[0, ids.shape[1] :].tolist())


def _complete(client: TestClient, folder: str, prompt: str, new: int = 6) -> str:
    body = {"model": folder, "prompt": prompt, "max_tokens": new, "temperature": 0.0}
    return json.loads(_post(client, "/v1/completions", body))["choices"][0]["text"]


def test_many_clients_at_once(served):
    model, folder, client = served
    prompts = [_prompt(n, seed=n) for n in (5, 20, 1, 33, 9, 14)]
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda prompt: _complete(client, folder, prompt), prompts))
    assert [text.split() for text in texts] == [_alone(model, prompt, 6).split() for prompt in prompts]


def test_a_stream(served):
    model, folder, client = served
    prompt = _prompt(12, seed=3)
    body = {"model": folder, "prompt": prompt, "max_tokens": 6, "temperature": 0.0, "stream": True}
    lines = [line[6:] for line in _post(client, "/v1/completions", body).splitlines() if line.startswith("data: {")]
    text = "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])
    assert text.split() == _alone(model, prompt, 6).split()


def test_a_chat(served):
    model, folder, client = served
    prompt = _prompt(12, seed=4)
    body = {"model": folder, "messages": [{"role": "user", "content": prompt}], "max_tokens": 4, "temperature": 0.0}
    answer = json.loads(_post(client, "/v1/chat/completions", body))
    assert answer["choices"][0]["message"]["content"].split() == _alone(model, prompt, 4).split()
    assert answer["usage"]["prompt_tokens"] == 12


def test_a_request_that_cannot_run_is_told_so_and_the_next_one_runs(served):
    model, folder, client = served
    body = {"model": folder, "prompt": _prompt(600, seed=1), "max_tokens": 6, "temperature": 0.0}
    _post(client, "/v1/completions", body, status=500)
    prompt = _prompt(7, seed=5)
    assert _complete(client, folder, prompt).split() == _alone(model, prompt, 6).split()
    assert client.get("/health").json() == {"status": "ok"}
