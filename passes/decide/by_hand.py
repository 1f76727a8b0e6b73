"""Attentions whose heads share one row per token, which is key and value at once.

Code that is absorbed by hand takes queries into the space of the latent itself (``q' = [q_n W_k | q_r]``), reads
``[c | r]`` as keys and ``c`` as values, and applies ``W_v`` to what comes out. No weight lies between rows and attention,
so there is no plan; to its user it is Multi-head Latent Attention all the same, with nothing left to do.

Other models are made in that form (DeepSeek-V4, whose queries are normed and rotated for each head). What their queries
went through tells nothing of a ``W_k``, and nothing has to: the attention is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import fx

from mla_compile.codes import Code
from mla_compile.passes.attention.site import AttentionSite, Operand, Product
from mla_compile.passes.decide.records import Verdict, repeats
from mla_compile.passes.ir.axes import Atom, Axis, flatten
from mla_compile.passes.ir.graph import packet, shape
from mla_compile.passes.ir.labels import LABELLED, product_labels
from mla_compile.passes.ir.operators import (
    Broadcast,
    Copy,
    Join,
    Permute,
    Regroup,
    Repeat,
    Slice,
    Write,
    decode,
    is_contraction,
)
from mla_compile.passes.ir.sizes import Size, same, same_sizes
from mla_compile.passes.ir.walk import first_equals, nearest
from mla_compile.passes.linear.records import Maps

REASON = "heads share one row per token, key and value at once, and read it as it is: nothing is left to absorb"
NO_WEIGHT = "heads share one row per token, key and value at once, and no weight lies between them and it"

_COLUMNS = "columns"
_Role: TypeAlias = "Axis | str"
"""What a dimension of K or V is: an axis of the site, or the columns of a row."""
_Cut: TypeAlias = "tuple[_Role, object]"


def over_shared_rows(graph: fx.Graph, verdicts: Sequence[Verdict], maps: Maps) -> list[Verdict]:
    """``verdicts``, in which attentions without a latent whose heads share rows that are key and value say so."""
    found = {v.site.node: shared for v in verdicts if v.code is Code.NOT_MLA and (shared := _shared(v.site, maps))}
    if not found:
        return list(verdicts)
    first = first_equals(graph)
    return [_told(v, found[v.site.node], maps, first) if v.site.node in found else v for v in verdicts]


def _told(verdict: Verdict, shared: set[Atom], maps: Maps, first: Mapping[fx.Node, fx.Node]) -> Verdict:
    site = verdict.site
    made = [p for p in site.products if _by_heads(p, shared, maps)]
    if made and _values_among_keys(site, made, first):
        return replace(verdict, code=Code.ALREADY_ABSORBED, reason=REASON, blame=None)
    # Where no weight makes the queries, an axis that they alone have may be one of tokens.
    heads = [a for a in shared if a in site.lead and isinstance(a.size, int)]
    if heads and _values_among_keys(site, site.products, first):
        return replace(verdict, code=Code.SHARED_ROWS, reason=NO_WEIGHT, blame=None)
    return verdict


def _shared(site: AttentionSite, maps: Maps) -> set[Atom]:
    """The axes of the queries along which all read the same keys and values."""
    operands = (*(p.k for p in site.products), site.v)
    return {a for a in (*site.lead, *site.queries) if all(repeats(o, a, maps) for o in operands)}


def heads_among_queries(site: AttentionSite, maps: Maps) -> list[Atom]:
    """The axes of the queries along which a weight makes them: heads that the code writes as it writes tokens."""
    found: set[Atom] = set()
    for product in site.products:
        for piece in maps.map(product.q.node).pieces:
            own = set() if piece.weight is None else set(piece.weight.atoms)
            dims = zip(product.q.axes, piece.axes, strict=True)
            found |= {axis[0] for axis, made in dims if len(axis) == 1 and own & set(made)}
    return [a for a in site.queries if a in found and isinstance(a.size, int)]


def _by_heads(product: Product, shared: set[Atom], maps: Maps) -> bool:
    """Whether a weight makes the queries for each of several heads, which are along an axis that is ``shared``.

    Other axes that only the queries have (the two of an image, say) are no heads.
    """
    dims = [k for k, axis in enumerate(product.q.axes) if shared & set(axis) and not set(axis) & set(product.features)]
    pieces = [(p, set(p.weight.atoms)) for p in maps.map(product.q.node).pieces if p.weight is not None]
    if any(set(piece.axes[k]) & atoms for piece, atoms in pieces for k in dims):
        return True

    # Queries that have heads before that weight, of a norm or from outside, are no linear map of rows.
    def inputs(node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if not maps.is_weight(n)]

    def by_heads(node: fx.Node) -> bool:
        return any(same(length, a.size) for length in _weights_of_their_own(node, maps) for a in shared)

    return bool(dims) and (
        by_heads(product.q.node) or bool(nearest(product.q.node, inputs, by_heads, is_contraction)[0])
    )


def _weights_of_their_own(node: fx.Node, maps: Maps) -> list[Size]:
    """The lengths of the axes along which ``node`` multiplies each position by a weight of its own."""
    labelled = product_labels(node) if packet(node) in LABELLED else None
    if labelled is None:
        return []
    (left, of_left), (right, of_right), out = labelled
    if maps.is_weight(left) == maps.is_weight(right):
        return []
    return [s for c, s in zip(of_left, shape(left), strict=True) if c in of_right and c in out and not same(s, 1)]


def _values_among_keys(site: AttentionSite, products: Iterable[Product], first: Mapping[fx.Node, fx.Node]) -> bool:
    """Whether each column of the values is one of the keys of ``products``."""
    keys = [piece for product in products for piece in reads(product.k, product.features, first)]
    outer = {*site.lead, *site.queries, *site.keys}
    values = reads(site.v, tuple(a for a in flatten(site.v.axes) if a not in outer), first)
    return bool(values) and all(piece.within(keys) for piece in values)


@dataclass(frozen=True)
class Read:
    """Columns ``start`` to ``stop`` of ``rows``, of which ``cuts`` are read."""

    rows: fx.Node
    cuts: tuple[_Cut, ...]
    start: int
    stop: int

    def within(self, others: Iterable[Read]) -> bool:
        """Whether ``others`` together read every column that this one does."""
        alike = [o for o in others if self.rows is o.rows and self.cuts == o.cuts]
        covered = self.start
        for other in sorted(alike, key=lambda o: o.start):
            if other.start <= covered:
                covered = max(covered, other.stop)
        return self.stop <= covered


def reads(operand: Operand, features: Axis, first: Mapping[fx.Node, fx.Node]) -> list[Read]:
    """The rows that an operand shows, looked for through views, casts and joins of columns."""
    roles: list[_Role] = [_COLUMNS if axis and set(axis) <= set(features) else axis for axis in operand.axes]
    width = [size for role, size in zip(roles, shape(operand.node), strict=True) if role == _COLUMNS]
    if len(width) != 1 or not isinstance(width[0], int):
        return []
    return _behind(operand.node, roles, (), 0, width[0], first)


def _behind(
    node: fx.Node,
    roles: Sequence[_Role],
    cuts: tuple[_Cut, ...],
    start: int,
    stop: int,
    first: Mapping[fx.Node, fx.Node],
) -> list[Read]:
    how = decode(node)
    if isinstance(how, Join) and roles[how.dim] == _COLUMNS:
        found: list[Read] = []
        for part in how.parts:
            width = shape(part)[how.dim]
            if not isinstance(width, int):
                return []
            if start < width and stop > 0:
                found += _behind(part, roles, cuts, max(start, 0), min(stop, width), first)
            start, stop = start - width, stop - width
        return found
    if isinstance(how, Write) and roles[how.dim] == _COLUMNS and how.taken is not None and how.taken.step == 1:
        at, end = how.taken.start, how.taken.stop
        found = _behind(how.base, roles, cuts, start, min(stop, at), first) if start < at else []
        if start < end and at < stop:
            found += _behind(how.x, roles, cuts, max(start, at) - at, min(stop, end) - at, first)
        return found + (_behind(how.base, roles, cuts, max(start, end), stop, first) if end < stop else [])
    if isinstance(how, Slice) and roles[how.dim] == _COLUMNS and how.taken is not None and how.taken.step == 1:
        return _behind(how.x, roles, cuts, start + how.taken.start, stop + how.taken.start, first)
    if isinstance(how, Slice) and roles[how.dim] != _COLUMNS and how.bounds is not None:
        bounds = tuple(first[b] if isinstance(b, fx.Node) else b for b in how.bounds)
        return _behind(how.x, roles, (*cuts, (roles[how.dim], bounds)), start, stop, first)
    if isinstance(how, (Copy, Permute, Broadcast, Repeat, Regroup)):
        before = _roles_before(how, node, roles)
        if before is not None:
            return _behind(how.x, before, cuts, start, stop, first)
    return [Read(first[node], cuts, start, stop)]


def _roles_before(
    how: Copy | Permute | Broadcast | Repeat | Regroup, node: fx.Node, roles: Sequence[_Role]
) -> list[_Role] | None:
    """What the dimensions of ``how.x`` are; None where that cannot be told, or its columns are others."""
    own, sizes = shape(how.x), shape(node)
    if isinstance(how, Permute):
        before: list[_Role] = [()] * len(own)
        for role, dim in zip(roles, how.order, strict=True):
            before[dim] = role
        return before
    if isinstance(how, Copy) and len(own) == len(sizes):
        return list(roles)
    if isinstance(how, Regroup):
        # Axes of size 1 come and go; those that are merged or split are not followed.
        named = iter([role for role, s in zip(roles, sizes, strict=True) if not same(s, 1)])
        if not same_sizes([s for s in own if not same(s, 1)], [s for s in sizes if not same(s, 1)]):
            return None
        before = [() if same(s, 1) else next(named) for s in own]
        return before if _COLUMNS in before else None
    if isinstance(how, (Broadcast, Repeat)):
        extra = len(sizes) - len(own)
        # Along an axis that was repeated all rows are alike; repeated columns are none of the row's own.
        before = [role if same(a, b) else () for role, a, b in zip(roles[extra:], own, sizes[extra:], strict=True)]
        return before if _COLUMNS in before else None
    return None
