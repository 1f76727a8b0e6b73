"""Keeps an optimized module within Dynamo's recompile limit, beyond which the original code runs uncompiled.

Some decode state changes in every step: int attributes of modules (``self.pos += 1``), and the sizes of registered
buffers that grow by ``cat``. With torch's default settings, Dynamo treats these values as constants and recompiles in
every step. While an optimized module runs, the values are constants until they change, and symbolic from then on.

After a graph break, several layers may share code that is compiled once per layer. A deep model then exceeds the limit
before its first token. Therefore each layer gets the full limit. Layers that are compiled one by one with
``torch.compile`` get the full limit, too, without a change of the user's settings (:func:`guard_module`).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType

import torch
from torch import fx
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import LocalSource, UnspecializedNNModuleSource
from torch._dynamo.utils import get_metrics_context
from torch._guards import ChainedSource, TracingContext

from mla_compile.core.program import Inputs
from mla_compile.dynamo.kept import kept
from mla_compile.dynamo.logs import SETTING, SaidOnce
from mla_compile.dynamo.phases import Phases
from mla_compile.dynamo.settings import change, held, user_value

logger = logging.getLogger("mla_compile")

SYMBOLIC = {"allow_unspec_int_on_nn_module": True, "force_parameter_static_shapes": False}
"""Dynamo settings that let int attributes and the sizes of buffers become symbolic."""

HOOKS = {"skip_nnmodule_hook_guards": False}
"""Makes compiled code notice hooks that are added later. By default torch skips that check to save guards."""

_ACCUMULATED = "accumulated_recompile_limit"


def parameters_of(gm: fx.GraphModule, example_inputs: Inputs) -> list[torch.nn.Parameter]:
    """Return the parameters that a graph is compiled for.

    They identify the layer, if several layers run the same code.
    """
    return [value for value in (*gm.parameters(), *example_inputs) if isinstance(value, torch.nn.Parameter)]


def guard_module(gm: fx.GraphModule) -> None:
    """Guard the identity of the module whose parameters the graph reads. Call this inside a backend.

    With the guard, each module has its own recompile limit. Otherwise, all modules that share a function have one
    limit.
    """
    context = TracingContext.try_get()
    sources = [getattr(node, "_dynamo_source", None) for node in gm.graph.find_nodes(op="placeholder")]
    modules = {module for source in sources if (module := _module_of(source)) is not None}
    if context is not None and len(modules) == 1:
        context.guards_context.dynamo_guards.add(modules.pop().make_guard(GuardBuilder.ID_MATCH))


def _module_of(source: object) -> LocalSource | None:
    """Return the local variable that holds the module in which Dynamo found an input; None if there is none."""
    while isinstance(source, ChainedSource):
        # Other containers, such as a dict of arguments, may hold a different module in each call.
        if isinstance(source, UnspecializedNNModuleSource) and isinstance(source.base, LocalSource):
            return source.base
        source = source.base
    return None


class _ThreadRecompiles(threading.local):
    running: Recompiles | None = None


_thread = _ThreadRecompiles()


def running() -> Recompiles | None:
    """Return the counts and settings of the optimized module that this thread is calling; ``None`` if there is none."""
    return _thread.running


def why_again() -> str | None:
    """Return Dynamo's reason for the current recompilation; ``None`` for a first compilation."""
    reason = getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason")
    return reason if isinstance(reason, str) else None


class Recompiles:
    """Sets Dynamo's settings during the calls of one optimized module, and counts the graphs of each of its layers.

    Args:
        dynamic: as for ``torch.compile``. ``True`` makes every int attribute symbolic from the start, such as the
            number of heads. ``False`` makes none symbolic. Either value is the user's choice and is not overridden.
        function: the name of the module's forward in messages.
        on_note: called when Dynamo gives up on code of the module.

    Attributes:
        drains: whether the module keeps a tensor that fills and drains, so that later calls will find other sizes.
    """

    def __init__(
        self, *, dynamic: bool | None = None, function: str = "", on_note: Callable[[], object] | None = None
    ) -> None:
        self.dynamic = dynamic
        self.function = function
        self.on_note = on_note
        self.notes: list[str] = []
        self.left_out: list[str] = []
        self.drains = False
        self._symbolic = SYMBOLIC if dynamic is None else {}
        self._graphs: dict[CodeType, Counter[tuple[int, ...]]] = {}
        self._layers = 1
        self._most = 0
        self._phases = Phases()
        self._lock = threading.Lock()

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Apply the settings for one call of the module, and restore the user's settings after it."""
        outer = running()
        _thread.running = self
        try:
            logged = {SETTING: SaidOnce(user_value(SETTING), self._left_out)}
            with held({**HOOKS, **self._symbolic, **self._limits(), **logged}):
                yield
        finally:
            _thread.running = outer

    def add(self, gm: fx.GraphModule, example_inputs: Inputs) -> None:
        """Count a graph that is compiled during a call of the module."""
        traced = TracingContext.get_traced_code()
        layer = tuple(map(id, parameters_of(gm, example_inputs)))
        if not traced or not layer:
            return
        reason = why_again()
        with self._lock:
            self._phases.drains |= bool(kept(gm).empty)
            if reason is not None:
                self._phases.add(reason)
            graphs = self._graphs.setdefault(traced[0], Counter())
            graphs[layer] += 1
            self._layers = max(self._layers, len(graphs))
            self._most = max(self._most, graphs[layer])
        change(self._limits())

    def _left_out(self, name: str, method: str) -> None:
        """Report that compiled code omits a message that a logger would have logged once."""
        note = f"compiled code omits what the logger {name} logs once ({method}), which would break the graph"
        if note not in self.left_out:
            self.left_out.append(note)
            logger.warning("%s", note)

    def given_up(self, note: str) -> bool:
        """Record that Dynamo gave up on code, and why. Return whether this is the first time."""
        self.notes.append(note)
        if self.on_note is not None:
            self.on_note()
        return len(self.notes) == 1

    def _limits(self) -> dict[str, int]:
        """Return the limits to set: the user's limit times the number of layers, or more if buffers fill and drain."""
        given = user_value("recompile_limit")
        limit = self._phases.room(given)
        if limit == given and self._layers == 1:
            return {}
        # A layer that exceeds its limit will go on recompiling, so the user's limit applies from then on. Variants that
        # are already compiled stay in use.
        room = limit * self._layers if self._most <= limit else given
        return {"recompile_limit": room, _ACCUMULATED: max(room, user_value(_ACCUMULATED))}
