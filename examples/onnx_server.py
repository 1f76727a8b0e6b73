"""A small HTTP server for an exported model: prompts of token ids in, new token ids out.

    pip install "mla-compile[onnx,server]"
    python examples/onnx_server.py MODEL_DIR
    curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt_ids": [1, 2, 3]}'

POST /v1/completions takes prompt_ids, max_new_tokens, temperature, top_k, top_p, seed and stream (server-sent events);
GET /health and GET /v1/model say how it is. One thread runs the model: it takes the requests that wait as one batch,
up to ``Limits.batch``, and the next ones when all of these have ended. It listens on this machine only, and knows no
users.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mla_compile.errors import InputError, MlaCompileError, OptionError
from mla_compile.onnx.generation import Generation
from mla_compile.onnx.sampling import Sampling
from mla_compile.onnx.session import Session

log = logging.getLogger("onnx_server")


@dataclass(frozen=True)
class Limits:
    """What a client may ask for, and how many may wait."""

    prompt_tokens: int = 4096
    new_tokens: int = 1024
    batch: int = 8
    waiting: int = 32
    body_bytes: int = 1 << 20


class Completion(BaseModel):
    """The body of POST /v1/completions."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt_ids: list[int] = Field(min_length=1)
    max_new_tokens: int = Field(16, ge=1)
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stream: bool = False


@dataclass
class Job:
    """One request on its way through the worker; events come back to the event loop it was made in."""

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    events: asyncio.Queue[int | Exception | None] = field(default_factory=asyncio.Queue)
    cancelled: threading.Event = field(default_factory=threading.Event)
    ended: bool = False

    def send(self, token: int) -> None:
        """Hand over a new token; called by the worker."""
        self.loop.call_soon_threadsafe(self.events.put_nowait, token)

    def end(self, error: Exception | None = None) -> None:
        """Nothing more is coming; called by the worker."""
        if not self.ended:
            self.ended = True
            self.loop.call_soon_threadsafe(self.events.put_nowait, error)

    async def tokens(self) -> AsyncIterator[int]:
        """The tokens as they come; raises what ended the job. Leaving early frees its place in the batch."""
        try:
            while (event := await self.events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.cancelled.set()


class Stopping(Exception):  # noqa: N818 - no error, the server is asked to end
    """The server is shutting down."""


class Worker:
    """The thread that runs the model, and the queue before it."""

    def __init__(self, session: Session, limits: Limits) -> None:
        self._session, self._limits = session, limits
        self._waiting: queue.Queue[Job | None] = queue.Queue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        """Begin to take jobs."""
        self._thread.start()

    def stop(self) -> None:
        """End the running batch after its current step and refuse the jobs that wait."""
        self._stop.set()
        self._waiting.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether jobs are taken."""
        return self._thread.is_alive() and not self._stop.is_set()

    @property
    def waiting(self) -> int:
        """Jobs that wait for the batch after the one that runs."""
        return self._waiting.qsize()

    def submit(self, job: Job) -> None:
        """Queue a job; only the event loop calls this, so nobody else fills the queue between look and put."""
        if not self.alive:
            raise HTTPException(503, "the server is shutting down")
        if self.waiting >= self._limits.waiting:
            raise HTTPException(429, f"{self.waiting} requests are waiting; try again later", {"retry-after": "1"})
        self._waiting.put(job)

    def _run(self) -> None:
        while not self._stop.is_set():
            jobs = self._next_batch()
            try:
                self._generate(jobs)
            except Exception as error:  # a thread that dies would leave every client waiting for ever
                log.exception("a batch failed")
                for job in jobs:
                    job.end(error)
        while not self._waiting.empty():
            if (left := self._waiting.get()) is not None:
                left.end(Stopping())

    def _next_batch(self) -> list[Job]:
        """Waits for a job and takes those that wait with it."""
        jobs = [self._waiting.get()]
        while len(jobs) < self._limits.batch and not self._waiting.empty():
            jobs.append(self._waiting.get())
        return [job for job in jobs if job is not None and not job.cancelled.is_set()]

    def _generate(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        steps = Generation(
            self._session,
            [job.prompt for job in jobs],
            max_new_tokens=[job.max_new_tokens for job in jobs],
            sampling=[job.sampling for job in jobs],
        )
        for tokens in steps:
            for row, (job, token) in enumerate(zip(jobs, tokens, strict=True)):
                if token is not None:
                    job.send(token)
                if self._stop.is_set():
                    job.end(Stopping())
                if job.cancelled.is_set() or job.ended:
                    steps.end(row)
                if steps.ended(row):
                    job.end()


class BodyLimit:
    """Answers a body that is too long before it is read into memory."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, counting what is read of it."""
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._most:
                raise HTTPException(413, f"the body has more than {self._most} bytes")
            return message

        await self._app(scope, counted if scope["type"] == "http" else receive, send)


def create_app(session: Session, limits: Limits | None = None) -> FastAPI:
    """The application; its worker runs for as long as the application does."""
    limits = limits or Limits()
    worker = Worker(session, limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.stop)

    app = FastAPI(title="mla_compile", lifespan=lifespan)
    app.add_middleware(BodyLimit, most=limits.body_bytes)
    app.state.worker = worker

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        said = [f"{'.'.join(map(str, entry['loc'][1:])) or 'body'}: {entry['msg']}" for entry in error.errors()[:5]]
        return _error(422, "; ".join(said))

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> Response:
        return _error(error.status_code, str(error.detail), dict(error.headers or {}))

    @app.get("/health")
    async def health() -> Response:
        status = {"status": "ok" if worker.alive else "stopped", "waiting": worker.waiting}
        return JSONResponse(status, 200 if worker.alive else 503)

    @app.get("/v1/model")
    async def model() -> dict[str, Any]:
        names = ("profile", "dtype", "vocab_size", "max_position", "eos_token_ids", "created_by")
        return {
            **{name: getattr(session.manifest, name) for name in names},
            "providers": session.providers,
            "library": str(session.decision),
            "limits": asdict(limits),
        }

    @app.post("/v1/completions")
    async def completions(body: Completion) -> Response:
        job = _job(session, limits, body)
        worker.submit(job)
        if body.stream:
            return StreamingResponse(_events(session, job), media_type="text/event-stream")
        try:
            tokens = [token async for token in job.tokens()]
        except Exception as error:  # noqa: BLE001 - whatever the worker met is an answer to this client
            return _error(*_reason(error))
        return JSONResponse({"token_ids": tokens, **_outcome(session, job, tokens)})

    return app


def _job(session: Session, limits: Limits, body: Completion) -> Job:
    """A job that is going to run, or the answer why not."""
    if len(body.prompt_ids) > limits.prompt_tokens:
        raise HTTPException(
            400, f"prompt_ids has {len(body.prompt_ids)} tokens, at most {limits.prompt_tokens} are taken"
        )
    if body.max_new_tokens > limits.new_tokens:
        raise HTTPException(400, f"max_new_tokens is {body.max_new_tokens}, at most {limits.new_tokens} are given")
    try:
        sampling = Sampling(body.temperature, body.top_k, body.top_p, body.seed)
        # Checks, and runs nothing: one wrong request must not end the batch it would have been in.
        Generation(session, [body.prompt_ids], max_new_tokens=body.max_new_tokens, sampling=sampling)
    except (InputError, OptionError) as error:
        raise HTTPException(400, str(error)) from None
    return Job(body.prompt_ids, body.max_new_tokens, sampling)


async def _events(session: Session, job: Job) -> AsyncIterator[str]:
    """Server-sent events: one per token, then the outcome or an error, then [DONE]."""
    tokens = []
    try:
        async for token in job.tokens():
            tokens.append(token)
            yield _event({"token_id": token})
        yield _event(_outcome(session, job, tokens))
    except Exception as error:  # noqa: BLE001 - the status is sent already, so the reason goes into the stream
        yield _event(_body(*_reason(error)))
    finally:
        job.cancelled.set()  # also where the client went away between two tokens
    yield "data: [DONE]\n\n"


def _outcome(session: Session, job: Job, tokens: list[int]) -> dict[str, Any]:
    stopped = bool(tokens) and tokens[-1] in session.manifest.eos_token_ids
    usage = {"prompt_tokens": len(job.prompt), "new_tokens": len(tokens)}
    return {"finish_reason": "stop" if stopped else "length", "usage": usage}


def _reason(error: Exception) -> tuple[int, str]:
    if isinstance(error, Stopping):
        return 503, "the server is shutting down"
    return 500, str(error) if isinstance(error, MlaCompileError) else "internal error; the server's log has more"


def _body(status: int, message: str) -> dict[str, Any]:
    return {"error": {"status": status, "message": message}}


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(_body(status, message), status, headers)


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def main(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="What `mla-compile export` wrote.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    provider: Annotated[list[str] | None, typer.Option(help="Execution provider, such as cuda or cpu.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests that run together.")] = Limits.batch,
    waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = Limits.waiting,
    new_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens of a request.")] = Limits.new_tokens,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a prompt.")] = Limits.prompt_tokens,
) -> None:
    """Serve an exported model."""
    limits = Limits(prompt_tokens=prompt_tokens, new_tokens=new_tokens, batch=batch, waiting=waiting)
    try:
        session = Session(model, providers=provider or None)
    except MlaCompileError as error:
        raise SystemExit(f"error: {error}") from None
    uvicorn.run(create_app(session, limits), host=host, port=port)


if __name__ == "__main__":
    typer.run(main)
