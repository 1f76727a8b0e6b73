"""The server's own first requests. They trigger imports and compilation, so that no client waits for these."""

from __future__ import annotations

import asyncio
import json
import logging

from starlette.types import ASGIApp, Message

logger = logging.getLogger("mla_compile")
TRIAL = "trial"
"""The id of the server's own requests. Clients' requests have random ids."""
_BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "a b c"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a b c"}]},
}


def try_out(app: ASGIApp) -> None:
    """Send each kind of request, streamed and not streamed.

    Refusals, for example because there is no chat template, are only logged.
    """
    for path, body in _BODIES.items():
        for stream in (False, True):
            status = asyncio.run(_status(app, path, {**body, "max_tokens": 2, "temperature": 0, "stream": stream}))
            logger.info("%s, streamed: %s: %s", path, stream, status)


async def _status(app: ASGIApp, path: str, body: dict[str, object]) -> int:
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "state": {"request_id": TRIAL},
    }
    messages: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    found: list[int] = []

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # this client never disconnects
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            found.append(message["status"])

    await app(scope, receive, send)
    return found[0]
