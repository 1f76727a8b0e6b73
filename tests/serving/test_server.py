"""The server as its clients meet it: over HTTP, in a thread of this process."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import transformers
from prometheus_client.parser import text_string_to_metric_families

import mla_compile
from mla_compile.serving.ranks import ServerRanks
from mla_compile.serving.server import Server
from tests.support.server import alone, another, complete, idle, post, running, settings, until, words

pytestmark = pytest.mark.filterwarnings("ignore")  # of the server's dependencies


def streamed(address: str, body: Any, path: str = "completions") -> list[dict[str, Any]]:
    lines = post(address, path, {**body, "stream": True}).text.split("\n\n")
    assert [line for line in lines if line][-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_many_clients_at_once(served, model):
    _, address = served
    prompts = [words(n, seed=n) for n in (5, 20, 1, 33, 9, 14)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda prompt: complete(address, prompt), prompts))
    assert found == [alone(model, prompt, 6) for prompt in prompts]


def test_a_stream_and_a_chat(served, model):
    _, address = served
    prompt = words(12, seed=3)
    parts = streamed(address, {"prompt": prompt, "max_tokens": 6, "temperature": 0})
    assert "".join(one["choices"][0]["text"] for one in parts).split() == alone(model, prompt, 6)
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 4, "temperature": 0, "model": "tiny"}
    answer = post(address, "chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"].split() == alone(model, prompt, 4)
    assert answer["usage"] == {"prompt_tokens": 12, "completion_tokens": 4, "total_tokens": 16}
    answer = post(address, "responses", {"input": prompt, "max_output_tokens": 4, "temperature": 0, "stream": False})
    assert answer.json()["output"][0]["content"][0]["text"].split() == alone(model, prompt, 4)


def test_requests_are_drawn_each_by_its_own_settings(served, model):
    """A seed gives the same words again, whoever is served beside, and nobody's temperature is another's."""
    _, address = served
    prompt = words(9, seed=8)
    hot = {"temperature": 2.0, "seed": 5, "top_p": 0.99}
    complete(address, prompt, 1, **{**hot, "seed": -(2**70)})
    (first,) = {tuple(complete(address, prompt, 8, **hot)) for _ in range(3)}
    assert list(first) != alone(model, prompt, 8)
    with ThreadPoolExecutor(6) as pool:
        mixed = list(pool.map(lambda k: complete(address, prompt, 8, **(hot if k % 2 else {})), range(6)))
    assert mixed == [list(first) if k % 2 else alone(model, prompt, 8) for k in range(6)]
    assert len({tuple(complete(address, prompt, 8, **{**hot, "seed": k})) for k in range(4)}) > 1
    assert complete(address, prompt, 8, **{**hot, "top_k": 1, "repetition_penalty": 1.0}) == alone(model, prompt, 8)


def test_an_answer_ends_with_its_last_token_unless_that_is_ignored(served, model):
    server, address = served
    prompt = words(9, seed=8)
    said = alone(model, prompt, 8)
    (reader, *_) = server.loaded.readers.values()
    reader._state.model.generation_config.eos_token_id = int(said[2][1:])
    try:
        assert complete(address, prompt, 8) == said[: said.index(said[2]) + 1]
        assert complete(address, prompt, 8, ignore_eos=True) == said
    finally:
        reader._state.model.generation_config.eos_token_id = None


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_a_stop_string(served, model, stream):
    _, address = served
    prompt = words(11, seed=2)
    said = alone(model, prompt, 8)
    at = next(k for k in range(2, 8) if said[k] not in said[:k])
    stop = f"{said[at - 1][-1]} {said[at]}"  # across two tokens
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "stop": ["never", stop]}
    if stream:
        parts = [one["choices"][0] for one in streamed(address, body)]
        text, reason = "".join(one["text"] for one in parts), parts[-1]["finish_reason"]
    else:
        choice = post(address, "completions", body).json()["choices"][0]
        text, reason = choice["text"], choice["finish_reason"]
    whole = " ".join(said)
    assert text == whole[: whole.index(stop)]
    assert reason == "stop"


def test_more_tokens_than_there_is_room_for_are_as_many_as_there_is(served, model):
    _, address = served
    prompt = words(500, seed=1)
    answer = post(address, "completions", {"prompt": prompt, "max_tokens": 10**9, "temperature": 0}).json()
    assert answer["choices"][0]["text"].split() == alone(model, prompt, 12)
    assert answer["choices"][0]["finish_reason"] == "length"


def test_ids_are_the_servers_own_and_the_clients_comes_back(served):
    _, address = served
    body = {"prompt": "w5", "max_tokens": 1}
    answers = [post(address, "completions", body, headers={"x-request-id": "mine"}) for _ in range(2)]
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine", "mine"]
    assert len({answer.json()["id"] for answer in answers} | {"mine"}) == 3


WRONG = {
    "no JSON": ("completions", "{", 422, "JSON decode error"),
    "no object": ("completions", "[1]", 422, "valid dictionary"),
    "no prompt": ("completions", {"max_tokens": 3}, 422, "prompt: Field required"),
    "an empty prompt": ("completions", {"prompt": ""}, 422, "prompt: String should have at least 1 character"),
    "a prompt without tokens": ("completions", {"prompt": "   "}, 400, "the prompt has no tokens"),
    "several prompts": ("completions", {"prompt": ["w5", "w6"]}, 422, "prompt: Input should be a valid string"),
    "half a character": ("completions", '{"prompt": "w5 \\ud800"}', 422, "prompt: Input should be a valid string"),
    "a prompt that is too long": ("completions", {"prompt": "w5 " * 600}, 400, "600 tokens, expected at most 511"),
    "no tokens wanted": ("completions", {"prompt": "w5", "max_tokens": 0}, 422, "max_tokens: Input should be greater"),
    "fewer than none": ("chat/completions", {"messages": [{"role": "user"}], "max_tokens": -1}, 422, "max_tokens"),
    "a part of a token": ("completions", {"prompt": "w5", "max_tokens": 1.5}, 422, "max_tokens"),
    "several answers": ("completions", {"prompt": "w5", "n": 2}, 422, "n: this server cannot do that"),
    "probabilities": ("completions", {"prompt": "w5", "logprobs": 3}, 422, "logprobs: this server cannot"),
    "a config": ("completions", {"prompt": "w5", "generation_config": "{}"}, 422, "generation_config: this server"),
    "a field that nobody knows": ("completions", {"prompt": "w5", "spam": 1}, 422, "Unexpected fields"),
    "hot": ("completions", {"prompt": "w5", "temperature": 9}, 422, "temperature"),
    "not a number": ("completions", '{"prompt": "w5", "temperature": NaN}', 422, "temperature"),
    "a seed that is none": ("completions", {"prompt": "w5", "seed": True}, 422, "seed"),
    "an empty stop string": ("completions", {"prompt": "w5", "stop": [""]}, 422, "stop"),
    "another model": ("completions", {"prompt": "w5", "model": "other"}, 404, "there is no model 'other' here"),
    "no messages": ("chat/completions", {"messages": []}, 422, "messages"),
    "a role that is none": ("chat/completions", {"messages": [{"role": "king", "content": "w5"}]}, 422, "role"),
    "a picture": (
        "chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 422, "content"
    ),
    "a call that is none": (
        "chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"x": 1}]}]}, 400, "cannot be read"
    ),
    "a template": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "w5"}], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        400,
        "chat_template_kwargs may not set chat_template",
    ),
    "JSON as an answer": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "w5"}], "response_format": {"type": "json_object"}},
        422,
        "response_format: this server cannot do that",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_request_is_told_what_is_wrong(served, wrong):
    _, address = served
    path, body, status, said = wrong
    data = body if isinstance(body, str) else json.dumps(body)
    answer = requests.post(f"{address}/v1/{path}", data=data, headers={"content-type": "application/json"}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (status, "invalid_request_error")
    assert said in error["message"]
    assert "\n" not in error["message"]


def test_a_large_body_is_refused_and_the_next_request_is_answered(served, model):
    _, address = served
    answer = requests.post(f"{address}/v1/completions", data=b"x" * (5 << 20), timeout=60)
    assert (answer.status_code, "expected at most 4194304" in answer.json()["error"]["message"]) == (413, True)
    chunked = requests.post(f"{address}/v1/completions", data=iter([b"x" * (1 << 20)] * 5), timeout=60)
    assert chunked.status_code == 413
    assert complete(address, "w7 w8") == alone(model, "w7 w8", 6)


def test_health_models_and_routes_that_are_not_there(served):
    _, address = served
    assert requests.get(f"{address}/health", timeout=60).json() == {"status": "ok"}
    (one,) = requests.get(f"{address}/v1/models", timeout=60).json()["data"]
    assert (one["id"], one["max_model_len"]) == ("tiny", 512)
    for path in ("reset", "load_model"):  # of transformers: they unload what others use
        assert requests.post(f"{address}/{path}", json={}, timeout=60).status_code == 404


def test_figures(served, model):
    server, address = served
    idle(server)
    before = mla_compile.metrics()
    prompt = words(7, seed=4)
    complete(address, prompt, 5)
    post(address, "completions", {"prompt": ""}, status=422)
    after = mla_compile.metrics()
    assert after["prompt_tokens"] - before["prompt_tokens"] == 7
    assert after["generation_tokens"] - before["generation_tokens"] == 5
    assert after["request_success"]["length"] - before["request_success"].get("length", 0) == 1
    assert after["refused_requests"]["422"] - before["refused_requests"].get("422", 0) == 1
    for name, times in (("time_to_first_token_seconds", 1), ("inter_token_latency_seconds", 4)):
        assert after[name]["count"] - before[name]["count"] == times
        assert after[name]["buckets"][float("inf")] == after[name]["count"]
    shown = text_string_to_metric_families(requests.get(f"{address}/metrics", timeout=60).text)
    values = {sample.name: sample.value for family in shown for sample in family.samples}
    assert values["mla_compile:generation_tokens_total"] == after["generation_tokens"]
    assert values["mla_compile:num_requests_running"] == 0
    assert values["mla_compile:kv_cache_usage_perc"] == 0
    assert values["mla_compile:inter_token_latency_seconds_count"] == after["inter_token_latency_seconds"]["count"]


def test_a_client_that_leaves_makes_room(served):
    """With and without a stream: its request is cancelled, its pages are free, nothing waits for it."""
    server, address = served
    manager, desk = server.loaded.manager, server.desk
    for stream in (False, True):
        with manager.pause():
            body = {"prompt": words(20, seed=5), "max_tokens": 400, "stream": stream}
            with pytest.raises(requests.exceptions.RequestException):
                requests.post(f"{address}/v1/completions", json=body, timeout=0.5).text  # noqa: B018
            until(lambda: desk.live == 0)
        until(lambda: len(manager.output_router) == 0 and manager.batch_processor.cache.unheld() == 32)
        assert not manager.output_router.result_handlers
        assert len(server.loaded.generation) == 0


def test_too_many_requests_are_told_to_come_again(served, folder, model):
    server = another(served[0], folder, max_waiting=3)
    server.load()
    with running(server) as address:
        body = {"prompt": "w5 w6", "max_tokens": 3, "temperature": 0}
        found = []
        with server.loaded.manager.pause():
            threads = [threading.Thread(target=lambda: found.append(complete(address, "w5 w6", 3))) for _ in range(3)]
            for one in threads:
                one.start()
            until(lambda: server.desk.live == 3)
            refused = post(address, "completions", body, status=429)
            assert refused.headers["retry-after"] == "1"
        for one in threads:
            one.join()
        assert found == [alone(model, "w5 w6", 3)] * 3


def test_a_request_that_takes_too_long_is_told_so(served, folder, model):
    server = another(served[0], folder, timeout=0.5)
    server.load()
    with running(server) as address:
        body = {"prompt": "w5 w6", "max_tokens": 3}
        with server.loaded.manager.pause():
            answer = post(address, "completions", body, status=408)
            assert answer.json()["error"]["message"] == "the request took longer than 0.5 s"
            post(address, "completions", {**body, "stop": "w"}, status=408)
            text = post(address, "completions", {**body, "stream": True}).text
            assert text.startswith('data: {"error": "the request took longer than 0.5 s"}')
        assert complete(address, "w7 w8", 3) == alone(model, "w7 w8", 3)


def test_who_sends_a_key(served, folder):
    with running(another(served[0], folder, api_key="sesame")) as address:
        for key, status in (("", 401), ("Bearer wrong", 401), ("Bearer s\xe9same", 401), ("Bearer sesame", 200)):
            answer = requests.get(f"{address}/v1/models", headers={"authorization": key.encode("latin-1")}, timeout=60)
            assert answer.status_code == status
        assert requests.get(f"{address}/health", timeout=60).status_code in (200, 503)


def test_it_says_what_it_is_at_until_it_is_ready(served, folder, model, monkeypatch):
    go = threading.Event()
    server = another(served[0], folder)
    inner = server.loaded.load
    monkeypatch.setattr(server.loaded, "load", lambda *_: go.wait() and inner())
    with running(server) as address:
        answer = requests.get(f"{address}/health", timeout=60)
        assert (answer.status_code, answer.json()) == (503, {"status": "unavailable", "reason": "starting"})
        answer = post(address, "completions", {"prompt": "w5"}, status=503)
        assert answer.json()["error"]["message"] == "the server is not ready: starting"
        go.set()
        until(lambda: requests.get(f"{address}/health", timeout=60).status_code == 200, 120)
        assert complete(address, "w7 w8") == alone(model, "w7 w8", 6)


def test_the_loop_may_die_as_often_as_it_gets_somewhere_between(served, model, monkeypatch):
    server, address = served
    kind = type(server.loaded.manager)
    inner = kind._generation_step
    for _ in range(4):

        def dies(self):
            monkeypatch.setattr(kind, "_generation_step", inner)
            raise RuntimeError('no "luck"')

        monkeypatch.setattr(kind, "_generation_step", dies)
        answer = post(address, "completions", {"prompt": "w5 w6", "max_tokens": 3}, status=503)
        assert 'no "luck"' in answer.json()["error"]["message"]
        until(lambda: requests.get(f"{address}/health", timeout=60).status_code == 200)
        assert complete(address, "w7 w8", 3) == alone(model, "w7 w8", 3)
    monkeypatch.setattr(kind, "_generation_step", lambda self: (_ for _ in ()).throw(RuntimeError('no "luck"')))
    (told,) = streamed_errors(address, {"prompt": "w5 w6", "max_tokens": 3})
    monkeypatch.setattr(kind, "_generation_step", inner)
    assert 'no "luck"' in told["error"]
    assert complete(address, "w7 w8", 3) == alone(model, "w7 w8", 3)


def streamed_errors(address: str, body: Any) -> list[dict[str, Any]]:
    lines = post(address, "completions", {**body, "stream": True}).text.split("\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith('data: {"error"')]


def test_a_model_without_latent_attention_is_named(folder, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    server = Server(settings(tmp_path))
    with pytest.raises(mla_compile.InputError, match="has no latent attention; serve it by `transformers serve`"):
        server.run()  # which ends by itself
    with pytest.raises(mla_compile.InputError, match="nowhere cannot be loaded"):
        Server(settings(tmp_path / "nowhere")).load()


COPIES = {"tensor_parallel": 1, "context_parallel": 4}
BAD = {
    "page_size": (48, "a power of two up to 256"),
    "pages": (0, "expected a number above 0"),
    "grace": (-1, "expected 0 or more"),
    "quantization": ("int2", "'bnb-4bit' or 'bnb-8bit'"),
    "api_key": ("", "leave it out"),
    "tensor_parallel": (0, "expected a number above 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_settings_that_cannot_be(folder, name):
    value, said = BAD[name]
    with pytest.raises(mla_compile.OptionError, match=said):
        settings(folder, **{name: value})


def test_ranks_that_cannot_be(folder, monkeypatch):
    """With 1 process, and with 4 as torchrun starts them."""
    with pytest.raises(mla_compile.OptionError, match=r"of 1 in all: .* `torchrun --nproc-per-node 2 -m mla_compile"):
        Server(settings(folder, tensor_parallel=2))
    for name, value in {"TORCHELASTIC_RUN_ID": "any", "RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    for tensor, context in ((2, 1), (2, 2), (None, 3), (1, 2), (4, 8)):
        with pytest.raises(mla_compile.OptionError, match="of 4 in all"):
            Server(settings(folder, tensor_parallel=tensor, context_parallel=context))
    with pytest.raises(mla_compile.OptionError, match="'cuda:0', expected auto"):
        Server(settings(folder, device="cuda:0"))
    found = [ServerRanks.of(settings(folder, **how)) for how in ({}, {"context_parallel": 2}, COPIES)]
    assert found == [ServerRanks(3, 4, 4, 1), ServerRanks(3, 4, 4, 2), ServerRanks(3, 4, 1, 4)]


def test_the_dashboard_draws_figures_that_there_are(served):
    shown = requests.get(f"{served[1]}/metrics", timeout=60).text
    names = set(re.findall(r"^# TYPE (\S+)", shown, re.MULTILINE))
    drawn = json.loads((Path(__file__).resolve().parents[2] / "examples" / "grafana_dashboard.json").read_text())
    asked = {
        name
        for panel in drawn["panels"]
        for one in panel["targets"]
        for name in re.findall(r"mla_compile:\w+", one["expr"])
    }
    assert asked
    assert {name.removesuffix("_bucket") for name in asked} <= names
