"""Plan one layout of a request: what fits in memory, the floors of a step and of prompts, and the tokens/s."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from mla_compile.core.quantities import BYTES
from mla_compile.errors import InputError
from mla_compile.report.facts import Facts
from mla_compile.report.stored import StoredWeights
from mla_compile.workbench.floors import Attention, Deployment, Floor, values
from mla_compile.workbench.machines import Machine
from mla_compile.workbench.request import WEIGHT_BYTES, Request
from mla_compile.workbench.step_formulas import Layout, by_user, number


@dataclass(frozen=True)
class Prefill:
    """The floor of one pass over all users' prompts, and prompt tokens/s of all machines together.

    ``first_token_s`` is the time for the prompt of a single user. ``tokens_per_s`` and ``most_tokens_per_s`` are
    defined as in :class:`LayoutPlan`.
    """

    floor: Floor
    step_s: float
    first_token_s: float
    tokens_per_s: float
    most_tokens_per_s: float
    bottleneck: str


@dataclass(frozen=True)
class LayoutPlan:
    """One layout: bytes on one machine, seconds of one decode step, tokens/s of all machines together.

    Attributes:
        cache_bytes_per_user: the size at the full context.
        most_cache_bytes_per_user: the largest size up to the full context. Tokens also take memory while they wait for
            the row that summarises them.
        most_users: the number of users with this largest size that fit in the memory of all machines.
        bottleneck: the name of the longest part of the step.
        network_bytes: the bytes that a machine exchanges with other machines in a step.
        choosing_memory_s, choosing_compute_s: the time for choosing keys of sparse attentions; 0 if there are none.
        tokens_per_s: the rate of one batch, step after step. Rejected drafts are not counted.
        most_tokens_per_s: the rate of batches that take turns.
        tokens_per_step: the tokens that a step adds per user.
        drafting_s: the time for drafting in a step.
        served_tokens_per_s, most_served_tokens_per_s: the rates if the machines also read the prompts; ``None`` if the
            request has no number of output tokens.
    """

    layout: Layout
    dcp: int
    weight_bytes: float
    cache_bytes_per_user: float
    most_cache_bytes_per_user: float
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
    tokens_per_step: float
    drafting_s: float
    prefill: Prefill
    served_tokens_per_s: float | None
    most_served_tokens_per_s: float | None


class ModelPart(NamedTuple):
    """The model, or one drafting layer with its number of ``copies``."""

    sites: tuple[Attention, ...]
    letters: Mapping[str, float]
    copies: int = 1


@dataclass(frozen=True)
class Case:
    """One layout of a request."""

    layout: Layout
    dcp: int
    model: Facts
    machine: Machine
    request: Request
    stored: StoredWeights | None

    def plan(self) -> LayoutPlan:
        """Compute the whole plan of this layout."""
        request, held = self.request, self.held
        per_user, most_per_user = self.per_user(most=False), self.per_user(most=True)
        room = max(0.0, self.machine.memory_bytes * (1 - request.reserve) - held)
        most = math.floor(room / most_per_user) * (request.tp if by_user(self.layout) else 1)
        drafting = self.drafting()
        step = self.step() + drafting if drafting else self.step()
        prompts = self.prompts(request.users)
        made, read = request.users * request.tokens_per_step, request.users * request.prompt_tokens
        served = most_served = None
        if request.output is not None:
            both = prompts + step * (request.output / request.tokens_per_step)
            answered = request.users * request.output
            served, most_served = answered / both.seconds, answered / both.busiest_s
        return LayoutPlan(
            self.layout, self.dcp, held, per_user, most_per_user, most, most >= request.users,
            step.cache_memory_s, step.attention_compute_s, step.attention_s, step.choosing_memory_s,
            step.choosing_compute_s, step.weight_memory_s, step.weight_compute_s, step.network_bytes, step.network_s,
            step.seconds, made / step.seconds, made / step.busiest_s, step.bottleneck, request.tokens_per_step,
            drafting.seconds if drafting else 0.0,
            Prefill(
                prompts, prompts.seconds, self.prompts(1).seconds, read / prompts.seconds, read / prompts.busiest_s,
                prompts.bottleneck,
            ),
            served, most_served,
        )  # fmt: skip

    @cached_property
    def parts(self) -> tuple[ModelPart, ...]:
        """The model, and the drafting layers if tokens are drafted."""
        request, plain = self.request, self.stored.dtype if self.stored else self.request.weight_dtype
        common = _bytes_of_weights(self.model, self.stored, plain) | {
            "B": request.users, "T": request.context, "P": request.tp, "C": self.dcp,
            "Q": self.machine.nodes(request.tp), "E": BYTES[request.cache_dtype],
            "A": max(2, WEIGHT_BYTES[plain]), "A_x": WEIGHT_BYTES[self.place.arithmetic],
        }  # fmt: skip
        model = ModelPart(attentions(self.model), common | self._sizes(self.model))
        if not (self.model.drafting and request.draft_tokens):
            return (model,)
        layer, count = self.model.drafting.layer, min(self.model.drafting.count, request.draft_tokens)
        return model, ModelPart(attentions(layer), common | self._sizes(layer), count)

    @property
    def place(self) -> Deployment:
        """The layout, machine and dtypes with which passes run."""
        arithmetic = self.stored.arithmetic if self.stored else self.request.weight_dtype
        return Deployment(self.layout, self.machine, self.request.cache_dtype, arithmetic)

    @property
    def held(self) -> float:
        """The bytes of weights on a machine."""
        weights, stored = self.model.weights, self.stored
        lookup = stored.lookup_bytes if stored else weights.lookup * WEIGHT_BYTES[self.request.weight_dtype]
        share = 1 if self.layout == "experts" else self.request.tp
        return lookup / share + sum(part.copies * self._once("weight bytes", part) for part in self.parts)

    def per_user(self, *, most: bool) -> float:
        """Return the bytes of a user's cache on one machine; if ``most``, the largest number up to this context."""
        beside = "bytes beside rows, per user" + ", at most" * most
        return sum(
            part.copies
            * (
                sum(s.count * self._of("cache bytes per user", s, part) for s in part.sites)
                + self._once("bytes to choose by, per user", part)
                + self._once(beside, part)
            )
            for part in self.parts
        )

    def step(self) -> Floor:
        """Return the floor of a pass over each user's next token and drafted tokens."""
        (sites, letters, _), tokens = self.parts[0], 1 + self.request.draft_tokens
        return self.place.floor(sites, {**letters, "S": tokens, "O": tokens})

    def drafting(self) -> Floor | None:
        """Return the floor of drafting for the next step; ``None`` if there are no drafts or no known layers."""
        if len(self.parts) == 1:
            return None
        sites, own, count = self.parts[1]
        letters = {**own, "W": own["W"] + own["D"] * own["N_v"], "O": 1}  # drafting uses the model's output projection
        first = self.place.floor(sites, letters | {"S": self.request.tokens_per_step})
        again = self.place.floor(sites, letters | {"S": 1})
        return first * count + again * (self.request.draft_tokens - count)

    def prompts(self, users: int) -> Floor:
        """Return the floor of a pass over the prompts of ``users`` users. The stored weights make K and V."""
        tokens = self.request.prompt_tokens
        whole = {"B": users, "S": tokens, "T": tokens, "O": 1, "U": 0, "Z": 0}
        first, *more = (self.place.floor(p.sites, {**p.letters, **whole}, prompt=True) * p.copies for p in self.parts)
        return sum(more, first)

    def _sizes(self, model: Facts) -> dict[str, float]:
        """Return the letters of a model or of a drafting layer.

        A drafting layer's W_kc and W_v are assumed to be stored like the model's.
        """
        stored, context = self.stored, self.request.context
        weights, up = model.weights, stored.up if stored else None
        share = sum(site.count for site in model.latent) / up.layers if up else 0.0
        return {
            "W": weights.dense, "W_h": min(model.head_values, weights.dense), "X": weights.experts,
            "N_v": weights.vocabulary, "n": weights.expert_count, "k": weights.expert_top_k, "D": model.width or 0,
            "Y": sum(c.count * c.besides * (context - context % max(1, c.every)) for c in model.cached) / context,
            "Y_b": sum(c.count * c.bytes_beside(context) for c in model.cached),
            "Y_m": sum(c.count * c.bytes_beside(context, most=True) for c in model.cached),
            "U": share * stored.kept_bytes if stored else 0.0,
            "Z": share * stored.read_in_their_place if stored else 0.0,
        }  # fmt: skip

    def _of(self, what: str, site: Attention, part: ModelPart) -> float:
        return number(self.layout, what, values(site, part.letters), latent=site.latent)

    def _once(self, what: str, part: ModelPart) -> float:
        return self._of(what, replace(part.sites[0], every=1, window=0), part)


def attentions(model: Facts) -> tuple[Attention, ...]:
    """Return a model's attentions. Latent attentions are absorbed, and others have the heads of their cache."""
    found = [
        Attention(s.count, d.H, L=d.L, R=d.R, N=d.N, V=d.V, J=s.chosen or 0, F=s.choosing_flops)
        for s in model.latent
        for d in (s.dims,)
    ]
    rows = {v for site in model.latent for v in (site.dims.latent_values, site.dims.expanded_values)}
    for layer in model.cached:
        if layer.rows in rows:
            continue
        if layer.value_width == 0 and model.heads is not None:  # heads share a row that is both key and value
            width, picked = layer.key_width, layer.chosen + layer.window if layer.chosen else 0
            found.append(
                Attention(
                    layer.count, model.heads, L=width, N=width, V=width, J=picked, F=layer.choosing_flops,
                    every=layer.every, window=layer.window,
                )
            )  # fmt: skip
            continue
        if model.heads is None or layer.key_heads != layer.value_heads:
            raise InputError(f"{model.name} does not say how many query heads its cache of {layer} serves")
        found.append(
            Attention(
                layer.count, model.heads, G=layer.key_heads, K=layer.key_width, V=layer.value_width,
                every=layer.every, window=layer.window,
            )
        )  # fmt: skip
    if not found:
        raise InputError(
            f"{model.name} has no attention whose cache is known and grows with the context, so there is nothing to "
            "plan; of modules with caches of their own, only latent rows are known"
        )
    return tuple(found)


def _bytes_of_weights(model: Facts, stored: StoredWeights | None, dtype: str) -> dict[str, float]:
    """Return bytes per weight, by letter. ``E_h`` is the average over all attention weights."""
    if stored is None:
        return dict.fromkeys(("E_w", "E_h", "E_x"), WEIGHT_BYTES[dtype])
    attention, experts = stored.part("attention"), stored.part("routed experts")
    return {
        "E_w": (stored.bytes - experts.bytes - stored.lookup_bytes) / max(1, model.weights.dense),
        "E_h": attention.bytes / max(1, attention.values),
        "E_x": experts.bytes / max(1, experts.values),
    }
