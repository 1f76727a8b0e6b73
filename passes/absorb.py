"""The rewrite: attention over expanded keys and values becomes attention over the latent rows.

Before::

    kv = linear(c, W_kc | W_v); K = [kv_k | k_rope]; V = kv_v         # K, V: H (N+R+V) values per cached token
    out = attention(q, K, V, mask, scale)

After::

    q~ = [einsum(q_nope, W_kc) | q_rope]                               # [B, S, H, L+R]
    o~ = mla_compile.decode_attention(q~, c, k_rope, mask, scale)      # [B, S, H, L]; reads L+R values per token
    out = einsum(o~, W_v)

because q . (W c) = (W^T q) . c and sum_i p_i (W c_i) = W (sum_i p_i c_i) (DeepSeek-V2, arXiv 2405.04434, 2.1.2).
A bias on the keys adds the same number to every score of a row, which the softmax cancels; a bias on the values comes
back once, because the weights of a row sum to 1. Where the part between the products is not a plain softmax
(``open_core``), each product is replaced by itself and everything between them stays.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import mla_compile.ops  # noqa: F401  registers the operator
from mla_compile.passes.align import Term
from mla_compile.passes.arrange import Sizes, arrange, spread
from mla_compile.passes.atoms import Atom, Axis, flatten
from mla_compile.passes.expr import Expr
from mla_compile.passes.factors import letters
from mla_compile.passes.graph import Builder, hint, size, val
from mla_compile.passes.plan import AbsorbPlan, Rows
from mla_compile.passes.project import project, wide
from mla_compile.passes.site import MaskTerm, Product

aten = torch.ops.aten

HIDDEN = -1e30
"""Added where scores were set to a large negative number: any score vanishes beside it, in float64 too, so that a row
without a visible key weighs all its keys alike, as it did."""


@dataclass(frozen=True)
class Absorbed:
    """A rewritten site: the node that stands for its output, the queries after W_kc, and the latent before W_v."""

    plan: AbsorbPlan
    out: fx.Node
    queries: tuple[fx.Node, ...]
    latent: fx.Node


def absorb(plan: AbsorbPlan, fake_mode: FakeTensorMode | None) -> Absorbed:
    """Rewrites one site. The nodes it no longer needs are left to dead code removal."""
    rewriter = Rewriter(plan, fake_mode)
    out = rewriter.run()
    assert rewriter.latent is not None
    return Absorbed(plan, out, tuple(rewriter.queries), rewriter.latent)


class Rewriter:
    """The state of one rewrite: where nodes go, and what was emitted already."""

    def __init__(self, plan: AbsorbPlan, fake_mode: FakeTensorMode | None) -> None:
        self.plan = plan
        self.site = plan.site
        self.builder = Builder(plan.site.node, fake_mode)
        self.memo: dict[Expr, fx.Node] = {}
        operands = [self.site.out, self.site.v, *(o for p in self.site.products for o in (p.q, p.k))]
        # In the order of the graph: what a product reads sizes from has to stand before it.
        known = sorted(((o.node, o.axes) for o in operands if o.node is not self.site.node), key=lambda pair: pair[0])
        self.sizes = Sizes(self.builder, known)
        self.dtype = val(self.site.v.node).dtype
        self.queries: list[fx.Node] = []
        self.latent: fx.Node | None = None
        self.mass: fx.Node | None = None  # what the weights of a row sum to, [batch, queries, heads], where not 1

    def run(self) -> fx.Node:
        new = self._open() if self.site.open_core else self._closed()
        old = self.site.node
        new = same_layout(self.builder, new, old)
        old.replace_all_uses_with(new)
        return new

    # The whole attention as one operator.

    def _closed(self) -> fx.Node:
        plan, site = self.plan, self.site
        latent, rope = self._query(plan.latent), self._query(plan.rope) if plan.rope else None
        query = latent if rope is None else self.builder.call(aten.cat.default, [latent, rope], -1)
        result = self.builder.call(
            torch.ops.mla_compile.decode_attention.default,
            query,
            self._rows(plan.latent),
            None if plan.rope is None else self._rows(plan.rope),
            None if plan.values is None else self._rows(plan.values),
            self._mask(),
            scale=site.scale,
            causal=site.causal,
        )
        out = self.builder.call(operator.getitem, result, 0)
        axes = (plan.batch, site.queries, plan.heads, plan.value_rows.width)
        if site.masks and (site.empty == "nan" or self._value_bias()):
            lse = self.builder.call(operator.getitem, result, 1)
            nothing = self.builder.call(aten.eq.Scalar, lse, float("-inf"))
            if site.empty == "nan":
                nothing = self.builder.call(aten.unsqueeze.default, nothing, -1)
                out = self.builder.call(aten.masked_fill.Scalar, out, nothing, float("nan"))
            else:  # a row without a visible key is zero, the values' bias included
                some = self.builder.cast(self.builder.call(aten.logical_not.default, nothing), wide(self.dtype))
                outer = [(a,) for axis in axes[:3] for a in axis]
                self.mass = arrange(self.builder, self.sizes, some, axes[:3], outer)
        return self._values(out, axes)

    def _value_bias(self) -> bool:
        return any(term.piece.bias is not None for term in self.plan.vals)

    def _query(self, rows: Rows) -> fx.Node:
        """The queries in the space of ``rows``: [B, S, H, width]."""
        parts = [
            self._absorbed(self.site.products[t.product], t, rows)
            for t in self.plan.keys
            if t.piece.source is rows.node and t.product is not None
        ]
        total = parts[0]
        for part in parts[1:]:
            total = self.builder.call(aten.add.Tensor, total, part)
        axes = self._query_axes(rows)
        target = (self.plan.batch, self.site.queries, self.plan.heads, rows.width)
        return arrange(self.builder, self.sizes, spread(self.builder, self.sizes, total, flatten(axes)), axes, target)

    def _query_axes(self, rows: Rows) -> tuple[Axis, ...]:
        return tuple((a,) for a in (*self.plan.batch, *self.site.queries, *self.plan.heads, *rows.width))

    def _absorbed(self, product: Product, term: Term, rows: Rows) -> fx.Node:
        """Q W for one term, one axis per atom: batch, queries, heads, width of the rows."""
        outer = (*self.plan.batch, *self.site.queries, *self.plan.heads)
        q, own = self._query_columns(product, term)
        piece = term.piece
        if piece.weight is None:
            q = self._in_order(q, (*own, *term.features), outer, rows.width)
        else:
            weight = piece.weight.expr.emit(self.builder, self.memo)
            inner = [term.at.get(a, a) for a in own]
            known = {*inner, *piece.weight.atoms}
            out = [b for b in (*(term.at.get(a, a) for a in outer), *rows.width) if b in known or b in rows.width]
            q = project(self.builder, q, (*inner, *term.features), weight, piece.weight.atoms, out)
            self.queries.append(q)
            for k, a in enumerate(outer):
                if term.at.get(a, a) not in known:
                    q = self.builder.call(aten.unsqueeze.default, q, k)
        if piece.scale != 1.0:
            q = self.builder.call(aten.mul.Tensor, q, piece.scale)
        return q

    def _bias_scores(self, product: Product, term: Term, atoms: Sequence[Atom]) -> fx.Node:
        """Q . b, the same for every key: what a bias on the keys adds to the scores."""
        assert term.piece.bias is not None
        q, own = self._query_columns(product, term)
        bias = term.piece.bias.expr.cast(val(q).dtype).emit(self.builder, self.memo)
        inner = [term.at.get(a, a) for a in own]
        lq, lb, lo = letters(
            (*inner, *term.features), term.piece.bias.atoms, [term.at.get(a, a) for a in atoms if a in own]
        )
        q = self.builder.call(aten.einsum.default, f"{lq},{lb}->{lo}", [q, bias])
        for k, a in enumerate(atoms):
            if a not in own:
                q = self.builder.call(aten.unsqueeze.default, q, k)
        return q

    def _in_order(self, q: fx.Node, own: Sequence[Atom], outer: Axis, width: Axis) -> fx.Node:
        return arrange(self.builder, self.sizes, q, tuple((a,) for a in own), [(a,) for a in (*outer, *width)])

    def _query_columns(self, product: Product, term: Term) -> tuple[fx.Node, list[Atom]]:
        """The columns of q that meet this term's columns of K, one axis per atom; its atoms besides the features."""
        q, axes = product.q.node, product.q.axes
        where = next((k for k, a in enumerate(axes) if a and set(a) == set(product.features)), None)
        if where is not None:
            if size(val(q).shape[where]) != term.stop - term.start:
                q = self.builder.call(aten.slice.Tensor, q, where, term.start, term.stop)
            axes = (*axes[:where], term.features, *axes[where + 1 :])
        outer = (*self.plan.batch, *self.site.queries, *self.plan.heads)
        own = [a for a in outer if a in flatten(product.q.axes)]
        q = arrange(self.builder, self.sizes, q, axes, [(a,) for a in (*own, *term.features)])
        return self.builder.cast(q, wide(val(q).dtype)), own

    def _rows(self, rows: Rows) -> fx.Node:
        """The rows as [B, T, width]."""
        target = (self.plan.batch, self.site.keys, rows.width)
        node = arrange(self.builder, self.sizes, rows.node, rows.axes, target)
        return self.builder.cast(node, self.dtype)

    def _mask(self) -> fx.Node | None:
        """All mask terms as one: boolean while only -inf is filled in, additive (float32) otherwise."""
        keep: fx.Node | None = None
        added: fx.Node | None = None
        for term in self.site.masks:
            mask = self._mask_axes(term)
            if term.kind == "add":
                mask = self.builder.cast(mask, torch.promote_types(val(mask).dtype, torch.float32))
                if term.scale != 1.0:
                    mask = self.builder.call(aten.mul.Tensor, mask, term.scale)
                if term.dtype is not None:
                    mask = self.builder.cast(self.builder.cast(mask, term.dtype), wide(term.dtype))
                added = mask if added is None else self.builder.call(aten.add.Tensor, added, mask)
                continue
            mask = self.builder.cast(mask, torch.bool)
            if term.kind == "drop":
                mask = self.builder.call(aten.logical_not.default, mask)
            keep = mask if keep is None else self.builder.call(aten.logical_and.default, keep, mask)
        if keep is None:
            return added
        if any(term.fill > float("-inf") for term in self.site.masks if term.kind != "add"):
            assert added is None, "a finite fill stands alone, else the core is open"
            return self._fill(keep, HIDDEN)
        return keep if added is None else self.builder.call(aten.add.Tensor, added, self._fill(keep, float("-inf")))

    def _fill(self, keep: fx.Node, value: float) -> fx.Node:
        """``value`` where ``keep`` is False, 0 elsewhere."""
        cut = self.builder.call(aten.logical_not.default, keep)
        zeros = self.builder.call(aten.zeros_like.default, cut, dtype=torch.float32)
        return self.builder.call(aten.masked_fill.Scalar, zeros, cut, value)

    def _mask_axes(self, term: MaskTerm) -> fx.Node:
        target = (self.plan.batch, self.plan.heads, self.site.queries, self.site.keys)
        node, axes = term.operand.node, term.operand.axes
        own = set(flatten(axes))
        cut = [axis for axis in target if own & set(axis)]  # a mask for some of the heads' factors stands for all
        if not own.issuperset(flatten(cut)):
            atoms = flatten(cut)
            node = arrange(self.builder, self.sizes, node, axes, [(a,) for a in atoms])
            node, axes = spread(self.builder, self.sizes, node, atoms), tuple((a,) for a in atoms)
        return arrange(self.builder, self.sizes, node, axes, target)

    # Values: from the latent to the output.

    def _values(self, latent: fx.Node, axes: tuple[Axis, ...]) -> fx.Node:
        """W_v applied to the attended latent, in the layout of the site's output."""
        outer = (*self.plan.batch, *self.site.queries, *self.plan.heads)
        width = self.plan.value_rows.width
        latent = arrange(self.builder, self.sizes, latent, axes, [(a,) for a in (*outer, *width)])
        latent = self.latent = self.builder.cast(latent, wide(self.dtype))
        parts = [self._value_part(latent, term, outer) for term in self.plan.vals]
        layout = self._out_layout()
        out = parts[0] if len(parts) == 1 else self.builder.call(aten.cat.default, parts, layout.index(None))
        features = self._value_features()
        out_axes = tuple(features if a is None else (a,) for a in layout)
        return arrange(self.builder, self.sizes, out, out_axes, self.site.out.axes)

    def _out_layout(self) -> list[Atom | None]:
        """The output's atoms in order, None for its feature axis."""
        outer = {*self.plan.batch, *self.site.queries, *self.plan.heads}
        layout: list[Atom | None] = []
        for axis in self.site.out.axes:
            layout += [a for a in axis if a in outer]
            if any(a not in outer for a in axis):
                layout.append(None)
        return layout if None in layout else [*layout, None]

    def _value_features(self) -> Axis:
        outer = {*self.plan.batch, *self.site.queries, *self.plan.heads}
        return tuple(a for a in flatten(self.site.out.axes) if a not in outer)

    def _value_part(self, latent: fx.Node, term: Term, outer: Axis) -> fx.Node:
        """One segment of the output's features, axes as in ``_out_layout``."""
        piece, layout = term.piece, self._out_layout()
        inner = [term.at.get(a, a) for a in outer]
        order = [x for a in layout for x in (term.features if a is None else (term.at.get(a, a),))]
        size = term.stop - term.start
        if piece.source is None:
            shape = [size if a is None else self.sizes.of(a) for a in layout]
            out = self.builder.call(aten.new_zeros.default, latent, shape)
        else:
            width = self.plan.value_rows.width
            if piece.weight is None:
                axes = tuple((a,) for a in (*inner, *width))
                out = arrange(self.builder, self.sizes, latent, axes, [(a,) for a in order])
            else:
                weight = piece.weight.expr.emit(self.builder, self.memo)
                out = project(self.builder, latent, (*inner, *width), weight, piece.weight.atoms, order)
            if piece.scale != 1.0:
                out = self.builder.call(aten.mul.Tensor, out, piece.scale)
        if piece.bias is not None:
            bias = self._aligned(piece.bias.expr, piece.bias.atoms, order)
            if self.mass is not None:
                mass = arrange(self.builder, self.sizes, self.mass, tuple((a,) for a in inner), [(a,) for a in order])
                bias = self.builder.call(aten.mul.Tensor, bias, mass)
            out = self.builder.call(aten.add.Tensor, out, bias)
        if len(term.features) != 1:
            features = [size if a is None else self.sizes.of(a) for a in layout]
            out = self.builder.call(aten.reshape.default, out, features)
        return out

    def _aligned(self, expr: Expr, atoms: Axis, order: Sequence[Atom]) -> fx.Node:
        """A bias as a tensor that broadcasts against axes ``order``."""
        own = [a for a in order if a in atoms]
        node = expr.cast(wide(self.dtype)).permute([atoms.index(a) for a in own]).emit(self.builder, self.memo)
        for k, a in enumerate(order):
            if a not in own:
                node = self.builder.call(aten.unsqueeze.default, node, k)
        return node

    # Each product by itself, everything between them untouched.

    def _open(self) -> fx.Node:
        probs = self.site.probs
        assert probs is not None
        order = {node: k for k, node in enumerate(probs.node.graph.nodes)}
        for product in sorted(set(self.site.products), key=lambda p: order[p.node]):  # one may be read twice
            self._replace_scores(product)
        builder, plan, site = self.builder, self.plan, self.site
        outer = (*plan.batch, *site.queries, *plan.heads)
        p_axes = [*outer, *site.keys]
        p = arrange(builder, self.sizes, probs.node, probs.axes, [(a,) for a in p_axes])
        p = builder.cast(p, self.dtype)
        if self._value_bias():  # with a sink, or rescaled, the weights of a row do not sum to 1
            over = list(range(len(outer), len(p_axes)))
            self.mass = builder.call(aten.sum.dim_IntList, p, over) if over else p
        rows = self._row_atoms(plan.value_rows)
        lp, lr, lo = letters(
            p_axes, (*plan.batch, *site.keys, *plan.value_rows.width), (*outer, *plan.value_rows.width)
        )
        latent = builder.call(aten.einsum.default, f"{lp},{lr}->{lo}", [p, rows])
        return self._values(latent, tuple((a,) for a in (*outer, *plan.value_rows.width)))

    def _row_atoms(self, rows: Rows) -> fx.Node:
        target = [(a,) for a in (*self.plan.batch, *self.site.keys, *rows.width)]
        return self.builder.cast(arrange(self.builder, self.sizes, rows.node, rows.axes, target), self.dtype)

    def _replace_scores(self, product: Product) -> None:
        """``q . K`` becomes the sum over its terms of ``(q W) . rows``, in the same place, shape and dtype."""
        assert product.node is not None
        plan, site = self.plan, self.site
        outer = self.builder
        self.builder = Builder(product.node, outer.fake_mode)
        self.sizes.builder = self.builder
        atoms = list(flatten(product.out))
        total: fx.Node | None = None
        index = site.products.index(product)
        for term in plan.keys:
            if term.product != index or term.piece.source is None:
                continue
            rows = next(r for r in (plan.latent, plan.rope) if r is not None and r.node is term.piece.source)
            q = self._absorbed(product, term, rows)
            r = self._row_atoms(rows)
            # The long operand is not converted, except that float16 queries may be out of its range.
            if val(r).dtype == torch.float16:
                r = self.builder.cast(r, val(q).dtype)
            q = self.builder.cast(q, val(r).dtype)
            q_atoms = (*plan.batch, *site.queries, *plan.heads, *rows.width)
            lq, lr, lo = letters(q_atoms, (*plan.batch, *site.keys, *rows.width), atoms)
            part = self.builder.call(aten.einsum.default, f"{lq},{lr}->{lo}", [q, r])
            total = part if total is None else self.builder.call(aten.add.Tensor, total, part)
            if term.piece.bias is not None:
                total = self.builder.call(aten.add.Tensor, total, self._bias_scores(product, term, atoms))
        assert total is not None
        new = arrange(self.builder, self.sizes, total, tuple((a,) for a in atoms), product.out)
        new = same_layout(self.builder, new, product.node)
        product.node.replace_all_uses_with(new)
        self.builder = outer
        self.sizes.builder = outer


def same_layout(builder: Builder, new: fx.Node, old: fx.Node) -> fx.Node:
    """``new`` in the dtype and memory order of ``old``: views that were traced on the old node's strides stay valid."""
    new = builder.cast(new, val(old).dtype)
    stride, wanted = val(new).stride(), val(old).stride()
    sizes = val(old).shape
    relevant = [d for d in range(len(sizes)) if size(sizes[d]) != 1]
    if all(size(stride[d]) == size(wanted[d]) for d in relevant):
        return new
    # Outermost first; size-1 axes may stand anywhere.
    order = sorted(relevant, key=lambda d: hint(size(wanted[d]), wanted[d]), reverse=True)
    order = [d for d in range(len(sizes)) if d not in relevant] + order
    inverse = [order.index(d) for d in range(len(sizes))]
    new = builder.call(aten.permute.default, new, order)
    new = builder.call(aten.clone.default, new, memory_format=torch.contiguous_format)
    return builder.call(aten.permute.default, new, inverse)
