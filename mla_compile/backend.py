"""The backend function of ``torch.compile(model, backend="mla")``, and the reports of the graphs that it compiled.

torch imports this module as soon as a program names the backend. To keep that import fast, the passes are imported only
when the first graph is compiled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from mla_compile.options import Options

if TYPE_CHECKING:
    from torch import fx

    from mla_compile.report.report import Report

_KEPT = 64
_told_of_models: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Model -> what users have been told about its graphs."""
_told_of_functions = WeakTensorKeyDictionary()
"""First weight of a graph -> what users have been told. Used if a function, not a model, is compiled."""
_ATTENTION = "a graph of this model has an attention"
_recent: deque[Report] = deque(maxlen=_KEPT)


def mla(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
    **more: Any,
) -> Callable[..., object]:
    """Rewrite and compile one graph that Dynamo has captured. ``backend="mla"`` calls this function.

    Keyword arguments set fields of :class:`mla_compile.Options` or options of Inductor.
    """
    from mla_compile.dynamo.compiler import Compiler  # imported on use: loads all passes
    from mla_compile.dynamo.outside import outermost_call, told_in_a_later_call
    from mla_compile.dynamo.recompiles import parameters_of

    compiler = Compiler(Options.parse({**more, **(options or {})}), mode, beside=True)
    if (outermost := outermost_call()) is not None:  # keyed by the model: graphs after a break have other weights
        compiler.told = _told_of_models.setdefault(outermost.f_locals["self"], set())
    elif weights := parameters_of(gm, example_inputs):
        compiler.told = _told_of_functions.setdefault(weights[0], set())
    call = compiler(gm, example_inputs)
    _recent.extend(compiler.reports)
    if compiler.reports or compiler.failures:
        compiler.told.add(_ATTENTION)
        return call
    told, of_model = compiler.told, outermost is not None
    return told_in_a_later_call(call, gm, told, lambda: _ATTENTION in told if of_model else _recent)


def reports() -> tuple[Report, ...]:
    """Return the reports of the last graphs compiled with ``backend="mla"`` in this process: oldest first, at most 64.

    Graphs without an attention have no report.
    """
    return tuple(_recent)
