"""Analysis: what to do with each attention: absorb it, keep it, or refuse it, always with a reason.

For every attention the sources of its keys and values are chosen (the narrowest rows that weights expand), the proof
obligations of :mod:`mla_compile.passes.plan` are checked, and the cost model picks a form. Last, sites whose expanded
keys or values are computed anyway because someone else reads them are taken back: absorbing those saves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import fx

from mla_compile.codes import CODES, Code
from mla_compile.passes.atoms import Axis
from mla_compile.passes.cost import Choice, Device, Fold, Forms, choose, saves_cache
from mla_compile.passes.explain_refusal import explain_refusal
from mla_compile.passes.fold_sides import fold_widths
from mla_compile.passes.graph import ancestors, bytes_hint, hint, is_tensor, packet, size, val
from mla_compile.passes.linear_map import LinearMaps, Piece, Stop
from mla_compile.passes.plan import AbsorbPlan, make_plan, pieces_of
from mla_compile.passes.residual import is_hidden_state
from mla_compile.passes.site import AttentionSite

aten = torch.ops.aten


@dataclass(frozen=True)
class Verdict:
    """The decision about one site. ``plan`` and ``choice`` are there whenever absorption is legal.

    ``by_call``: the number of queries is symbolic, so both forms are kept and every call picks.
    """

    site: AttentionSite
    code: Code
    reason: str
    blame: fx.Node | None = None
    plan: AbsorbPlan | None = None
    choice: Choice | None = None
    by_call: bool = False

    @property
    def absorb(self) -> bool:
        return self.code is Code.ABSORBED


def judge(
    graph: fx.Graph,
    sites: Sequence[AttentionSite],
    maps: LinearMaps,
    device: Device,
    forms: Forms = "auto",
    fold: Fold = "auto",
) -> list[Verdict]:
    """One verdict per site, in order."""

    def judge_site(site: AttentionSite, computed: Collection[fx.Node] = ()) -> Verdict:
        return _judge_site(site, maps.with_stops(computed) if computed else maps, computed, device, forms, fold)

    return _respect_other_users(graph, [judge_site(site) for site in sites], judge_site)


def _judge_site(
    site: AttentionSite, maps: LinearMaps, computed: Collection[fx.Node], device: Device, forms: Forms, fold: Fold
) -> Verdict:
    """The verdict on one site; ``computed``: nodes that are there anyway, behind which no source is looked for."""
    keys = [maps.map(p.k.node) for p in site.products]
    values = maps.map(site.v.node)
    pieces = [*pieces_of(keys), *pieces_of([values])]
    cuts, wide = choose_sources(pieces)
    at_cuts = maps.with_stops({*cuts, *computed})
    plan = make_plan(site, [at_cuts.map(p.k.node) for p in site.products], at_cuts.map(site.v.node))
    if isinstance(plan, Stop):
        stop = explain_refusal(site, plan, maps, wide)
        return Verdict(site, Code(stop.code), stop.detail, stop.node)
    if _is_hidden_state(plan, maps):
        return Verdict(site, Code.NOT_MLA, "K and V are projected from the rows that the queries are made of")
    if plan.dims.latent_values >= min(plan.dims.H * plan.dims.N, plan.dims.H * plan.dims.V) and is_hidden_state(
        plan.latent.node
    ):
        return Verdict(site, Code.NOT_MLA, "K and V are projected from hidden states, which are no narrower")
    if site.problem is not None:
        return Verdict(site, Code(site.problem.code), site.problem.detail, site.problem.node)
    if not saves_cache(plan.dims):
        rows, whole = plan.dims.latent_values, plan.dims.expanded_values
        return Verdict(site, Code.COST_LATENT_WIDE, f"the latent rows hold {rows} values, K and V {whole}", plan=plan)
    if fold != "never":
        q_width, model_width = fold_widths(plan, maps)
        plan = replace(plan, dims=replace(plan.dims, Q=q_width, D=model_width))
    return _choose_form(plan, device, forms, fold)


def _is_hidden_state(plan: AbsorbPlan, maps: LinearMaps) -> bool:
    """Whether the queries are projected from the very rows that K and V are: MHA without RoPE, which has no latent."""
    rows = {plan.latent.node}
    for piece in maps.map(plan.latent.node).pieces:
        if not piece.projected:  # some of the rows of the hidden state, where an attention is local
            rows |= {node for visit in piece.path for node in _whole(visit.node)}
    queue = [p.q.node for p in plan.site.products]
    for node in queue:
        for piece in pieces_of([maps.map(node)]):
            if any(one in rows for visit in piece.path for one in _whole(visit.node)):
                return True
            queue += _unscaled(piece.source) if piece.source is not None else []
    return False


def _whole(node: fx.Node) -> list[fx.Node]:
    """``node``, and what it is some of the rows of."""
    found = [node]
    while packet(found[-1]) in (aten.slice, aten.narrow, aten.select, aten.index_select):
        found.append(found[-1].args[0])  # type: ignore[arg-type]  # the tensor
    return found


def _unscaled(node: fx.Node) -> list[fx.Node]:
    """The rows that ``node`` multiplies by one number, where it does: a scale may be known at run time only."""
    if packet(node) not in (aten.mul, aten.div):
        return []
    rows = [n for n in node.all_input_nodes if is_tensor(n) and val(n).dim()]
    return rows if len(rows) == 1 and len(node.all_input_nodes) == 2 else []


def _choose_form(plan: AbsorbPlan, device: Device, forms: Forms, fold: Fold) -> Verdict:
    _, s, t = plan.sizes()
    counts = [_axis_hint(plan, axis) for axis in (plan.batch, plan.site.queries, plan.site.keys)]
    element = val(plan.latent.node).element_size()
    prefill = not isinstance(s, int) and s == t
    # One query is decode: what counts is the long context it will meet, not the one it was traced with.
    context = None if s == 1 or not isinstance(t, int) else counts[2]
    dims = plan.dims
    choice = choose(
        dims, B=counts[0], S=counts[1], T=context, element_bytes=element, device=device,
        forms=forms, fold=fold, can_fold_query=dims.Q is not None, can_fold_output=dims.D is not None,
    )  # fmt: skip
    if not isinstance(s, int) and forms == "auto" and not prefill:
        return Verdict(plan.site, Code.ABSORBED, "each call picks by its number of queries", None, plan, choice, True)
    if choice.absorbed and not (prefill and forms == "auto"):
        return Verdict(plan.site, Code.ABSORBED, choice.reason, None, plan, choice)
    code = Code.FORMS_EXPANDED if forms == "expanded" else Code.COST_PREFILL
    reason = "a prompt: as many queries as keys, whatever their number" if choice.absorbed else choice.reason
    return Verdict(plan.site, code, reason, None, plan, choice)


def _axis_hint(plan: AbsorbPlan, axis: Axis) -> int:
    """The size of a product of atoms at the sizes seen when the graph was traced."""
    hints: dict[Axis, int] = {}
    for operand in (plan.site.out, plan.site.v, *(p.k for p in plan.site.products)):
        for own, dim in zip(operand.axes, val(operand.node).shape, strict=True):
            hints[own] = hint(size(dim), dim)
    if axis in hints:
        return hints[axis]
    return math.prod(hints.get((a,), a.size if isinstance(a.size, int) else 1) for a in axis)


@dataclass(frozen=True)
class _Cut:
    node: fx.Node
    bytes: int
    piece: Piece


def _cuts(piece: Piece, proper: bool) -> _Cut | None:
    """The narrowest tensor on the way from the source to the piece, before (proper) or after its last projection."""
    last = piece.path[-1]
    best: tuple[int, int, int] | None = None
    where: fx.Node | None = None
    for index, visit in enumerate(piece.path):
        if (visit.contractions < last.contractions) != proper:
            continue
        key = (bytes_hint(visit.node), last.scalings - visit.scalings, index)
        if best is None or key < best:
            best, where = key, visit.node
    return None if best is None or where is None else _Cut(where, best[0], piece)


def choose_sources(pieces: Sequence[Piece]) -> tuple[set[fx.Node], fx.Node | None]:
    """Where the walks should end, and a source that was passed over because its rows are no narrower."""
    proper: dict[fx.Node, list[Piece]] = {}
    as_they_are: list[_Cut] = []
    wide: fx.Node | None = None
    for piece in pieces:
        cut = _cuts(piece, proper=True)
        trivial = _cuts(piece, proper=False)
        if cut is not None:
            proper.setdefault(cut.node, []).append(piece)
        elif trivial is not None:
            as_they_are.append(trivial)
    chosen: set[fx.Node] = set()
    for node, using in proper.items():
        cuts = [c for c in (_cuts(p, proper=False) for p in using) if c is not None]
        if bytes_hint(node) < sum({c.node: c.bytes for c in cuts}.values()):
            chosen.add(node)
        else:
            as_they_are += cuts
            wide = node
    return chosen | _rejoined(as_they_are), wide


def _rejoined(cuts: Sequence[_Cut]) -> set[fx.Node]:
    """The nodes of ``cuts``, parts that are joined again further on replaced by what they are joined to.

    A rotary key is often ``cat(a cos - b sin, b cos + a sin)``: two sources that nothing expands, but one row.
    """
    chosen = {c.node: c.bytes for c in cuts}
    after = [(c.node, _after(c)) for c in cuts]
    for joint in dict.fromkeys(node for _, further in after for node in further):
        parts = {node for node, further in after if node in chosen and joint in further}
        if len(parts) > 1 and bytes_hint(joint) <= sum(chosen[n] for n in parts):
            for part in parts:
                del chosen[part]
            chosen[joint] = bytes_hint(joint)
    return set(chosen)


def _after(cut: _Cut) -> list[fx.Node]:
    """The nodes between a cut and the tensor it is a part of."""
    nodes = [v.node for v in cut.piece.path]
    return nodes[nodes.index(cut.node) + 1 :]


def _respect_other_users(
    graph: fx.Graph, verdicts: list[Verdict], judge_site: Callable[[AttentionSite, Collection[fx.Node]], Verdict]
) -> list[Verdict]:
    """Takes back every site whose expansion stays alive although the site no longer reads it.

    Unless it is alive because the latent comes from it: a rotary key from the projection that also makes the latent,
    where the hidden state before it happens to be narrower. Then those rows are the source.
    """
    computed: dict[fx.Node, set[fx.Node]] = {v.site.node: set() for v in verdicts}
    while True:
        chosen = {v.site.node: v for v in verdicts if v.absorb}
        alive = _alive(graph, chosen)
        for index, verdict in enumerate(verdicts):
            if verdict.absorb and (found := _expansion_alive(verdict, alive)) is not None:
                which, node = found
                verdicts[index] = _taken_back(verdict, which, node)
                if verdict.plan is not None and node in ancestors(verdict.plan.latent.node):
                    computed[verdict.site.node].add(node)
                    closer = judge_site(verdict.site, computed[verdict.site.node])
                    verdicts[index] = closer if closer.absorb else verdicts[index]
                break
        else:
            return verdicts


def _alive(graph: fx.Graph, absorbed: dict[fx.Node, Verdict]) -> dict[fx.Node, fx.Node | None]:
    """Every node still needed when the sites are absorbed, and one node that needs it."""
    output = graph.output_node()
    alive: dict[fx.Node, fx.Node | None] = {output: None}
    queue = [output]
    products = {p.node: v for v in absorbed.values() if v.site.open_core for p in v.site.products if p.node}
    while queue:
        node = queue.pop()
        inputs: list[fx.Node] = list(node.all_input_nodes)
        verdict = absorbed.get(node) or products.get(node)
        if verdict is not None and verdict.plan is not None:
            site = verdict.site
            inputs = [*verdict.plan.sources, *_weight_nodes(verdict.plan), *(p.q.node for p in site.products)]
            inputs += [m.operand.node for m in site.masks]
            if site.open_core and node is site.node and site.probs is not None:
                inputs = [*verdict.plan.sources, *_weight_nodes(verdict.plan), site.probs.node]
        for i in inputs:
            if i not in alive:
                alive[i] = node
                queue.append(i)
    return alive


def _weight_nodes(plan: AbsorbPlan) -> list[fx.Node]:
    factors = [f for t in (*plan.keys, *plan.vals) for f in (t.piece.weight, t.piece.bias) if f is not None]
    return [n for f in factors for n in f.expr.leaves()]


def _expansion_alive(verdict: Verdict, alive: dict[fx.Node, fx.Node | None]) -> tuple[str, fx.Node] | None:
    """The projection that makes K or V from the sources, where it is still computed: whose it is, and the node."""
    assert verdict.plan is not None
    for which, terms in (("keys", verdict.plan.keys), ("values", verdict.plan.vals)):
        for term in terms:
            path = term.piece.path
            for before, visit in pairwise(path):
                last = visit.contractions == path[-1].contractions  # one before it may make rows that others read too
                if visit.contractions > before.contractions and last and visit.node in alive:
                    return which, visit.node
    return None


def _taken_back(verdict: Verdict, which: str, node: fx.Node) -> Verdict:
    masks = {m.operand.node for m in verdict.site.masks}
    seen: set[fx.Node] = set()
    queue = [node]
    while queue:
        for user in queue.pop().users:
            if user in masks:
                code = Code.MASK_DEPENDS_ON_KEYS
                return replace(verdict, code=code, reason=CODES[code].meaning, blame=user)
            if user not in seen and user is not verdict.site.node:
                seen.add(user)
                queue.append(user)
    code = Code.KEYS_USED_ELSEWHERE if which == "keys" else Code.VALUES_USED_ELSEWHERE
    return replace(verdict, code=code, reason=CODES[code].meaning, blame=node)
