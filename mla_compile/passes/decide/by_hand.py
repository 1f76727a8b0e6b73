"""Attentions whose heads share one row per token, which is key and value at once.

In code that its author absorbed by hand, queries are projected into the latent space (``q' = [q_n W_k | q_r]``), keys
are ``[c | r]``, values are ``c``, and ``W_v`` is applied to the output. No weight lies between rows and attention, so
there is no plan. This is still Multi-head Latent Attention, but nothing is left to absorb.

Other models are designed in this form. In DeepSeek-V4, for example, queries are normed and rotated for each head. Their
path has no ``W_k``, but the attention is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from mla_compile.codes import Code
from mla_compile.passes.attention.site import AttentionSite, Product
from mla_compile.passes.ir.axes import Atom, flatten
from mla_compile.passes.ir.graph import packet, shape
from mla_compile.passes.ir.labels import LABELLED, product_labels
from mla_compile.passes.ir.moves import Copy, Rearrange
from mla_compile.passes.ir.operators import behind, is_contraction
from mla_compile.passes.ir.sizes import Size, same
from mla_compile.passes.ir.walk import first_equals, nearest
from mla_compile.passes.linear.records import Maps
from mla_compile.passes.proof.plan import make_plan
from mla_compile.passes.sources.reads import reads
from mla_compile.passes.sources.records import AbsorbPlan, Verdict, repeats

REASON = "heads share one row per token, key and value at once, and read it as it is: nothing is left to absorb"
_OUT_OF_SIGHT = (Code.NOT_MLA, Code.EXPANDED_INPUTS, Code.EXPANDED_CACHE)
NO_WEIGHT = "heads share one row per token, key and value at once, and no weight lies between the heads and the rows"


def over_shared_rows(graph: fx.Graph, verdicts: Sequence[Verdict], maps: Maps) -> list[Verdict]:
    """Return ``verdicts``, with separate codes for attentions whose heads share rows that are key and value."""
    if all(v.code not in _OUT_OF_SIGHT for v in verdicts):
        return list(verdicts)
    first = first_equals(graph)
    return [_told(v, maps, first) if v.code in _OUT_OF_SIGHT else v for v in verdicts]


def _told(verdict: Verdict, maps: Maps, first: Mapping[fx.Node, fx.Node]) -> Verdict:
    site = verdict.site
    made = _queries_by_heads(site, maps) if verdict.code is Code.NOT_MLA else []
    if made and _values_among_keys(site, made, first):
        return replace(verdict, code=Code.ALREADY_ABSORBED, reason=REASON, blame=None)
    plan = plan_by_hand(site, maps)
    if plan is None or not plan.heads:
        return verdict
    if not _values_among_keys(plan.site, plan.site.products, first):
        return verdict
    return replace(verdict, code=Code.SHARED_ROWS, reason=NO_WEIGHT, blame=None)


def _queries_by_heads(site: AttentionSite, maps: Maps) -> list[Product]:
    """Return the products whose queries are made by a weight per head, if several heads share keys and values.

    Other axes that only the queries have (for example, the two axes of an image) are not heads.
    """
    operands = (*(p.k for p in site.products), site.v)
    shared = {a for a in (*site.lead, *site.queries) if all(repeats(o, a, maps) for o in operands)}
    return [p for p in site.products if _by_heads(p, shared, maps)] if shared else []


def plan_by_hand(site: AttentionSite, maps: Maps) -> AbsorbPlan | None:
    """Return the plan for heads that share rows without a weight. The model's code may write heads like tokens."""
    bases = {behind(o.node, (Copy, Rearrange))[-1] for o in (*(p.k for p in site.products), site.v)}
    if len(bases) == 1:  # one tensor is key and value, however it was joined
        maps = maps.with_sources(bases)
    written = [] if site.causal else heads_among_queries(site, maps)
    plan = make_plan(_with_heads(site, written), maps, by_hand=True)
    if isinstance(plan, AbsorbPlan) and not plan.heads and not site.causal:
        plan = make_plan(_with_heads(site, _unmasked(site)), maps, by_hand=True)
    return plan if isinstance(plan, AbsorbPlan) else None


def _with_heads(site: AttentionSite, heads: Sequence[Atom]) -> AttentionSite:
    queries = tuple(a for a in site.queries if a not in heads)
    return replace(site, lead=(*site.lead, *heads), queries=queries)


def _unmasked(site: AttentionSite) -> list[Atom]:
    """Return the only query axis of fixed length that no mask has, if queries have more than three axes.

    Return an empty list if there are several such axes.
    """
    masked = {a for mask in site.masks for a in flatten(mask.operand.axes)}
    several = all(len(p.q.axes) > 3 for p in site.products)
    found = [a for a in site.queries if several and isinstance(a.size, int) and a not in masked]
    return found if len(found) == 1 else []


def heads_among_queries(site: AttentionSite, maps: Maps) -> list[Atom]:
    """Return the query axes along which a weight differs: heads that the code writes like tokens."""
    found: set[Atom] = set()
    for product in site.products:
        for piece in maps.map(product.q.node).pieces:
            own = set() if piece.weight is None else set(piece.weight.atoms)
            dims = zip(product.q.axes, piece.axes, strict=True)
            found |= {axis[0] for axis, made in dims if len(axis) == 1 and own & set(made)}
    return [a for a in site.queries if a in found and isinstance(a.size, int)]


def _by_heads(product: Product, shared: set[Atom], maps: Maps) -> bool:
    dims = [k for k, axis in enumerate(product.q.axes) if shared & set(axis) and not set(axis) & set(product.features)]
    pieces = [(p, set(p.weight.atoms)) for p in maps.map(product.q.node).pieces if p.weight is not None]
    if any(set(piece.axes[k]) & atoms for piece, atoms in pieces for k in dims):
        return True

    # Queries may have a head axis before per-head weights are applied (from an input or a norm). Such queries have no
    # map, so upstream products are searched.
    def inputs(node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if not maps.is_weight(n)]

    def by_heads(node: fx.Node) -> bool:
        return any(same(length, a.size) for length in _weights_of_their_own(node, maps) for a in shared)

    return bool(dims) and (
        by_heads(product.q.node) or bool(nearest(product.q.node, inputs, by_heads, is_contraction)[0])
    )


def _weights_of_their_own(node: fx.Node, maps: Maps) -> list[Size]:
    """Return the lengths of the axes along which ``node`` multiplies each position by its own weight."""
    labelled = product_labels(node) if packet(node) in LABELLED else None
    if labelled is None:
        return []
    (left, of_left), (right, of_right), out = labelled
    if maps.is_weight(left) == maps.is_weight(right):
        return []
    return [s for c, s in zip(of_left, shape(left), strict=True) if c in of_right and c in out and not same(s, 1)]


def _values_among_keys(site: AttentionSite, products: Iterable[Product], first: Mapping[fx.Node, fx.Node]) -> bool:
    """Whether each column of the values is a column of the keys of ``products``."""
    keys = [piece for product in products for piece in reads(product.k, product.features, first)]
    outer = {*site.lead, *site.queries, *site.keys}
    values = reads(site.v, tuple(a for a in flatten(site.v.axes) if a not in outer), first)
    return bool(values) and all(piece.within(keys) for piece in values)
