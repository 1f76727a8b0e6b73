"""The wording for one attention site in the text and on the page: a headline, and a line for each fact."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mla_compile.codes import CODES, PLAIN, Code, VerdictName, section
from mla_compile.core.records import Location, SiteReport
from mla_compile.passes.cost import cost
from mla_compile.report.grouping import SiteGroup

WORDS: dict[VerdictName, str] = {"absorbed": "absorbed", "kept": "kept", "refused": "refused", "not_mla": "not MLA"}


def queries(number: float) -> str:
    """Format a number of queries, which may be infinite or fractional."""
    return "any number of" if math.isinf(number) else f"{math.ceil(number):,}"


def not_mla(kind: str = PLAIN) -> str:
    """Return words for a model without MLA, as the end of a sentence."""
    return f"{kind}, not Multi-head Latent Attention: there is no latent to absorb"


def headline(site: SiteReport) -> str:
    """Return the verdict with the form (if absorbed) or the code."""
    if site.verdict == "absorbed":
        words = [*filter(None, [site.form]), *([f"{' and '.join(site.parts)} only"] if len(site.parts) == 1 else [])]
        return f"absorbed ({', '.join(words)})" if words else "absorbed"
    return f"{WORDS[site.verdict]}: {PLAIN if site.verdict == 'not_mla' else site.code}"


def rows_of(group: SiteGroup) -> Sequence[tuple[str, str]]:
    """Return the label and the value of every line below a headline. Unknown facts are left out."""
    site = group.site
    rows = [("source", _source(site.where)), ("why", site.reason)]
    if site.blame is not None:
        rows.append(("because of", _source(site.blame, with_op=True)))
    for kept in site.kept:
        rows.append(("stays", f"{kept.part} ({kept.code}): {kept.reason}"))
        if kept.blame is not None:
            rows.append(("because of", _source(kept.blame, with_op=True)))
    if site.verdict != "absorbed":
        rows.append(("to change it", (CODES[site.code].fix or "") if site.fix is None else site.fix))
    explained = [*([site.code] if site.verdict in ("kept", "refused") else []), *(kept.code for kept in site.kept)]
    rows.append(("see", "\n".join(dict.fromkeys(section(code) for code in explained))))
    if site.dims is not None:
        rows.append(("dims", str(site.dims)))
    # A shared row may represent several tokens. The cache knows how many tokens, but the graph does not.
    each_one = "cached row" if site.code is Code.SHARED_ROWS else "context token"
    for label, before, after, unit in (
        ("reads", site.values_read_before, site.values_read_after, "values per key"),
        ("cache holds", site.values_held_before, site.values_held_after, "values per token"),
        ("decode", site.decode_flops_before, site.decode_flops_after, f"FLOPs per {each_one}"),
        ("", site.decode_bytes_before, site.decode_bytes_after, f"bytes per {each_one}"),
    ):
        if site.chosen is not None and after == 0:  # the cost of reading chosen keys does not grow with the context
            rows.append((label, f"{before:,} {unit} before, now those of the chosen keys alone"))
        else:
            rows.append((label, _change(before, after, unit, done=site.verdict == "absorbed")))
    if site.chosen is not None:
        each = "" if site.dims is None else f", {cost.decode_flops(site.dims, 'chained'):,} FLOPs for each of them"
        rows.append(("sparse", f"{site.chosen:,} chosen keys of each query, at most, whatever the context{each}"))
    if site.choosing_flops is not None:
        how = "all heads in one operator" if site.choosing_fused else "as the model writes it"
        rows.append(("choosing", f"{site.choosing_flops:,} FLOPs per {each_one}, {how}"))
        rows.append(("", f"{site.choosing_bytes:,} bytes per {each_one}"))
    if site.break_even_S is not None:
        always = math.isinf(site.break_even_S)
        limit = "for any number of queries" if always else f"below {math.ceil(site.break_even_S)} queries"
        rows.append(("absorbing pays", f"{limit} per call, in FLOPs on a long context"))
    if group.precision_ratio is not None:
        rows.append(("precision", f"error against float64 is {group.precision_ratio:.3g} x the original's"))
    if group.fold_error is not None:
        rows.append(("folded weights", f"relative rounding error {group.fold_error:.2g}"))
    rows += [("note", note) for note in site.notes]
    return [(label, value) for label, value in rows if value]


def _source(where: Location, *, with_op: bool = False) -> str:
    """Return file and line, with the source code on a second line. Facts that were not recorded are left out."""
    place = " at ".join(filter(None, [(where.op or where.node) if with_op else None, where.source]))
    return "\n".join(filter(None, [place, where.code and where.code.strip()]))


def _change(before: int | None, after: int | None, unit: str, *, done: bool) -> str:
    """Return ``a -> b`` for absorbed sites, ``a (absorbed: b)`` for others, and "" if ``before`` is unknown."""
    if before is None:
        return ""
    if after is None:
        return f"{before:,} {unit}"
    if not done:
        return f"{before:,} {unit} (absorbed: {after:,})"
    if before == after:
        return f"{before:,} {unit}, as before"
    gain = f", {before / after:.3g} times less" if 0 < after < before else ""
    return f"{before:,} -> {after:,} {unit}{gain}"
