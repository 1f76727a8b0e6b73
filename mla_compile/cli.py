"""The command line: parses options, calls the module that does the work, and shows what it returns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import mla_compile
from mla_compile import demo as demo_
from mla_compile.cli_explain import explain
from mla_compile.cli_export import export
from mla_compile.cli_plan import plan
from mla_compile.cli_run import run
from mla_compile.errors import MlaCompileError

app = typer.Typer(
    help="Find Multi-head Latent Attention in PyTorch models and decode it in its absorbed form.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a plain traceback is what a bug report needs
)
_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False)


app.command()(explain)
app.command()(plan)
app.command()(export)
app.command()(run)


def _version(wanted: bool) -> None:
    if wanted:
        _out.print(mla_compile.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Find Multi-head Latent Attention in PyTorch models and decode it in its absorbed form."""


@app.command()
def demo(
    layers: Annotated[int, typer.Option(help="Decoder layers of the model.")] = 2,
    contexts: Annotated[str, typer.Option(help="Context lengths to time, separated by commas.")] = "512,2048,8192",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(demo_.DTYPES)}.")] = "float32",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write everything to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One layer, short contexts, few rounds.")] = False,
) -> None:
    """Optimize a small model in the shape of DeepSeek-V3, compare its tokens with the original's, and time both.

    The model is built from its config with seeded weights: no download.

    Exits with 1 when the tokens differ or the demo cannot run.
    """
    try:
        lengths = _lengths(contexts)
        if quick:
            settings = demo_.Settings(1, tuple(sorted({min(n, 1024) for n in lengths})), dtype, tokens=8, rounds=3)
        else:
            settings = demo_.Settings(layers, lengths, dtype)
        outcome = _with_progress(settings)
        if json_file is not None:
            json_file.write_text(json.dumps(outcome.to_dict(), indent=2, allow_nan=False) + "\n")
    except (MlaCompileError, OSError) as error:
        _err.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    _show(outcome)
    if not outcome.agreement.ok:
        raise typer.Exit(1)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no list of whole numbers such as 512,2048", param_hint="--contexts"
        ) from None


def _with_progress(settings: demo_.Settings) -> demo_.Outcome:
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=_err, transient=True) as bar:
        task = bar.add_task("", total=demo_.stages(settings))
        begun = False

        def advance(stage: str) -> None:
            nonlocal begun
            bar.update(task, description=stage, advance=int(begun))
            begun = True

        return demo_.run(settings, advance)


def _show(outcome: demo_.Outcome) -> None:
    _out.print(outcome.report)
    _out.print()
    _show_agreement(outcome.agreement)
    if outcome.precision_ratio is not None:
        _out.print(f"precision: error against float64 at most {outcome.precision_ratio:.3g} times the original's")
    before, after = outcome.cache_bytes
    if after:
        _out.print(
            f"cache per token, all layers: {before:,} bytes as K and V of every head, "
            f"{after:,} bytes as latent rows ({before / after:.1f} times less)"
        )
    _out.print()
    _out.print(_timing_table(outcome))


def _show_agreement(agreement: demo_.Agreement) -> None:
    count, step = len(agreement.tokens), agreement.first_difference
    error = f"largest difference of logits {agreement.logits_error:.1e} of the largest logit"
    if step is not None:
        why = "where rounding decides between two tokens" if agreement.tie else "and rounding does not explain it"
        said = f"tokens differ from step {step + 1} of {count}, {why}; {error}"
    else:
        said = f"tokens: all {count} equal to the original's; {error}"
    if agreement.logits_error > agreement.tolerance:
        said += f", more than the {agreement.tolerance:.0e} that rounding explains"
    _out.print(said, style="green" if agreement.ok else "bold red")


def _timing_table(outcome: demo_.Outcome) -> Table:
    table = Table(title=f"one decode step, milliseconds (median of {outcome.settings.rounds} interleaved rounds)")
    for name in ("context", "eager", "Inductor", "mla_compile", "vs eager", "vs Inductor"):
        table.add_column(name, justify="right", no_wrap=True)
    for t in outcome.timings:
        times = [f"{ms:.2f}" for ms in (t.eager_ms, t.inductor_ms, t.mla_ms)]
        table.add_row(f"{t.context:,}", *times, f"{t.eager_ms / t.mla_ms:.1f}x", f"{t.inductor_ms / t.mla_ms:.1f}x")
    first, last = outcome.timings[0], outcome.timings[-1]
    if last.context > first.context:
        span = (last.context - first.context) / 1000
        slopes = [(getattr(last, name) - getattr(first, name)) / span for name in ("eager_ms", "inductor_ms", "mla_ms")]
        table.add_section()
        table.add_row("per 1,000 more", *(f"{slope:.2f}" for slope in slopes), "", "")
    return table
