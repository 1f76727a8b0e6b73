"""Keeps an optimized module within Dynamo's recompile limit, beyond which the original code runs uncompiled.

Some decode state never settles under torch's own settings, because it changes in every step and is taken for constant:
int attributes of modules (``self.pos += 1``), and the sizes of registered buffers that grow by ``cat``. While a module
of ours runs, both are like every other size: constant until they were seen to change, symbolic from then on.

Code that several layers share after a graph break settles, but may be compiled once for each layer: a deep model is
over the limit before its first token is there. So each layer gets the limit for itself.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import TracingContext

from mla_compile.runtime import dynamo_config

if TYPE_CHECKING:
    from torch import fx

SYMBOLIC = {"allow_unspec_int_on_nn_module": True, "force_parameter_static_shapes": False}
"""Settings of Dynamo by which int attributes and the sizes of buffers can become symbolic."""

HOOKS = {"skip_nnmodule_hook_guards": False}
"""Compiled code must notice a hook that is added later; torch leaves that check out to make its guards shorter."""

_ACCUMULATED = "accumulated_recompile_limit"


class _Thread(threading.local):
    running: Recompiles | None = None


_thread = _Thread()


def running() -> Recompiles | None:
    """Of the optimized module that this thread is in a call of."""
    return _thread.running


class Recompiles:
    """Of one optimized module: Dynamo's settings for its calls, and how often it was compiled for which layer.

    Args:
        dynamic: as for ``torch.compile``. With True every int attribute would be symbolic from the start, numbers of
            heads too; with False nothing ever is. Either is what the user asked for, and left alone.
        function: the module's forward, as it is named to the user.
        on_note: called when Dynamo has given up on code of the module.
    """

    def __init__(
        self, dynamic: bool | None = None, *, function: str = "", on_note: Callable[[], object] | None = None
    ) -> None:
        self.dynamic = dynamic
        self.function = function
        self.on_note = on_note
        self.notes: list[str] = []
        self._symbolic = SYMBOLIC if dynamic is None else {}
        self._graphs: dict[CodeType, Counter[tuple[int, ...]]] = {}
        self._layers = 1
        self._most = 0
        self._lock = threading.Lock()

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Around each call of the module."""
        outer = running()
        _thread.running = self
        try:
            with dynamo_config.held({**HOOKS, **self._symbolic, **self._limits()}):
                yield
        finally:
            _thread.running = outer

    def add(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        """To be called in such a call for each graph that is compiled."""
        traced = TracingContext.get_traced_code()
        layer = tuple(
            id(value) for value in (*gm.parameters(), *example_inputs) if isinstance(value, torch.nn.Parameter)
        )
        if not traced or not layer:
            return
        with self._lock:
            graphs = self._graphs.setdefault(traced[0], Counter())
            graphs[layer] += 1  # parameters tell the layers apart that run one code
            self._layers = max(self._layers, len(graphs))
            self._most = max(self._most, graphs[layer])
        dynamo_config.change(self._limits())

    def given_up(self, note: str) -> bool:
        """Remembers what Dynamo gave up on, and why; whether that is the first time."""
        self.notes.append(note)
        if self.on_note is not None:
            self.on_note()
        return len(self.notes) == 1

    def _limits(self) -> dict[str, int]:
        """The user's limit for each layer: Dynamo can only be told how much that is for all layers of one code."""
        if self._layers == 1:
            return {}
        limit = dynamo_config.users("recompile_limit")
        # A layer over the limit never settles: the user's limit is kept from there on, and what is compiled runs on.
        room = limit * self._layers if self._most <= limit else limit
        return {"recompile_limit": room, "accumulated_recompile_limit": max(room, dynamo_config.users(_ACCUMULATED))}
