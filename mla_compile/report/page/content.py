"""The content of the page: the report and the tables of ``explain``, prepared for the template."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata

from mla_compile.codes import CODES, VerdictName
from mla_compile.core.drawing import DrawnNode
from mla_compile.core.quantities import amount, gigabytes, scaled
from mla_compile.core.records import Location, SiteReport
from mla_compile.report.explained import CONTEXTS, CacheRow, Explained, SiteChoice, TokenCost, query_flops, token_costs
from mla_compile.report.facts import Facts, Family
from mla_compile.report.grouping import SiteGroup, grouped
from mla_compile.report.page import charts
from mla_compile.report.page.graphs import PlacedGraph, laid_out
from mla_compile.report.verdicts import advice, verdict
from mla_compile.report.wording import headline, rows_of
from mla_compile.version import __version__

PLACES = tuple(2**i for i in range(11, 20))
"""The contexts of the cost charts. They include the contexts of the tables."""
QUERIES = tuple(2**i for i in range(13))
_QUERY_CONTEXT = 32768
_STYLES = {"expanded": "before", "as it is": "before", "absorbed": "after", "sparse": "listed"}
_FAMILIES: dict[Family, str] = {
    "refused": "not proved to be MLA",
    "kept": "a latent as wide as K and V",
    "shared rows": "heads that share one row per token",
}


@dataclass(frozen=True)
class Picture:
    """A named drawing, and a list of its nodes for readers who cannot see the drawing."""

    name: str
    graph: PlacedGraph
    nodes: tuple[DrawnNode, ...]


@dataclass(frozen=True)
class Quote:
    """A line of the user's source, and its role in the verdict."""

    what: str
    place: str
    code: str


@dataclass(frozen=True)
class SiteView:
    """One group of equal attentions."""

    verdict: VerdictName
    headline: str
    where: str
    count: int
    code: str
    meaning: str
    rows: tuple[tuple[str, str], ...]
    quotes: tuple[Quote, ...]
    pictures: tuple[Picture, ...]


@dataclass(frozen=True)
class Table:
    """A table with a caption. The first column names the rows.

    ``rows``: the cells of each row, and whether the row is highlighted. ``numbers``: the columns with numbers.
    """

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], bool], ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class SizeChoices:
    """Break-even and folds of the attentions of one size."""

    title: str
    break_even: str
    fold: str
    table: Table
    chart: charts.LineChart | None


@dataclass(frozen=True)
class Content:
    """The content of the whole page."""

    title: str
    facts: tuple[str, ...]
    tone: VerdictName
    verdict: str
    advice: str
    notes: tuple[str, ...]
    sites: tuple[SiteView, ...]
    cache_chart: charts.BarChart | None
    cache_table: Table | None
    cache_note: str
    cost_charts: tuple[charts.LineChart, ...]
    cost_table: Table | None
    cost_note: str
    choices: tuple[SizeChoices, ...]
    versions: str


def content(result: Explained, title: str) -> Content:
    """Return everything that the page shows about one explained model."""
    model = result.facts
    tone, said = verdict(model)
    costs = result.costs
    return Content(
        title=title or model.name,
        facts=_facts(model, result.dtype),
        tone=tone,
        verdict=said,
        advice=advice(model),
        notes=(*result.notes, *model.messages),
        sites=tuple(_site(group) for group in grouped(model.sites)),
        cache_chart=_cache_chart(result.cache) if result.cache else None,
        cache_table=_cache_table(result) if result.cache else None,
        cache_note=model.own_cache(),
        cost_charts=_cost_charts(result) if costs else (),
        cost_table=_cost_table(costs) if costs else None,
        cost_note=_crossing(costs),
        choices=tuple(_choice(choice) for choice in result.choices),
        versions=_versions(),
    )


def _facts(model: Facts, dtype: str) -> tuple[str, ...]:
    weights = model.weights
    said = [model.name, _FAMILIES.get(model.family, model.family)]
    if weights.total:
        said.append(f"{amount(weights.total)} parameters")
        if weights.active != weights.total:
            said.append(f"{amount(weights.active)} read for a token")
    if model.stored:
        said.append(f"{gigabytes(model.stored.bytes)} of weights as stored ({model.stored.method})")
        return (*said, f"cache in {dtype}")
    return (*said, f"weights and cache in {dtype}")


def _site(group: SiteGroup) -> SiteView:
    site = group.site
    count = sum(site.stands_for for site in group.sites)
    quoted = ("source", "because of")
    pictures: list[Picture] = []
    if site.drawing is not None:
        pictures.append(Picture("before" if site.drawing.after else "as it is", laid_out(site.drawing.before),
                                site.drawing.before.nodes))  # fmt: skip
        if site.drawing.after is not None:
            pictures.append(Picture("after", laid_out(site.drawing.after), site.drawing.after.nodes))
    return SiteView(
        site.verdict, headline(site), group.where, count, str(site.code), _meaning(site),
        tuple((label, value) for label, value in rows_of(group) if label not in quoted),
        _quotes(site), tuple(pictures),
    )  # fmt: skip


def _meaning(site: SiteReport) -> str:
    if not site.kept:
        return CODES[site.code].meaning
    return f"absorbed are {', '.join(site.parts)}; {', '.join(k.part for k in site.kept)} stay as they were"


def _quotes(site: SiteReport) -> tuple[Quote, ...]:
    places: list[tuple[str, Location | None]] = [("the attention", site.where), ("what stands in the way", site.blame)]
    places += [(f"why {kept.part} stay", kept.blame) for kept in site.kept]
    return tuple(Quote(what, at.source, at.code or "") for what, at in places if at is not None and at.source)


def _cache_chart(rows: Sequence[CacheRow]) -> charts.BarChart:
    drawn = [(row.kind, row.values, row.own) for row in rows]
    return charts.bars("Cached values per token and layer", drawn, "values per token and layer")


def _cache_table(result: Explained) -> Table:
    head = ("kind", "of each token", "values per layer", *(charts.short(T) for T in CONTEXTS))
    rows = tuple(
        ((row.kind, row.meaning, f"{row.values:,}", *(gigabytes(size) for size in row.bytes)), row.own)
        for row in result.cache
    )
    return Table(f"Cache of one sequence in {result.dtype}, all layers, by context", head, rows, (2, 3, 4, 5))


def _cost_charts(result: Explained) -> tuple[charts.LineChart, ...]:
    costs = token_costs(result.facts, result.element_bytes, PLACES)
    made = []
    for title, unit, values in (("FLOPs per token", "", _flops_of), ("Bytes per token", "B", _bytes_of)):
        series = [charts.Series(row.form, _STYLES.get(row.form, "before"), values(row)) for row in costs]
        at = crossing(costs, values)
        limit = (at, "break-even") if at is not None else None
        made.append(charts.lines(title, "tokens of context", PLACES, series, marked=CONTEXTS, unit=unit, limit=limit))
    return tuple(made)


def _cost_table(costs: Sequence[TokenCost]) -> Table:
    rows = []
    for row in costs:
        rows.append(((row.form, "FLOPs", *(scaled(n, "").strip() for n in row.flops)), row is costs[-1]))
        rows.append((("", "bytes", *(scaled(n, "B") for n in row.bytes)), row is costs[-1]))
    head = ("form", "", *(charts.short(T) for T in CONTEXTS))
    return Table("One decoded token of one sequence, by context", head, tuple(rows), (2, 3, 4))


def crossing(costs: Sequence[TokenCost], values: Callable[[TokenCost], Sequence[int]]) -> float | None:
    """Return the context at which the first two forms have equal cost; ``None`` if there is no such context.

    Both costs are linear in the context.
    """
    if len(costs) < 2:
        return None
    (a, b), (T, U) = [values(row) for row in costs[:2]], CONTEXTS[:2]
    slopes = [(v[1] - v[0]) / (U - T) for v in (a, b)]
    if slopes[0] == slopes[1]:
        return None
    at = T + (b[0] - a[0]) / (slopes[0] - slopes[1])
    return at if at > 0 else None


def _crossing(costs: Sequence[TokenCost]) -> str:
    if len(costs) < 2:
        return ""
    said = []
    for what, values in (("FLOPs", _flops_of), ("bytes", _bytes_of)):
        at = crossing(costs, values)
        said.append(f"in {what} from {math.ceil(at):,} tokens on" if at is not None and at > 1 else f"in {what} always")
    return f"For one query, absorbing pays {' and '.join(said)}."


def _flops_of(row: TokenCost) -> Sequence[int]:
    return row.flops


def _bytes_of(row: TokenCost) -> Sequence[int]:
    return row.bytes


def _choice(choice: SiteChoice) -> SizeChoices:
    rows = tuple(
        (
            (side.product, f"{side.chained:,}", f"{side.folded:,}", f"{side.folded / side.chained:.3g} x",
             "pays" if side.pays else "does not pay"),
            side.pays,
        )
        for side in choice.folds
    )  # fmt: skip
    return SizeChoices(
        f"{choice.dims}",
        f"Break-even: {choice.when_absorbing_pays}.",
        f"Fold verdict: {choice.whether_folding_pays}.",
        Table(
            "Weights read per token and layer",
            ("product", "as they are", "folded", "ratio", "in bytes"),
            rows,
            (1, 2, 3),
        ),
        _query_chart(choice),
    )


def _query_chart(choice: SiteChoice) -> charts.LineChart:
    series = [charts.Series(form, _STYLES[form], values) for form, values in
              query_flops(choice.dims, QUERIES, _QUERY_CONTEXT)]  # fmt: skip
    even = choice.break_even[CONTEXTS.index(_QUERY_CONTEXT)]
    limit = None if math.isinf(even) else (even, f"break-even: {math.ceil(even):,}")
    return charts.lines(
        f"FLOPs of one attention call, {charts.short(_QUERY_CONTEXT)} tokens of context", "queries per call", QUERIES,
        series, marked=(1, 128, 1024), unit="", limit=limit,
    )  # fmt: skip


def _versions() -> str:
    known = [f"mla_compile {__version__}"]
    for name in ("torch", "transformers"):
        try:
            known.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join([*known, f"Python {platform.python_version()}"])
