"""``backend="mla"`` settles with decode state that changes in every step, as an optimized module does.

Dynamo takes int attributes of modules and the sizes of buffers for constant, compiles a step eight times, and then runs
it uncompiled. An optimized module has settings against that for its own calls; with ``torch.compile`` the settings are
the user's. So what a function with attention was compiled again for is named as dynamic while Dynamo compiles that
function, and at no other time.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import torch
from torch._dynamo import config
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._dynamo.utils import get_metrics_context
from torch._guards import CompileContext

from mla_compile.dynamo.causes import changed_source
from mla_compile.dynamo.recompiles import running

_sources: dict[str, list[str]] = {}
"""By Dynamo's number of the function, what made Dynamo compile it again."""


class _Thread(threading.local):
    patch: ExitStack | None = None


_thread = _Thread()


def settle() -> None:
    """Called inside the backend, for a graph with attention: the function is followed when it is compiled again."""
    current = CompileContext.current_compile_id()
    if current is None or running() is not None:
        return
    _sources.setdefault(_function(str(current)), [])
    if _started not in callback_handler.start_callbacks:  # a reset of Dynamo forgets them
        callback_handler.register_start_callback(_started)
        callback_handler.register_end_callback(_ended)


def _function(compile_id: str) -> str:
    return compile_id.rpartition("/")[0]


def _started(what: CallbackArgs) -> None:
    if what.callback_trigger is not CallbackTrigger.DYNAMO or running() is not None:
        return
    function, first = _function(what.compile_id), what.compile_id.endswith("/0")
    if first:
        _sources.pop(function, None)  # another function got this number after a reset
    if function not in _sources or not config.automatic_dynamic_shapes:  # torch.compile(dynamic=False)
        return
    found = changed_source(str(getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason")))
    if found is not None and found not in _sources[function]:
        _sources[function].append(found)
    if _sources[function]:
        compiler_config: Any = torch.compiler.config
        theirs = compiler_config.dynamic_sources
        together = ",".join([*filter(None, [theirs]), *_sources[function]])
        _thread.patch = ExitStack()
        _thread.patch.enter_context(compiler_config.patch(dynamic_sources=together))


def _ended(_: CallbackArgs) -> None:
    patch, _thread.patch = _thread.patch, None
    if patch is not None:
        patch.close()
