"""The command line and its commands, including the demo."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperCommand

from mla_compile.cli import values
from mla_compile.cli.bench import bench
from mla_compile.cli.common import EXIT_CODES, NEGATIVE, AsJson, ending, out, print_json, progress, say, show_table
from mla_compile.cli.explain import explain
from mla_compile.cli.export import export
from mla_compile.cli.plan import plan
from mla_compile.cli.run import run
from mla_compile.cli.serve import serve
from mla_compile.version import __version__
from mla_compile.workbench import demo as demo_

app = typer.Typer(
    help="Find Multi-head Latent Attention in PyTorch models and decode it in its absorbed form.",
    no_args_is_help=True,
    epilog=EXIT_CODES,
    pretty_exceptions_enable=False,  # bug reports need plain tracebacks
    rich_markup_mode="markdown",  # fills the paragraphs of a docstring to the terminal's width
)
_MOST_CONTEXT = 2**27


class _Plain(TyperCommand):
    """A command whose help is plain text, because a table would cut the names of options."""

    def format_help(self, *how: Any) -> None:
        self.rich_markup_mode = None
        super().format_help(*how)


app.command()(explain)
app.command()(plan)
app.command()(bench)
app.command()(export)
app.command()(run)
app.command(cls=_Plain)(serve)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(__version__)
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
    layers: Annotated[int, typer.Option(metavar="N", help="Decoder layers of the model.")] = 2,
    contexts: Annotated[
        str, typer.Option(metavar="N,N,...", help="Context lengths to time, separated by commas; k is 1,024.")
    ] = "512,2048,8192",
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help=f"One of {', '.join(demo_.DTYPES)}.")] = "float32",
    quick: Annotated[bool, typer.Option("--quick", help="One layer, short contexts, few rounds.")] = False,
    as_json: AsJson = False,
) -> None:
    """Optimize a small model like DeepSeek-V3, compare its tokens with the original's, and time both models.

    The model is built from its config with seeded weights, so nothing is downloaded.

    Exits with 0 if the tokens are equal, 1 if they differ, 2 if the demo cannot run.
    """
    with ending():
        lengths = values.counts(contexts, "contexts", _MOST_CONTEXT)
        settings = demo_.DemoSettings(layers, lengths, dtype)
        if quick:
            short = tuple(sorted({min(n, 1024) for n in lengths}))
            settings = replace(settings, layers=1, contexts=short, tokens=8, rounds=3)
        with progress(demo_.stages(settings)) as stage:
            outcome = demo_.run(settings, stage)
        if as_json:
            print_json(outcome.to_dict())
        else:
            _show(outcome)
        if not outcome.agreement.ok:
            raise typer.Exit(NEGATIVE)


def _show(outcome: demo_.DemoResult) -> None:
    out.print(outcome.report)
    out.print()
    _show_agreement(outcome.agreement)
    if outcome.precision_ratio is not None:
        out.print(f"precision: error against float64 at most {outcome.precision_ratio:.3g} times the original's")
    if outcome.held is not None:
        before, after = outcome.held
        say(f"measured bytes per token in the cache, all layers: {after:,.0f}; with the original {before:,.0f}")
    read, reads = outcome.read_bytes
    if reads:
        say(
            f"attention reads {reads:,} bytes of rows per cached token in a step, all layers; the original reads "
            f"{read:,} bytes of K and V, which every step expands from those rows ({read / reads:.1f} times more)"
        )
    out.print()
    show_table(_timing_table(outcome))


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
    out.print(said, style="green" if agreement.ok else "bold red")


def _timing_table(outcome: demo_.DemoResult) -> Table:
    table = Table(title=f"one decode step, milliseconds (median of {outcome.settings.rounds} interleaved rounds)")
    for name in ("context", "eager", "Inductor", "mla_compile", "vs eager", "vs Inductor"):
        table.add_column(name, justify="right", no_wrap=True)
    names = "eager", "inductor", "mla"
    for t in outcome.timings:
        eager, inductor, mla = (t.times[name].median for name in names)
        times = [f"{ms:.2f}" for ms in (eager, inductor, mla)]
        table.add_row(f"{t.context:,}", *times, f"{eager / mla:.1f}x", f"{inductor / mla:.1f}x")
    first, last = outcome.timings[0], outcome.timings[-1]
    if last.context > first.context:
        slopes = [first.per_1000(last, name) for name in names]
        table.add_section()
        table.add_row("per 1,000 more", *("within the spread" if s is None else f"{s:.2f}" for s in slopes), "", "")
    return table
