"""Wraps generators and coroutines so that each piece, up to the next yield or await, runs within a given context."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

Around = Callable[[Any], AbstractContextManager[object]]
"""Makes the context for one piece of a method. The argument is the object that the method is called on."""


def runs_in_pieces(function: Callable[..., Any]) -> bool:
    """Whether a function is a generator or coroutine, so that a call returns before the function's code runs."""
    return (
        inspect.isgeneratorfunction(function)
        or inspect.iscoroutinefunction(function)
        or inspect.isasyncgenfunction(function)
    )


def in_pieces(function: Callable[..., Any], around: Around) -> Callable[..., Any]:
    """Wrap a generator, coroutine or asynchronous generator method. Each piece runs within ``around(self)``."""
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generator(self: object, *args: object, **kwargs: object) -> Generator[Any, Any, Any]:
            return (yield from driven(function(self, *args, **kwargs), around, self))

        return generator
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def coroutine(self: object, *args: object, **kwargs: object) -> object:
            return await driven(function(self, *args, **kwargs), around, self)

        return coroutine

    @functools.wraps(function)
    async def generator_of_coroutines(self: object, *args: object, **kwargs: object) -> Any:
        steps = function(self, *args, **kwargs)
        resume = steps.asend(None)
        while True:
            try:
                out = await driven(resume, around, self)
            except StopAsyncIteration:
                return
            try:
                resume = steps.asend((yield out))
            except GeneratorExit:
                await steps.aclose()
                raise
            except BaseException as error:  # noqa: BLE001  what the caller throws is thrown into the method
                resume = steps.athrow(error)

    return generator_of_coroutines


@types.coroutine
def driven(steps: Any, around: Around, owner: object) -> Generator[Any, Any, Any]:
    """Run ``steps`` (a generator or an awaitable) with each piece within ``around(owner)``."""
    send, value = steps.send, None
    while True:
        try:
            with around(owner):
                out = send(value)
        except StopIteration as end:
            return end.value
        try:
            send, value = steps.send, (yield out)
        except GeneratorExit:
            steps.close()
            raise
        except BaseException as error:  # noqa: BLE001  what the caller throws is thrown into the method
            send, value = steps.throw, error
