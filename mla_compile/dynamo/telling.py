"""Tells users what was done with a graph, by log records, warnings, and an artifact for tlparse."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

from torch._logging._internal import trace_structured

from mla_compile.codes import OVER_ROWS, Code
from mla_compile.errors import warn
from mla_compile.report.report import Report, count_sites
from mla_compile.report.wording import not_mla

logger = logging.getLogger("mla_compile")


def tell(report: Report, told: set[str]) -> None:
    """Log a line about a graph at INFO and its report at DEBUG. Warn if no attention of the graph was absorbed.

    There is no warning if the graph has no attention, or if all attentions were left by choice. ``told``: the warnings
    already given about the model, which are not repeated.
    """
    count_sites(report)
    logger.info("%s", report.summary())
    logger.debug("%s", report)
    if not report.sites or report.absorbed or _all_kept_by_choice(report):
        return
    message = f"nothing was absorbed in a graph with attention: {replace(report, graph='', passes=()).summary()}"
    if all(site.verdict == "not_mla" for site in report.sites):
        message = f"nothing was absorbed: this is {not_mla()}"
    broken = [site for site in report.sites if site.code in (Code.GRAPH_BREAK, Code.WRAPPED_FORWARD)]
    if broken and len(broken) == len(report.sites):  # the summary does not say where, nor what to do
        message = f"{message}: {broken[0].reason}; {broken[0].fix}"
    if message not in told:
        told.add(message)
        warn(message)


def add_to_trace(report: Report) -> None:
    """Add the report to the compilation's trace for tlparse. This does nothing unless torch writes a trace."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "mla_compile_report", "encoding": "json"},
        payload_fn=lambda: json.dumps(report.to_dict(), indent=1),
    )


def _all_kept_by_choice(report: Report) -> bool:
    """Whether each site was left by choice: to save time, by the user's wish, or because nothing can be absorbed."""
    choices = (
        Code.COST_PREFILL, Code.COST_LATENT_WIDE, Code.FORMS_EXPANDED, Code.TRAINING, *OVER_ROWS,
    )  # fmt: skip
    return all(site.code in choices for site in report.sites)
