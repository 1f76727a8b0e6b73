"""The server as the package ``openai`` talks to it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.server import alone, idle, words

pytestmark = pytest.mark.filterwarnings("ignore")  # of the server's dependencies


@pytest.fixture(scope="module")
def openai() -> Any:
    """The package, whose thousand types take long to import."""
    import openai

    return openai


@pytest.fixture
def client(served, openai) -> Any:
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_completions_and_chats(client, model):
    prompt = words(9, seed=1)
    (choice,) = client.completions.create(model="tiny", prompt=prompt, max_tokens=5, temperature=0).choices
    assert choice.text.split() == alone(model, prompt, 5)
    (again,) = client.completions.create(model="tiny", prompt=[prompt], max_tokens=5, temperature=0).choices
    assert again.text == choice.text
    messages = [{"role": "system", "content": "w7"}, {"role": "user", "content": [{"type": "text", "text": prompt}]}]
    (choice,) = client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, temperature=0).choices
    assert choice.message.content.split() == alone(model, f"w7 {prompt}", 5)
    assert client.responses.create(
        model="tiny", input=prompt, max_output_tokens=5, temperature=0
    ).output_text.split() == alone(model, prompt, 5)
    assert [one.id for one in client.models.list()] == ["tiny"]


def test_streams(client, model):
    prompt = words(9, seed=2)
    how: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "temperature": 0, "stream": True}
    parts = client.completions.create(prompt=prompt, **how)
    assert "".join(part.choices[0].text for part in parts).split() == alone(model, prompt, 5)
    parts = client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **how)
    assert "".join(part.choices[0].delta.content or "" for part in parts).split() == alone(model, prompt, 5)


def test_a_stream_that_is_closed_is_cancelled(client, served):
    stream = client.completions.create(model="tiny", prompt="w5 w6", max_tokens=400, stream=True)
    next(iter(stream))
    stream.close()
    idle(served[0])
    assert served[0].desk.live == 0


def test_many_at_once(served, model, openai):
    prompts = [words(n, seed=n) for n in range(1, 13)]

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served[1]}/v1", api_key="none") as client:
            asked = (
                client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0)
                for prompt in prompts
            )
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    found = asyncio.run(all_of_them())
    assert [text.split() for text in found] == [alone(model, prompt, 6) for prompt in prompts]


def test_errors(client, openai):
    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here"):
        client.completions.create(model="other", prompt="w5")
    with pytest.raises(openai.UnprocessableEntityError, match="n: this server cannot do that"):
        client.completions.create(model="tiny", prompt="w5", n=2)
