"""The report: one record per attention site, shown as text or page to people and as JSON to programs."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

from mla_compile.codes import VerdictName
from mla_compile.core.counting import count
from mla_compile.core.records import VERDICTS, PassRecord, SiteReport
from mla_compile.errors import InputError
from mla_compile.report.grouping import grouped, of_each_attention
from mla_compile.report.page.write import render_report, write_report
from mla_compile.report.wording import WORDS, headline, rows_of

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = "mla_compile.report/2"
"""The schema in every JSON report. The number grows when programs for the old layout would misread the new layout."""

_SHOWN_SECONDS = 0.01
"""The text omits passes that took less time. The record has all passes."""

_NOT_OURS = ("trace", "code", "guards")  # stages of a compilation that Dynamo or the code generator runs

_STYLES: dict[VerdictName, str] = {"absorbed": "green", "kept": "yellow", "refused": "red", "not_mla": "dim"}


NOTHING_YET = "nothing was compiled yet: call the model, or its generate(), under torch.no_grad()"
"""The message of a report before the first call."""

UNSEEN = "no graph that was compiled has an attention"
"""The beginning of a message in a report without sites, if some of the model's code is in no graph."""

LEFT_OUT = "an attention ran uncompiled"
"""The beginning of a message about a method of an optimized module that calls uncompiled code."""


@dataclass(frozen=True, repr=False)
class Report:
    """The result for every attention site of a graph, or of several graphs (see :meth:`merged`).

    ``print`` shows the report as text, and rich shows it in colour.

    Attributes:
        sites: one entry for each attention.
        graph: the names of the graphs.
        passes: the changes and seconds of the capture and of each pass. For an optimized module, Dynamo's trace comes
            first, and the code generation (by kind of layer) and Dynamo's guards come last.
        messages: notes that concern no single site.
    """

    sites: tuple[SiteReport, ...]
    graph: str = ""
    passes: tuple[PassRecord, ...] = ()
    messages: tuple[str, ...] = ()

    @property
    def absorbed(self) -> int:
        """The number of sites that run in an absorbed form."""
        return self._count("absorbed")

    @property
    def kept(self) -> int:
        """The number of sites left as they are, for example because of cost, an option or a failed check."""
        return self._count("kept")

    @property
    def refused(self) -> int:
        """The number of sites where absorption would change the result, or could not be proved safe."""
        return self._count("refused")

    @property
    def not_mla(self) -> int:
        """The number of attention sites that are plain MHA, GQA or MQA."""
        return self._count("not_mla")

    def to_html(self, path: str | os.PathLike[str], *, title: str = "", dtype: str = "bf16") -> None:
        """Write one self-contained page: sites (drawn if the report is from ``explain``), cache, costs, refusals.

        Args:
            path: the file. An existing file stays until the new file is complete.
            title: the page's title.
            dtype: the dtype of weights and cache: fp32, bf16, fp16 or fp8.

        Raises:
            InputError: the path cannot be written.
            OptionError: ``dtype`` has another value.
        """
        write_report(self.sites, self.messages, path, title=title, dtype=dtype)

    @property
    def seconds(self) -> float:
        """The time spent in the capture and in all passes: the compile time without Dynamo and code generation."""
        return sum(p.seconds for p in self.passes if is_ours(p.name))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able record. The key ``schema`` names the layout."""
        return {
            "schema": SCHEMA,
            "graph": self.graph,
            "counts": {verdict: self._count(verdict) for verdict in VERDICTS},
            "sites": [site.to_dict() for site in self.sites],
            "passes": [asdict(p) for p in self.passes],
            "messages": list(self.messages),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return ``to_dict`` as strict JSON (no ``NaN`` or ``Infinity``)."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Report:
        """Read a report from the record that ``to_dict`` returns.

        Raises:
            InputError: ``record`` is not a report of this schema.
        """
        schema = record.get("schema")
        if schema != SCHEMA:
            raise InputError(f"this is not a report that can be read here: schema is {schema!r}, expected {SCHEMA!r}")
        try:
            return cls(
                sites=tuple(SiteReport.from_dict(site) for site in record["sites"]),
                graph=record["graph"],
                passes=tuple(PassRecord(**p) for p in record["passes"]),
                messages=tuple(record["messages"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"the report names the schema {SCHEMA!r} but does not follow it: {error!r}") from error

    @classmethod
    def merged(cls, reports: Iterable[Report]) -> Report:
        """Merge reports of several graphs.

        Sites are renumbered, the changes and seconds of equally named passes are added, and equal messages are kept
        once.
        """
        several = list(reports)
        sites = [(site, site.graph or report.graph) for report in several for site in report.sites]
        totals: dict[str, PassRecord] = {}
        for p in (p for report in several for p in report.passes):
            seen = totals.get(p.name, PassRecord(p.name, 0, 0.0))
            totals[p.name] = PassRecord(p.name, seen.changes + p.changes, seen.seconds + p.seconds)
        return cls(
            sites=tuple(replace(site, index=i, graph=graph) for i, (site, graph) in enumerate(sites)),
            graph=", ".join(dict.fromkeys(report.graph for report in several if report.graph)),
            passes=tuple(totals.values()),
            messages=tuple(dict.fromkeys(message for report in several for message in report.messages)),
        )

    def within(self, path: str) -> Report:
        """Return the report with ``path`` before all module paths, for a model that holds this module at ``path``."""
        if not path:
            return self
        placed = (replace(s.where, module=".".join(filter(None, (path, s.where.module)))) for s in self.sites)
        return replace(self, sites=tuple(replace(s, where=w) for s, w in zip(self.sites, placed, strict=True)))

    def summary(self) -> str:
        """Return one line for logs."""
        place = f" in graph{'s' * (', ' in self.graph)} {self.graph}" if self.graph else ""
        if NOTHING_YET in self.messages:
            return NOTHING_YET
        if not self.sites:
            return next(
                (note for note in self.messages if note.startswith((UNSEEN, LEFT_OUT))), f"no attention sites{place}"
            )
        counts = []
        for verdict in VERDICTS:
            sites = [site for site in self.sites if site.verdict == verdict]
            if sites:
                # Show codes only for kept and refused sites, because other codes tell the reader nothing.
                codes = ", ".join(dict.fromkeys(str(site.code) for site in sites))
                counts.append(f"{len(sites)} {WORDS[verdict]}" + f" ({codes})" * (verdict in ("kept", "refused")))
        noun = "attention site" if len(self.sites) == 1 else "attention sites"
        attentions = sum(site.stands_for for site in of_each_attention(self.sites))
        of = f" of {attentions} attention{'s' * (attentions > 1)}" if attentions != len(self.sites) else ""
        line = f"{len(self.sites)} {noun}{of}{place}: {', '.join(counts)}"
        line += "".join(f"; {what}" for what in self._figures())
        return line + (f"; capture and passes {self.seconds:.2f} s" if self.passes else "")

    def _figures(self) -> list[str]:
        """Say how many values absorbed attentions read and hold per token.

        Each attention of the model is counted once.
        """
        each = [site for site in of_each_attention(self.sites) if site.verdict == "absorbed"]
        said = []
        for words, before, after in (
            ("attention reads {} -> {} values per key", "values_read_before", "values_read_after"),
            ("the cache holds {} -> {} values per token", "values_held_before", "values_held_after"),
        ):
            known = [s for s in each if getattr(s, before) is not None and getattr(s, after) is not None]
            totals = (sum(getattr(s, name) * s.stands_for for s in known) for name in (before, after))
            said += [words.format(*(f"{total:,}" for total in totals))] if known else []
        return said

    def text(self, width: int = 100) -> str:
        """Return the whole report as plain text without colour."""
        from rich.console import Console

        buffer = io.StringIO()
        Console(file=buffer, width=width, color_system=None, force_terminal=False, legacy_windows=False).print(self)
        return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Report: {self.summary()}>"

    def _repr_html_(self) -> str:
        """Return the page of :meth:`to_html` for a notebook, in a frame that isolates the page's styles."""
        page = render_report(self.sites, self.messages)
        return f'<iframe srcdoc="{escape(page)}" style="width: 100%; height: 32em; border: 0"></iframe>'

    def __rich__(self) -> RenderableType:
        # Import rich only when a report is shown, so that compiling a graph does not pay for the import.
        from rich.console import Group
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        parts: list[RenderableType] = [Text(f"mla_compile: {self.summary()}", style="bold")]
        for group in grouped(self.sites):
            head = Text("\n")
            head.append(headline(group.site), style=f"bold {_STYLES[group.site.verdict]}")
            head.append(f"  {group.where}")
            if len(group.sites) > 1:
                head.append(f"  ({len(group.sites)} sites)", style="dim")
            rows = Table.grid(padding=(0, 2))
            rows.add_column(style="dim", no_wrap=True)
            rows.add_column(overflow="fold")
            for label, value in rows_of(group):
                rows.add_row(label, Text(value))
            parts += [head, Padding(rows, (0, 0, 0, 2))]
        line = self.summary()  # may be one of the messages
        if notes := [f"note: {message}" for message in self.messages if message != line]:
            parts.append(Text("\n" + "\n".join(notes)))
        slow = [f"{p.name} {p.seconds:.2f}" for p in self.passes if p.seconds >= _SHOWN_SECONDS]
        if slow:
            parts.append(Text(f"\nseconds: {', '.join(slow)}"))
        return Group(*parts)

    def _count(self, verdict: VerdictName) -> int:
        return sum(site.verdict == verdict for site in self.sites)


def is_ours(stage: str) -> bool:
    """Whether a stage of a compilation is the capture or a pass."""
    return stage.partition(" of ")[0] not in _NOT_OURS


def count_sites(report: Report) -> None:
    """Add the verdicts on the attentions of a compiled, served or saved graph to the metrics."""
    for site in report.sites:
        count("sites", became=site.verdict)
