"""The plots of ``mla-compile plan`` (floors over the context, tokens per second over the users) and of ``bench``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from mla_compile.core.measuring import Times
from mla_compile.errors import InputError
from mla_compile.report.facts import Facts
from mla_compile.report.page.write import checked
from mla_compile.workbench.machines import Machine
from mla_compile.workbench.planning import plan
from mla_compile.workbench.request import Request
from mla_compile.workbench.step_formulas import LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CONTEXTS = tuple(2**i for i in range(10, 21))
USERS = tuple(2**i for i in range(11))


def check(path: Path) -> None:
    """Raise :class:`InputError` unless a plot can be written to ``path``. Called before slow work."""
    if path.suffix.lower() not in (".svg", ".png"):
        raise InputError(f"{path} is neither .svg nor .png")
    checked(path)
    try:
        import_module("matplotlib")
    except ImportError:
        raise InputError('--plot needs matplotlib: pip install "mla-compile[plot]"') from None


def draw(model: Facts, machine: Machine, request: Request, path: Path) -> None:
    """Draw both plots of ``plan`` into one file. Lines are dotted if the users do not fit in memory."""
    figure: Figure = import_module("matplotlib.figure").Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    request = replace(request, prompt=None, output=None)  # only steps are drawn; contexts may be shorter than a prompt
    _lines(left, model, machine, [(T, replace(request, context=T)) for T in CONTEXTS], "step_s", 1e3)
    left.set(xlabel="tokens of context per user", ylabel="floor of a decode step, ms", title=f"{request.users:,} users")
    _lines(right, model, machine, [(n, replace(request, users=n)) for n in USERS], "tokens_per_s", 1.0)
    right.set(xlabel="users", ylabel="tokens/s of one batch", title=f"{request.context:,} tokens of context")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    where = f"{request.tp} x {machine.name}" if request.tp > 1 else machine.name
    figure.suptitle(f"{model.name} on {where}, {request.weight_dtype}; dotted: does not fit")
    figure.savefig(path)


def _lines(
    axes: Axes, model: Facts, machine: Machine, points: list[tuple[int, Request]], what: str, unit: float
) -> None:
    plans = [(x, plan(model, machine, request)) for x, request in points]
    for i, first in enumerate(plans[0][1].layouts):
        rows = [(x, getattr(p.layouts[i], what) * unit, p.layouts[i].fits) for x, p in plans]
        color = f"C{i}"
        axes.plot([x for x, *_ in rows], [y for _, y, _ in rows], ":", color=color)
        fitting = [(x, y) for x, y, fits in rows if fits]
        axes.plot([x for x, _ in fitting], [y for _, y in fitting], "o-", ms=3, color=color, label=LABELS[first.layout])


def draw_times(title: str, rows: Mapping[int, Mapping[str, Times]], path: Path) -> None:
    """Plot medians against the context, one line per variant, with bars from the 10th to the 90th percentile."""
    figure: Figure = import_module("matplotlib.figure").Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    for variant in dict.fromkeys(name for times in rows.values() for name in times):
        points = [(context, times[variant]) for context, times in rows.items() if variant in times]
        medians = [t.median for _, t in points]
        spread = [[t.median - t.p10 for _, t in points], [t.p90 - t.median for _, t in points]]
        axes.errorbar(
            [context for context, _ in points], medians, yerr=spread, fmt="o-", ms=3, capsize=3, label=variant
        )
    axes.set(xlabel="cached tokens", ylabel="one decode step, ms", title=title, xscale="log", yscale="log")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path)
