"""Stops repeated recompilations of functions with attention: sources that caused a recompilation become dynamic.

Dynamo takes int attributes of modules and the sizes of buffers for constants. It compiles a step eight times, and then
runs the step uncompiled. An optimized module prevents this by other settings during its own calls. With
``torch.compile``, the settings belong to the user. Sources that made Dynamo recompile a function are therefore declared
dynamic only while Dynamo compiles this function. With ``optimize`` and with ``torch.compile``, ints that the function
writes are declared dynamic as well, even before they change.

Some tensors fill and drain, such as a buffer of tokens that wait to be compressed. They are empty in some calls and
have one row in others. Dynamo specialises on both sizes, and on each combination of the sizes of several tensors. After
the first tensor of this kind, three things change. Sizes of 0 and 1 are treated like other sizes. Sizes share a symbol
only if they were equal in all graphs so far. The limit allows several times as many variants.

An optimized module also declares the axes along which kept tensors are empty or change, and raises the limit during its
own calls. With ``torch.compile``, a hook that Dynamo calls for every recompilation raises the limit. The limit is
restored as soon as Dynamo has checked it.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dynamo import config
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.utils import get_hook_for_recompile_user_context, register_hook_for_recompile_user_context
from torch._guards import CompileContext
from torch.fx.experimental import _config as sizes_config

from mla_compile.dynamo.causes import changed_source
from mla_compile.dynamo.kept import kept
from mla_compile.dynamo.phases import Phases
from mla_compile.dynamo.products import of_any_size
from mla_compile.dynamo.recompiles import running, why_again
from mla_compile.dynamo.sizes import History


@dataclass
class _Settling:
    """What made Dynamo recompile a function, or may make Dynamo recompile it.

    Three sets hold names to declare dynamic. ``counts``: ints that the function keeps. ``rows``: axes of tensors that
    the function keeps (used only if a tensor fills and drains). ``changed``: what caused a recompilation. In addition,
    ``sizes`` holds the inputs' sizes in each graph.
    """

    phases: Phases = field(default_factory=Phases)
    counts: set[str] = field(default_factory=set)
    rows: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    sizes: History = field(default_factory=History)


_functions: dict[str, _Settling] = {}
"""Dynamo's number of each function with attention -> what is known about the function."""


class _ThreadPatch(threading.local):
    patch: ExitStack | None = None
    room: ExitStack | None = None


_thread = _ThreadPatch()


def settle(gm: fx.GraphModule) -> None:
    """Watch later recompilations of the function from which ``gm``, a graph with an attention, was traced.

    Call this inside the backend. If the settings have to change now, this function raises
    ``TensorifyScalarRestartAnalysis``, so that Dynamo traces again.
    """
    current = CompileContext.current_compile_id()
    if current is None:
        return
    known = _functions.setdefault(_forget_others(str(current)), _Settling())
    found, module = kept(gm), running()
    drained_before, rows_before = known.phases.drains, frozenset(known.rows)
    if (found.empty or found.waits) and module is not None:
        known.phases.drains = module.drains = True
    known.counts |= found.counts
    known.rows |= found.empty | found.rows
    known.sizes.add(gm)
    if _started not in callback_handler.start_callbacks:  # a reset of Dynamo drops the callbacks
        callback_handler.register_start_callback(_started)
        callback_handler.register_end_callback(_ended)
    if _asked not in (get_hook_for_recompile_user_context() or ()):
        register_hook_for_recompile_user_context(_asked)
    reason = why_again()
    if not (known.phases.drains and reason is not None and config.automatic_dynamic_shapes):
        return
    # Trace again with the new settings. A graph for exactly these sizes would not be used in later calls.
    if not drained_before or (module is not None and known.rows > rows_before):
        _open(known, reason)
        raise TensorifyScalarRestartAnalysis("what the traced code keeps fills and drains")


def sizes_so_far() -> History | None:
    """Return the sizes in all graphs of the current function; None if no tensor of the function fills and drains."""
    known = _current()
    return known.sizes if known is not None and known.phases.drains else None


def variants_allowed() -> int:
    """Return how many variants Dynamo keeps of the function that is being compiled."""
    limit, known = config.recompile_limit, _current()
    return limit if known is None or running() is not None else known.phases.room(limit)


def _current() -> _Settling | None:
    return _functions.get(_number(str(CompileContext.current_compile_id())))


def _number(compile_id: str) -> str:
    return compile_id.rpartition("/")[0]


def _forget_others(compile_id: str) -> str:
    """Return the number of the function. Drop the state of a function that had this number before Dynamo was reset."""
    function = _number(compile_id)
    if compile_id.endswith("/0"):
        _functions.pop(function, None)
    return function


def _asked() -> str:
    """Raise the limit if needed. Dynamo calls this hook before it checks the limit and compiles."""
    _close("room")
    current, reason = CompileContext.current_compile_id(), why_again()
    known = None if current is None else _functions.get(_forget_others(str(current)))
    if current is None or known is None or reason is None:
        return ""
    known.phases.add(reason)
    allowed, variants = variants_allowed(), current.frame_compile_id or 0
    # Raise the limit only if Dynamo then compiles, because only the start of the compilation restores the limit.
    if config.recompile_limit <= variants < min(allowed, config.accumulated_recompile_limit):
        _thread.room = ExitStack()
        _thread.room.enter_context(config.patch(recompile_limit=allowed))
    return ""


def _started(what: CallbackArgs) -> None:
    _close("room")
    if what.callback_trigger is not CallbackTrigger.DYNAMO:
        return
    known, reason = _functions.get(_forget_others(what.compile_id)), why_again()
    # automatic_dynamic_shapes is off if the user chose dynamic=False
    if known is None or reason is None or not config.automatic_dynamic_shapes:
        return
    _open(known, reason)


def _open(known: _Settling, reason: str) -> None:
    """Until the compilation ends, apply the settings that a function needs."""
    _close("patch")
    patches = ExitStack()
    if known.phases.drains:
        sizes: Any = sizes_config
        patches.enter_context(sizes.patch(backed_size_oblivious=True, use_duck_shape=False))
        patches.enter_context(of_any_size())
    module = running()
    # If sizes may be 0, only the axis that changed becomes dynamic and not the whole tensor, because torch cannot
    # concatenate tensors whose width is symbolic and 0.
    found = changed_source(reason, of_axis=known.phases.drains) if module is None else None
    if found is not None:
        known.changed.add(found)
    # `rows` are used only in an optimized module. In its trace, `begin_apart` keeps an argument's size of 1 (one token)
    # constant, although other sizes of 1 become symbolic.
    rows = known.rows if known.phases.drains and module is not None else set[str]()
    names = sorted(known.counts | rows | known.changed)
    if names and (module is None or module.dynamic is None):
        compiler_config: Any = torch.compiler.config
        theirs = compiler_config.dynamic_sources
        together = ",".join([*filter(None, [theirs]), *names])
        patches.enter_context(compiler_config.patch(dynamic_sources=together))
    _thread.patch = patches


def _ended(_: CallbackArgs) -> None:
    _close("patch")


def _close(name: str) -> None:
    held = getattr(_thread, name)
    setattr(_thread, name, None)
    if held is not None:
        held.close()
