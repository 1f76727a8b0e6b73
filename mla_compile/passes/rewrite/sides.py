"""Emit the two sides of an absorbed attention: map queries into the space of the rows, and map results back.

Two rewrites share this module. :mod:`mla_compile.passes.rewrite.absorb` makes the whole attention one operator, and
:mod:`mla_compile.passes.rewrite.products` replaces each product separately. The formulas are q . (W c) = (W^T q) . c
for the keys and P (W c) = W (P c) for the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.attention.site import Product
from mla_compile.passes.cost.terms import cheapest, pays
from mla_compile.passes.ir.arrange import SizeSources, aligned, arrange, einsum, spread
from mla_compile.passes.ir.axes import Atom, Axis, flatten, fresh_axis
from mla_compile.passes.ir.expr import Expr, Factor, wide
from mla_compile.passes.ir.graph import Builder, is_virtual, materialize, shape, val
from mla_compile.passes.ir.moves import Slice
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import same, size
from mla_compile.passes.linear.records import Term
from mla_compile.passes.rewrite.project import project
from mla_compile.passes.sources.records import AbsorbPlan, Rows
from mla_compile.passes.sources.refine import value_features

aten = torch.ops.aten


class Sides:
    """The state of one rewrite: where new nodes are inserted, and which weight expressions the graph already has."""

    def __init__(self, plan: AbsorbPlan, fake_mode: FakeTensorMode | None, *, merges: bool = False) -> None:
        self.plan = plan
        # A weight that will be folded is emitted as one tensor, adapters included.
        self.merges = merges
        self.site = plan.site
        self.builder = Builder(plan.site.node, fake_mode)
        self.memo: dict[Expr, fx.Node] = {}
        self.views: dict[fx.Node, fx.Node] = {}
        self.joined: dict[Rows, fx.Node] = {}
        self.wholes: dict[fx.Node, fx.Node] = {}
        operands = [self.site.out, self.site.v, *(o for p in self.site.products for o in (p.q, p.k))]
        # In graph order, because sizes can only be read from nodes that are already defined.
        known = sorted(((o.node, o.axes) for o in operands if o.node is not self.site.node), key=lambda pair: pair[0])
        # Sizes are also read from rows. The keys of an image, for example, may be one axis of K but two axes of rows.
        known += sorted(((r.node, r.axes) for r in plan.rows if not is_virtual(r.node)), key=lambda pair: pair[0])
        self.sizes = SizeSources(self.builder, known)
        self.dtype = val(self.site.v.node).dtype
        # Read later by folding: the products q W_kc, and the attended latent before W_v.
        self.queries: list[fx.Node] = []
        self.latent: fx.Node | None = None
        self.weights: dict[fx.Node, None] = {}
        # The sums of the probabilities [batch, queries, heads]; None if all sums are 1. They multiply a bias on values.
        self.mass: fx.Node | None = None
        self.outer: Axis = (*plan.batch, *self.site.queries, *plan.heads)

    def _value_bias(self) -> bool:
        return any(term.piece.bias is not None for term in self.plan.vals)

    def _query(self, rows: Rows) -> fx.Node:
        """Return the queries in the space of ``rows``: [B, S, H, width]."""
        if rows.parts:
            return self.builder.call(aten.cat.default, [self._query(r) for r in rows.parts], -1)
        parts = [
            self._absorbed(self.site.products[t.product], t, rows)
            for t in self.plan.keys
            if t.piece.source is rows.node and t.product is not None
        ]
        atoms = (*self.outer, *rows.width)
        target = (self.plan.batch, self.site.queries, self.plan.heads, rows.width)
        total = spread(self.builder, self.sizes, self._total(parts), atoms)
        return arrange(self.builder, self.sizes, total, tuple((a,) for a in atoms), target)

    def _total(self, parts: Sequence[fx.Node]) -> fx.Node:
        return reduce(lambda a, b: self.builder.call(aten.add.Tensor, a, b), parts)

    def _absorbed(self, product: Product, term: Term, rows: Rows) -> fx.Node:
        """Return ``q W`` for one term, with one axis per atom: batch, queries, heads, width of the rows."""
        q, own = self._query_columns(product, term)
        piece = term.piece
        if piece.weight is None:  # without a weight, as for a shared rotary key, K has the columns of the rows
            axes = tuple((a,) for a in (*own, *term.features))
            q = arrange(self.builder, self.sizes, q, axes, [(a,) for a in (*self.outer, *rows.width)])
        else:
            # A head is a different atom in the weight than in the query.
            inner = [term.at.get(a, a) for a in own]
            order = [*(term.at.get(a, a) for a in self.outer), *rows.width]
            known = {*inner, *piece.weight.atoms, *rows.width}
            out = [a for a in order if a in known]
            q = self._projected(q, (*inner, *term.features), piece.weight, out)
            self.queries.append(q)
            q = aligned(self.builder, q, out, order)
        if piece.scale != 1.0:
            q = self.builder.call(aten.mul.Tensor, q, piece.scale)
        return q

    def _projected(self, x: fx.Node, atoms: Sequence[Atom], weight: Factor, out: Sequence[Atom]) -> fx.Node:
        """Multiply ``x`` by the terms of a weight, in turn or added up first, whichever takes fewer operations."""
        if self.merges or not pays(x, atoms, weight, out):
            return project(self.builder, x, atoms, self._weight(weight), weight.atoms, out)
        return self._total([self._one_by_one(x, atoms, term, out) for term in weight.terms])

    def _one_by_one(self, x: fx.Node, atoms: Sequence[Atom], term: Sequence[Factor], out: Sequence[Atom]) -> fx.Node:
        for step in cheapest(x, atoms, term, out):
            node = self._weight(step.factor)
            x, atoms = project(self.builder, x, atoms, node, step.factor.atoms, step.out), step.out
        return x

    def _weight(self, weight: Factor) -> fx.Node:
        node = weight.expr.emit(self.builder, self.memo)
        self.weights[node] = None
        return node

    def _bias_scores(self, product: Product, term: Term, atoms: Sequence[Atom]) -> fx.Node:
        """Return ``q . b``, which a bias on the keys adds to the score of every key."""
        assert term.piece.bias is not None
        q, own = self._query_columns(product, term)
        bias = term.piece.bias.expr.cast(val(q).dtype).emit(self.builder, self.memo)
        inner = [term.at.get(a, a) for a in own]
        out = [a for a in atoms if a in own]
        q_atoms = (*inner, *term.features)
        q = einsum(self.builder, q, q_atoms, bias, term.piece.bias.atoms, [term.at.get(a, a) for a in out])
        return aligned(self.builder, q, out, atoms)

    def _query_columns(self, product: Product, term: Term) -> tuple[fx.Node, list[Atom]]:
        """Return the columns of q that multiply this term's columns of K, and the atoms of the other axes.

        The columns of q have one axis per atom. They are in float32 or wider, which
        :mod:`mla_compile.passes.rewrite.project` explains.
        """
        q, axes = product.q.node, product.q.axes
        where = next((k for k, a in enumerate(axes) if a and set(a) == set(product.features)), None)
        if where is not None:
            if size(val(q).shape[where]) != term.stop - term.start:
                q = self.builder.call(aten.slice.Tensor, q, where, term.start, term.stop)
            axes = (*axes[:where], term.features, *axes[where + 1 :])
        own = [a for a in self.outer if a in flatten(product.q.axes)]
        q = arrange(self.builder, self.sizes, q, axes, [(a,) for a in (*own, *term.features)])
        return self.builder.cast(q, wide(val(q).dtype)), own

    def _rows(self, rows: Rows) -> fx.Node:
        """Return the rows as [B, T, width]."""
        if rows not in self.joined:
            if rows.parts:
                node = self._beside(rows.parts) or self.builder.call(
                    aten.cat.default, [self._rows(r) for r in rows.parts], -1
                )
            else:
                target = (self.plan.batch, self.site.keys, rows.width)
                node, axes = self._in_graph(rows), rows.axes
                if not set(self.plan.batch) <= {*flatten(axes)}:  # all batch entries share these rows
                    atoms = (*self.plan.batch, *self.site.keys, *rows.width)
                    node = arrange(self.builder, self.sizes, node, axes, [(a,) for a in atoms])
                    node, axes = spread(self.builder, self.sizes, node, atoms), tuple((a,) for a in atoms)
                node = arrange(self.builder, self.sizes, node, axes, target)
            self.joined[rows] = self.builder.cast(node, self.dtype)
        return self.joined[rows]

    def _beside(self, parts: Sequence[Rows]) -> fx.Node | None:
        """Return a tensor that ``parts`` divide into column slices, in order; None if there is no such tensor."""
        whole, stop = None, 0
        for part in parts:
            how = None if is_virtual(part.node) else decode(part.node)
            if not isinstance(how, Slice) or how.taken is None or how.taken.step != 1 or how.taken.start != stop:
                return None
            others = [own for k, own in enumerate(part.axes) if k != how.dim]
            if part.heads or part.axes[how.dim] != part.width or whole not in (None, (how.x, how.dim, others)):
                return None
            whole, stop = (how.x, how.dim, others), how.taken.stop
        if whole is None or not same(shape(whole[0])[whole[1]], stop):
            return None
        x, dim, others = whole
        width = fresh_axis(stop)
        axes = (*others[:dim], width, *others[dim:])
        if not set(self.plan.batch) <= {*flatten(axes)}:
            return None
        self.wholes.update((part.node, x) for part in parts)
        return arrange(self.builder, self.sizes, x, axes, (self.plan.batch, self.site.keys, width))

    @property
    def given(self) -> tuple[fx.Node, ...]:
        """The rows that get random numbers when the rewrite is verified; empty if these are the plan's sources."""
        sources = dict.fromkeys(self.wholes.get(source, source) for source in self.plan.sources)
        return tuple(sources) if self.wholes else ()

    def _in_graph(self, rows: Rows) -> fx.Node:
        """Return the node of the rows; add a virtual source to the graph."""
        return materialize(rows.node, self.builder, self.views)

    def row_atoms(self, rows: Rows) -> tuple[fx.Node, tuple[Atom, ...]]:
        """Return the rows with one axis per atom, and the atoms: batch, heads with separate rows, keys, width."""
        atoms = (*self.plan.batch, *rows.heads, *self.site.keys, *rows.width)
        return arrange(self.builder, self.sizes, self._in_graph(rows), rows.axes, [(a,) for a in atoms]), atoms

    def term_scores(self, product: Product, term: Term, atoms: Sequence[Atom], dtype: torch.dtype) -> fx.Node:
        """Return ``(q W) . rows`` of one term of the keys in ``dtype``, with the axes ``atoms``."""
        assert term.piece.source is not None
        rows = self.plan.rows_of(term.piece.source)
        q = self.builder.cast(self._absorbed(product, term, rows), dtype)
        r, r_atoms = self.row_atoms(rows)
        return einsum(self.builder, q, (*self.outer, *rows.width), self.builder.cast(r, dtype), r_atoms, atoms)

    def _values(self, attended: dict[fx.Node, tuple[fx.Node, tuple[Axis, ...]]]) -> fx.Node:
        """Apply W_v to the attended rows of each source; the result has the layout of the site's output."""
        found: dict[fx.Node, fx.Node] = {}
        for source, (node, axes) in attended.items():
            target = [(a,) for a in (*self.outer, *self.plan.rows_of(source).width)]
            found[source] = self.builder.cast(arrange(self.builder, self.sizes, node, axes, target), wide(self.dtype))
        self.latent = next(iter(found.values()))
        columns: dict[int, list[fx.Node]] = {}
        for term in self.plan.vals:
            columns.setdefault(term.start, []).append(self._value_part(found, term))
        parts = [self._total(summands) for summands in columns.values()]
        layout = self._out_layout()
        out = parts[0] if len(parts) == 1 else self.builder.call(aten.cat.default, parts, layout.index(None))
        out_axes = tuple(value_features(self.site) if a is None else (a,) for a in layout)
        return arrange(self.builder, self.sizes, out, out_axes, self.site.out.axes)

    def _out_layout(self) -> list[Atom | None]:
        """Return the output's atoms in order, with None for the feature axis. If this axis is missing, None is last."""
        layout: list[Atom | None] = []
        for axis in self.site.out.axes:
            layout += [a for a in axis if a in self.outer]
            if any(a not in self.outer for a in axis):
                layout.append(None)
        return layout if None in layout else [*layout, None]

    def _value_part(self, attended: dict[fx.Node, fx.Node], term: Term) -> fx.Node:
        """Return one segment of the output's features, with the axes of ``_out_layout``."""
        piece, layout = term.piece, self._out_layout()
        inner = [term.at.get(a, a) for a in self.outer]
        order = [x for a in layout for x in (term.features if a is None else (term.at.get(a, a),))]
        if piece.source is None:  # columns of zeros, or of a bias alone
            atoms = [x for a in layout for x in (term.features if a is None else (a,))]
            shape = [self.sizes.of(a) for a in atoms]
            assert self.latent is not None
            out = self.builder.call(aten.new_zeros.default, self.latent, shape)
        else:
            latent, width = attended[piece.source], self.plan.rows_of(piece.source).width
            if piece.weight is None:
                axes = tuple((a,) for a in (*inner, *width))
                out = arrange(self.builder, self.sizes, latent, axes, [(a,) for a in order])
            else:
                out = self._projected(latent, (*inner, *width), piece.weight, order)
            if piece.scale != 1.0:
                out = self.builder.call(aten.mul.Tensor, out, piece.scale)
        if piece.bias is not None:
            bias = piece.bias.expr.cast(wide(self.dtype)).emit(self.builder, self.memo)
            bias = aligned(self.builder, bias, piece.bias.atoms, order)
            # sum_i p_i (W c_i + b) = W (sum_i p_i c_i) + b sum_i p_i, where sum_i p_i may differ from 1.
            if self.mass is not None:
                mass = arrange(self.builder, self.sizes, self.mass, tuple((a,) for a in inner), [(a,) for a in order])
                bias = self.builder.call(aten.mul.Tensor, bias, mass)
            out = self.builder.call(aten.add.Tensor, out, bias)
        if len(term.features) != 1:  # segments are joined along one feature axis
            features = [term.stop - term.start if a is None else self.sizes.of(a) for a in layout]
            out = self.builder.call(aten.reshape.default, out, features)
        return out
