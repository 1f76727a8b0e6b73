"""What is known about a model as far as decoding is concerned: its attention sites, its cache, its weights."""

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
"""``refused``: sites that could be proved neither to be MLA nor to be anything else. ``kept``: sites whose latent is no
narrower than K and V. ``absorbed by hand``: all sites with a latent are in the absorbed form as they are written.
``shared rows``: heads share rows that are key and value, and no weight makes K or V of them.
``not MLA``: MHA, GQA or MQA, and nothing tells which."""


@dataclass(frozen=True)
class Weights:
    """Parameters, in values.

    Attributes:
        total: all of them, tied ones once.
        lookup: the input embedding, of which a token reads one row; 0 where it is also the output projection.
        experts: all routed experts of all layers.
        expert_count, expert_top_k: routed experts per layer, and how many of them a token takes on average.
        vocabulary: the width of the logits; 0 where nothing tells which projection makes them.
    """

    total: int
    lookup: int = 0
    experts: int = 0
    expert_count: int = 1
    expert_top_k: float = 1.0
    vocabulary: int = 0

    @property
    def dense(self) -> int:
        """Read by every token: neither routed experts nor the input embedding."""
        return self.total - self.experts - self.lookup

    @property
    def active(self) -> int:
        """Read for one token, routed experts included."""
        return self.dense + round(self.experts * self.expert_top_k / self.expert_count)

    def share_read(self, stored: StoredWeights) -> int:
        """The bytes of those that are active, as stored."""
        experts = stored.part("routed experts").bytes
        dense = stored.bytes - experts - stored.lookup_bytes
        return dense + round(experts * self.expert_top_k / self.expert_count)


@dataclass(frozen=True)
class LatentSites:
    """``count`` attention sites of the same sizes that read one latent row per token.

    ``whole``: absorbed neither in part nor by groups of heads; only then do the formulas of an attention hold.
    ``chosen``: the keys that a query attends to, ``None`` for all. ``choosing_flops``, ``choosing_bytes``: what
    it takes per context token to choose them, 0 where another attention chose.
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
    """``count`` layers with equal caches: the heads of both tensors, and the values per token and head.

    ``besides``: values per token that are neither keys nor values, of an indexer for example. ``every``: how many
    tokens a row stands for; 0: no row stays. ``window``: of so many of the last tokens there is a row besides.
    ``value_width`` is 0 where one row is key and value. ``chosen``: how many rows an indexer picks of those that stay,
    0 for all, with ``choosing_flops`` for each of them.
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

    @property
    def rows(self) -> int:
        """Values of a row: keys and values of one layer."""
        return self.key_heads * self.key_width + self.value_heads * self.value_width

    @property
    def values(self) -> float:
        """Cached values per token and layer."""
        found = (self.rows / self.every if self.every else 0) + self.besides
        return int(found) if found == int(found) else found

    def told(self) -> str:
        """What a layer holds of each token, in words."""
        rows = f"{self.rows:,}" + (f" / {self.every}" if self.every > 1 else "")
        parts = [*([rows] if self.every else []), *([f"{self.besides:,}"] if self.besides else [])]
        window = f"{self.rows:,} for each of the last {self.window:,}" if self.window else ""
        return " and ".join(filter(None, [f"({' + '.join(parts)})" if len(parts) > 1 else "".join(parts), window]))


@dataclass(frozen=True)
class Drafting:
    """``count`` layers that predict tokens after the next one (multi-token prediction), and one as a model by itself.

    ``layer`` makes its logits with the output projection of the model, which is not among its weights.
    """

    count: int
    layer: Facts


@dataclass(frozen=True)
class Facts:
    """One model as ``explain`` and ``plan`` see it; query ``heads`` and model ``width`` may be unknown.

    ``sites`` and ``messages`` are those of its report.
    ``stored``: the weights as a quantized checkpoint has them; ``None`` if nothing says that they are quantized.
    ``drafting``: ``None`` if the config names no layers that draft; ``weights`` and ``cached`` are without them.
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
        """Values per token that the model's own code caches, in all layers."""
        return sum(layer.values * layer.count for layer in self.cached)

    def own_cache(self) -> str:
        """What its own code caches, in words; empty if that is not known."""
        parts = [f"{layer.count} x {layer.told()}" for layer in self.cached]
        return f"its own code caches {self.cache_values:,} values per token ({' + '.join(parts)})" if parts else ""

    @property
    def in_part(self) -> int:
        """Attentions absorbed in part or by groups of heads; how much those cache and compute is not known."""
        return sum(site.stands_for for site in self.sites if site.parts)

    @property
    def head_values(self) -> int:
        """Weights into and out of the heads of the latent sites, as far as their widths are known."""
        return self.over_sites(_head_values)

    def over_sites(self, what: Callable[[Dims], int]) -> int:
        """A quantity of one latent site, summed over all of them."""
        return sum(site.count * what(site.dims) for site in self.latent)


def facts_of(sites: tuple[SiteReport, ...], messages: tuple[str, ...], name: str) -> Facts:
    """What a report alone tells: its sites, once each; nothing about weights or about what a cache holds."""
    family = family_of(sites) or ("not MLA" if sites else "no attention")
    latent = latent_sites((site, site.dims) for site in sites)
    return Facts(name, family, sites, latent, (), Weights(0), messages=messages)


def latent_sites(found: Iterable[tuple[SiteReport, Dims | None]]) -> tuple[LatentSites, ...]:
    """The attentions of equal sizes counted together; given are each site and its sizes.

    Groups of heads with a latent each count as so many attentions.
    """
    counts: Counter[LatentSites] = Counter()
    for site, dims in found:
        if dims is not None:
            chooses = site.choosing_flops or 0, site.choosing_bytes or 0
            kind = LatentSites(dims, 0, site.verdict == "absorbed", not site.parts, site.chosen, *chooses)
            counts[kind] += site.stands_for * dims.G
    return tuple(replace(sites, count=count) for sites, count in counts.items())


def family_of(sites: Sequence[SiteReport]) -> Family | None:
    """What the sites alone tell; ``None`` if none of them has a latent."""
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
