"""``mla-compile plan``: tell what fits on a machine, and the best possible speed of decoding and of reading prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import sympy
import typer
from rich.table import Table

from mla_compile.cli import values
from mla_compile.cli.common import NEGATIVE, AsJson, ending, err, print_json, say, show_table
from mla_compile.core.quantities import gigabytes, seconds
from mla_compile.errors import InputError
from mla_compile.models.survey import survey
from mla_compile.report.facts import Facts
from mla_compile.workbench import planning, step_formulas
from mla_compile.workbench.layouts import LayoutPlan, attentions
from mla_compile.workbench.machines import machine as machine_named
from mla_compile.workbench.planning import DeploymentPlan
from mla_compile.workbench.plotting import check, draw
from mla_compile.workbench.request import AS_STORED, MOST_DRAFTS, WEIGHT_BYTES, Request

_MEMORY = (
    "cache bytes per user", "bytes to choose by, per user", "bytes beside rows, per user",
    "bytes beside rows, per user, at most", "weight bytes",
)  # fmt: skip
_MOST_CONTEXT, _MOST_USERS, _MOST_MACHINES = 2**27, 2**24, 2**13


def plan(
    source: Annotated[
        str, typer.Argument(metavar="MODEL", help="A config.json, a directory with one, or python:MODULE:FUNCTION.")
    ],
    gpu: Annotated[
        str, typer.Option(metavar="GPU|FILE", help="h200, h100, a100, b200, gb200, cpu, or a .yaml or .json file.")
    ] = "h200",
    context: Annotated[str, typer.Option(metavar="TOKENS", help="Tokens of context per user; k is 1,024.")] = "128k",
    users: Annotated[str, typer.Option(metavar="N", help="Users decoded together.")] = "32",
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help=f"Dtype of the weights: {', '.join(WEIGHT_BYTES)}. Default: as the config stores them, else bf16.",
        ),
    ] = None,
    cache_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Dtype of the cache. Default: the weights' dtype; for quantized weights, the dtype they are used in.",
        ),
    ] = None,
    tp: Annotated[str, typer.Option(metavar="N", help="GPUs that share the model (tensor parallel).")] = "1",
    dcp: Annotated[str, typer.Option(metavar="N", help="GPUs of these that share a context; 1 means all.")] = "1",
    draft_tokens: Annotated[
        str, typer.Option(metavar="N", help="Draft tokens per step, which the step verifies (MTP).")
    ] = "0",
    acceptance: Annotated[
        float,
        typer.Option(metavar="SHARE", help="Probability, 0 to 1, that a draft is accepted if those before it are."),
    ] = Request.acceptance,
    prompt: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Tokens per prompt. Default: the whole context.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="TOKENS", help="Tokens generated per prompt; also counts prompts and steps together."),
    ] = None,
    reserve: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of memory kept free for everything else.")
    ] = 0.1,
    show_formulas: Annotated[bool, typer.Option("--formulas", help="Also print the formulas.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw a .svg or .png file over context and users.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan serving: weights, cache per user, users that fit, floors of a step and of prompts, and their bottlenecks.

    Weights are counted in their stored dtypes, plus the dequantized W_kc and W_v that absorption keeps. With --dtype,
    all weights are counted in one dtype, without dequantized copies.

    A floor is the least time that memory, arithmetic and links allow, if kernels reach a good share of the data sheet's
    figures. Real steps take longer. Latent attention is counted in its absorbed form, plain attention as it is. Prompts
    are counted in the form with fewer FLOPs, each read in one pass.

    With --draft-tokens, a step verifies drafts, and tokens/s count accepted drafts. If the config names drafting layers
    (num_nextn_predict_layers), each is counted like the last layer.

    Exits with 0 if the users fit in at least one layout, 1 if they fit in none, 2 for input that cannot be read.
    """
    with ending():
        weight_dtype = "bf16" if dtype is None else values.dtype(dtype, known=WEIGHT_BYTES)
        if not 0 <= reserve < 1:
            raise InputError(f"reserve is {reserve}, expected a share from 0 to below 1")
        request = Request(
            values.count(context, "context", _MOST_CONTEXT),
            values.count(users, "users", _MOST_USERS),
            weight_dtype,
            values.dtype(cache_dtype or ("bf16" if weight_dtype == "fp4" else weight_dtype), "cache-dtype"),
            values.count(tp, "tp", _MOST_MACHINES),
            values.count(dcp, "dcp", _MOST_MACHINES),
            reserve,
            values.count(draft_tokens, "draft-tokens", MOST_DRAFTS, least=0),
            acceptance,
            None if prompt is None else values.count(prompt, "prompt", _MOST_CONTEXT),
            None if output is None else values.count(output, "output", _MOST_CONTEXT),
        )
        request.check()
        machine = machine_named(gpu)
        if plot is not None:
            check(plot)
        with err.status("reading the model's sizes"):
            model = survey(source, request.cache_dtype).facts
        if dtype is None and model.stored:
            cache = model.stored.dtype if cache_dtype is None else request.cache_dtype
            request = replace(request, weight_dtype=AS_STORED, cache_dtype=cache)
        result = planning.plan(model, machine, request)
        if plot is not None:
            draw(model, machine, request, plot)
        texts = formula_lines(result, *_kinds(model)) if show_formulas else []
        if as_json:
            print_json(result.to_dict() | ({"formulas": texts} if texts else {}))
        else:
            _show(result)
            if not result.fits:
                say(_advice(model, result))
            say(*texts)
        if not result.fits:
            raise typer.Exit(NEGATIVE)


def _advice(model: Facts, result: DeploymentPlan) -> str:
    """Suggest options under which the users fit."""
    request, most = result.request, max(row.most_users for row in result.layouts)
    asked = f"{request.users:,} users of {request.context:,} tokens"
    fewer = f"; at most {most:,} fit, so give --users {most}, or a shorter --context" if most else ""
    least = planning.least_tp(model, result.machine, request)
    if least is None:
        return f"{asked} fit on no number of GPUs up to {planning.MOST_TP:,}{fewer or '; give a shorter --context'}"
    fit = next(row for row in least.layouts if row.fits)
    return f"{asked} fit from --tp {least.request.tp} on ({step_formulas.LABELS[fit.layout]}){fewer}"


def _kinds(model: Facts) -> tuple[bool, set[sympy.Symbol]]:
    """Return whether any attention has a latent, and which letters are 0 for this model."""
    sites, zero = attentions(model), set[sympy.Symbol]()
    if not any(a.J for a in sites):
        zero |= {step_formulas.F, step_formulas.Y}
    if not any(c.waiting_bytes or c.state_bytes for c in model.cached):
        zero |= {step_formulas.Y_b, step_formulas.Y_m}
    return any(a.latent for a in sites), zero


def formula_lines(result: DeploymentPlan, latent: bool, zero: set[sympy.Symbol]) -> list[str]:
    """Return all evaluated formulas, one per line, and the meaning of the letters."""
    used: set[sympy.Symbol] = set()
    lines = []
    for row in result.layouts:
        lines.append(f"{step_formulas.LABELS[row.layout]}, per GPU (attention and its network: per layer)")
        for name, expression in step_formulas.expressions(row.layout, latent=latent).items():
            if not expression.free_symbols.isdisjoint(zero):
                continue
            used |= expression.free_symbols
            lines.append(f"  {name} = {sympy.sstr(expression)}")
            of_prompts = step_formulas.expressions(row.layout, latent=latent, prompt=True)[name]
            if name not in _MEMORY and of_prompts != expression:
                used |= of_prompts.free_symbols
                lines.append(f"  {name} of prompts = {sympy.sstr(of_prompts)}")
    lines.append("letters: " + "; ".join(f"{s} {step_formulas.MEANING[s]}" for s in step_formulas.MEANING if s in used))
    return lines


def _show(result: DeploymentPlan) -> None:
    request, machine = result.request, result.machine
    where = f"{request.tp} x {machine.name}" if request.tp > 1 else machine.name
    dtypes = f"weights {AS_STORED}" if result.stored else request.weight_dtype
    if request.cache_dtype != request.weight_dtype:
        dtypes += f", cache in {request.cache_dtype}"
    memory, compute = f"{machine.memory_share:.0%}", f"{machine.compute_share:.0%}"
    say(
        f"{result.model} ({result.family}) on {where}, {dtypes}: {request.users:,} users of {request.context:,} tokens",
        *(f"note: {note}" for note in result.notes),
        f"floors at {memory} of the data sheet's bandwidth and {compute} of its FLOP/s",
        *(result.stored.lines() if result.stored else ()),
    )
    names = [step_formulas.LABELS[row.layout] + (f" (dcp {row.dcp})" if row.dcp > 1 else "") for row in result.layouts]
    table = Table()
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    rows = result.layouts
    _fits(table, request, rows)
    if result.fits:  # floors are shown only if the users fit in some layout
        _step(table, request, rows)
        _prompts(table, request, rows)
    show_table(table)
    if machine.source:
        say(f"figures of the machine: {machine.source}")


def _fits(table: Table, request: Request, rows: tuple[LayoutPlan, ...]) -> None:
    table.add_row("weights per GPU", *(gigabytes(r.weight_bytes) for r in rows))
    table.add_row("cache of a user on a GPU", *(gigabytes(r.cache_bytes_per_user) for r in rows))
    if any(r.most_cache_bytes_per_user > r.cache_bytes_per_user for r in rows):
        table.add_row("at most, while tokens wait for a row", *(gigabytes(r.most_cache_bytes_per_user) for r in rows))
    table.add_row("users that fit", *(f"{r.most_users:,}" for r in rows))
    table.add_row("users per GPU", *(f"{r.most_users / request.tp:,.4g}" for r in rows))
    fits = ("[green]yes[/]" if r.fits else "[red]no[/]" for r in rows)
    table.add_row(f"{request.users:,} users fit", *fits, end_section=True)


def _step(table: Table, request: Request, rows: tuple[LayoutPlan, ...]) -> None:
    table.add_row("attention: reading the cache", *(seconds(r.cache_memory_s) for r in rows))
    table.add_row("attention: arithmetic", *(seconds(r.attention_compute_s) for r in rows))
    if any(r.choosing_memory_s or r.choosing_compute_s for r in rows):
        table.add_row("choosing keys: reading", *(seconds(r.choosing_memory_s) for r in rows))
        table.add_row("choosing keys: arithmetic", *(seconds(r.choosing_compute_s) for r in rows))
    table.add_row("the rest: reading weights", *(seconds(r.weight_memory_s) for r in rows))
    table.add_row("the rest: arithmetic", *(seconds(r.weight_compute_s) for r in rows))
    if any(r.network_bytes for r in rows):
        table.add_row("bytes over links of a GPU", *(f"{r.network_bytes / 1e6:,.4g} MB" for r in rows))
    table.add_row("links", *(seconds(r.network_s) for r in rows), end_section=True)
    table.add_row("floor of a decode step", *(seconds(r.step_s) for r in rows), style="bold")
    if request.draft_tokens:
        table.add_row("of it drafting", *(seconds(r.drafting_s) for r in rows))
        table.add_row("tokens of a user per step", *(f"{r.tokens_per_step:.3g}" for r in rows))
    table.add_row("tokens/s of one batch", *(f"{r.tokens_per_s:,.0f}" for r in rows))
    table.add_row("bound on tokens/s", *(f"{r.most_tokens_per_s:,.0f}" for r in rows))
    table.add_row("bound on tokens/s per GPU", *(f"{r.most_tokens_per_s / request.tp:,.0f}" for r in rows))
    table.add_row("bottleneck", *(r.bottleneck for r in rows), end_section=True)


def _prompts(table: Table, request: Request, rows: tuple[LayoutPlan, ...]) -> None:
    read = [row.prefill for row in rows]
    table.add_row(f"prompts of {request.prompt_tokens:,} tokens")
    table.add_row("attention", *(seconds(p.floor.attention_s) for p in read))
    if any(p.floor.choosing_s for p in read):
        table.add_row("choosing keys", *(seconds(p.floor.choosing_s) for p in read))
    table.add_row("the rest", *(seconds(p.floor.weights_s) for p in read))
    table.add_row("links", *(seconds(p.floor.network_s) for p in read), end_section=True)
    table.add_row(f"floor of {request.users:,} prompts", *(seconds(p.step_s) for p in read), style="bold")
    table.add_row("first token of one alone", *(seconds(p.first_token_s) for p in read))
    table.add_row("prompt tokens/s of one batch", *(f"{p.tokens_per_s:,.0f}" for p in read))
    table.add_row("bound on prompt tokens/s", *(f"{p.most_tokens_per_s:,.0f}" for p in read))
    table.add_row("bound on them per GPU", *(f"{p.most_tokens_per_s / request.tp:,.0f}" for p in read))
    table.add_row("bottleneck", *(p.bottleneck for p in read), end_section=True)
    if request.output is not None:
        batch, most = ([r.served_tokens_per_s or 0 for r in rows], [r.most_served_tokens_per_s or 0 for r in rows])
        table.add_row(f"{request.output:,} tokens for each prompt", style="bold")
        table.add_row("tokens/s of one batch", *(f"{n:,.0f}" for n in batch))
        table.add_row("bound on tokens/s", *(f"{n:,.0f}" for n in most))
        table.add_row("bound on tokens/s per GPU", *(f"{n / request.tp:,.0f}" for n in most))
