"""Warns when Dynamo gives up on code that this package compiled.

Dynamo keeps a limited number of compiled variants of a function (8 by default). Beyond the limit it runs the function
uncompiled: results stay the same, but decode becomes slow, and only a log line says so. Dynamo has no hook for this
event, so this module adds a handler to Dynamo's logger. If that logger is off, the warning is given when the last
variant within the limit is compiled.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from weakref import WeakValueDictionary

import torch
from torch import fx
from torch._guards import CompileContext, TracingContext

from mla_compile.core.program import Inputs
from mla_compile.dynamo.causes import Cause, cause, of_layers, place, readable
from mla_compile.dynamo.kept import source_name
from mla_compile.dynamo.recompiles import parameters_of, running
from mla_compile.dynamo.settling import variants_allowed
from mla_compile.errors import warn

_KEPT = 1024
_ENTRY = str(Path(__file__).with_name("entry.py"))  # the file in which Dynamo sees the entry to an optimized module
_logger = logging.getLogger("torch._dynamo.convert_frame")


@dataclass(frozen=True)
class _Function:
    """Facts about one function: whether any graph had an attention, where inputs are used, and which layers ran it."""

    attention: bool = False
    places: dict[str, str] = field(default_factory=dict)
    layers: WeakValueDictionary[int, torch.nn.Parameter] = field(default_factory=WeakValueDictionary)
    """One parameter of each live layer or model for which the function was compiled."""


_ours: OrderedDict[str, _Function] = OrderedDict()
"""Function (spelled as in Dynamo's log) -> facts about its compilations."""

_attention = threading.Event()
"""Whether any graph so far had an attention."""


def watch_current_function(gm: fx.GraphModule, example_inputs: Inputs, *, attention: bool) -> int:
    """Warn if Dynamo later gives up on the function that is being compiled. Call this inside a backend.

    When Dynamo gives up on a function, the functions called by that function run uncompiled, too. Therefore a function
    without an attention is also watched, once any graph has had an attention. Returns the number of layers or models
    for which the function was compiled so far.
    """
    if attention:
        _attention.set()
    if not any(isinstance(handler, _LimitHandler) for handler in _logger.handlers):
        _logger.addHandler(_LimitHandler(logging.WARNING))
    traced = TracingContext.get_traced_code()
    if not traced:
        return 0
    function = _spelled(traced[0])  # the function itself comes first, then the inlined ones
    before = _ours.get(function, _Function())
    before.layers.update((id(weight), weight) for weight in parameters_of(gm, example_inputs)[:1])
    _ours[function] = _Function(attention or before.attention, _places(gm), before.layers)
    _ours.move_to_end(function)
    if len(_ours) > _KEPT:
        _ours.popitem(last=False)
    current = CompileContext.current_compile_id()
    variants = 1 + ((current.frame_compile_id if current is not None else None) or 0)
    if attention and variants == variants_allowed() and not _logger.isEnabledFor(logging.WARNING):
        _tell(f"{variants} variants of {_named(function)} are compiled; Dynamo runs any further one uncompiled", None)
    return len(before.layers)


class _LimitHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if "torch._dynamo hit config." not in record.getMessage() or not isinstance(record.args, tuple):
            return
        limit, value, function, reason, *_ = record.args
        if running() is None and (function not in _ours or not _attention.is_set()):
            return
        known = _ours.get(str(function), _Function())
        why = cause(str(reason), known.places, "module" if running() else None)
        # Each layer needs at least two variants, one for a prompt and one for decoding. With enough layers, this alone
        # reaches the limit.
        count = len(known.layers)
        if running() is None and count > 1 and 2 * count >= int(str(value)):
            why = of_layers(count)
        _tell(
            f"Dynamo reached {limit} ({value}) for {_named(str(function))} and runs it uncompiled from now on",
            why,
            attention=known.attention,
        )


def _tell(message: str, why: Cause | None, *, attention: bool = True) -> None:
    module = running()
    slow = "decode is as slow as before" if attention else "attention that it calls may run in its original form"
    message += f": results are right, but {slow}. "
    if why is None:
        message += 'TORCH_LOGS="recompiles" shows what changes from call to call'
    else:
        advice = why.advice(optimized=module is not None, dynamic=module.dynamic if module else None)
        message += f"The cause: {why.what}{f' ({why.where})' if why.where else ''}. What helps: {advice}"
    if module is None or module.given_up(message):
        warn(message)


def _named(function: str) -> str:
    """Return a function's name in messages. The entry to an optimized module has the name of the user's forward."""
    module = running()
    return module.function if module is not None and f"({_ENTRY}:" in function else function


def _spelled(code: CodeType) -> str:
    return f"'{code.co_name}' ({code.co_filename}:{code.co_firstlineno})"


def _places(gm: fx.GraphModule) -> dict[str, str]:
    """Return the source line where each input of a graph is first used."""
    places: dict[str, str] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None)
        if source is None:
            continue
        for user in node.users:
            where = place(user.meta.get("stack_trace") or "")
            if where is not None:
                places.setdefault(readable(source_name(source)), where)
    return places
