"""Rewrite each product of an attention separately. The operators between the products stay unchanged.

Before: ``scores = q K^T; out = P V`` with K = W_k c, V = W_v c. After: ``scores = (q W_k) c^T; out = (P c) W_v``.

This rewrite is used if the core is not a plain softmax, or if only a part of the attention can be absorbed. The part
is one side, or some columns of the keys. All other columns of the keys get a separate product. A fused attention is
first written out as products and a softmax. If only a part is absorbed, new products are computed in float32 (or
wider), because half precision would round more often than the original.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.attention.site import Product
from mla_compile.passes.ir.arrange import arrange, einsum, same_layout
from mla_compile.passes.ir.axes import Atom, Axis, flatten
from mla_compile.passes.ir.expr import wide
from mla_compile.passes.ir.graph import Builder, val
from mla_compile.passes.linear.records import Term
from mla_compile.passes.rewrite.sides import Sides
from mla_compile.passes.rewrite.unfuse import written_out
from mla_compile.passes.sources.records import AbsorbPlan, selected

aten = torch.ops.aten


class ProductRewriter(Sides):
    """Replaces the query-key products, the value product, or both."""

    def __init__(self, plan: AbsorbPlan, fake_mode: FakeTensorMode | None, *, merges: bool = False) -> None:
        if plan.site.probs is None:
            plan = replace(plan, site=written_out(plan.site, fake_mode))
        super().__init__(plan, fake_mode, merges=merges)
        if plan.part:
            self.dtype = wide(self.dtype)

    def run(self) -> fx.Node:
        site = self.site
        if self.plan.keys:
            assert site.probs is not None
            # In graph order, so that a weight emitted for one product precedes later products that use it.
            order = {node: k for k, node in enumerate(site.probs.node.graph.nodes)}
            for product in sorted(set(site.products), key=lambda p: order[p.node]):  # a product may occur twice
                self._replace_scores(product)
        if not self.plan.vals:
            return site.node
        new = same_layout(self.builder, self._weighted_values(), site.node)
        site.node.replace_all_uses_with(new)
        return new

    def _weighted_values(self) -> fx.Node:
        builder, plan, site = self.builder, self.plan, self.site
        assert site.probs is not None
        outer = self.outer
        p_axes = [*outer, *site.keys]
        p = arrange(builder, self.sizes, site.probs.node, site.probs.axes, [(a,) for a in p_axes])
        p = builder.cast(p, self.dtype)
        if self._value_bias():  # with a sink, or after rescaling, the probabilities of a row may not sum to 1
            over = list(range(len(outer), len(p_axes)))
            self.mass = builder.call(aten.sum.dim_IntList, p, over) if over else p
        attended: dict[fx.Node, tuple[fx.Node, tuple[Axis, ...]]] = {}
        for source in dict.fromkeys(t.piece.source for t in plan.vals if t.piece.source is not None):
            width = plan.rows_of(source).width
            rows, r_atoms = self.row_atoms(plan.rows_of(source))
            node = einsum(builder, p, p_axes, builder.cast(rows, self.dtype), r_atoms, (*outer, *width))
            attended[source] = node, tuple((a,) for a in (*outer, *width))
        return self._values(attended)

    def _replace_scores(self, product: Product) -> None:
        """Replace ``q . K`` by the sum of ``(q W) . rows`` over the terms of K; keep place, shape and dtype."""
        assert product.node is not None
        outer = self.builder
        # New nodes are inserted at the product, because the readers of the scores come before the attention's output.
        self.builder = Builder(product.node, outer.fake_mode)
        self.sizes.builder = self.builder
        atoms = list(flatten(product.out))
        index = self.site.products.index(product)
        shared = self.outer
        self.outer = (*shared, *selected(self.site, product))
        terms = [t for t in self.plan.keys if t.product == index]
        parts = [part for t in terms for part in self._scores_of(product, t, atoms)]
        assert parts, "keys of zeros are no attention"
        total = self._total(parts)
        if all(t.piece.source is None for t in terms):  # without rows, all keys have equal scores
            total = self.builder.call(aten.expand.default, total, [self.sizes.of(a) for a in atoms])
        new = arrange(self.builder, self.sizes, total, tuple((a,) for a in atoms), product.out)
        new = same_layout(self.builder, new, product.node)
        product.node.replace_all_uses_with(new)
        self.outer, self.builder = shared, outer
        self.sizes.builder = outer

    def _scores_of(self, product: Product, term: Term, atoms: Sequence[Atom]) -> Iterator[fx.Node]:
        """Yield the scores of a term: the scores of its rows and of its bias, if there are any."""
        if term.piece.source is not None:
            yield self.term_scores(product, term, atoms, self._score_dtype(product, term.piece.source))
        if term.piece.bias is not None:
            yield self._bias_scores(product, term, atoms)

    def _score_dtype(self, product: Product, source: fx.Node) -> torch.dtype:
        """Return the dtype for computing scores: the dtype of the rows if possible, so that no rows are converted.

        Scores that the model computes in float32 stay in float32. Scores of float16 rows are also computed in float32,
        because q W may overflow even if q . (W c) does not. In a plan for a part, all scores are in float32.
        """
        assert product.node is not None
        rows = torch.promote_types(val(source).dtype, val(product.node).dtype)
        return wide(rows) if self.plan.part or rows == torch.float16 else rows
