"""Tells when no compiled graph has an attention although Dynamo left code out of its graphs: one may run there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import counters

from mla_compile.core.program import Call
from mla_compile.errors import warn
from mla_compile.report.report import UNSEEN

DISABLED = re.compile(
    r"Skip (?:calling|inlining) function `?<function (\S+) at (0x[0-9a-f]+)>`? since it was wrapped with"
)
"""How Dynamo says that it left out a function under ``torch.compiler.disable``: its name and its address."""

_TORCH = str(Path(torch.__file__).parent)


def breaks() -> Mapping[str, int]:
    """How often Dynamo broke a graph in this process, by its reason."""
    return Counter(counters["graph_break"])


def broken_since(before: Mapping[str, int]) -> tuple[str, ...]:
    """The reasons for which Dynamo has broken graphs since ``before``, one line each."""
    return tuple(_one_line(reason) for reason in Counter(counters["graph_break"]) - Counter(before))


class Unseen:
    """Tells once that no graph of a model has an attention, after a call in which Dynamo left code out.

    Attributes:
        message: what was told; None until then.
    """

    def __init__(self, on_told: Callable[[], None]) -> None:
        self.message: str | None = None
        self._on_told = on_told

    @contextmanager
    def call(self, seen: Callable[[], object]) -> Iterator[None]:
        """Surrounds a call of the model; ``seen`` says whether a graph with an attention was compiled for it."""
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
    """Why and where Dynamo ended a graph early; None if it did not."""
    why: Any = getattr(gm, "compile_subgraph_reason", None)
    return None if why is None or not why.graph_break else _one_line(why.reason) + _place(why.user_stack)


def told_when_run_again(call: Call, gm: fx.GraphModule, seen: Callable[[], object]) -> Call:
    """``call``, which warns in its second run if Dynamo ended ``gm`` early and ``seen`` is still false.

    A backend does not learn when a model's call ends. When one of its graphs runs again, the others have been compiled.
    """
    end = end_of(gm)
    if end is None:
        return call
    runs = 0

    def counted(*inputs: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs == 2 and not seen():
            warn(_message(end))
        return call(*inputs)

    return counted


def _place(stack: Sequence[FrameSummary]) -> str:
    """The innermost line of a stack that is not torch's."""
    lines = [line for line in stack if not line.filename.startswith(_TORCH)]
    return f" ({lines[-1].filename}:{lines[-1].lineno}: {lines[-1].line})" if lines else ""


def _message(left_out: str) -> str:
    return f"{UNSEEN}; if the model has one, it runs uncompiled where Dynamo broke the graph: {left_out}"


def _one_line(reason: str) -> str:
    """Dynamo's reason for a graph break without its hints: the headline and, if there is one, the explanation."""
    if disabled := DISABLED.search(reason):
        return f"{disabled[1]} is under torch.compiler.disable"
    if reason.startswith("generic_jump"):
        return "a branch depends on the values of a tensor"
    lines = [line.strip() for line in reason.strip().splitlines()]
    told = (line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: "))
    return ": ".join((*lines[:1], *told))
