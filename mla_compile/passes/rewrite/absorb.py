"""The rewrite: attention over expanded keys and values becomes attention over the latent rows.

Before::

    kv = linear(c, W_kc | W_v); K = [kv_k | k_rope]; V = kv_v         # K, V: H (N+R+V) values per cached token
    out = attention(q, K, V, mask, scale)

After::

    q~ = [einsum(q_nope, W_kc) | q_rope]                               # [B, S, H, L+R]
    o~ = mla_compile.decode_attention(q~, c, k_rope, mask, scale)      # [B, S, H, L]; reads L+R values per token
    out = einsum(o~, W_v)

Both forms are equal because q . (W c) = (W^T q) . c and sum_i p_i (W c_i) = W (sum_i p_i c_i) (DeepSeek-V2, arXiv
2405.04434, 2.1.2). A bias on the keys adds the same number to every score of a row, and the softmax cancels this
number. A bias on the values is added once, because the probabilities of a row sum to 1.

If the core is open (``open_core``), or if only a part of the attention can be absorbed, each product is replaced
separately (:mod:`mla_compile.passes.rewrite.products`). There is one exception. If the only obstacle is that some key
columns come from per-head rows, the operator is still used, and the scores of these columns are added to the mask.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import mla_compile.ops  # noqa: F401  registers the operator
from mla_compile.passes.attention.site import VANISHING, Chosen, MaskTerm, Operand
from mla_compile.passes.ir.arrange import arrange, same_layout, spread
from mla_compile.passes.ir.axes import Axis, axis_size, flatten
from mla_compile.passes.ir.expr import wide
from mla_compile.passes.ir.graph import shape, val
from mla_compile.passes.ir.sizes import same
from mla_compile.passes.rewrite.lengths import Lengths
from mla_compile.passes.rewrite.products import ProductRewriter
from mla_compile.passes.rewrite.records import Absorbed
from mla_compile.passes.rewrite.sides import Sides
from mla_compile.passes.sources.records import AbsorbPlan

aten = torch.ops.aten

HIDDEN = -1e30
"""The mask value for scores that the model replaces by a finite number.

Adding a score to this value changes nothing, even in float64. So a row without a visible key gives all keys equal
weight. The model also does this, because it gives all keys of such a row equal scores.
"""


def absorb(plan: AbsorbPlan, fake_mode: FakeTensorMode | None, lengths: Lengths, *, merges: bool = False) -> Absorbed:
    """Rewrite one site. Dead code removal deletes the nodes that are no longer needed.

    ``lengths``: writes lengths into the graph, and is shared by all sites. ``merges``: whether to add up the terms of a
    weight into one tensor, because the weight will be folded.
    """
    rewriter = (
        Whole(plan, fake_mode, lengths, merges=merges)
        if plan.whole
        else ProductRewriter(plan, fake_mode, merges=merges)
    )
    out = rewriter.run()
    views, weights = tuple(rewriter.views.values()), tuple(rewriter.weights)
    return Absorbed(plan, out, tuple(rewriter.queries), rewriter.latent, views, weights, given=rewriter.given)


class Operands(NamedTuple):
    """The operator's inputs: query [B,S,H,L+R], latent [B,T,L], rope [B,T,R] and values (None: the latent)."""

    query: fx.Node
    latent: fx.Node
    rope: fx.Node | None
    values: fx.Node | None


class Whole(Sides):
    """Replaces the whole attention by one operator."""

    def __init__(
        self, plan: AbsorbPlan, fake_mode: FakeTensorMode | None, lengths: Lengths, *, merges: bool = False
    ) -> None:
        super().__init__(plan, fake_mode, merges=merges)
        self.lengths = lengths

    def run(self) -> fx.Node:
        new = same_layout(self.builder, self._closed(), self.site.node)
        self.site.node.replace_all_uses_with(new)
        return new

    def _closed(self) -> fx.Node:
        plan, site, visible = self.plan, self.site, self.plan.visible
        out, lse, indices = self.attend()
        axes = (plan.batch, site.queries, plan.heads, plan.value_rows.width)
        if visible.alike:
            rows = self._rows(plan.values or plan.latent)
            added = [term for term in visible.masks if term.kind == "add"]
            # With an additive mask, a row without a visible key attends only to the keys with the greatest mask value.
            numbers = (self._mask_axes(added[0]), indices, visible.fill) if added else ()
            out = self.builder.call(torch.ops.mla_compile.weigh_alike.default, out, lse, rows, VANISHING, *numbers)
        if site.sinks is not None:
            share = self._share(lse, site.sinks)
            wide_out = self.builder.cast(out, val(share).dtype)
            out = self.builder.call(aten.mul.Tensor, wide_out, self.builder.call(aten.unsqueeze.default, share, -1))
            self.mass = arrange(self.builder, self.sizes, share, axes[:3], [(a,) for axis in axes[:3] for a in axis])
        # The operator returns zero for a row without a visible key. The model may differ in two ways.
        elif not visible.alike and not visible.always and (site.empty == "nan" or self._value_bias()):
            nothing = self.builder.call(aten.eq.Scalar, lse, float("-inf"))
            if site.empty == "nan":  # a plain softmax gives NaN
                nothing = self.builder.call(aten.unsqueeze.default, nothing, -1)
                out = self.builder.call(aten.masked_fill.Scalar, out, nothing, float("nan"))
            else:  # the fused attention gives zero, so the value bias must not be added
                some = self.builder.cast(self.builder.call(aten.logical_not.default, nothing), wide(self.dtype))
                outer = [(a,) for axis in axes[:3] for a in axis]
                self.mass = arrange(self.builder, self.sizes, some, axes[:3], outer)
        attended: dict[fx.Node, tuple[fx.Node, tuple[Axis, ...]]] = {}
        start = 0
        for one in plan.value_rows.each:
            stop = start + one.size
            part = self.builder.call(aten.slice.Tensor, out, -1, start, stop) if plan.value_rows.parts else out
            attended[one.node] = part, (*axes[:3], one.width)
            start = stop
        return self._values(attended)

    def attend(self) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        """Return the operator's output [B,S,H,L], its log-sum-exp [B,S,H], and its sparse index list (or None)."""
        visible = self.plan.visible
        operands = self._operands()
        indices = self._indices(visible.chosen) if visible.chosen else None
        result = self.builder.call(
            torch.ops.mla_compile.decode_attention.default,
            *operands,
            self._mask(),
            *self._lengths(),
            scale=self.site.scale,
            causal=visible.causal,
            **({"window": visible.window} if visible.window else {}),
            **({"indices": indices} if indices else {}),
        )
        return self.builder.call(operator.getitem, result, 0), self.builder.call(operator.getitem, result, 1), indices

    def _operands(self) -> Operands:
        plan = self.plan
        latent, rope = self._query(plan.latent), self._query(plan.rope) if plan.rope else None
        query = latent if rope is None else self.builder.call(aten.cat.default, [latent, rope], -1)
        return Operands(
            query,
            self._rows(plan.latent),
            None if plan.rope is None else self._rows(plan.rope),
            None if plan.values is None else self._rows(plan.values),
        )

    def _share(self, lse: fx.Node, sinks: Operand) -> fx.Node:
        """Return the total probability [B,S,H] of all keys in a softmax with a sink.

        This is ``exp(lse) / (exp(lse) + exp(sinks))``. The probability is 1 if the sink is minus infinity, and 0 for a
        row without a visible key.
        """
        target = (self.plan.batch, self.site.queries, self.plan.heads)
        # The operator's scores omit a bias on the keys, which adds the same number to all scores of a row. The score of
        # a sink has no bias, so the log-sum-exp has to include the bias here.
        biases = [
            self._bias_scores(self.site.products[t.product], t, self.outer)
            for t in self.plan.keys
            if t.piece.bias is not None and t.product is not None
        ]
        if biases:
            more = spread(self.builder, self.sizes, self._total(biases), self.outer)
            more = arrange(self.builder, self.sizes, more, tuple((a,) for a in self.outer), target)
            more = self.builder.call(aten.mul.Tensor, more, self.site.scale)
            lse = self.builder.call(aten.add.Tensor, lse, self.builder.cast(more, val(lse).dtype))
        sink = self.builder.cast(self._laid_out(sinks, target), val(lse).dtype)
        return self.builder.call(aten.sigmoid.default, self.builder.call(aten.sub.Tensor, lse, sink))

    def _lengths(self) -> list[fx.Node]:
        lengths = self.lengths.write(self.plan, self.builder, self.sizes)
        return [] if lengths is None else [lengths]

    def _indices(self, chosen: Chosen) -> fx.Node:
        """Return the sparse index list as int32 [B,S,k]; repeated and invalid entries become negative."""
        call, device = self.builder.call, val(self.plan.latent.node).device
        listed, flags = (None if o is None else self._listed(o, chosen) for o in (chosen.indices, chosen.flags))
        assert listed is not None
        # The operator ignores negative entries.
        if flags is not None:
            listed = call(aten.masked_fill.Scalar, listed, call(aten.eq.Scalar, flags, 0), -1)
        if not chosen.distinct:
            listed = call(operator.getitem, call(aten.sort.default, listed, -1), 0)
            again = call(
                aten.eq.Tensor, call(aten.slice.Tensor, listed, 2, 1), call(aten.slice.Tensor, listed, 2, 0, -1)
            )
            first = call(aten.slice.Tensor, listed, 2, 0, 1)
            # A pad operator would specialise symbolic sizes to the numbers seen in the trace.
            again = call(aten.cat.default, [call(aten.ne.Tensor, first, first), again], 2)
            listed = call(aten.masked_fill.Scalar, listed, again, -1)
        if chosen.any_number:  # entries beyond int32 name no key
            listed = call(aten.clamp.default, listed, -1, 2**31 // chosen.block - 1)
        if chosen.block > 1:
            inside = call(aten.arange.default, chosen.block, device=val(listed).device)
            first = call(aten.unsqueeze.default, call(aten.mul.Tensor, listed, chosen.block), -1)
            listed = call(aten.flatten.using_ints, call(aten.add.Tensor, first, inside), -2)
        return self.builder.on_device(self.builder.cast(listed, torch.int32), device)

    def _listed(self, operand: Operand, chosen: Chosen) -> fx.Node:
        """Return ``operand``, the sparse index list or its flags, laid out as [B,S,k]."""
        atoms = (*self.plan.batch, *self.site.queries, *chosen.count)
        for dim, one in enumerate(operand.axes):
            if one == chosen.count:
                self.sizes.show(one, operand.node, dim)
        node = arrange(self.builder, self.sizes, operand.node, operand.axes, tuple((a,) for a in atoms))
        node = spread(self.builder, self.sizes, node, atoms)
        target = (self.plan.batch, self.site.queries, chosen.count)
        return arrange(self.builder, self.sizes, node, tuple((a,) for a in atoms), target)

    def _mask(self) -> fx.Node | None:
        """Merge all masks and extra scores into one mask, which is boolean or additive.

        An additive mask is in float32 or wider.
        """
        keep: fx.Node | None = None
        added: fx.Node | None = None
        extra = self._extra_scores()
        for term in self.plan.visible.masks:
            mask = self._mask_axes(term)
            if term.kind == "add":
                dtype = torch.promote_types(val(mask).dtype, wide(val(self.site.products[0].q.node).dtype))
                mask = self.builder.cast(mask, dtype)
                if term.scale != 1.0:
                    mask = self.builder.call(aten.mul.Tensor, mask, term.scale)
                if term.dtype is not None:  # the model adds the mask in a narrower dtype, where it may overflow
                    mask = self.builder.cast(self.builder.cast(mask, term.dtype), wide(term.dtype))
                added = mask if added is None else self.builder.call(aten.add.Tensor, added, mask)
                continue
            mask = self.builder.cast(mask, torch.bool)
            if term.kind == "drop":
                mask = self.builder.call(aten.logical_not.default, mask)
            keep = mask if keep is None else self.builder.call(aten.logical_and.default, keep, mask)
        if keep is None:
            return self._plus(added, extra)
        # All masks have one fill value, because several fill values make an open core, which is not rewritten here.
        (fill,) = {term.fill for term in self.plan.visible.masks if term.kind != "add"}
        # If the fill is finite, a row without a visible key gives all keys equal weight and does not become zero.
        if fill > float("-inf"):
            return self._plus(self._fill(keep, HIDDEN), extra)
        if added is None and extra is None:
            return keep
        return self._plus(self._plus(added, extra), self._fill(keep, fill))

    def _plus(self, a: fx.Node | None, b: fx.Node | None) -> fx.Node | None:
        return a or b if a is None or b is None else self.builder.call(aten.add.Tensor, a, b)

    def _extra_scores(self) -> fx.Node | None:
        """Return the scaled scores of the columns that the operator does not read, [batch, heads, queries, keys]."""
        outside = {rows.node for rows in self.plan.extra}
        order = (*self.plan.batch, *self.plan.heads, *self.site.queries, *self.site.keys)
        total: fx.Node | None = None
        for term in self.plan.keys:
            if term.product is not None and term.piece.source in outside:
                product = self.site.products[term.product]
                total = self._plus(total, self.term_scores(product, term, order, wide(self.dtype)))
        if total is None:
            return None
        total = self.builder.call(aten.mul.Tensor, total, self.site.scale)
        total = spread(self.builder, self.sizes, total, order)
        target = (self.plan.batch, self.plan.heads, self.site.queries, self.site.keys)
        return arrange(self.builder, self.sizes, total, tuple((a,) for a in order), target)

    def _fill(self, keep: fx.Node, value: float) -> fx.Node:
        """Return ``value`` where ``keep`` is False, and 0 elsewhere."""
        cut = self.builder.call(aten.logical_not.default, keep)
        zeros = self.builder.call(aten.zeros_like.default, cut, dtype=torch.float32)
        return self.builder.call(aten.masked_fill.Scalar, zeros, cut, value)

    def _mask_axes(self, term: MaskTerm) -> fx.Node:
        return self._laid_out(term.operand, (self.plan.batch, self.plan.heads, self.site.queries, self.site.keys))

    def _laid_out(self, operand: Operand, target: tuple[Axis, ...]) -> fx.Node:
        """Arrange ``operand`` along the axes ``target``; axes that ``operand`` lacks get length 1."""
        own = set(flatten(operand.axes))
        atoms = flatten(axis for axis in target if own & set(axis))
        each = tuple((a,) for a in atoms)
        node = self.builder.on_device(operand.node, val(self.plan.latent.node).device)
        for dim, axis in enumerate(operand.axes):
            if axis and not same(shape(node)[dim], axis_size(axis)):  # the model never read the rest of this axis
                node = self.builder.call(aten.slice.Tensor, node, dim, 0, *self.sizes.shape([axis]))
        node = arrange(self.builder, self.sizes, node, operand.axes, each)
        # The heads may be a product of atoms. An operand is repeated along the atoms that it lacks.
        node = spread(self.builder, self.sizes, node, atoms)
        return arrange(self.builder, self.sizes, node, each, target)
