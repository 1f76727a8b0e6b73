"""The floor of one pass. A pass is a decode step, the drafting for the next step, or the reading of prompts.

A floor is the sum of four times: attention, choosing the keys of attention, everything else, and traffic on links. The
first three are each the longer of memory time and arithmetic time. Floors of consecutive passes add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace

from mla_compile.workbench.machines import Machine
from mla_compile.workbench.step_formulas import MEANING, Layout, number


@dataclass(frozen=True)
class Attention:
    """``count`` attentions of the same sizes, with latent rows (L, R) or G heads of keys and values (K, V).

    ``N`` and ``V`` are the widths to which prompts expand latent rows. ``J``: the number of tokens that a query attends
    to, 0 for all. ``F``: the FLOPs per context token for choosing these tokens; 0 if this attention chooses no tokens.
    ``every``: the number of tokens that a row represents, 0 if no row is kept for good. ``window``: the number of
    latest tokens that have an additional row each.
    """

    count: int
    H: int
    L: int = 0
    R: int = 0
    G: int = 1
    K: int = 0
    V: int = 0
    J: int = 0
    F: int = 0
    N: int = 0
    every: int = 1
    window: int = 0

    def rows(self, T: float) -> float:
        """Return the number of rows for T tokens."""
        return self.kept(T) + min(self.window, T)

    def kept(self, T: float) -> float:
        """Return the number of rows kept for good for T tokens."""
        return T // self.every if self.every else 0

    @property
    def latent(self) -> bool:
        """Whether all heads read one latent row per token."""
        return self.L > 0


@dataclass(frozen=True)
class Floor:
    """The least time that one or more passes take on one machine, in seconds for each cause.

    ``attention_s``, ``choosing_s``, ``weights_s``: the longer of memory time and arithmetic time, summed over passes.
    ``network_bytes``: the bytes on the links of the machine.
    """

    cache_memory_s: float
    attention_compute_s: float
    attention_s: float
    choosing_memory_s: float
    choosing_compute_s: float
    choosing_s: float
    weight_memory_s: float
    weight_compute_s: float
    weights_s: float
    network_bytes: float
    network_s: float

    def __add__(self, other: Floor) -> Floor:
        """Return the floor of two passes, one after the other."""
        return Floor(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: float) -> Floor:
        """Return the floor of ``times`` equal passes."""
        return Floor(*(times * a for a in astuple(self)))

    @property
    def seconds(self) -> float:
        """The seconds of all parts in sequence."""
        return self.attention_s + self.choosing_s + self.weights_s + self.network_s

    @property
    def busiest_s(self) -> float:
        """The longest of memory, arithmetic and link time: the floor if all three overlap fully."""
        memory = self.cache_memory_s + self.choosing_memory_s + self.weight_memory_s
        arithmetic = self.attention_compute_s + self.choosing_compute_s + self.weight_compute_s
        return max(memory, arithmetic, self.network_s)

    @property
    def bottleneck(self) -> str:
        """The name of the longest part."""
        parts: dict[str, float] = {}
        for name, reading, computing in (
            (("reading the cache", "attention arithmetic"), self.cache_memory_s, self.attention_compute_s),
            (
                ("choosing keys: reading", "choosing keys: arithmetic"),
                self.choosing_memory_s,
                self.choosing_compute_s,
            ),
            (("reading weights", "arithmetic of weights"), self.weight_memory_s, self.weight_compute_s),
        ):
            parts[name[computing > reading]] = max(reading, computing)
        parts["links"] = self.network_s
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Deployment:
    """The layout of the machines, the dtype of the cache, and the dtype in which weights are multiplied."""

    layout: Layout
    machine: Machine
    cache_dtype: str
    arithmetic: str

    def floor(self, sites: tuple[Attention, ...], letters: Mapping[str, float], *, prompt: bool = False) -> Floor:
        """Return the floor of a pass. ``letters`` are sizes, users and tokens."""

        def of(what: str, site: Attention) -> float:
            return number(self.layout, what, values(site, letters, prompt=prompt), latent=site.latent, prompt=prompt)

        def total(what: str) -> float:
            return sum(s.count * of(what, s) for s in sites)

        def once(what: str) -> float:
            return of(what, replace(sites[0], every=1, window=0))  # these quantities do not depend on the attention

        machine, peak = self.machine, self.machine.peak(self.cache_dtype)
        memory_s, compute_s = total("attention bytes") / machine.bandwidth, total("attention FLOPs") / peak
        attention_s = sum(
            s.count * max(of("attention bytes", s) / machine.bandwidth, of("attention FLOPs", s) / peak) for s in sites
        )
        choose_s, rank_s = once("choosing bytes") / machine.bandwidth, total("choosing FLOPs") / peak
        read_s = once("weight bytes read") / machine.bandwidth
        multiply_s = once("weight FLOPs") / machine.peak(self.arithmetic)
        exchanged, between = (
            total(f"network bytes{where}") + once(f"network bytes of the vocabulary{where}")
            for where in ("", " between nodes")
        )
        network_s = (exchanged - between) / machine.link_bytes_per_s if machine.link_bytes_per_s else 0.0
        if machine.network_bytes_per_s:
            network_s = max(network_s, between / machine.network_bytes_per_s)
        return Floor(
            memory_s, compute_s, attention_s, choose_s, rank_s, max(choose_s, rank_s),
            read_s, multiply_s, max(read_s, multiply_s), exchanged, network_s,
        )  # fmt: skip


def values(site: Attention, letters: Mapping[str, float], *, prompt: bool = False) -> dict[str, float]:
    """Return the inputs of the formulas: an attention's sizes, and ``letters``. Missing letters are 0."""
    sizes: dict[str, float] = {name: getattr(site, name) for name in "HLRNGKV"}
    T = site.rows(letters["T"])
    # Keys are chosen only among rows that are kept for good. But the formulas count all tokens of a prompt, or all rows
    # in a step. Therefore scale F by the share of kept rows.
    older = 0.0 if not (site.every and T) else 1 / site.every if prompt else site.kept(letters["T"]) / T
    sizes |= {"J": min(site.J or T, T), "F": site.F * older, "M": float(site.F > 0)}
    return dict.fromkeys(map(str, MEANING), 0.0) | sizes | {**letters, "T": T}
