"""Facts about a model that matter for decoding: its attention sites, its cache, its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mla_compile.codes import OVER_ROWS, Code
from mla_compile.core.dims import Dims
from mla_compile.core.records import SiteReport
from mla_compile.report.stored import StoredWeights

Family = Literal[
    "MLA", "MHA", "GQA", "MQA", "not MLA", "refused", "kept", "absorbed by hand", "shared rows", "no attention"
]
"""The kind of attention in a model.

``refused``: no site is proved to be MLA, and some sites are refused. ``kept``: the latent of the sites is no narrower
than K and V. ``absorbed by hand``: in the model's code, all sites with a latent are already absorbed. ``shared rows``:
heads share rows that are both key and value, and no weight expands these rows into K or V. ``not MLA``: MHA, GQA or
MQA, but the report does not say which kind.
"""


@dataclass(frozen=True)
class Weights:
    """The number of parameters, by their use.

    Attributes:
        total: all parameters; tied parameters are counted once.
        lookup: the input embedding, a table from which a token reads one row; 0 if it is also the output projection.
        experts: the routed experts of all layers.
        expert_count, expert_top_k: routed experts per layer, and experts that a token uses on average.
        vocabulary: the width of the logits; 0 if unknown.
    """

    total: int
    lookup: int = 0
    experts: int = 0
    expert_count: int = 1
    expert_top_k: float = 1.0
    vocabulary: int = 0

    @property
    def dense(self) -> int:
        """The parameters that every token reads: all except routed experts and the input embedding."""
        return self.total - self.experts - self.lookup

    @property
    def active(self) -> int:
        """The parameters that one token reads, routed experts included."""
        return self.dense + round(self.experts * self.expert_top_k / self.expert_count)

    def share_read(self, stored: StoredWeights) -> int:
        """Return the stored bytes of the active parameters."""
        experts = stored.part("routed experts").bytes
        dense = stored.bytes - experts - stored.lookup_bytes
        return dense + round(experts * self.expert_top_k / self.expert_count)


@dataclass(frozen=True)
class LatentSites:
    """``count`` attention sites of the same sizes that read one latent row per token.

    ``whole``: the sites are not absorbed in part or by groups of heads. The cost formulas hold only for whole sites.
    ``chosen``: the number of keys that a query attends to, ``None`` for all. ``choosing_flops``, ``choosing_bytes``:
    the cost per context token of choosing these keys, 0 if another attention chose the keys.
    """

    dims: Dims
    count: int
    absorbed: bool
    whole: bool = True
    chosen: int | None = None
    choosing_flops: int = 0
    choosing_bytes: int = 0


@dataclass(frozen=True)
class CachedLayers:
    """``count`` layers with equal caches: the heads and widths of the cached keys and values.

    ``value_width`` is 0 if one row is both key and value. ``besides``: cached values per token that are neither keys
    nor values, for example the values of an indexer. ``every``: the number of tokens that a row represents; 0 if no row
    is kept for good. ``window``: the number of latest tokens that have an additional row each. ``chosen``: the number
    of kept rows that an indexer picks, 0 for all. ``choosing_flops``: the indexer's cost per row. ``waiting_bytes``:
    the bytes for each token that has no row yet. ``state_bytes``: the bytes of a state that does not grow.
    """

    key_heads: int
    key_width: int
    value_heads: int
    value_width: int
    count: int
    besides: float = 0
    every: int = 1
    window: int = 0
    chosen: int = 0
    choosing_flops: int = 0
    waiting_bytes: int = 0
    state_bytes: int = 0

    @property
    def rows(self) -> int:
        """The number of values in a row: the keys and values of all heads of one layer."""
        return self.key_heads * self.key_width + self.value_heads * self.value_width

    @property
    def values(self) -> float:
        """The cached values per token and layer."""
        found = (self.rows / self.every if self.every else 0) + self.besides
        return int(found) if found == int(found) else found

    def bytes_beside(self, tokens: int, *, most: bool = False) -> int:
        """Return the bytes for tokens without a row and for the state, after ``tokens`` tokens.

        ``most``: return the maximum for any number of tokens up to ``tokens``.
        """
        waiting = min(tokens, self.every - 1) if most else tokens % self.every if self.every else 0
        return max(0, waiting) * self.waiting_bytes + (self.state_bytes if tokens >= self.every else 0)

    def told(self) -> str:
        """Describe in words what a layer caches for each token."""
        rows = f"{self.rows:,}" + (f" / {self.every}" if self.every > 1 else "")
        parts = [*([rows] if self.every else []), *([f"{self.besides:,}"] if self.besides else [])]
        window = f"{self.rows:,} for each of the last {self.window:,}" if self.window else ""
        most = self.bytes_beside(self.every, most=True)
        beside = f"up to {most:,} bytes beside its rows" if most else ""
        return " and ".join(
            filter(None, [f"({' + '.join(parts)})" if len(parts) > 1 else "".join(parts), window, beside])
        )


@dataclass(frozen=True)
class Drafting:
    """``count`` layers that predict tokens after the next one (multi-token prediction).

    ``layer`` describes one of these layers as a separate model. Its weights do not include the output projection,
    because that projection belongs to the model.
    """

    count: int
    layer: Facts


@dataclass(frozen=True)
class Facts:
    """Facts about one model, for ``explain`` and ``plan``. Query ``heads`` and model ``width`` may be unknown.

    ``sites`` and ``messages`` come from the model's report. ``stored`` describes the weights of a quantized checkpoint;
    it is ``None`` for other checkpoints. ``drafting`` is ``None`` if the config names no drafting layers. ``weights``
    and ``cached`` do not include drafting layers.
    """

    name: str
    family: Family
    sites: tuple[SiteReport, ...]
    latent: tuple[LatentSites, ...]
    cached: tuple[CachedLayers, ...]
    weights: Weights
    heads: int | None = None
    width: int | None = None
    notes: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    stored: StoredWeights | None = None
    drafting: Drafting | None = None

    @property
    def cache_values(self) -> float:
        """The values per token that the model's own code caches, in all layers."""
        return sum(layer.values * layer.count for layer in self.cached)

    def own_cache(self) -> str:
        """Describe in words what the model's own code caches; empty if unknown."""
        parts = [f"{layer.count} x {layer.told()}" for layer in self.cached]
        return f"its own code caches {self.cache_values:,} values per token ({' + '.join(parts)})" if parts else ""

    @property
    def in_part(self) -> int:
        """The number of attentions absorbed in part or by groups of heads, whose cache and cost are unknown."""
        return sum(site.stands_for for site in self.sites if site.parts)

    @property
    def head_values(self) -> int:
        """The number of weights into and out of the heads of latent sites. Weights of unknown width are left out."""
        return self.over_sites(_head_values)

    def over_sites(self, what: Callable[[Dims], int]) -> int:
        """Sum a quantity of one latent site over all latent sites."""
        return sum(site.count * what(site.dims) for site in self.latent)


def facts_of(sites: tuple[SiteReport, ...], messages: tuple[str, ...], name: str) -> Facts:
    """Return the facts that a report's sites contain. Facts about weights and caches are left empty."""
    family = family_of(sites) or ("not MLA" if sites else "no attention")
    latent = latent_sites((site, site.dims) for site in sites)
    return Facts(name, family, sites, latent, (), Weights(0), messages=messages)


def latent_sites(found: Iterable[tuple[SiteReport, Dims | None]]) -> tuple[LatentSites, ...]:
    """Count attentions of equal sizes together. ``found`` lists each site with its sizes.

    If a site's heads form G groups with one latent each, the site is counted as G attentions.
    """
    counts: Counter[LatentSites] = Counter()
    for site, dims in found:
        if dims is not None:
            chooses = site.choosing_flops or 0, site.choosing_bytes or 0
            kind = LatentSites(dims, 0, site.verdict == "absorbed", not site.parts, site.chosen, *chooses)
            counts[kind] += site.stands_for * dims.G
    return tuple(replace(sites, count=count) for sites, count in counts.items())


def family_of(sites: Sequence[SiteReport]) -> Family | None:
    """Return the family that the sites show; ``None`` if there are only plain MHA, GQA or MQA sites, or no sites."""
    verdicts = {site.verdict for site in sites}
    if "absorbed" in verdicts or any(site.dims is not None for site in sites):
        return "MLA"
    if "refused" in verdicts or "kept" not in verdicts:
        return "refused" if "refused" in verdicts else None
    codes = {site.code for site in sites if site.verdict == "kept"}
    if not codes <= OVER_ROWS:
        return "kept"
    return "absorbed by hand" if Code.ALREADY_ABSORBED in codes else "shared rows"


def _head_values(dims: Dims) -> int:
    into, out = dims.Q or 0, dims.D or 0
    return dims.H * (into * (dims.N + dims.R) + dims.L * (dims.N + dims.V) + dims.V * out)
