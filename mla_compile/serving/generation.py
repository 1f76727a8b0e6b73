"""Turn token ids into answers. Each request has its own stop strings and time limit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

from fastapi import HTTPException
from transformers import BatchEncoding, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.utils import BaseGenerateManager, CBStreamer, ReasoningText, _StreamError
from transformers.generation.continuous_batching.requests import GenerationOutput

from mla_compile.batching.manager import LatentManager

LATER = {"Retry-After": "1"}


class _UpToStop:
    """A queue of pieces of text that ends before the first stop string."""

    def __init__(self, queue: asyncio.Queue[object], stops: Sequence[str], found: Callable[[], None]) -> None:
        self._queue, self._stops, self._found = queue, stops, found
        self._held, self._done = "", False

    def put_nowait(self, item: object) -> None:
        """Put text into the queue. If a stop string may begin at the end of the text, hold back this end."""
        if self._done:
            return
        if not isinstance(item, str) or isinstance(item, ReasoningText):
            held, self._held = self._held, ""
            self._say(held)
            self._queue.put_nowait(item)
            return
        text = self._held + item
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self._done = True
            self._say(text[: min(ends)])
            self._queue.put_nowait(None)
            self._found()
            return
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        self._say(text[: len(text) - keep])

    def _say(self, text: str) -> None:
        if text:
            self._queue.put_nowait(text)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that is a beginning of ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class _Streamer(CBStreamer):
    """The streamer of one request. Further calls of ``cancel``, and calls after the request's end, do nothing."""

    def __init__(self, generation: ServedGeneration, request_id: str, *args: object, **kwargs: object) -> None:
        super().__init__(generation.manager, request_id, *args, **kwargs)
        self._generation = generation
        self.tokens: list[int] = []

    def put(self, output: GenerationOutput) -> None:
        super().put(output)
        self.tokens = list(output.generated_tokens)

    def cancel(self) -> None:
        self._generation.cancel(self._request_id)


class ServedGeneration(BaseGenerateManager):
    """The manager to which the handlers of transformers submit requests.

    If a request takes longer than ``seconds``, it ends with an error. A failure is reported as status 503 (the client
    may try again), or as an error in the stream.
    """

    def __init__(self, manager: LatentManager, seconds: float) -> None:
        self.manager, self._seconds = manager, seconds
        self._pending: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def generate_streaming(
        self,
        model: PreTrainedModel,
        processor: PreTrainedTokenizerBase,
        inputs: BatchEncoding,
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: object = None,
    ) -> tuple[asyncio.Queue[str | _StreamError | None], _Streamer]:
        """Return a queue of pieces of text that ends with None, and the streamer that fills it."""
        queue: asyncio.Queue[str | _StreamError | None] = asyncio.Queue()
        texts = _UpToStop(queue, _stops(gen_config), lambda: self.cancel(request_id))
        loop = asyncio.get_running_loop()
        streamer = _Streamer(self, request_id, processor._tokenizer, loop, texts, response_parser=response_parser)

        def on_output(output: GenerationOutput) -> None:
            try:
                streamer.put(output)
                if output.error is not None:
                    texts.put_nowait(_error(output.error))
                if output.is_finished():
                    self._ended(request_id)
                    streamer.end()
            except Exception as error:  # noqa: BLE001  a tokenizer or parser failed; this thread serves other requests too
                self.cancel(request_id)
                texts.put_nowait(_error(str(error)))

        def on_timeout() -> None:
            self.cancel(request_id)
            texts.put_nowait(_error(self._too_long()))

        self._submit(inputs["input_ids"], request_id, gen_config, on_output, on_timeout, streaming=True)
        return queue, streamer

    async def generate_non_streaming(
        self,
        model: PreTrainedModel,
        processor: PreTrainedTokenizerBase,
        inputs: BatchEncoding,
        gen_config: GenerationConfig,
        request_id: str,
    ) -> tuple[str, int, list[int]]:
        """Return the text, the number of prompt tokens, and the new tokens."""
        ids = inputs["input_ids"]
        if _stops(gen_config):
            queue, streamer = self.generate_streaming(model, processor, inputs, gen_config, request_id)
            return await self._up_to_stop(queue, request_id), len(ids), streamer.tokens
        future: asyncio.Future[GenerationOutput] = asyncio.get_running_loop().create_future()

        def on_output(output: GenerationOutput) -> None:
            self._ended(request_id)
            if not future.done():
                future.set_result(output)

        def on_timeout() -> None:
            if not future.done():
                future.set_exception(HTTPException(408, self._too_long()))

        self._submit(ids, request_id, gen_config, on_output, on_timeout, streaming=False)
        try:
            output = await future
        finally:
            self.cancel(request_id)
        if output.error is not None:
            raise HTTPException(503, output.error, LATER)
        return processor.decode(output.generated_tokens, skip_special_tokens=True), len(ids), output.generated_tokens

    async def _up_to_stop(self, queue: asyncio.Queue[str | _StreamError | None], request_id: str) -> str:
        """Return the whole text of ``queue``. The text ends before the first stop string."""
        texts: list[str] = []
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, _StreamError):
                    told = json.loads(f'"{item.msg}"')
                    raise HTTPException(408 if told == self._too_long() else 503, told, LATER)
                texts.append(item)
        finally:
            self.cancel(request_id)
        return "".join(texts)

    def _submit(
        self,
        ids: list[int],
        request_id: str,
        gen_config: GenerationConfig,
        on_output: Callable[[GenerationOutput], None],
        on_timeout: Callable[[], None],
        *,
        streaming: bool,
    ) -> None:
        self.manager.register_result_handler(request_id, on_output)
        sampling = gen_config.mla_sampling
        more = {} if sampling is None else {"mla_sampling": sampling}
        added = self.manager.add_request(
            ids,
            request_id=request_id,
            max_new_tokens=gen_config.max_new_tokens,
            eos_token_id=gen_config.eos_token_id,
            streaming=streaming,
            **more,
        )
        if added is None:
            why = self.manager.background_thread_status.can_accept_new_requests()
            raise HTTPException(503, f"the server takes no requests: {why}", LATER)
        self._pending[request_id] = asyncio.get_running_loop().call_later(self._seconds, on_timeout)

    def cancel(self, request_id: str) -> None:
        """Cancel a request that has not ended yet. Do nothing for any other id."""
        if self._ended(request_id):
            self.manager.cancel_request(request_id)

    def _ended(self, request_id: str) -> bool:
        timer = self._pending.pop(request_id, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    def _too_long(self) -> str:
        return f"the request took longer than {self._seconds:g} s"

    def stop(self) -> None:
        """Stop the loop, and end the requests that are still running."""
        self.manager.stop(block=True, timeout=5, hard_stop=True)


def _stops(gen_config: GenerationConfig) -> list[str]:
    given = gen_config.stop_strings
    return [given] if isinstance(given, str) else list(given or ())


def _error(message: str) -> _StreamError:
    """Escape a message for the handlers, which put messages into a JSON string unchanged."""
    return _StreamError(json.dumps(message)[1:-1])
