"""``mla-compile bench``: time decode steps of a model in eager, Inductor and mla side by side on this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from mla_compile.cli import values
from mla_compile.cli.common import INTERRUPTED, AsJson, ending, err, failed, print_json, progress, say, show_table
from mla_compile.core.dims import Dims
from mla_compile.errors import InputError
from mla_compile.models import config_file
from mla_compile.workbench.bench import DTYPES, VARIANTS, Bench, BenchSettings, config_of, config_with, subject
from mla_compile.workbench.plotting import check, draw_times

_TITLES = {"eager": "eager", "inductor": "Inductor", "mla": "mla"}
_MOST_CONTEXT, _MOST_BATCH, _MOST_ROUNDS, _MOST_THREADS = 2**27, 2**16, 10**5, 2**10


def bench(
    source: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A config.json or a directory with one; or give --dims.")
    ] = None,
    dims: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help='Sizes instead of a config: "H=16 L=512 R=64 N=128 V=128 D=2048"; add Q if queries have a latent.',
        ),
    ] = None,
    contexts: Annotated[
        str, typer.Option(metavar="N,N,...", help="Cached tokens, separated by commas; k is 1,024.")
    ] = "512,4k",
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help=f"Dtype to run in: {', '.join(DTYPES)}.")] = "bf16",
    batch: Annotated[str, typer.Option(metavar="N", help="Sequences decoded together.")] = "1",
    layers: Annotated[str, typer.Option(metavar="N", help="The number of layers to keep.")] = "1",
    rounds: Annotated[str, typer.Option(metavar="N", help="The most rounds at each length.")] = "15",
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="Approximate time at each length; at least three rounds are run.")
    ] = 20.0,
    threads: Annotated[str | None, typer.Option(metavar="N", help="CPU threads. Default: torch's choice.")] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu, cuda or cuda:N.")] = "cpu",
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw a .svg or .png file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure decode steps on this machine: eager PyTorch, Inductor and mla, in turns in one process.

    The model has random weights, few layers and a small vocabulary. Caches are filled with random rows, so no prompt is
    run. Timing starts only if all variants give equal logits. Ctrl-C shows the results so far.

    Exits with 0 after measuring, 1 if there is nothing to compare (no Multi-head Latent Attention, nothing absorbed,
    results that differ), 2 for input that cannot be used, 130 if interrupted.
    """
    with ending():
        settings = BenchSettings(
            values.counts(contexts, "contexts", _MOST_CONTEXT), values.dtype(dtype),
            values.count(batch, "batch", _MOST_BATCH),
            values.count(layers, "layers", config_file.LARGEST_DEPTH),
            values.count(rounds, "rounds", _MOST_ROUNDS), seconds, _device(device),
        )  # fmt: skip
        sizes = _dims(dims) if dims is not None else None
        if (source is None) == (sizes is None):
            raise InputError("give either a MODEL (config.json or a directory) or its sizes as --dims")
        if plot is not None:
            check(plot)
        if threads is not None:
            torch.set_num_threads(values.count(threads, "threads", _MOST_THREADS))
        with err.status("reading the model's sizes"):
            if sizes is not None:
                run = Bench(subject(config_with(sizes, settings.layers), (), settings))
            else:
                run = Bench(subject(*config_of(str(source), settings.layers), settings))
        interrupted = _run(run)
        rows = run.measured()
        if plot is not None and rows:
            draw_times(f"{run.subject.facts.name}, {settings.dtype}", {r.context: r.times() for r in rows}, plot)
        if as_json:
            print_json(run.to_dict())
        else:
            _show(run)
        if interrupted:
            raise failed(f"interrupted; {len(rows)} of {len(settings.contexts)} lengths were measured", INTERRUPTED)


def _run(run: Bench) -> bool:
    """Measure, and return whether the user interrupted."""
    try:
        with progress(run.stages()) as stage:
            for name in run.run():
                stage(name)
    except KeyboardInterrupt:
        return True
    return False


def _device(text: str) -> str:
    found = re.fullmatch(r"cpu|cuda(?::(\d{1,3}))?", text)
    if found is None:
        raise InputError(f"device is {text!r}, expected cpu, cuda or cuda:N")
    if text != "cpu" and int(found[1] or 0) >= torch.cuda.device_count():
        seen = torch.cuda.device_count()
        raise InputError(f"device is {text!r}, and torch {torch.__version__} sees {seen} CUDA devices")
    return text


def _dims(text: str) -> Dims:
    letters = dict.fromkeys("HLRNVDQ")
    sizes: dict[str, int] = {}
    for part in text.replace(",", " ").split():
        name, _, number = part.partition("=")
        if name not in letters:
            raise InputError(f"--dims has {part!r}, expected a size for each of {', '.join(letters)}")
        if name in sizes:
            raise InputError(f"--dims has {name} twice")
        sizes[name] = values.count(number, f"--dims: {name}", config_file.LARGEST_COUNT if name == "H" else 2**17)
    missing = [name for name in "HLRNVD" if name not in sizes]
    if missing:
        raise InputError(f"--dims has no {', '.join(missing)}; an example: H=16 L=512 R=64 N=128 V=128 D=2048")
    return Dims(**sizes)


def _show(run: Bench) -> None:
    settings, model = run.settings, run.subject.facts
    about = run.about
    where = about.get("device", f"{about['cpu']}, {about['threads']} threads")
    say(f"{model.name} with {run.subject.dims}, {settings.dtype}, batch {settings.batch}, on {where}")
    say(*(f"note: {note}" for note in run.subject.notes))
    rows = run.measured()
    if not rows:
        return
    table = Table(title="one decode step, milliseconds: median [10th to 90th percentile]", title_justify="left")
    for name in ("context", *(_TITLES[v] for v in VARIANTS), "vs eager", "vs Inductor", "rounds"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        times, faster = row.times(), row.faster_than()
        shown = [f"{t.median:.3g} [{t.p10:.3g}-{t.p90:.3g}]" if (t := times.get(v)) else "too large" for v in VARIANTS]
        gains = [f"{faster[v]:.3g}x" if v in faster else "" for v in ("eager", "inductor")]
        table.add_row(f"{row.context:,}", *shown, *gains, str(row.rounds))
    show_table(table)
    if any(row.too_large for row in rows):
        say("too large: expanded keys and values would not fit in the free memory; only mla was run there")
