"""Declares dynamic what caused recompilations of functions with attention, for ``optimize`` and ``torch.compile``.

Dynamo takes int attributes of modules and the sizes of buffers for constants, compiles a step eight times, and then
runs it uncompiled. An optimized module changes settings against that during its own calls; with ``torch.compile`` the
settings belong to the user. So the sources that caused a recompilation of a function with attention are declared
dynamic while Dynamo compiles that function, and at no other time.

Tensors that fill and drain (tokens that wait to be compressed) are empty in some calls and have one row in others.
Dynamo specialises on both sizes, in combination with every size of every other such tensor. Once such a tensor has been
seen, 0 and 1 are treated like other sizes, for both entry points.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import torch
from torch._dynamo import config
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._guards import CompileContext
from torch.fx.experimental import _config as sizes_config

from mla_compile.dynamo.causes import changed_source, drained
from mla_compile.dynamo.recompiles import running, why_again

_sources: dict[str, list[str]] = {}
"""Dynamo's number of a function -> the sources for which it was recompiled."""
_draining: set[str] = set()
"""The numbers of functions with a tensor that was seen empty."""


class _Thread(threading.local):
    patch: ExitStack | None = None


_thread = _Thread()


def settle() -> None:
    """Called inside the backend, for a graph with attention: watch later recompilations of the function."""
    current = CompileContext.current_compile_id()
    if current is None:
        return
    _sources.setdefault(_forget_others(str(current)), [])
    if _started not in callback_handler.start_callbacks:  # a reset of Dynamo drops the callbacks
        callback_handler.register_start_callback(_started)
        callback_handler.register_end_callback(_ended)


def _forget_others(compile_id: str) -> str:
    """The number of the function. Drops the state of a function that had this number before a reset of Dynamo."""
    function = compile_id.rpartition("/")[0]
    if compile_id.endswith("/0"):
        _sources.pop(function, None)
        _draining.discard(function)
    return function


def _started(what: CallbackArgs) -> None:
    if what.callback_trigger is not CallbackTrigger.DYNAMO:
        return
    function, reason = _forget_others(what.compile_id), why_again()
    # the user chose dynamic=False
    if function not in _sources or reason is None or not config.automatic_dynamic_shapes:
        return
    patches = ExitStack()
    if function in _draining or drained(reason):
        _draining.add(function)
        sizes: Any = sizes_config
        patches.enter_context(sizes.patch(backed_size_oblivious=True))
    if running() is None:
        _name_dynamic(_sources[function], reason, patches)
    _thread.patch = patches


def _name_dynamic(sources: list[str], reason: str, patches: ExitStack) -> None:
    found = changed_source(reason)
    if found is not None and found not in sources:
        sources.append(found)
    if sources:
        compiler_config: Any = torch.compiler.config
        theirs = compiler_config.dynamic_sources
        together = ",".join([*filter(None, [theirs]), *sources])
        patches.enter_context(compiler_config.patch(dynamic_sources=together))


def _ended(_: CallbackArgs) -> None:
    patch, _thread.patch = _thread.patch, None
    if patch is not None:
        patch.close()
