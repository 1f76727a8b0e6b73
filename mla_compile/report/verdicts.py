"""The verdict on a whole model, in sentences for the text and the page."""

from __future__ import annotations

from mla_compile.codes import OVER_ROWS, VerdictName
from mla_compile.report.facts import Facts
from mla_compile.report.wording import WORDS, not_mla


def verdict(model: Facts) -> tuple[VerdictName, str]:
    """Return the verdict on the model, as a name and as a sentence."""
    counts = dict.fromkeys(WORDS, 0)
    for site in model.sites:
        counts[site.verdict] += site.stands_for
    total, absorbed = sum(counts.values()), counts["absorbed"]
    if not total:
        return "not_mla", "There is no attention in this model."
    if not absorbed:
        worst: VerdictName = next(v for v in ("refused", "kept", "not_mla") if counts[v])
        first = next(site for site in model.sites if site.verdict == worst)
        if worst == "not_mla":
            return worst, f"This is {not_mla() if model.family == 'not MLA' else not_mla(model.family)}."
        what = "Nothing is absorbed" if worst == "refused" else "Nothing needs to be absorbed"
        who = "the one attention is" if counts[worst] == 1 else f"{counts[worst]} attentions are"
        said = f"{who} {WORDS[worst]} ({first.code}): {first.reason}"
        return worst, f"{what}: {said}."
    gain = _in_part(model, absorbed) + _gain(model)
    if absorbed == total:
        who = "The one attention is" if total == 1 else f"All {total} attentions are"
        return "absorbed", f"{who} decoded in absorbed form{gain}."
    others = ", ".join(f"{n} {WORDS[v]}" for v, n in counts.items() if n and v != "absorbed")
    return "absorbed", f"{absorbed} of {total} attentions are decoded in absorbed form{gain}; {others}."


def advice(model: Facts) -> str:
    """Return one or two sentences about what to do next."""
    if any(site.verdict == "absorbed" for site in model.sites):
        return 'Use it with mla_compile.optimize(model), or torch.compile(model, backend="mla").'
    if any(site.verdict in ("refused", "kept") and site.code not in OVER_ROWS for site in model.sites):
        return "Each attention is listed with what stands in the way, and where. The model runs as it is."
    plan = "; mla-compile plan says what it costs to serve" if model.cached else ""
    return f"mla_compile leaves it as it is{plan}."


def _in_part(model: Facts, absorbed: int) -> str:
    some = sum(site.stands_for for site in model.sites if site.kept)
    if not some:
        return ""
    return ", in part" if absorbed == 1 else f", {'all' if some == absorbed else some} of them in part"


def _gain(model: Facts) -> str:
    saved = [s for s in model.sites if s.verdict == "absorbed" and s.values_read_after]
    before, after = (saved[0].values_read_before, saved[0].values_read_after) if saved else (None, None)
    if before is None or after is None or before <= after:
        return ""
    return f": {after:,} values are read per key and layer instead of {before:,}, {before / after:.3g} times fewer"
