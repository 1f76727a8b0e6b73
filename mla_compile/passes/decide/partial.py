"""Find the parts that can be absorbed if an attention cannot be absorbed as a whole.

The two products of an attention can be rewritten separately: ``P V = (P c) W_v`` does not involve the keys, and
``q K^T`` does not involve the values. So V can be absorbed even if K is rotated after its up-projection. K can be
absorbed even if V is not a linear map of any rows. If only some columns of K are made from rows that all heads share,
only these columns are absorbed, and other columns keep their own product. The report says why parts stay expanded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import fx

from mla_compile.codes import Code
from mla_compile.core.choices import Forms
from mla_compile.core.records import KeptPart
from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.blame.blame import SYMPTOMS, explain_source, of_queries, plain_side
from mla_compile.passes.cost.cost import AbsorbedColumns, Choice, DeviceModel, choose_parts
from mla_compile.passes.decide.call_sizes import call_sizes
from mla_compile.passes.ir.axes import axis_size, fixed_size
from mla_compile.passes.ir.locate import locate
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.ir.walk import depends_on
from mla_compile.passes.linear.records import Maps
from mla_compile.passes.proof.plan import make_part_plan
from mla_compile.passes.sources.records import AbsorbPlan, Rows, Side, ends_of, pieces_of
from mla_compile.passes.sources.residual import is_hidden_state
from mla_compile.passes.sources.sources import choose_sources, cut


@dataclass(frozen=True)
class Partial:
    """A part of a site that can be absorbed, its cost in both forms, and the parts that stay expanded.

    ``pays``: whether to absorb the part. ``by_call``: whether the decision depends on the number of queries per call.
    """

    plan: AbsorbPlan
    parts: tuple[AbsorbedColumns, ...]
    choice: Choice
    kept: tuple[KeptPart, ...]
    pays: bool
    by_call: bool


def partial(
    site: AttentionSite,
    maps: Maps,
    failed: Stop,
    device: DeviceModel,
    forms: Forms,
    keep: Collection[Side] = (),
) -> Partial | None:
    """Return the first plan of ``_plans`` that pays, else the first plan, else None.

    ``failed``: the reason why the whole site cannot be absorbed. ``keep``: sides that must stay as they are.
    """
    if site.problem is not None:
        return None
    found = [_weighed(plan, maps, failed, device, forms, keep) for plan in _plans(site, maps, keep)]
    return next((p for p in found if p.pays), found[0] if found else None)


def _plans(site: AttentionSite, maps: Maps, keep: Collection[Side]) -> Iterator[AbsorbPlan]:
    """Yield the legal plans for parts of ``site``: for both sides, then for the values, then for the keys."""
    own = of_queries(site, maps)
    options: tuple[tuple[Side, ...], ...] = (("keys", "values"), ("values",), ("keys",))
    for sides in options:
        if set(sides) & set(keep):
            continue
        nodes = [p.k.node for p in site.products] if "keys" in sides else []
        nodes += [site.v.node] if "values" in sides else []
        # If queries are also made from these rows, the rows are the model's hidden state and not a latent.
        pieces = pieces_of([maps.map(node) for node in nodes])
        if all(cut(piece, proper=True, without=own) is None for piece in pieces):
            continue
        cuts, _ = choose_sources(pieces, own)
        plan = make_part_plan(site, maps.with_sources(cuts), sides)
        # If a plan for both sides expands only one side, skip it. The plan for this side alone is tried later.
        if isinstance(plan, Stop) or {p.side for p in parts_of(plan)} != set(sides):
            continue
        if not any(is_hidden_state(rows.node) for rows in plan.rows if plan.expands(rows)):
            yield plan


def parts_of(plan: AbsorbPlan) -> tuple[AbsorbedColumns, ...]:
    """Return the absorbed columns, grouped by side and by source rows.

    Columns that all heads share, such as a shared rotary key, are not expanded, so they are left out.
    """
    heads = axis_size(plan.heads)
    parts: dict[tuple[Side, Rows, int], int] = {}
    for side, terms in plan.sides:
        for t in terms:
            if t.piece.projected and t.piece.source is not None:
                made = fixed_size(a for a in plan.heads if t.kind(a) != "broadcast")
                if made > 1 or heads == 1:
                    key = (side, plan.rows_of(t.piece.source), made)
                    parts[key] = parts.get(key, 0) + t.stop - t.start
    return tuple(
        AbsorbedColumns(side, plan.dims.H, rows.size, columns, made, rows.count)
        for (side, rows, made), columns in parts.items()
    )


def _weighed(
    plan: AbsorbPlan, maps: Maps, failed: Stop, device: DeviceModel, forms: Forms, keep: Collection[Side]
) -> Partial:
    sizes = call_sizes(plan)
    parts = parts_of(plan)
    # A fused attention has no separate product. It is written out first, which costs a trip through memory.
    writes = plan.site.probs is None and not (plan.fits_op and plan.site.open_core is None)
    choice = choose_parts(
        parts, writes=writes, B=sizes.B, S=sizes.S, T=sizes.T, element_bytes=sizes.element_bytes, device=device,
        forms=forms, made=sizes.made,
    )  # fmt: skip
    auto = forms == "auto"
    by_call = sizes.symbolic and auto and not sizes.prefill
    pays = by_call or (choice.absorbed and not (sizes.prefill and auto))
    return Partial(plan, parts, choice, tuple(_kept(plan, maps, failed, keep)), pays, by_call)


def _kept(plan: AbsorbPlan, maps: Maps, failed: Stop, keep: Collection[Side]) -> Iterator[KeptPart]:
    """Yield the sides and columns that stay expanded, each with the operator to blame."""
    site = plan.site
    read = [rows.node for rows in plan.rows]
    sides: tuple[tuple[Side, bool, list[fx.Node]], ...] = (
        ("keys", bool(plan.keys), [p.k.node for p in site.products]),
        ("values", bool(plan.vals), [site.v.node]),
    )
    for side, absorbed, nodes in sides:
        if side in keep:
            yield _kept_part(side, failed)
            continue
        if not absorbed:
            yield _kept_part(side, _why(site, side, nodes, maps, failed, read))
            continue
        terms = plan.keys if side == "keys" else plan.vals
        own = {t.piece.source for t in terms if t.piece.source is not None and not t.piece.projected}
        for rows in plan.rows:
            if rows.node in own and rows.heads:
                own_stop = maps.reasons.get(rows.node)
                # A dropout or a nonlinearity is a better reason than differing heads.
                if own_stop is None or own_stop.code not in ("dropout", "nonlinear"):
                    own_stop = _of_heads(site, side, rows.node, maps)
                stop = explain_source(rows.node, site, maps, read) or own_stop
                yield _kept_part(f"some columns of the {side}", stop)


def _of_heads(site: AttentionSite, side: Side, node: fx.Node, maps: Maps) -> Stop:
    """Return why the columns of ``side`` that are read from ``node`` stay expanded."""
    _, wide = choose_sources(pieces_of([maps.map(node)]), of_queries(site, maps))
    if wide is not None:
        return Stop(
            wide, "cost_latent_wide", f"the rows that are expanded are no narrower than these columns of the {side}"
        )
    code = "per_head_rope" if side == "keys" else "head_dependent_latent"
    return Stop(node, code, "every head has rows of its own")


def _kept_part(what: str, stop: Stop) -> KeptPart:
    if what == "values" and stop.code == "per_head_rope":  # this code is about keys
        stop = Stop(stop.node, "head_dependent_latent", "some rows differ from head to head")
    return KeptPart(what, Code(stop.code), stop.detail, locate(stop.node))


def _why(
    site: AttentionSite, side: Side, nodes: list[fx.Node], maps: Maps, failed: Stop, read: Collection[fx.Node]
) -> Stop:
    """Explain why the side that ``nodes`` make stays expanded.

    The reason is an obstacle upstream of this side. If there is none, the reason is ``failed``.
    """
    # These codes describe the end of a walk. Any other code names the operator that is the obstacle.
    if failed.code not in (*SYMPTOMS, "cost_latent_wide", "unsupported_op"):
        other: Side = "values" if side == "keys" else "keys"
        alone = any(not any(rows.heads for rows in plan.rows) for plan in _plans(site, maps, (other,)))
        if not alone and any(n is failed.node or depends_on(n, [failed.node]) for n in nodes):
            return failed
        # This side itself was not shown to be an obstacle.
        failed = Stop(failed.node, "unsupported_op", f"{failed.detail}, so that only the {other} are absorbed")
        if alone:
            return failed
    operands = [p.k for p in site.products] if side == "keys" else [site.v]
    found = (explain_source(source, site, maps, read) for source in ends_of(operands, site.lead, maps))
    said = next((f for f in found if f is not None), None)
    if said is None and failed.code in ("per_head_rope", "not_mla", "expanded_inputs", "graph_break"):
        said = plain_side(site, side, nodes, maps)
    return said or (failed if failed.node in nodes else Stop(nodes[0], failed.code, failed.detail))
