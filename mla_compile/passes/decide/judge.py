"""Decide whether each attention is absorbed, kept or refused, always with a reason.

For every attention, the analysis chooses the sources of keys and values (the narrowest rows that weights expand),
checks the proof obligations of :mod:`mla_compile.passes.proof.plan`, and picks a form with the cost model. If an
attention cannot be absorbed as a whole, parts are tried (:mod:`mla_compile.passes.decide.partial`). If another reader
needs the expanded keys or values of a site, absorbing this side would save nothing. The side or the whole site then
stays expanded.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from mla_compile.codes import CODES, Code
from mla_compile.core.choices import Fold, Forms
from mla_compile.passes.attention.site import AttentionSite
from mla_compile.passes.blame.blame import SYMPTOMS, explain_source
from mla_compile.passes.blame.explain import explain_refusal
from mla_compile.passes.cost.cost import DeviceModel, choose
from mla_compile.passes.decide.alive import Alive, added_to, expansion_alive, expansions
from mla_compile.passes.decide.by_hand import over_shared_rows
from mla_compile.passes.decide.call_sizes import call_sizes
from mla_compile.passes.decide.fold_sides import fold_widths
from mla_compile.passes.decide.partial import partial
from mla_compile.passes.ir.graph import ROWS, args_of, is_tensor, operator_name, packet, val
from mla_compile.passes.ir.moves import Select, Slice
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.ir.walk import depends_on, reachable
from mla_compile.passes.linear.records import Maps
from mla_compile.passes.proof.plan import make_plan
from mla_compile.passes.sources.cached import are_cached, come_from
from mla_compile.passes.sources.mixed import mixing_products
from mla_compile.passes.sources.readers import narrower_readers, other_reader, strides_show, tokens_read
from mla_compile.passes.sources.records import AbsorbPlan, Side, Verdict, pieces_of
from mla_compile.passes.sources.residual import is_hidden_state
from mla_compile.passes.sources.sources import choose_sources

aten = torch.ops.aten


_OF_A_SIDE = {
    Code.NONLINEAR, Code.POSITION_DEPENDENT, Code.TOKEN_MIXING, Code.HEAD_DEPENDENT_LATENT, Code.UNSUPPORTED_WEIGHT,
}  # fmt: skip
"""Codes for operators on the path to one side. They say nothing about the other side."""


def judge(
    graph: fx.Graph,
    sites: Sequence[AttentionSite],
    maps: Maps,
    device: DeviceModel,
    forms: Forms = "auto",
    fold: Fold = "auto",
    *,
    sparse: bool = True,
) -> list[Verdict]:
    """Return one verdict per site, in order.

    ``sparse``: whether attention may read only the keys of an index list.
    """
    judged = _Judge(graph, maps, device, forms, fold, sparse)
    verdicts = judged.respect_other_users([judged.whole(site) for site in sites])
    verdicts = [_with_advice(verdict, maps) for verdict in verdicts]
    return over_shared_rows(graph, verdicts, maps)


def _with_advice(verdict: Verdict, maps: Maps) -> Verdict:
    """Drop the advice to use other operators if the blamed operator has a rule, which only failed in this graph."""
    if verdict.code is Code.UNSUPPORTED_OP and verdict.fix is None and verdict.blame is not None:
        return replace(verdict, fix="" if maps.follows(verdict.blame) else None)
    return verdict


@dataclass(frozen=True)
class _Judge:
    graph: fx.Graph
    maps: Maps
    device: DeviceModel
    forms: Forms
    fold: Fold
    sparse: bool

    def whole(self, site: AttentionSite, computed: Collection[fx.Node] = ()) -> Verdict:
        """Return the verdict on one site. Walks end at the nodes ``computed``, which are computed in any case."""
        maps = self.maps.with_sources(computed) if computed else self.maps
        operands = (*(p.k for p in site.products), site.v)
        cuts, wide = choose_sources(pieces_of([maps.map(o.node) for o in operands]))
        plan = make_plan(site, maps.with_sources({*cuts, *computed}))
        # Products that are rewritten one by one read all keys, under a mask instead of an index list.
        if isinstance(plan, AbsorbPlan) and not (self.sparse and plan.whole):
            plan = replace(plan, visible=plan.visible.dense)
        if isinstance(plan, Stop) and (mixed := mixing_products(site, plan, maps)):
            behind = self.whole(site, {*computed, *mixed})
            if behind.plan is not None and not behind.parts:
                return behind
        if isinstance(plan, Stop):
            stop = explain_refusal(site, plan, maps, wide)
            refused = Verdict(site, Code(stop.code), stop.detail, stop.node, fix=stop.fix)
            return self.part(refused, stop, maps)
        # This is checked before the site's problem, because plain attention with an odd mask must not be reported as
        # refused MLA.
        if _is_hidden_state(plan, maps):
            return Verdict(site, Code.NOT_MLA, "K and V are projected from the same rows as the queries")
        # Rows from a residual connection that are no narrower than K or V are the hidden state.
        narrowest = min(plan.dims.H * plan.dims.N, plan.dims.H * plan.dims.V)
        if plan.dims.latent_values >= narrowest and is_hidden_state(plan.latent.node):
            return Verdict(site, Code.NOT_MLA, "K and V are projected from hidden states, which are no narrower")
        if site.problem is not None:
            problem = site.problem
            return Verdict(site, Code(problem.code), problem.detail, problem.node, fix=problem.fix)
        # Rows that are cached in any case may be wide. For these, only the cost of the work matters.
        if not plan.saves_cache and not are_cached(plan.latent.node):
            reason = f"the latent rows hold {plan.row_values} values, K and V {plan.expanded_values}"
            return Verdict(site, Code.COST_LATENT_WIDE, reason, plan=plan)
        # Q and D are computed last. They need two more walks, which would be wasted on a refused attention.
        if self.fold != "never":
            q_width, model_width = fold_widths(plan, maps)
            plan = replace(plan, dims=replace(plan.dims, Q=q_width, D=model_width))
        return _choose_form(plan, self.device, self.forms, self.fold)

    def part(self, refused: Verdict, stop: Stop, maps: Maps, keep: Collection[Side] = ()) -> Verdict:
        """Return the verdict on a site that is ``refused`` as a whole: absorbed in part if this is legal and pays.

        ``stop``: the reason for the refusal.
        """
        if self.forms == "expanded":
            return refused
        found = partial(refused.site, maps, stop, self.device, self.forms, keep)
        if found is None:
            return refused
        sides = " and ".join(dict.fromkeys(p.side for p in found.parts))
        if not found.pays:
            why = call_sizes(found.plan).many if found.choice.absorbed else found.choice.reason
            note = f"the {sides} alone could be absorbed; {why}"
            # If a part is made from a latent, the attention is MLA, whatever the obstacle for the other parts. It is
            # kept because of its cost.
            if refused.code in SYMPTOMS:
                return replace(refused, code=Code.COST_PREFILL, reason=note, blame=None)
            return replace(refused, notes=(note,))
        reason = f"each call picks by its number of queries whether the {sides} are absorbed"
        return Verdict(
            refused.site,
            Code.ABSORBED,
            reason if found.by_call else found.choice.reason,
            # An attention absorbed in part computes the scores of all keys in any case, so no index list is used.
            plan=replace(found.plan, visible=found.plan.visible.dense),
            choice=found.choice,
            by_call=found.by_call,
            parts=found.parts,
            kept=found.kept,
            instead=refused,
        )

    def respect_other_users(self, verdicts: list[Verdict]) -> list[Verdict]:
        """Change the verdict on every site whose K or V would still be expanded for another reader.

        These options are tried in order:

        1. Compute only what the other reader needs.
        2. Start from rows that are computed anyway. For example, the projection of a narrower hidden state may make
           the latent and the rotary key.
        3. Absorb only the other side.
        4. Do not absorb the site.
        """
        # Every change of a verdict changes which nodes are alive, so all sites are checked again. The loop ends:
        # `computed` only grows, and each of the few verdicts in `options` is taken once.
        computed: dict[fx.Node, set[fx.Node]] = {v.site.node: set() for v in verdicts}
        options: dict[fx.Node, list[Verdict]] = {}
        while True:
            # A changed verdict on one site may remove the readers for which another site was narrowed.
            verdicts = [replace(v, narrowed=()) for v in verdicts]
            alive = Alive(self.graph, verdicts)
            for index, verdict in enumerate(verdicts):
                if not verdict.absorb or (found := expansion_alive(verdict, alive)) is None:
                    continue
                which, node = found
                narrowed = self._narrowed(verdict, alive)
                if narrowed is not None:
                    verdicts[index] = replace(verdict, narrowed=narrowed)
                    continue
                read = _taken_back(verdict, which, node, alive, self.maps)
                verdicts[index] = self._instead(verdict, which, node, read, computed[verdict.site.node], options)
                break
            else:
                return verdicts

    def _narrowed(self, verdict: Verdict, alive: Alive) -> tuple[tuple[fx.Node, tuple[fx.Node, ...]], ...] | None:
        """Return the nodes to compute instead of whole projections, with their rows; None if this is impossible."""
        assert verdict.plan is not None
        paths = _ways(verdict)
        made: dict[tuple[fx.Node, tuple[fx.Node, ...]], None] = {}
        for _, node, source in expansions(verdict):
            if node in alive.nodes:
                # Other readers may read lengths and a few tokens. They may read columns of all tokens only if a part is
                # absorbed.
                columns = verdict.plan.part
                rows = added_to(verdict, node, source)
                found = narrower_readers(node, rows, self.maps, alive.reads, alive.nodes, paths, columns=columns)
                if found is None:
                    return None
                made.update(((f, rows), None) for f in found)
        return tuple(made)

    def _instead(
        self,
        verdict: Verdict,
        which: Side,
        node: fx.Node,
        read: Verdict,
        computed: set[fx.Node],
        options: dict[fx.Node, list[Verdict]],
    ) -> Verdict:
        """Return the next best verdict on a site if its keys or values (``which``) are expanded in any case.

        ``node``: the projection that expands them. ``read``: the verdict that blames the other reader.
        """
        site = verdict.site
        assert verdict.plan is not None
        # The projection `node` makes rows that the attention reads. Rows upstream are narrower, but the projection is
        # computed in any case, so the walk must end at its result. If `computed` already has the node, other rows of
        # the plan need tensors upstream.
        behind = node not in computed and any(depends_on(rows.node, [node]) for rows in verdict.plan.rows)
        if not verdict.plan.part and behind:
            computed.add(node)
            closer = self.whole(site, computed)
            return closer if closer.absorb or _merely_wide(closer, verdict.plan, self.maps) else read
        if site.node not in options:
            final = verdict.instead or read
            options[site.node] = [final]
            if self.forms != "expanded":
                # Absorbing the other side alone is tried first, because this side is expanded in any case.
                sides: tuple[Side, ...] = ("values", "keys") if which == "values" else ("keys", "values")
                # This side stays because of its other reader, unless `final` blames an operator between the rows and
                # this side with a code that is no symptom.
                rows = [rows.node for rows in verdict.plan.rows if verdict.plan.expands(rows)]
                about = _made_with(site, which, final.blame) and not _behind(rows, final.blame)
                why = final if about and final.code not in SYMPTOMS else read
                stops = [_stop_of(side, v, node) for side, v in zip(sides, (why, final), strict=True)]
                tried = (self.part(final, stop, self.maps, (side,)) for side, stop in zip(sides, stops, strict=True))
                options[site.node] = [*(v for v in tried if v.absorb), final]
        return options[site.node].pop(0)


def _is_hidden_state(plan: AbsorbPlan, maps: Maps) -> bool:
    """Whether Q, K and V are projected from the same rows: plain MHA without RoPE, which has no latent."""
    rows = {plan.latent.node}
    for piece in maps.map(plan.latent.node).pieces:
        if not piece.projected:  # local attention slices the hidden state before the projection
            rows |= {node for visit in piece.path for node in _whole(visit.node)}

    def unscaled(node: fx.Node) -> Iterable[fx.Node]:
        return (n for p in pieces_of([maps.map(node)]) if p.source is not None for n in _unscaled(p.source))

    made_of = reachable((p.q.node for p in plan.site.products), unscaled)
    visited = (visit.node for node in made_of for p in pieces_of([maps.map(node)]) for visit in p.path)
    return any(one in rows for node in visited for one in _whole(node))


def _whole(node: fx.Node) -> list[fx.Node]:
    """Return ``node`` and its sources through slices, selections of rows and paddings."""
    found = [node]
    others = (aten.index, aten.index_select, aten.constant_pad_nd)
    while isinstance(how := decode(found[-1]), (Slice, Select)) or packet(found[-1]) in others:
        found.append(how.x if isinstance(how, (Slice, Select)) else args_of(found[-1])[0])
    return found


def _unscaled(node: fx.Node) -> list[fx.Node]:
    """Return the rows that ``node`` multiplies or divides by one number known only at run time; else an empty list."""
    if packet(node) not in (aten.mul, aten.div):
        return []
    rows = [n for n in node.all_input_nodes if is_tensor(n) and val(n).dim()]
    return rows if len(rows) == 1 and len(node.all_input_nodes) == 2 else []


def _choose_form(plan: AbsorbPlan, device: DeviceModel, forms: Forms, fold: Fold) -> Verdict:
    sizes = call_sizes(plan)
    dims = plan.dims
    choice = choose(
        dims, B=sizes.B, S=sizes.S, T=sizes.T, element_bytes=sizes.element_bytes, device=device,
        forms=forms, fold=fold, can_fold_query=dims.Q is not None, can_fold_output=dims.D is not None, made=sizes.made,
        chosen=sizes.chosen,
    )  # fmt: skip
    # The number of chosen keys does not grow with the prompt, so absorbing may pay for a long prompt.
    by_call = sizes.symbolic and forms == "auto" and (not sizes.prefill or sizes.chosen is not None)
    if not (choice.sparse or by_call):
        plan = replace(plan, visible=plan.visible.dense)
    held = come_from((rows.node for rows in plan.rows), ROWS)
    told = functools.partial(Verdict, plan.site, plan=plan, choice=choice, held=held, beside=sizes.made == 0)
    if by_call:
        return told(Code.ABSORBED, "each call picks by its number of queries", by_call=True)
    if choice.absorbed and not (sizes.prefill and forms == "auto"):
        return told(Code.ABSORBED, choice.reason)
    # If absorbing is cheaper for the traced length of a prompt, this says nothing about other lengths. The reason is
    # then `sizes.many`.
    code = Code.FORMS_EXPANDED if forms == "expanded" else Code.COST_PREFILL
    reason = sizes.many if choice.absorbed else choice.reason
    return told(code, reason)


def _ways(verdict: Verdict) -> set[fx.Node]:
    """Return the nodes on the paths from the sources to K and V."""
    assert verdict.plan is not None
    return {v.node for t in verdict.plan.terms for v in (*t.piece.path, *t.piece.before)}


def _read_by_its_own_rows(verdict: Verdict, node: fx.Node, source: fx.Node, alive: Alive, maps: Maps) -> Stop | None:
    """Explain how ``node`` makes other rows of the same site; None if ``node`` is also read outside the site."""
    assert verdict.plan is not None
    site = verdict.site
    if _needed_beside(site, site.node.graph.output_node().all_input_nodes, node, alive):
        return None
    rows = (r.node for r in verdict.plan.rows if r.node is not source and depends_on(r.node, [node]))
    return next((stop for r in rows if (stop := explain_source(r, site, maps, [source])) is not None), None)


def _needed_beside(site: AttentionSite, ends: Iterable[fx.Node], node: fx.Node, alive: Alive) -> bool:
    """Whether ``ends`` need ``node`` on a path outside the products of ``site``."""
    products = {site.node, *(p.node for p in site.products if p.node is not None)}
    return node in set(reachable(ends, lambda n: () if n in products else alive.reads(n)))


def _read_by_its_own_scores(site: AttentionSite, node: fx.Node, alive: Alive) -> bool:
    """Whether ``node`` is read between the products (for example, to scale scores), but not outside of the site."""
    outputs = site.node.graph.output_node().all_input_nodes
    between = site.probs is not None and _needed_beside(site, [site.probs.node], node, alive)
    return between and not _needed_beside(site, outputs, node, alive)


def _merely_wide(closer: Verdict, plan: AbsorbPlan, maps: Maps) -> bool:
    """Whether ``closer`` blames only the width of a node, and the rows that this node makes are linear maps of it."""
    wide = closer.blame
    if closer.code is not Code.COST_LATENT_WIDE or wide is None:
        return False
    made = [maps.with_sources([wide]).map(r.node) for r in plan.rows if depends_on(r.node, [wide])]
    return all(p.source is wide for p in pieces_of(made))


def _made_with(site: AttentionSite, side: Side, node: fx.Node | None) -> bool:
    """Whether ``side`` is computed from ``node``; True if there is no node."""
    operands = [site.v.node] if side == "values" else [p.k.node for p in site.products]
    return node is None or _behind(operands, node)


def _behind(nodes: Iterable[fx.Node], node: fx.Node | None) -> bool:
    return node is not None and any(n is node or depends_on(n, [node]) for n in nodes)


def _stop_of(side: Side, verdict: Verdict, node: fx.Node) -> Stop:
    """Return the stop of a verdict for ``side``. A code about only the other side becomes "unsupported_op"."""
    told = verdict.code in _OF_A_SIDE and not _made_with(verdict.site, side, verdict.blame)
    return Stop(verdict.blame or node, (Code.UNSUPPORTED_OP if told else verdict.code).value, verdict.reason)


def _taken_back(verdict: Verdict, which: Side, node: fx.Node, alive: Alive, maps: Maps) -> Verdict:
    for mask in (m.operand.node for m in verdict.site.masks):
        if depends_on(mask, [node]):
            code = Code.MASK_DEPENDS_ON_KEYS
            return replace(verdict, code=code, reason=CODES[code].meaning, blame=mask)
    source = next(source for _, made, source in expansions(verdict) if made is node)
    rows = added_to(verdict, node, source)
    if (stop := _read_by_its_own_rows(verdict, node, source, alive, maps)) is not None:
        return replace(verdict, code=Code(stop.code), reason=stop.detail, blame=stop.node)
    if (part := tokens_read(node, rows, maps, alive.reads, alive.nodes)) is not None:
        made = f"the product that makes the {which}"  # which may also make the other side
        why = "returned with the strides of all" if strides_show(part) else "read outside the attention"
        reason = f"some tokens of {made} are {why}, and cannot be made alone"
        return replace(verdict, code=Code.UNSUPPORTED_OP, reason=reason, blame=part)
    code = Code.KEYS_USED_ELSEWHERE if which == "keys" else Code.VALUES_USED_ELSEWHERE
    reader = other_reader(node, rows, maps, alive.reads, alive.nodes, _ways(verdict))
    if reader.op == "output":
        return replace(
            verdict, code=code, reason=f"the expanded {which} are returned, so they are computed anyway", blame=node
        )
    if _read_by_its_own_scores(verdict.site, node, alive):
        reason = (
            f"beside the scores, {operator_name(reader)} of this attention reads the product that makes the {which}"
        )
        return replace(verdict, code=Code.UNSUPPORTED_OP, reason=reason, blame=reader)
    reason = f"{operator_name(reader)} also reads the product that makes the {which}, so it is computed anyway"
    return replace(verdict, code=code, reason=reason, blame=reader)
