"""Says so when Dynamo gives up on code that this package compiled.

Dynamo keeps a limited number of compiled variants of a function (8 by default) and runs it uncompiled beyond that:
same results, without the speed, and a log line that few notice. There is no hook for it, so the log line is the hook.
"""

from __future__ import annotations

import logging
import warnings

from torch._guards import TracingContext

from mla_compile.errors import MlaCompileWarning

_ours: set[str] = set()
"""Functions of which a graph came to us, as Dynamo's log line spells them."""


def watch_current_function() -> None:
    """To be called inside a backend: warn if Dynamo later gives up on the function it is compiling now."""
    logger = logging.getLogger("torch._dynamo.convert_frame")
    if not any(isinstance(handler, _LimitHandler) for handler in logger.handlers):
        logger.addHandler(_LimitHandler(logging.WARNING))
    traced = TracingContext.get_traced_code()
    if traced:  # the function itself first, then what was inlined into it
        code = traced[0]
        _ours.add(f"'{code.co_name}' ({code.co_filename}:{code.co_firstlineno})")


class _LimitHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if "torch._dynamo hit config." not in record.getMessage() or not isinstance(record.args, tuple):
            return
        limit, value, function, reason, *_ = record.args
        if function not in _ours:
            return
        warnings.warn(
            f"Dynamo reached {limit} ({value}) for {function} and runs it uncompiled from here on: results are right, "
            f"decode is as slow as before. Last reason to recompile: {reason}. Call mla_compile.optimize(model), which "
            "counts each model on its own, or raise torch._dynamo.config.recompile_limit",
            MlaCompileWarning,
            stacklevel=2,
        )
