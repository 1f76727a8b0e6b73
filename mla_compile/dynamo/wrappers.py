"""Wrappers around forwards that Dynamo does not follow: how they are found, and what a report says of those left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mla_compile.capture import capture
from mla_compile.codes import Code
from mla_compile.core.program import Inputs
from mla_compile.core.wrapped import Unwrapped, unwrap
from mla_compile.passes.quantized.layers import is_known
from mla_compile.report.report import Report


def take_off(module: torch.nn.Module) -> Unwrapped:
    """:func:`mla_compile.core.wrapped.unwrap` for ``module``, a copy."""
    return unwrap(module, is_known, _is_captured)


def _is_captured(forward: Callable[..., Any], rows: torch.Tensor) -> bool:
    def backend(gm: fx.GraphModule, example_inputs: Inputs) -> Callable[..., Any]:
        capture.from_dynamo(gm, example_inputs)
        return gm

    try:
        with torch.inference_mode(mode=False), torch.no_grad():
            torch.compile(forward, backend=backend, fullgraph=True)(rows)
    except Exception:  # noqa: BLE001  it is a library's code that is traced, and then runs
        return False
    return True


def told(report: Report, left: Mapping[str, int]) -> Report:
    """The report, in which attentions that were cut off name the wrappers ``left``, each around so many modules."""
    if not left:
        return report
    who = "; ".join(f"{what} ({count} module{'s' if count > 1 else ''})" for what, count in left.items())
    sites = [
        replace(site, code=Code.WRAPPED_FORWARD, reason=f"{site.reason}: {who}")
        if site.code == Code.GRAPH_BREAK
        else site
        for site in report.sites
    ]
    return replace(report, sites=tuple(sites))
