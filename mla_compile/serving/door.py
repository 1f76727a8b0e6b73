"""The first checks of a request. Each request gets an id. Under ``/v1/``, key, size and duration are checked.

The server uses its own ids. An id that a client sends is only returned to this client.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mla_compile.core.counting import count
from mla_compile.serving.settings import Settings

_ID = "x-request-id"
_DRAINED = 16
"""A body above the limit is read and discarded, up to this multiple of the limit. A client that is still sending would
not read the refusal."""


class Gone(Exception):  # noqa: N818
    """The client has disconnected."""


def refusal(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """Return an error response in the format of OpenAI's interface."""
    count("refused_requests", status=str(status))
    told = message.encode("utf-8", "backslashreplace").decode()
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": told, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers)


class Door:
    """Checks requests, and gives accepted requests with their whole bodies to the application."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        own = uuid.uuid4().hex
        shown = headers.get(_ID) or own
        scope.setdefault("state", {})["request_id"] = own

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_ID] = shown[:256]
            await send(message)

        refused: Response | None = None
        body = b""
        if scope["path"].startswith("/v1/"):
            refused = self._without_key(headers)
            if refused is None:
                try:
                    given = await asyncio.wait_for(self._body(headers, receive), self._settings.timeout)
                except Gone:
                    return
                except asyncio.TimeoutError:
                    given = refusal(408, f"the body did not come within {self._settings.timeout:g} s")
                body, refused = (b"", given) if isinstance(given, Response) else (given, None)
        if refused is not None:
            await refused(scope, receive, answer)
            return
        await self._app(scope, _whole(body, receive), answer)

    def _without_key(self, headers: Headers) -> Response | None:
        key = self._settings.api_key
        given = headers.get("authorization", "")
        if key is None or secrets.compare_digest(given.encode(), f"Bearer {key}".encode()):
            return None
        return refusal(401, "the API key is missing or wrong", {"WWW-Authenticate": "Bearer"})

    async def _body(self, headers: Headers, receive: Receive) -> bytes | Response:
        most, size, parts = self._settings.max_body, 0, list[bytes]()
        declared = headers.get("content-length", "0")
        size_told = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            part = message.get("body", b"")
            size += len(part)
            if max(size, size_told) > most:
                parts.clear()
            else:
                parts.append(part)
            if not message.get("more_body", False) or size > most * _DRAINED:
                break
        if max(size, size_told) > most:
            return refusal(413, f"the request has {max(size, size_told)} bytes, expected at most {most}")
        return b"".join(parts)


def _whole(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that first delivers ``body``, which was already read."""
    read = False

    async def again() -> Message:
        nonlocal read
        if read:
            return await receive()
        read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
