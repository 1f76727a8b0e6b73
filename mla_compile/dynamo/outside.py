"""Warn if no compiled graph has an attention, but code outside of Dynamo's graphs may run an attention."""

from __future__ import annotations

import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from traceback import FrameSummary
from types import FrameType

import torch
from torch import fx, nn
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.utils import counters

from mla_compile.core.program import Call
from mla_compile.errors import warn
from mla_compile.report.report import UNSEEN

_DISABLED = re.compile(r"Skip (?:calling|inlining) function `?<function (\S+) at 0x\w+>`? since it was wrapped with")
"""Dynamo's message about a function under ``torch.compiler.disable``. The group is the function's qualified name."""

_TORCH = Path(torch.__file__).parent


def breaks() -> Mapping[str, int]:
    """Return how often Dynamo broke a graph in this process, by reason."""
    return Counter(counters["graph_break"])


def broken_since(before: Mapping[str, int]) -> tuple[str, ...]:
    """Return the reasons for Dynamo's graph breaks since ``before``, one line each."""
    return tuple(_one_line(reason) for reason in Counter(counters["graph_break"]) - Counter(before))


class Unseen:
    """Warns once that no graph of a model has an attention, after a call in which Dynamo left code out of its graphs.

    Attributes:
        message: the warning; None until it was given.
    """

    def __init__(self, on_told: Callable[[], None]) -> None:
        self.message: str | None = None
        self._on_told = on_told

    @contextmanager
    def call(self, seen: Callable[[], object]) -> Iterator[None]:
        """Surround a call of the model. ``seen`` returns whether any graph of the model has an attention."""
        if self.message is not None or seen():
            yield
            return
        before = breaks()
        yield
        left_out = broken_since(before)
        if left_out and not seen():
            self.message = _message("; ".join(left_out))
            self._on_told()
            warn(self.message)


def end_of(gm: fx.GraphModule) -> str | None:
    """Return why and where Dynamo ended a graph early; None if it did not."""
    why: GraphCompileReason | None = getattr(gm, "compile_subgraph_reason", None)
    return None if why is None or not why.graph_break else _one_line(why.reason) + _place(why.user_stack)


def told_in_a_later_call(call: Call, gm: fx.GraphModule, told: set[str], seen: Callable[[], object]) -> Call:
    """If Dynamo ended ``gm`` early, wrap ``call``: a later call of the model warns if ``seen()`` is still false.

    The warning has to wait for a later call, because the present call of the model may still compile other graphs, and
    a backend does not learn when that call ends. ``told`` holds what users have been told about graphs of this model.
    """
    end = end_of(gm)
    if end is None:
        return call
    lasts, done = _this_call(), False

    def checked(*inputs: object) -> object:
        nonlocal done
        if not done and not lasts():
            done = True
            if not seen() and UNSEEN not in told:
                told.add(UNSEEN)
                warn(_message(end))
        return call(*inputs)

    return checked


def outermost_call() -> FrameType | None:
    """Return the frame of the outermost module call that is running; None if no module is being called."""
    found: FrameType | None = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is nn.Module._wrapped_call_impl.__code__:
            found = frame
        frame = frame.f_back
    return found


class _Mark:
    """An object that lives as long as a call."""


def _this_call() -> Callable[[], object]:
    """Return a function that says whether the outermost module call that is running now is still running.

    A mark is stored among that call's keyword arguments, and lives as long as they do. If no module is being called (a
    function was compiled), only the first query returns a true value.
    """
    mark, frame = _Mark(), outermost_call()
    if frame is None:
        return partial(next, iter([mark]), None)
    frame.f_locals["kwargs"][mark] = mark
    return weakref.ref(mark)


def _place(stack: Sequence[FrameSummary]) -> str:
    """Return the innermost line of a stack, outside of torch's files."""
    lines = [line for line in stack if not Path(line.filename).is_relative_to(_TORCH)]
    return f" ({lines[-1].filename}:{lines[-1].lineno}: {lines[-1].line})" if lines else ""


def _message(left_out: str) -> str:
    return f"{UNSEEN}; if the model has one, it runs uncompiled where Dynamo broke the graph: {left_out}"


def _one_line(reason: str) -> str:
    """Return Dynamo's reason for a graph break without its hints: the headline, and the explanation if there is one."""
    if disabled := _DISABLED.search(reason):
        return f"{disabled[1]} is under torch.compiler.disable"
    if reason.startswith("generic_jump"):
        return "a branch depends on the values of a tensor"
    lines = [line.strip() for line in reason.strip().splitlines()]
    told = (line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: "))
    return ": ".join((*lines[:1], *told))
