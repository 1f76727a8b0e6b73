"""Compute from a model's sizes what fits on a machine, and the best possible speed of decode steps and prompts.

A step reads the weights once and every user's cache once; a prompt is read in one pass. Real kernels overlap less than
a floor assumes, so real steps are slower. A single step cannot keep memory, arithmetic and links busy at once, but
several batches that take turns can. The resource that is busy longest then limits tokens/s.

A step may verify drafted tokens (speculative decoding). It reads everything once for all drafted tokens. Then each
drafting layer runs over the accepted tokens and drafts one token. Each further draft token takes another pass of a
drafting layer over a single token.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from mla_compile.core.quantities import amount
from mla_compile.errors import InputError
from mla_compile.report.facts import Facts
from mla_compile.report.stored import StoredWeights
from mla_compile.workbench.layouts import Case, LayoutPlan, attentions
from mla_compile.workbench.machines import Machine
from mla_compile.workbench.request import AS_STORED, Request
from mla_compile.workbench.step_formulas import Layout, by_user

SCHEMA = "mla_compile.plan/1"
MOST_TP = 1024
"""The maximum number of GPUs that :func:`least_tp` tries."""


@dataclass(frozen=True)
class DeploymentPlan:
    """All layouts of one request. ``stored`` describes stored weights if the request asks for these."""

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

    def to_dict(self) -> dict[str, object]:
        """Return a JSON-able record; the key ``schema`` names the layout."""
        return {"schema": SCHEMA, **asdict(self), "stored": self.stored and self.stored.to_dict()}


def plan(model: Facts, machine: Machine, request: Request) -> DeploymentPlan:
    """Plan every layout that the request's number of machines allows.

    Raises :class:`InputError` if the request is invalid or cannot be planned for this model and machine.
    """
    sites, stored = attentions(model), _stored(model, request)
    _check(machine, request)
    notes = list(model.notes)
    layouts: list[tuple[Layout, int]] = [("replicated", 1)]
    if request.tp > 1:
        layouts += [("context", request.dcp if request.dcp > 1 else request.tp), ("data", 1)]
        layouts += [("experts", 1)] if model.weights.experts else []
    if uneven := next((site.H for site in sites if site.H % request.tp), 0):
        layouts = [one for one in layouts if by_user(one[0])]
        notes.append(f"tp is {request.tp}, which does not divide the {uneven} heads of an attention: heads stay whole")
    if model.in_part:
        notes.append(f"attentions absorbed in part or by groups of heads ({model.in_part}) are counted as whole ones")
    elif model.family in ("refused", "kept"):
        notes.append("nothing is absorbed; what is recomputed from the cache in every step is not counted")
    for dtype in dict.fromkeys((stored.arithmetic if stored else request.weight_dtype, request.cache_dtype)):
        if dtype not in machine.flops_per_s:
            notes.append(f"{machine.name} computes no {dtype}: it is read as {dtype} and computed as bf16")
    if request.draft_tokens:
        notes.append(_drafted(model))
    rows = tuple(Case(layout, dcp, model, machine, request, stored).plan() for layout, dcp in layouts)
    return DeploymentPlan(model.name, model.family, machine, request, rows, tuple(notes), stored)


def least_tp(model: Facts, machine: Machine, request: Request) -> DeploymentPlan | None:
    """Double ``request.tp`` until the users fit, and return the plan; ``None`` if no number of GPUs suffices.

    ``request.dcp`` is ignored.
    """
    tp = 2 * request.tp
    while tp <= MOST_TP and machine.link_bytes_per_s is not None:
        if machine.nodes(tp) > 1 and machine.network_bytes_per_s is None:
            return None
        found = plan(model, machine, replace(request, tp=tp, dcp=1))
        if found.fits:
            return found
        tp *= 2
    return None


def _stored(model: Facts, request: Request) -> StoredWeights | None:
    """Return a description of the stored weights if the request asks for it, else None."""
    if request.weight_dtype != AS_STORED:
        return None
    if model.stored is None:
        raise InputError(f"nothing says how the weights of {model.name} are stored; name their dtype")
    return model.stored


def _drafted(model: Facts) -> str:
    """Describe which work of drafting is counted."""
    if model.drafting is None:
        return "the config names no layers that draft (multi-token prediction): only verifying is counted"
    count, weights = model.drafting.count, model.drafting.layer.weights.total
    who = f"{count} more layers, each" if count > 1 else "one more layer"
    return f"tokens are drafted by {who} with {amount(weights)} weights, assumed to be like the last"


def _check(machine: Machine, request: Request) -> None:
    request.check()
    if request.tp > 1 and machine.link_bytes_per_s is None:
        raise InputError(f"{machine.name} has no link_bytes_per_s, so tp is at most 1, got {request.tp}")
    if request.tp % request.dcp:
        raise InputError(f"dcp is {request.dcp}, expected a divisor of tp, which is {request.tp}")
    if machine.nodes(request.tp) > 1 and machine.network_bytes_per_s is None:
        raise InputError(
            f"{machine.name} has no network_bytes_per_s, so tp is at most the {machine.node_machines} of a node, got "
            f"{request.tp}"
        )
