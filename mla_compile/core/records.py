"""Records about attention sites and passes: plain frozen data, independent of how they are displayed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mla_compile.codes import OVER_ROWS, Code, VerdictName
from mla_compile.core.dims import Dims
from mla_compile.core.drawing import SiteDrawing

VERDICTS: tuple[VerdictName, ...] = ("absorbed", "kept", "refused", "not_mla")


@dataclass(frozen=True)
class Location:
    """A node of the graph, and the user's source line for this node, if the trace recorded the line."""

    node: str
    op: str
    module: str = ""
    file: str | None = None
    line: int | None = None
    code: str | None = None

    @property
    def source(self) -> str | None:
        """The source line as ``folder/file.py:line``; ``None`` if it was not recorded."""
        if self.file is None:
            return None
        short = "/".join(self.file.replace("\\", "/").split("/")[-2:])
        return short if self.line is None else f"{short}:{self.line}"

    def __str__(self) -> str:
        parts = [self.op or self.node]
        if self.source:
            parts.append(f"at {self.source}")
        if self.module:
            parts.append(f"in {self.module}")
        return " ".join(parts)


@dataclass(frozen=True)
class KeptPart:
    """The part of an absorbed attention that stays expanded (``keys``, ``values``, some columns), and why."""

    part: str
    code: Code
    reason: str
    blame: Location | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", Code(self.code))


@dataclass(frozen=True, kw_only=True)
class SiteReport:
    """One attention site: its location, what was done and why, and its costs before and after.

    Attributes:
        index: position of the site in its report, from 0.
        where: the attention core.
        verdict: ``absorbed``, ``kept``, ``refused`` or ``not_mla``.
        form: the form in which the site now runs (``expanded``, ``chained``, ``folded``), or ``None``.
        code: the reason as a stable code; ``mla_compile.codes.section(code)`` returns the path of its documentation.
        reason: the reason in words, for this site.
        fix: what the user could change. ``None`` means that the generic advice for ``code`` applies. An empty text
            means that there is no advice.
        blame: the node that prevents absorption.
        dims: the sizes, if they were found.
        values_read_before: values per context token that the original attention reads: K and V of all heads,
            GH(N+R-A+V), which most models recompute in every call.
        values_read_after: values per context token that the absorbed form reads: rows, usually L+R.
        values_held_before: values per token that the model's own cache holds for this attention; ``None`` if the graph
            shows no cache, as in a first call.
        values_held_after: values per token that the cache holds after the rewrite.
        graph: the name of the graph, if the report covers several graphs.
        stands_for: how many equal attentions of the model this traced attention represents.
        decode_flops_before: FLOPs of one decode step per context token (2 per multiply-add). If heads share rows (code
            ``shared_rows``), all FLOPs and bytes below are per cached row, because a row may summarise several tokens.
        decode_flops_after: FLOPs of one decode step per context token in the absorbed form.
        decode_bytes_before: bytes moved by one decode step per context token.
        decode_bytes_after: bytes moved by one decode step per context token in the absorbed form.
        break_even_S: queries per call below which the absorbed form is cheaper on a long context; ``inf`` if always.
        precision_ratio: error of the rewritten site divided by the error of the original site. The reference is
            float64.
        fold_error: relative rounding error of the folded weights.
        chosen: the number of keys to which each query of a sparse attention attends. The context length then does not
            change the cost.
        choosing_flops: FLOPs of one decode step per context token to choose these keys. ``None`` if the indexer is not
            in the graph. Also ``None`` if an earlier site's report has the cost, because this attention reuses that
            site's top-k indices.
        choosing_bytes: bytes moved to choose these keys: the cached rows that the indexer reads, and the per-head
            products that it writes and reads. ``None`` in the same cases as ``choosing_flops``.
        choosing_fused: whether one operator computes the scores, so that no per-head product is stored in memory.
        parts: the absorbed parts: ``keys`` or ``values``, possibly of some heads only (``heads 0-7 of 16``, ``values of
            heads 8-15 of 16``). Empty if the whole attention is absorbed.
        kept: the parts of a partly absorbed attention that stay expanded, and why.
        notes: further notes, one line each.
        drawing: the site's nodes before and after the rewrite, from ``explain``. Comparisons and JSON ignore this.
    """

    index: int
    where: Location
    verdict: VerdictName
    code: Code
    reason: str
    form: str | None = None
    fix: str | None = None
    blame: Location | None = None
    dims: Dims | None = None
    values_read_before: int | None = None
    values_read_after: int | None = None
    values_held_before: int | None = None
    values_held_after: int | None = None
    decode_flops_before: int | None = None
    decode_flops_after: int | None = None
    decode_bytes_before: int | None = None
    decode_bytes_after: int | None = None
    break_even_S: float | None = None
    precision_ratio: float | None = None
    fold_error: float | None = None
    chosen: int | None = None
    choosing_flops: int | None = None
    choosing_bytes: int | None = None
    choosing_fused: bool | None = None
    parts: tuple[str, ...] = ()
    kept: tuple[KeptPart, ...] = ()
    notes: tuple[str, ...] = ()
    graph: str = ""
    stands_for: int = 1
    drawing: SiteDrawing | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict is {self.verdict!r}, expected one of {', '.join(VERDICTS)}")
        object.__setattr__(self, "code", Code(self.code))  # raises for an unknown code

    @property
    def latent(self) -> bool:
        """Whether the attention expands K or V from a latent, as opposed to MHA and to attention over shared rows."""
        return self.verdict != "not_mla" and self.code not in OVER_ROWS

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-serialisable values; infinite and NaN floats become strings such as ``inf``."""
        record = dataclasses.asdict(dataclasses.replace(self, drawing=None))
        del record["drawing"]
        record["code"] = str(self.code)
        record["notes"], record["parts"] = list(self.notes), list(self.parts)
        record["kept"] = [{**dataclasses.asdict(k), "code": str(k.code)} for k in self.kept]
        for name in _FLOATS:
            record[name] = plain_float(record[name])
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> SiteReport:
        """Rebuild a report from the result of ``to_dict``.

        Raises ``TypeError``, ``KeyError`` or ``ValueError`` for any other mapping.
        """
        fields = dict(record)
        fields["where"] = Location(**fields["where"])
        fields["blame"] = None if fields["blame"] is None else Location(**fields["blame"])
        fields["dims"] = None if fields["dims"] is None else Dims(**fields["dims"])
        fields["notes"] = tuple(fields["notes"])
        fields["parts"] = tuple(fields.get("parts", ()))  # reports of version 0.1 have neither parts nor kept
        fields["kept"] = tuple(_kept_part(k) for k in fields.get("kept", ()))
        for name in _FLOATS:
            fields[name] = None if fields[name] is None else float(fields[name])
        return cls(**fields)


@dataclass(frozen=True)
class PassRecord:
    """One run of a pass over a graph: how many changes it made, and how long it took."""

    name: str
    changes: int
    seconds: float


def _kept_part(record: Mapping[str, Any]) -> KeptPart:
    blame = record["blame"]
    return KeptPart(**{**record, "blame": None if blame is None else Location(**blame)})


_FLOATS = ("break_even_S", "precision_ratio", "fold_error")


def plain_float(value: float | None) -> float | str | None:
    """Return a number in a form that JSON can hold: ``inf`` and ``nan`` become strings."""
    return value if value is None or math.isfinite(value) else str(float(value))
