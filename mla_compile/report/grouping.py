"""Group sites that differ only in their layer number, so that a report on 61 layers is one paragraph.

For example, 61 equal records from ``model.layers.0.self_attn`` to ``model.layers.60.self_attn`` become one group at
``model.layers.{0-60}.self_attn``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mla_compile.core.records import Location, SiteReport

_NUMBER = re.compile(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])")


@dataclass(frozen=True)
class SiteGroup:
    """Sites with equal text, in the order of the report. The first site represents the group."""

    sites: tuple[SiteReport, ...]

    @property
    def site(self) -> SiteReport:
        """The site whose fields are shown."""
        return self.sites[0]

    @property
    def where(self) -> str:
        """The group's module paths as one pattern. Node names are used if the trace recorded no module."""
        return module_pattern([site.where.module or site.where.node for site in self.sites])

    @property
    def precision_ratio(self) -> float | None:
        """The worst measured ratio of the rewritten form's error to the original form's error."""
        return max((s.precision_ratio for s in self.sites if s.precision_ratio is not None), default=None)

    @property
    def fold_error(self) -> float | None:
        """The worst measured rounding error of the group's folded weights."""
        return max((s.fold_error for s in self.sites if s.fold_error is not None), default=None)


def of_each_attention(sites: Iterable[SiteReport]) -> list[SiteReport]:
    """Return one site per attention of the model, although several graphs may contain the attention.

    An absorbed site is preferred. Attentions of one module are distinguished by their order in the graph.
    """
    count: Counter[tuple[str, str]] = Counter()
    found: dict[tuple[str, int], SiteReport] = {}
    for site in sites:
        name = site.where.module or site.where.source or site.where.node
        place = name, count[site.graph, name]
        count[site.graph, name] += 1
        if place not in found or _known(site) > _known(found[place]):
            found[place] = site
    return list(found.values())


def _known(site: SiteReport) -> tuple[bool, bool, bool]:
    figures = site.values_read_before is not None and site.values_read_after is not None
    return site.verdict == "absorbed", figures, site.values_held_after is not None


def grouped(sites: Iterable[SiteReport]) -> list[SiteGroup]:
    """Return groups of equal sites, in order of first appearance.

    Sites of a group may differ in index, graph, number of represented attentions, numbers in module paths, names of
    nodes (which the trace numbers) and measured errors. A group shows its worst error.
    """
    groups: dict[SiteReport, list[SiteReport]] = {}
    for site in sites:
        groups.setdefault(_anonymous(site), []).append(site)
    return [SiteGroup(tuple(members)) for members in groups.values()]


def module_pattern(paths: Sequence[str]) -> str:
    """Write paths as one pattern: ``a.{0-2,5}.b`` for ``a.0.b``, ``a.1.b``, ``a.2.b``, ``a.5.b``.

    Return the paths as a list if their numbers form no full grid.
    """
    distinct = list(dict.fromkeys(paths))
    if len({_NUMBER.sub("#", path) for path in distinct}) > 1:
        return ", ".join(distinct)
    numbers = [[int(digits) for digits in _NUMBER.findall(path)] for path in distinct]
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    if math.prod(map(len, columns)) != len(distinct):
        return ", ".join(distinct)
    ranges = iter(columns)
    return _NUMBER.sub(lambda match: _ranges(next(ranges)), distinct[0])


def _ranges(numbers: list[int]) -> str:
    """Format sorted, distinct numbers: ``3`` for one number, ``{0-2,5}`` for several."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "}"


def _anonymous(site: SiteReport) -> SiteReport:
    blame = None if site.blame is None else _unnumbered(site.blame)
    where = _unnumbered(site.where)
    kept = tuple(replace(k, blame=None if k.blame is None else _unnumbered(k.blame)) for k in site.kept)
    return replace(
        site,
        index=0,
        graph="",
        stands_for=1,
        where=where,
        blame=blame,
        kept=kept,
        precision_ratio=None,
        fold_error=None,
    )


def _unnumbered(where: Location) -> Location:
    # Drop the names of nodes, even if sites have no module path: node names do not identify layers.
    return replace(where, node="", module=_NUMBER.sub("#", where.module))
