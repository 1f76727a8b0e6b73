"""The FastAPI routes of ``transformers serve``, except routes that load or unload models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mla_compile.serving import bodies
from mla_compile.serving.door import refusal
from mla_compile.serving.exposition import registry
from mla_compile.serving.generation import LATER
from mla_compile.serving.loaded import Loaded
from mla_compile.serving.settings import Settings
from mla_compile.serving.trial import TRIAL
from mla_compile.version import __version__

_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, as in OpenAI's interface.", "content": {"text/event-stream": {}}},
    400: {"description": "The request cannot be read, or asks for more than there is room for."},
    401: {"description": "The API key is missing or wrong."},
    404: {"description": "There is no such model."},
    408: {"description": "The request took too long."},
    413: {"description": "The request is too large."},
    422: {"description": "A field has a value that it cannot have."},
    429: {"description": "Too many requests wait; Retry-After says when to try again."},
    503: {"description": "The server starts, stops, or could not answer this; Retry-After says when to try again."},
}
_LEFT = 499
"""The status in nginx for a client that disconnected before the answer."""


def build(settings: Settings, loaded: Loaded, desk: Desk) -> FastAPI:
    """Return the application of one server."""
    app = FastAPI(title="mla_compile", version=__version__)

    @app.exception_handler(AnyHTTPException)
    async def told(_: Request, error: AnyHTTPException) -> Response:
        return refusal(error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def not_valid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        names = (str(part) for part in first["loc"] if part != "body")
        # Pydantic adds members of a union to the path, but these are not fields of the request.
        place = ".".join(name for name in names if name.isidentifier() or name.isdecimal())
        return refusal(422, f"{place or 'the body'}: {first['msg'].removeprefix('Value error, ')}")

    @app.post("/v1/completions", responses=_ANSWERS)
    async def completions(body: bodies.Completion, request: Request) -> Any:
        return await desk.answer(body, request)

    @app.post("/v1/chat/completions", responses=_ANSWERS)
    async def chat_completions(body: bodies.Chat, request: Request) -> Any:
        return await desk.answer(body, request)

    @app.post("/v1/responses", responses=_ANSWERS)
    async def responses(body: bodies.Response, request: Request) -> Any:
        return await desk.answer(body, request)

    @app.get("/v1/models", responses={401: _ANSWERS[401]})
    async def models() -> Any:
        one = {"id": settings.name, "object": "model", "created": 0, "owned_by": "local"}
        return {"object": "list", "data": [{**one, "max_model_len": loaded.room or None}]}

    @app.get("/health", responses={503: _ANSWERS[503]})
    async def health() -> Any:
        why = loaded.trouble()
        if why is None:
            return {"status": "ok"}
        return JSONResponse({"status": "unavailable", "reason": why}, 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(generate_latest(registry()), media_type=CONTENT_TYPE_LATEST)

    return app


class Desk:
    """Accepts requests unless too many are waiting. Cancels requests whose clients have disconnected."""

    def __init__(self, settings: Settings, loaded: Loaded) -> None:
        self._settings, self._loaded = settings, loaded
        self.live = 0

    async def answer(self, given: bodies.Body, request: Request) -> Any:
        """Return the response to one request. Raises :class:`HTTPException` if the request is refused."""
        if request.state.request_id != TRIAL:
            self._loaded.check()
        if self._loaded.waiting(self.live) >= self._settings.max_waiting:
            raise HTTPException(429, f"{self._settings.max_waiting} requests wait already; try again later", LATER)
        ticket = Ticket(self, request.state.request_id)
        try:
            response = await self._answered(given, request)
        except BaseException:
            ticket.leave()
            raise
        return TicketedResponse(response, ticket)

    async def _answered(self, given: bodies.Body, request: Request) -> Any:
        path, request_id = request.url.path, request.state.request_id
        body, reader = given.asked(), self._loaded.readers[path]
        body["stream"] = bool(given.stream)  # if the field were missing, transformers would stream some answers
        inputs = await run_in_threadpool(reader.read, body)
        reader.bound(body, inputs, self._loaded.room)
        response = await _unless_gone(reader.answer(body, inputs, request_id, given), request)
        if isinstance(response, StreamingResponse) and path != "/v1/responses":
            response.body_iterator = _with_end(response.body_iterator)
        return response

    def let_go(self, request_id: str) -> None:
        """Forget a request that was answered or whose client has disconnected."""
        self.live -= 1
        if self._loaded.generation is not None:
            self._loaded.generation.cancel(request_id)


class Ticket:
    """One accepted request, which is counted until :meth:`leave` is first called."""

    def __init__(self, desk: Desk, request_id: str) -> None:
        self._desk, self._id, self._here = desk, request_id, True
        desk.live += 1

    def leave(self) -> None:
        """Note that the request has ended, successfully or not."""
        if self._here:
            self._here = False
            self._desk.let_go(self._id)


class TicketedResponse(Response):
    """A response that keeps a ticket until the response has been sent or sending has failed."""

    def __init__(self, response: Response, ticket: Ticket) -> None:
        self._response, self._ticket = response, ticket
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
        try:
            await self._response(scope, receive, send)
        finally:
            self._ticket.leave()


async def _unless_gone(answer: Any, request: Request) -> Any:
    """Return the result of ``answer``. If the client disconnects first, cancel ``answer``."""
    work, gone = asyncio.ensure_future(answer), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise HTTPException(_LEFT, "the client has left")
    finally:
        for one in (work, gone):
            one.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _with_end(parts: AsyncIterable[Any]) -> AsyncIterator[Any]:
    """Add the final event. Clients of OpenAI's interface expect it, and transformers omits it."""
    async for part in parts:
        yield part
    yield "data: [DONE]\n\n"
