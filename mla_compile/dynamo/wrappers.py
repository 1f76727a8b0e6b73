"""Removes from modules' forwards the wrappers that Dynamo cannot trace, and reports wrappers that remain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import fx

from mla_compile.capture import capture
from mla_compile.codes import CODES, Code
from mla_compile.core.program import Inputs
from mla_compile.core.shared_state import replaced_weights
from mla_compile.core.wrapped import Unwrapped, unwrap
from mla_compile.dynamo.names import FIX, is_of_a_name
from mla_compile.errors import CaptureError
from mla_compile.passes.quantized.layers import is_known
from mla_compile.report.report import Report


def take_off(module: torch.nn.Module) -> Unwrapped:
    """Apply :func:`mla_compile.core.wrapped.unwrap` to ``module``, which has to be a copy of the user's module."""
    return unwrap(module, is_known, _is_captured)


def _is_captured(forward: Callable[..., object], rows: torch.Tensor) -> bool:
    def backend(gm: fx.GraphModule, example_inputs: Inputs) -> Callable[..., object]:
        if replaced_weights(gm, example_inputs):  # torch 2.14 traces this, but the model would run uncompiled
            raise CaptureError("a layer gives its weight other memory")
        capture.from_dynamo(gm, example_inputs)
        return gm

    try:
        with torch.inference_mode(mode=False), torch.no_grad():
            torch.compile(forward, backend=backend, fullgraph=True)(rows)
    except Exception:  # noqa: BLE001  a library's code is traced and run here, and may raise anything
        return False
    return True


def told(report: Report, left: Mapping[str, int], last: str | None, *, optimized: bool) -> Report:
    """Add the cause to each attention that a graph break cut off.

    ``left``: remaining wrapper -> its number of modules. If there are such wrappers, they are the cause. Otherwise, the
    cause is ``last``, Dynamo's last graph break. ``optimized``: whether the graph comes from ``optimize``.
    """
    who = [f"{what}, {count} module{'s' if count > 1 else ''}" for what, count in left.items()]
    code = Code.WRAPPED_FORWARD if who else Code.GRAPH_BREAK
    if last is not None and not who:
        who = [f"Dynamo last broke a graph: {last}"]
    if not who:
        return report
    of_a_name = not (left or optimized) and last is not None and is_of_a_name(last)
    fix = FIX if of_a_name else CODES[code].fix if left else None
    sites = [
        replace(site, code=code, reason=f"{site.reason} ({'; '.join(who)})", fix=fix or site.fix)
        if site.code == Code.GRAPH_BREAK
        else site
        for site in report.sites
    ]
    return replace(report, sites=tuple(sites))
