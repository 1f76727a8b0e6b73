"""Removes wrappers around forwards that Dynamo cannot trace, and reports those that remain."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FunctionType

import torch
from torch import fx
from torch._dynamo.utils import counters

from mla_compile.capture import capture
from mla_compile.codes import CODES, Code
from mla_compile.core.program import Inputs
from mla_compile.core.wrapped import Unwrapped, unwrap
from mla_compile.dynamo.outside import DISABLED
from mla_compile.passes.quantized.layers import is_known
from mla_compile.report.report import Report


def take_off(module: torch.nn.Module) -> Unwrapped:
    """Apply :func:`mla_compile.core.wrapped.unwrap` to ``module``, a copy."""
    return unwrap(module, is_known, _is_captured)


def _is_captured(forward: Callable[..., object], rows: torch.Tensor) -> bool:
    def backend(gm: fx.GraphModule, example_inputs: Inputs) -> Callable[..., object]:
        capture.from_dynamo(gm, example_inputs)
        return gm

    try:
        with torch.inference_mode(mode=False), torch.no_grad():
            torch.compile(forward, backend=backend, fullgraph=True)(rows)
    except Exception:  # noqa: BLE001  a library's code is traced here, and then runs
        return False
    return True


def told(report: Report, left: Mapping[str, int], last: str | None) -> Report:
    """The report, in which attentions cut off by a graph break name the wrappers ``left`` with their number of modules.

    If there are none, it names the functions under ``torch.compiler.disable`` at which Dynamo broke graphs of this
    process, or else ``last``, the last break.
    """
    who = [f"{what}, {count} module{'s' if count > 1 else ''}" for what, count in left.items()]
    code = Code.WRAPPED_FORWARD if who else Code.GRAPH_BREAK
    # The breaks of a process may be another model's; the last one comes shortly before the attention.
    other = last is not None and "torch.compiler.disable" not in last
    skipped = [] if who or other or all(site.code != Code.GRAPH_BREAK for site in report.sites) else _skipped()
    who += [f"Dynamo broke a graph at {name}, which is under torch.compiler.disable" for name in skipped]
    who += [f"Dynamo last broke a graph: {last}"] if last and not who else []
    if not who:
        return report
    sites = [
        replace(site, code=code, reason=f"{site.reason} ({'; '.join(who)})", fix=CODES[code].fix if left else site.fix)
        if site.code == Code.GRAPH_BREAK
        else site
        for site in report.sites
    ]
    return replace(report, sites=tuple(sites))


def _skipped() -> list[str]:
    """The functions under ``torch.compiler.disable`` that broke a graph of this process, with their modules."""
    found = {match.groups() for reason in counters["graph_break"] if (match := DISABLED.search(reason))}
    if not found:
        return []
    places = {int(place, 16): name for name, place in found}
    functions = (one for one in gc.get_objects() if id(one) in places)
    modules = {id(one): getattr(one, "__module__", "") for one in functions if isinstance(one, FunctionType)}
    return sorted({f"{modules[place]}.{name}" if modules.get(place) else name for place, name in places.items()})
