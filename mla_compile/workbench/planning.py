"""What fits on a machine, and how fast a decode step can be at best: the formulas with the values of one model.

A step reads the weights once and every user's cache once. Its floor is the sum of what has to happen in sequence: the
attention of every layer, everything else, and what goes over the links; of each, the slower of memory and arithmetic.
Real kernels overlap less than that, so real steps are slower, never faster. Several batches that take turns can keep
memory, arithmetic and links busy at once, which no single step does: what bounds tokens/s is the busiest of the three.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from mla_compile.core.quantities import BYTES
from mla_compile.errors import InputError
from mla_compile.report.facts import Facts
from mla_compile.report.stored import StoredWeights
from mla_compile.workbench.machines import Machine
from mla_compile.workbench.step_formulas import MEANING, Layout, by_user, number

SCHEMA = "mla_compile.plan/1"
AS_STORED = "as stored"
"""The dtype of weights in a request that takes them as the model's checkpoint stores them."""
WEIGHT_BYTES = {**BYTES, "fp4": 0.5625}
"""Bytes of a weight by dtype; ``fp4`` is NVFP4, in which 16 values share a scale of one byte."""


@dataclass(frozen=True)
class Attention:
    """``count`` attentions of the same sizes, with latent rows (L, R) or G heads of keys and values (K, V).

    ``J``: the tokens that a query attends to, 0 for all; ``F``: FLOPs per token of context to choose them, 0 where
    another attention chose.
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

    @property
    def latent(self) -> bool:
        """Whether all heads read one latent row per token."""
        return self.L > 0


@dataclass(frozen=True)
class Request:
    """What is asked for: ``users`` with ``context`` tokens each; ``reserve`` is the share of memory kept free.

    ``weight_dtype`` is one of :data:`WEIGHT_BYTES` for all weights, or :data:`AS_STORED`.
    """

    context: int = 131072
    users: int = 32
    weight_dtype: str = "bf16"
    cache_dtype: str = "bf16"
    tp: int = 1
    dcp: int = 1
    reserve: float = 0.1


@dataclass(frozen=True)
class LayoutPlan:
    """One layout: bytes on one machine, seconds of one decode step, tokens/s of all machines together.

    ``most_users``: how many fit in the memory of all machines. ``bottleneck`` names the longest part of the step.
    ``network_bytes``: what a machine exchanges with the others in a step.
    ``choosing_memory_s`` and ``choosing_compute_s``: what chooses the keys of sparse attentions, 0 without any.
    ``tokens_per_s`` is of one batch, step after step; ``most_tokens_per_s`` of batches that take turns.
    """

    layout: Layout
    dcp: int
    weight_bytes: float
    cache_bytes_per_user: float
    most_users: int
    fits: bool
    cache_memory_s: float
    attention_compute_s: float
    attention_s: float
    choosing_memory_s: float
    choosing_compute_s: float
    weight_memory_s: float
    weight_compute_s: float
    network_bytes: float
    network_s: float
    step_s: float
    tokens_per_s: float
    most_tokens_per_s: float
    bottleneck: str


@dataclass(frozen=True)
class Plan:
    """Every layout of one request; ``stored`` is what it counts if it takes weights as they are stored."""

    model: str
    family: str
    machine: Machine
    request: Request
    layouts: tuple[LayoutPlan, ...]
    notes: tuple[str, ...]
    stored: StoredWeights | None = None

    @property
    def fits(self) -> bool:
        """Whether any layout fits."""
        return any(layout.fits for layout in self.layouts)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; the key ``schema`` names the layout."""
        return {"schema": SCHEMA, **asdict(self), "stored": self.stored and self.stored.to_dict()}


def floor_seconds(attention: Attention, machine: Machine, *, B: int, T: int, dtype: str = "bf16") -> float:
    """The floor of one decode attention of B sequences with T cached tokens, on one machine."""
    values = _values(attention, B=B, T=T, E=BYTES[dtype], P=1, C=1)
    return max(
        number("replicated", attention.latent, "attention bytes", values) / machine.bandwidth,
        number("replicated", attention.latent, "attention FLOPs", values) / machine.peak(dtype),
    )


def attentions(model: Facts) -> tuple[Attention, ...]:
    """The attentions of a model: in absorbed form where they are latent, else with the heads of their cache."""
    found = [
        Attention(s.count, s.dims.H, L=s.dims.L, R=s.dims.R, J=s.chosen or 0, F=s.choosing_flops) for s in model.latent
    ]
    rows = {v for site in model.latent for v in (site.dims.latent_values, site.dims.expanded_values)}
    for layer in model.cached:
        if layer.rows in rows:
            continue
        if model.heads is None or layer.key_heads != layer.value_heads:
            raise InputError(f"{model.name} does not say how many query heads its cache of {layer} serves")
        found.append(Attention(layer.count, model.heads, G=layer.key_heads, K=layer.key_width, V=layer.value_width))
    if not found:
        raise InputError(
            f"{model.name} has no attention whose cache is known and grows with the context, so there is nothing to "
            "plan; of modules with caches of their own, only latent rows are known"
        )
    return tuple(found)


def plan(model: Facts, machine: Machine, request: Request) -> Plan:
    """Every layout that the request's machines allow; a single machine allows only one. Raises :class:`InputError`."""
    sites, stored = attentions(model), _stored(model, request)
    _check(machine, request)
    notes = list(model.notes)
    layouts: list[tuple[Layout, int]] = [("replicated", 1)]
    if request.tp > 1:
        layouts += [("context", request.dcp if request.dcp > 1 else request.tp), ("data", 1)]
        layouts += [("experts", 1)] if model.weights.experts else []
    if uneven := next((site.H for site in sites if site.H % request.tp), 0):
        layouts = [one for one in layouts if by_user(one[0])]
        notes.append(f"tp is {request.tp}, which does not divide the {uneven} heads of an attention: none is split")
    if model.in_part:
        notes.append(f"attentions absorbed in part or by groups of heads ({model.in_part}) are counted as whole ones")
    elif model.family in ("refused", "kept"):
        notes.append("nothing is absorbed; what is recomputed from the cache in every step is not counted")
    for dtype in dict.fromkeys((stored.arithmetic if stored else request.weight_dtype, request.cache_dtype)):
        if dtype not in machine.flops_per_s:
            notes.append(f"{machine.name} computes no {dtype}: it is read as {dtype} and computed as bf16")
    rows = tuple(_layout(layout, dcp, model, sites, machine, request) for layout, dcp in layouts)
    return Plan(model.name, model.family, machine, request, rows, tuple(notes), stored)


def _stored(model: Facts, request: Request) -> StoredWeights | None:
    """The weights as stored, if that is how they are asked for."""
    if request.weight_dtype != AS_STORED:
        return None
    if model.stored is None:
        raise InputError(f"nothing says how the weights of {model.name} are stored; name their dtype")
    return model.stored


def _weight_bytes(model: Facts, request: Request) -> dict[str, float]:
    """What the formulas take for the bytes of weights; of heads it is the average of all weights of attentions."""
    stored, weights = _stored(model, request), model.weights
    if stored is None:
        return dict.fromkeys(("E_w", "E_h", "E_x"), WEIGHT_BYTES[request.weight_dtype])
    attention, experts = stored.part("attention"), stored.part("routed experts")
    return {
        "E_w": (stored.bytes - experts.bytes - stored.lookup_bytes) / max(1, weights.dense),
        "E_h": attention.bytes / max(1, attention.values),
        "E_x": experts.bytes / max(1, experts.values),
        "U": stored.kept_bytes,
        "Z": stored.read_in_their_place,
    }


def _check(machine: Machine, request: Request) -> None:
    if request.tp > 1 and machine.link_bytes_per_s is None:
        raise InputError(f"{machine.name} has no link_bytes_per_s, so tp is at most 1, got {request.tp}")
    if request.tp % request.dcp:
        raise InputError(f"dcp is {request.dcp}, expected a divisor of tp, which is {request.tp}")
    if machine.nodes(request.tp) > 1 and machine.network_bytes_per_s is None:
        raise InputError(
            f"{machine.name} has no network_bytes_per_s, so tp is at most the {machine.node_machines} of a node, got "
            f"{request.tp}"
        )


def _layout(
    layout: Layout, dcp: int, model: Facts, sites: tuple[Attention, ...], machine: Machine, request: Request
) -> LayoutPlan:
    weights, stored = model.weights, _stored(model, request)
    plain = stored.dtype if stored else request.weight_dtype
    arithmetic = stored.arithmetic if stored else plain
    common = _weight_bytes(model, request) | {
        "B": request.users, "T": request.context, "P": request.tp, "C": dcp, "D": model.width or 0,
        "E": BYTES[request.cache_dtype], "A": max(2, WEIGHT_BYTES[plain]),
        "Q": machine.nodes(request.tp), "A_x": WEIGHT_BYTES[arithmetic],
        "W": weights.dense, "W_h": min(model.head_values, weights.dense), "X": weights.experts,
        "N_v": weights.vocabulary, "n": weights.expert_count, "k": weights.expert_top_k,
        "Y": sum(c.count * c.besides for c in model.cached),
    }  # fmt: skip

    def total(what: str) -> float:
        return sum(s.count * number(layout, s.latent, what, _values(s, **common)) for s in sites)

    def once(what: str) -> float:
        return number(layout, sites[0].latent, what, _values(sites[0], **common))

    lookup = stored.lookup_bytes if stored else weights.lookup * WEIGHT_BYTES[plain]
    held = once("weight bytes") + lookup / (1 if layout == "experts" else request.tp)
    per_user = total("cache bytes per user") + once("bytes to choose by, per user")
    room = max(0.0, machine.memory_bytes * (1 - request.reserve) - held)
    most = math.floor(room / per_user) * (request.tp if by_user(layout) else 1)
    peak, bandwidth = machine.peak(request.cache_dtype), machine.bandwidth
    memory_s, compute_s = total("attention bytes") / bandwidth, total("attention FLOPs") / peak
    attention_s = sum(
        s.count * max(
            number(layout, s.latent, "attention bytes", _values(s, **common)) / bandwidth,
            number(layout, s.latent, "attention FLOPs", _values(s, **common)) / peak,
        )
        for s in sites
    )  # fmt: skip
    choose_s, rank_s = once("choosing bytes") / bandwidth, total("choosing FLOPs") / peak
    read_s = once("weight bytes read") / bandwidth
    multiply_s = once("weight FLOPs") / machine.peak(arithmetic)
    exchanged, between = (
        total(f"network bytes{where}") + once(f"network bytes of the vocabulary{where}")
        for where in ("", " between nodes")
    )
    network_s = 0.0
    if machine.link_bytes_per_s:
        network_s = (exchanged - between) / machine.link_bytes_per_s
    if machine.network_bytes_per_s:
        network_s = max(network_s, between / machine.network_bytes_per_s)
    parts = {
        "reading the cache": memory_s if memory_s >= compute_s else 0.0,
        "attention arithmetic": compute_s if compute_s > memory_s else 0.0,
        "choosing keys: reading": choose_s if choose_s >= rank_s else 0.0,
        "choosing keys: arithmetic": rank_s if rank_s > choose_s else 0.0,
        "reading weights": read_s if read_s >= multiply_s else 0.0,
        "arithmetic of weights": multiply_s if multiply_s > read_s else 0.0,
        "links": network_s,
    }
    step_s = attention_s + max(choose_s, rank_s) + max(read_s, multiply_s) + network_s
    busiest_s = max(memory_s + choose_s + read_s, compute_s + rank_s + multiply_s, network_s)
    return LayoutPlan(
        layout, dcp, held, per_user, most, most >= request.users, memory_s, compute_s, attention_s, choose_s,
        rank_s, read_s, multiply_s, exchanged, network_s, step_s, request.users / step_s, request.users / busiest_s,
        max(parts, key=lambda name: parts[name]),
    )  # fmt: skip


def _values(site: Attention, **common: float) -> dict[str, float]:
    sizes: dict[str, float] = {"H": site.H, "L": site.L, "R": site.R, "G": site.G, "K": site.K, "V": site.V}
    sizes |= {"J": min(site.J or common["T"], common["T"]), "F": site.F, "M": float(site.F > 0)}
    return dict.fromkeys(map(str, MEANING), 0.0) | sizes | common
