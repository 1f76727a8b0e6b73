"""The handlers of transformers, for a model that is there already, with text read off the event loop.

A handler is a coroutine that checks a request, makes token ids of its text, submits them and answers. Tokenizing
megabytes takes seconds, in which a server would answer nobody, and what templates and tokenizers raise about a client's
text is that client's error. So each handler is run twice: once in a thread, up to the token ids, and then on the event
loop, where it gets them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from fastapi import HTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler, GenerationState

from mla_compile.batching.sampling import Sampling
from mla_compile.errors import brief
from mla_compile.serving.bodies import Body
from mla_compile.serving.generation import ServedGeneration

_text: ContextVar[Any] = ContextVar("mla_compile_serving_text")
_given: ContextVar[Body | None] = ContextVar("mla_compile_serving_given", default=None)


class _Read(Exception):  # noqa: N818  no error: it ends the first run
    def __init__(self, inputs: Any) -> None:
        self.inputs = inputs


class _TextRequest:
    """Stands for a tokenizer whose text is read now, which ends the run, or was read before."""

    def __init__(self, tokenizer: Any, inputs: Any = None) -> None:
        self._of, self._inputs = tokenizer, inputs

    @property  # type: ignore[misc]  # which handlers ask for
    def __class__(self) -> Any:
        return type(self._of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._read(self._of, args, kwargs)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return self._read(self._of.apply_chat_template, args, kwargs)

    def _read(self, read: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inputs is None:
            raise _Read(read(*args, **kwargs))
        return self._inputs


class ServedModel(GenerationState):
    """The one model that is served."""

    def __init__(self, name: str, model: Any, tokenizer: Any, generation: ServedGeneration) -> None:
        super().__init__(continuous_batching=True)
        self.name, self.model, self.tokenizer, self.generation = name, model, tokenizer, generation

    def use_continuous_batching(self, *_: Any) -> bool:
        """Always."""
        return True

    def get_manager(self, *_: Any, **__: Any) -> ServedGeneration:
        """The one that there is."""
        return self.generation


def _served(kind: type[Any]) -> type[Any]:
    class Served(kind):
        def _resolve_model(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
            state: ServedModel = self.generation_state
            asked = body.get("model")
            if asked not in (None, state.name):
                raise HTTPException(404, f"there is no model {asked!r} here; this server has {state.name!r}")
            return state.name, state.model, _text.get()

        def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            seed = body.get("seed")  # transformers would set that of the whole process
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
"""Where each kind of request says how many tokens are wanted; the first that is given counts."""


class RequestReader:
    """One kind of request, from its body to its answer."""

    def __init__(self, path: str, state: ServedModel) -> None:
        self._state, self._limits = state, LIMITS[path]
        self._handler: Any = HANDLERS[path](model_manager=ModelManager, generation_state=state)
        self._own_template_words = set(inspect.signature(state.tokenizer.apply_chat_template).parameters)

    def read(self, body: dict[str, Any]) -> Any:
        """The handler's inputs, to be called in a thread; raises :class:`HTTPException` for what cannot be read."""
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
        except Exception as error:  # templates and tokenizers raise anything about a client's text
            raise HTTPException(400, f"the request cannot be read: {brief(error)}") from error
        finally:
            run.close()
        raise AssertionError("a handler of transformers that reads no text")

    def bound(self, body: dict[str, Any], inputs: Any, room: int) -> None:
        """Bounds the tokens that are wanted by what ``room`` leaves; raises :class:`HTTPException` if that is none."""
        count = len(inputs["input_ids"])
        left = room - count
        if not count:
            raise HTTPException(400, "the prompt has no tokens; expected at least one")
        if left < 1:
            raise HTTPException(400, f"the prompt has {count} tokens, expected at most {room - 1}")
        wanted = next((body[name] for name in self._limits if body.get(name) is not None), None)
        body[self._limits[0]] = min(left, 1024 if wanted is None else wanted)

    async def answer(self, body: dict[str, Any], inputs: Any, request_id: str, given: Body) -> Any:
        """The response, by the handler of transformers; ``given`` is the request as it came."""
        _given.set(given)
        _text.set(_TextRequest(self._state.tokenizer, inputs))
        return await self._handler.handle_request(body, request_id)
