"""The tables of ``mla-compile explain``: caches of several kinds, the cost of a token, break-even and folds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import sympy

from mla_compile.core.dims import Dims
from mla_compile.core.quantities import seconds
from mla_compile.core.records import plain_float
from mla_compile.passes.cost import cost, formulas
from mla_compile.passes.cost.formulas import Form
from mla_compile.report.facts import Facts
from mla_compile.report.wording import queries

SCHEMA = "mla_compile.explain/1"
CONTEXTS = (4096, 32768, 131072)
GROUPS = 8
"""The number of KV heads in a comparison with GQA (a common choice). A GQA model's own number replaces it."""
_UNTOLD = ("refused", "kept", "absorbed by hand", "shared rows")
"""Families for which the contents of the cache are unknown: K and V, or tensors from which K and V are recomputed."""


@dataclass(frozen=True)
class CacheRow:
    """One kind of cache: values per token in the most frequent kind of layer, and bytes per sequence by context."""

    kind: str
    meaning: str
    values: int
    bytes: tuple[int, ...]
    own: bool = False


@dataclass(frozen=True)
class TokenCost:
    """FLOPs and bytes of the whole model for one decoded token in one form. Tuples have a value per context."""

    form: str
    flops: tuple[int, ...]
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class FoldSide:
    """A product of weights that can be folded. ``chained`` and ``folded`` are values read per token and layer."""

    side: Literal["query", "output"]
    product: str
    chained: int
    folded: int

    @property
    def pays(self) -> bool:
        """Whether the folded weight has fewer values."""
        return self.folded < self.chained


@dataclass(frozen=True)
class SiteChoice:
    """Break-even and folds of sites with equal sizes.

    Seconds are estimates of the cost model for a GPU and a long context. ``folds``: the sides with known widths.
    ``folded_s``: the time if both sides are folded; ``None`` if a width is unknown.
    """

    dims: Dims
    count: int
    break_even: tuple[float, ...]
    break_even_long: float
    folds: tuple[FoldSide, ...]
    chained_s: float
    folded_s: float | None
    fold: tuple[str, ...]

    @property
    def when_absorbing_pays(self) -> str:
        """A sentence with the number of queries below which absorbing takes fewer FLOPs, for each context."""
        at = ", ".join(f"{queries(s)} at {T // 1024}k" for s, T in zip(self.break_even, CONTEXTS, strict=True))
        long = queries(self.break_even_long)
        return f"absorbing takes fewer FLOPs below {long} queries per call on a long context ({at})"

    @property
    def whether_folding_pays(self) -> str:
        """A sentence with the sides to fold and the estimated times."""
        if not self.folds:
            return "unknown, because the widths of the query and the output projection are"
        times = f"about {seconds(self.chained_s)} chained"
        if self.folded_s is not None:
            times += f", {seconds(self.folded_s)} with both folded"
        said = f"fold {' and '.join(self.fold)}" if self.fold else "do not fold"
        return f"{said} (one layer, one query, 32k tokens on a data-centre GPU: {times}, by the cost model)"


@dataclass(frozen=True)
class Explained:
    """The explanation of one model."""

    facts: Facts
    dtype: str
    element_bytes: int
    cache: tuple[CacheRow, ...]
    costs: tuple[TokenCost, ...]
    choices: tuple[SiteChoice, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the tables, or the reason why there are no tables."""
        count = self.facts.in_part
        if not count:
            return self.facts.notes
        which = "1 attention is" if count == 1 else f"{count} attentions are"
        return (
            *self.facts.notes,
            f"{which} absorbed in part or by groups of heads, so there are no tables of cache and costs",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able record without the report; the key ``schema`` names the layout."""
        model = self.facts
        record: dict[str, object] = {"schema": SCHEMA, "dtype": self.dtype, "contexts": list(CONTEXTS)}
        record |= {"model": model.name, "family": model.family, "notes": list(self.notes)}
        record["weights"] = asdict(model.weights) | {"active": model.weights.active}
        record["stored"] = model.stored and model.stored.to_dict()
        record["cached_by_its_code"] = [asdict(layer) | {"values": layer.values} for layer in model.cached]
        record["sites"] = [asdict(site) for site in model.latent]
        record["cache"] = [asdict(row) for row in self.cache]
        record["costs"] = [asdict(row) for row in self.costs]
        record["choices"] = [_plain(choice) for choice in self.choices]
        return record


def explained(model: Facts, dtype: str, element_bytes: int) -> Explained:
    """Return the tables of one model. ``element_bytes``: the size of cached values and of unquantized weights."""
    return Explained(
        model, dtype, element_bytes, _cache(model, element_bytes), token_costs(model, element_bytes),
        tuple(_choice(site.dims, site.count, element_bytes) for site in model.latent if site.whole),
    )  # fmt: skip


def _cache(model: Facts, element: int) -> tuple[CacheRow, ...]:
    """Return all kinds of cache for the model's heads and widths.

    The letter ``d`` is the mean width of a head's K and V.
    """
    sizes: list[tuple[int, dict[str, float]]]
    own_groups = 1
    if model.in_part or model.family in _UNTOLD:
        return ()
    if model.latent:
        dims = [(site.count, site.dims) for site in model.latent]
        sizes = [(n, {"H": d.H, "d": (d.N + d.R + d.V) / 2, "L": d.L, "R": d.R}) for n, d in dims]
    elif model.cached:
        sizes = [
            (c.count, {"H": model.heads or c.key_heads, "d": (c.key_width + c.value_width) / 2}) for c in model.cached
        ]
        own_groups = max(model.cached, key=lambda c: c.count).key_heads
    else:
        return ()
    _, most = max(sizes, key=lambda size: size[0])
    groups = own_groups if 1 < own_groups < most["H"] else GROUPS
    rows = [("MHA", f"K and V of all {most['H']} heads", formulas.cache_values("mha"))]
    if groups < most["H"]:
        rows.append(("GQA", f"K and V of {groups} heads", formulas.cache_values("gqa")))
    rows.append(("MQA", "K and V of one head", formulas.cache_values("mqa")))
    if model.latent:
        rows.append(("MLA", "one latent row and one rotary key", formulas.cache_values("mla")))
    table = []
    for kind, meaning, formula in rows:
        total = sum(n * _values(formula, letters, groups) for n, letters in sizes)
        at = tuple(total * element * T for T in CONTEXTS)
        table.append(CacheRow(kind, meaning, _values(formula, most, groups), at, kind == model.family))
    return tuple(table)


def _values(formula: sympy.Expr, letters: Mapping[str, float], groups: int) -> int:
    return int(formula.subs({getattr(formulas, name): size for name, size in {**letters, "G": groups}.items()}))


def token_costs(model: Facts, element: int, contexts: Sequence[int] = CONTEXTS) -> tuple[TokenCost, ...]:
    """Return the cost of a decoded token per form and context. Unknown weights are not counted."""
    active, stored = model.weights.active, model.stored
    read = model.weights.share_read(stored) if stored else element * active
    if model.in_part or model.family in _UNTOLD:
        return ()
    if not model.latent:
        if model.heads is None or not model.cached:
            return ()
        per_token = sum(2 * model.heads * (c.key_width + c.value_width) * c.count for c in model.cached)
        flops = tuple(2 * active + per_token * T for T in contexts)
        moved = tuple(int(read + element * model.cache_values * T) for T in contexts)
        return (TokenCost("as it is", flops, moved),)
    # The formulas include the up-projections of K and V, because each form uses them differently.
    ups = model.over_sites(lambda d: d.H * d.L * (d.N + d.V))
    rest = active - ups if model.weights.total else 0
    rest_bytes = read - element * ups if model.weights.total else 0
    # The expanded form reads stored up-projections, the absorbed form reads dequantized up-projections.
    more = 0, stored.kept_bytes - stored.read_in_their_place if stored else 0
    forms: list[tuple[str, Form]] = [("expanded", "expanded"), ("absorbed", "chained")]
    if any(site.chosen is not None for site in model.latent):
        forms.append(("sparse", "sparse"))
    # The cost of choosing keys does not depend on the form.
    chooses = (
        sum(s.count * s.choosing_flops for s in model.latent),
        sum(s.count * s.choosing_bytes for s in model.latent),
    )
    return tuple(
        TokenCost(
            name,
            tuple(2 * rest + chooses[0] * T + _all_sites(model, formulas.flops(form), T) for T in contexts),
            tuple(
                rest_bytes + more[form != "expanded"] + chooses[1] * T
                + _all_sites(model, formulas.moved_bytes(form), T, E=element)
                for T in contexts
            ),
        )
        for name, form in forms
    )  # fmt: skip


def query_flops(dims: Dims, queries: Sequence[int], T: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the FLOPs of one call of an attention for each number of queries, in expanded and in absorbed form."""
    forms: Sequence[tuple[str, Form]] = (("expanded", "expanded"), ("absorbed", "chained"))
    return tuple(
        (name, tuple(int(formulas.evaluate(formulas.flops(form), dims, B=1, S=S, T=T)) for S in queries))
        for name, form in forms
    )


def _all_sites(model: Facts, expression: sympy.Expr, T: int, **letters: float) -> int:
    return sum(
        site.count * int(formulas.evaluate(expression, site.dims, B=1, S=1, T=T, J=min(site.chosen or T, T), **letters))
        for site in model.latent
    )


def _choice(dims: Dims, count: int, element: int) -> SiteChoice:
    sides: tuple[tuple[Literal["query", "output"], str, Form, int | None], ...] = (
        ("query", "W_q W_kc", "folded_query", dims.Q),
        ("output", "W_v W_o", "folded_output", dims.D),
    )
    known = Dims(**{**asdict(dims), "Q": dims.Q or 0, "D": dims.D or 0})
    folds = []
    for side, product, form, width in sides:
        if width is not None:
            stages = formulas.stages("chained")[:2] if side == "query" else formulas.stages("chained")[-2:]
            chained = sum(int(formulas.evaluate(s.weights, known)) for s in stages)
            stage = formulas.stages(form)[0 if side == "query" else -1]
            folds.append(FoldSide(side, product, chained, int(formulas.evaluate(stage.weights, known))))
    device = cost.DEVICES["cuda"]
    chosen = cost.choose(
        dims, B=1, S=1, T=None, element_bytes=element, device=device, forms="absorbed", can_fold_query=True,
        can_fold_output=True,
    )  # fmt: skip
    folded = None
    if len(folds) == len(sides):
        folded = cost.seconds("folded", dims, B=1, S=1, T=cost.LONG_CONTEXT, element_bytes=element, device=device)
    taken = ["query"] * chosen.fold_query + ["output"] * chosen.fold_output
    return SiteChoice(
        dims, count, tuple(cost.break_even_S(dims, T) for T in CONTEXTS), cost.break_even_S(dims), tuple(folds),
        chosen.seconds["chained"], folded, tuple(taken),
    )  # fmt: skip


def _plain(choice: SiteChoice) -> dict[str, object]:
    record = asdict(choice)
    record["break_even"] = [plain_float(at) for at in choice.break_even]
    record["break_even_long"] = plain_float(choice.break_even_long)
    return record
