"""``mla-compile explain``: tell, without weights, what would be absorbed in a model and what this saves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from mla_compile.cli import values
from mla_compile.cli.common import NEGATIVE, AsJson, ending, err, out, print_json, say, say_aside, show_table
from mla_compile.core.quantities import BYTES, amount, gigabytes, scaled
from mla_compile.errors import InputError
from mla_compile.models.survey import survey
from mla_compile.report.explained import CONTEXTS, Explained, SiteChoice, explained
from mla_compile.report.page.write import checked, write_page
from mla_compile.report.report import Report
from mla_compile.report.verdicts import advice, verdict

_CONTEXT_NAMES = tuple(f"{T // 1024}k" for T in CONTEXTS)


def explain(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A config.json, a directory with one, or python:MODULE:FUNCTION (see above)."
        ),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help=f"Dtype of weights and cache: {', '.join(BYTES)}. Default: as the config stores them, else bf16.",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write an HTML page to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Explain what would be absorbed in a model, why not more, and the cost of its cache and tokens.

    The model is built from its config on the meta device, and one decode step is traced. This needs no weights and no
    download, and takes a few seconds for any model. python:MODULE:FUNCTION names a function that returns a causal
    language model of transformers, or a module with the inputs of one decode step: (model, args) or (model, args,
    kwargs).

    Exits with 0 if something is absorbed, 1 if nothing is (for example, no Multi-head Latent Attention), 2 for input
    that cannot be read.
    """
    with ending():
        asked = None if dtype is None else values.dtype(dtype)
        target = None if html is None else checked(html)
        own = (Path(source), Path(source) / "config.json")
        if target is not None and target.exists() and any(p.exists() and p.samefile(target) for p in own):
            raise InputError(f"{target} is the model's config, which the page would replace; give it another name")
        with err.status("tracing a decode step"):
            facts, report = survey(source, asked or "bf16")
            if asked is not None:
                facts = replace(facts, stored=None)
            name = asked or (facts.stored.dtype if facts.stored else "bf16")
            result = explained(facts, name, BYTES[name])
            if target is not None:
                write_page(result, target, _title(source))
        if as_json:
            print_json(result.to_dict() | {"report": report.to_dict()})
        else:
            _show(result, report)
        if target is not None:
            say_aside(f"wrote {target}")
        if not report.absorbed:
            raise typer.Exit(NEGATIVE)


def _title(source: str) -> str:
    """Return the model's name: the name of the config file, its directory or the function."""
    path = Path(source)
    if source.startswith("python:"):
        return source.removeprefix("python:")
    return path.absolute().parent.name if path.name == "config.json" else path.absolute().stem


def _show(result: Explained, report: Report) -> None:
    model = result.facts
    weights = model.weights
    size = f"{amount(weights.total)} parameters"
    active = "" if weights.active == weights.total else f", {amount(weights.active)} of them read for a token"
    out.print(f"{model.name}: {model.family}, {size}{active}", style="bold", markup=False, soft_wrap=True)
    for note in result.notes:
        out.print(f"note: {note}", markup=False, soft_wrap=True)
    out.print()
    out.print(report)
    out.print()
    if result.cache:
        show_table(_cache_table(result))
    if own := model.own_cache():
        say(own)
    if result.costs:
        show_table(_cost_table(result))
    for choice in result.choices:
        say(*_choice_lines(choice))
    if model.stored:
        say(*model.stored.lines())
    say(f"{verdict(model)[1]} {advice(model)}")


def _cache_table(result: Explained) -> Table:
    table = Table(title=f"cache in {result.dtype}, with these heads and widths", title_justify="left")
    table.add_column("kind")
    table.add_column("of each token", overflow="fold")
    table.add_column("values per layer", justify="right")
    for name in _CONTEXT_NAMES:
        table.add_column(name, justify="right", no_wrap=True)
    for row in result.cache:
        sizes = [gigabytes(size) for size in row.bytes]
        table.add_row(row.kind, row.meaning, f"{row.values:,}", *sizes, style="bold green" if row.own else None)
    return table


def _cost_table(result: Explained) -> Table:
    table = Table(title="one decoded token of one sequence, whole model", title_justify="left")
    for name in ("form", "", *_CONTEXT_NAMES):
        table.add_column(name, justify="right" if name in _CONTEXT_NAMES else "left", no_wrap=True)
    for row in result.costs:
        table.add_row(row.form, "FLOPs", *(scaled(n, "") for n in row.flops))
        table.add_row("", "bytes", *(scaled(n, "B") for n in row.bytes), end_section=True)
    return table


def _choice_lines(choice: SiteChoice) -> list[str]:
    lines = [f"{choice.count} sites with {choice.dims}", f"  break-even: {choice.when_absorbing_pays}"]
    for side in choice.folds:
        verdict = "pays" if side.pays else "does not pay"
        lines.append(
            f"  folding {side.product}: {side.chained:,} weights as they are, {side.folded:,} folded "
            f"({side.folded / side.chained:.3g} x): {verdict} in bytes"
        )
    return [*lines, f"  fold verdict: {choice.whether_folding_pays}"]
