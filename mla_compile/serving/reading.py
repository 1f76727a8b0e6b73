"""The handlers of transformers for a model that is already loaded, with text read outside of the event loop.

A handler is a coroutine that checks a request, tokenizes text, submits the token ids and answers. Tokenizing megabytes
takes seconds, in which the event loop could answer no request. So each handler runs twice. The first run is in a
thread, and ends when the handler has the token ids. The second run is on the event loop, with these ids. Errors of a
template or tokenizer in the thread are attributed to the client's text.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from fastapi import HTTPException
from starlette.responses import Response
from transformers import BatchEncoding, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler, GenerationState

from mla_compile.batching.sampling import Sampling
from mla_compile.errors import brief
from mla_compile.serving.bodies import Body
from mla_compile.serving.generation import ServedGeneration

_text: ContextVar[_TextRequest] = ContextVar("mla_compile_serving_text")
_given: ContextVar[Body | None] = ContextVar("mla_compile_serving_given", default=None)


class _Read(Exception):  # noqa: N818  not an error: it ends the first run
    def __init__(self, inputs: BatchEncoding) -> None:
        self.inputs = inputs


class _TextRequest:
    """A stand-in for the tokenizer.

    In the first run it tokenizes the text and ends the run. In the second run it returns these tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, inputs: BatchEncoding | None = None) -> None:
        self._of, self._inputs = tokenizer, inputs

    @property  # type: ignore[misc]  # handlers test it with isinstance
    def __class__(self) -> type[PreTrainedTokenizerBase]:
        return type(self._of)

    def __getattr__(self, name: str) -> object:
        return getattr(self._of, name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._read(self._of, args, kwargs)

    def apply_chat_template(self, *args: object, **kwargs: object) -> object:
        return self._read(self._of.apply_chat_template, args, kwargs)

    def _read(self, read: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if self._inputs is None:
            raise _Read(read(*args, **kwargs))
        return self._inputs


class ServedModel(GenerationState):
    """The one model that is served."""

    def __init__(
        self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, generation: ServedGeneration
    ) -> None:
        super().__init__(continuous_batching=True)
        self.name, self.model, self.tokenizer, self.generation = name, model, tokenizer, generation

    def use_continuous_batching(self, *_: object) -> bool:
        """Return True, because this server always uses continuous batching."""
        return True

    def get_manager(self, *_: object, **__: object) -> ServedGeneration:
        """Return the only manager."""
        return self.generation


def _served(kind: type[Any]) -> type[Any]:
    class Served(kind):
        def _resolve_model(self, body: dict[str, Any]) -> tuple[str, PreTrainedModel, _TextRequest]:
            state: ServedModel = self.generation_state
            asked = body.get("model")
            if asked not in (None, state.name):
                raise HTTPException(404, f"there is no model {asked!r} here; this server has {state.name!r}")
            return state.name, state.model, _text.get()

        def _build_generation_config(self, body: dict[str, Any], *args: object, **kwargs: object) -> GenerationConfig:
            seed = body.get("seed")  # transformers would seed the whole process with it
            if seed is not None:
                seed %= 1 << 63  # torch.Generator takes no larger seed
            config = super()._build_generation_config({**body, "seed": None}, *args, **kwargs)
            if body.get("temperature"):
                config.do_sample = True
            if (given := _given.get()) is not None:
                config.top_k = config.top_k if given.top_k is None else max(given.top_k, 0)
                config.eos_token_id = -1 if given.ignore_eos else config.eos_token_id
            config.mla_sampling = Sampling.of(config, seed)
            return config

    return Served


HANDLERS: dict[str, type[BaseHandler]] = {
    "/v1/completions": _served(CompletionHandler),
    "/v1/chat/completions": _served(ChatCompletionHandler),
    "/v1/responses": _served(ResponseHandler),
}
LIMITS = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/responses": ("max_output_tokens",),
}
"""The fields that limit the number of tokens, for each kind of request. The first field that is present is used."""


class RequestReader:
    """Reads and answers one kind of request."""

    def __init__(self, path: str, state: ServedModel) -> None:
        self._state, self._limits = state, LIMITS[path]
        self._handler: BaseHandler = HANDLERS[path](model_manager=ModelManager, generation_state=state)
        self._own_template_words = set(inspect.signature(state.tokenizer.apply_chat_template).parameters)

    def read(self, body: dict[str, Any]) -> BatchEncoding:
        """Return the handler's inputs.

        Call this in a thread. Raises :class:`HTTPException` for an unreadable request.
        """
        words = self._own_template_words & {*(body.get("chat_template_kwargs") or {})}
        if words:
            raise HTTPException(400, f"chat_template_kwargs may not set {', '.join(sorted(words))}")
        _text.set(_TextRequest(self._state.tokenizer))
        run = self._handler.handle_request(copy.deepcopy(body), "reading")
        try:
            run.send(None)
        except _Read as read:
            return read.inputs
        except HTTPException:
            raise
        except Exception as error:  # a template or tokenizer may raise anything for a client's text
            raise HTTPException(400, f"the request cannot be read: {brief(error)}") from error
        finally:
            run.close()
        raise AssertionError("a handler of transformers that reads no text")

    def bound(self, body: dict[str, Any], inputs: BatchEncoding, room: int) -> None:
        """Limit the number of new tokens, so that prompt and answer together have at most ``room`` tokens.

        Raises :class:`HTTPException` if the prompt is empty or leaves no tokens for the answer.
        """
        count = len(inputs["input_ids"])
        left = room - count
        if not count:
            raise HTTPException(400, "the prompt has no tokens; expected at least one")
        if left < 1:
            raise HTTPException(400, f"the prompt has {count} tokens, expected at most {room - 1}")
        wanted = next((body[name] for name in self._limits if body.get(name) is not None), None)
        body[self._limits[0]] = min(left, 1024 if wanted is None else wanted)

    async def answer(self, body: dict[str, object], inputs: BatchEncoding, request_id: str, given: Body) -> Response:
        """Return the response of transformers' handler. ``given`` is the client's original request."""
        _given.set(given)
        _text.set(_TextRequest(self._state.tokenizer, inputs))
        response: Response = await self._handler.handle_request(body, request_id)
        return response
