"""Random requests, most of them wrong: each is answered or told what is wrong, and others are served as if alone.

``MLA_SERVER_FUZZ`` is how many; a thousand take about as many seconds as a hundred do with a compiler.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_compile.serving import bodies
from tests.support.server import another_client, until

pytestmark = pytest.mark.filterwarnings("ignore")  # of the server's dependencies
CASES = int(os.environ.get("MLA_SERVER_FUZZ", "60"))
FINE = {200, 400, 404, 413, 422, 429}

texts = st.one_of(
    st.lists(st.sampled_from(["w1", "w5", "w9", "nothing", "\0", "é", "\U0001f600"]), max_size=20).map(" ".join),
    st.text(max_size=20),
    st.just("w5 " * 2000),
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
counts = st.one_of(st.integers(1, 8), st.sampled_from([0, -1, 10**9, 2**70, 1.5, "3", None]))
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", "king"]), "content": texts | anything},
        optional={"tool_calls": anything, "tool_call_id": anything, "name": anything},
    ),
    max_size=3,
)
OWN: dict[str, Any] = {
    "max_tokens": counts,
    "max_completion_tokens": counts,
    "max_output_tokens": counts,
    "temperature": st.sampled_from([0, 0.5, 1, -1, 1e9, None]) | st.floats(),
    "top_p": st.floats(0, 1) | anything,
    "seed": st.integers() | anything,
    "stop": texts | st.lists(texts, max_size=20) | anything,
    "stream": st.booleans() | anything,
    "suffix": texts,
    "tools": anything,
    "chat_template_kwargs": anything,
}
KINDS = {
    "completions": (bodies.Completion, {"prompt": texts | anything}),
    "chat/completions": (bodies.Chat, {"messages": messages | anything}),
    "responses": (bodies.Response, {"input": texts | messages | anything}),
}


@st.composite
def asked(draw: Any) -> tuple[str, str, dict[str, str]]:
    """A path, a body, headers."""
    path = draw(st.sampled_from(sorted(KINDS)))
    kind, needed = KINDS[path]
    optional = {name: OWN.get(name, anything) for name in kind.model_fields if name not in ("model", *needed)}
    names = draw(st.lists(st.sampled_from(sorted(optional)), max_size=3, unique=True))
    body = {name: draw(of) for name, of in needed.items()} | {name: draw(optional[name]) for name in names}
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.text(max_size=8))] = draw(anything)
    body.setdefault("max_output_tokens" if path == "responses" else "max_tokens", 4)
    text = json.dumps(body)
    if draw(st.integers(0, 19)) == 0:
        text = text[: draw(st.integers(0, len(text)))]
    return path, text, {"x-request-id": draw(st.sampled_from(["same", "", "é" * 9]))}


def test_random_requests(served, model):
    server, address = served

    @settings(max_examples=CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(asked())
    def one(request: tuple[str, str, dict[str, str]]) -> None:
        path, text, headers = request
        sent = {"content-type": "application/json", **{name: value.encode() for name, value in headers.items()}}
        answer = requests.post(f"{address}/v1/{path}", data=text.encode(), headers=sent, timeout=60)
        assert answer.status_code in FINE, answer.text
        if answer.status_code != 200:
            said = answer.json()["error"]["message"]
            assert said
            assert "\n" not in said
            assert len(said) < 2000

    with another_client(address, model):
        one()
    assert requests.get(f"{address}/health", timeout=60).status_code == 200
    until(lambda: server.desk.live == 0 and server.loaded.manager.batch_processor.cache.unheld() == 32)
    assert not server.loaded.manager.output_router.result_handlers
