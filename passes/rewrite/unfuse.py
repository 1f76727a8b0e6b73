"""The fused attention written out as two products and a softmax between them, for rewrites of one product.

Before: ``out = scaled_dot_product_attention(q, K, V, mask, scale)``

After: ``scores = q K^T; P = softmax(scale * scores + mask); out = P V``, all of it in float32 or wider, as the fused
kernels compute it inside. Rows without a visible key are zero, as there.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.attention.flex import Flex, flex_of
from mla_compile.passes.attention.site import AttentionSite, MaskTerm, Operand
from mla_compile.passes.ir.arrange import Sizes, arrange, same_layout, spread
from mla_compile.passes.ir.axes import Atom, flatten
from mla_compile.passes.ir.factors import letters
from mla_compile.passes.ir.graph import Builder, val
from mla_compile.passes.rewrite.project import wide

aten = torch.ops.aten


def written_out(site: AttentionSite, fake_mode: FakeTensorMode | None) -> AttentionSite:
    """Replaces the fused attention of ``site``; the same site over the nodes that now compute it."""
    writer = _Writer(site, fake_mode)
    scores = writer.scores()
    probs = writer.probabilities(scores)
    v, out = writer.output(probs)
    (product,) = site.products
    own = tuple((a,) for a in writer.present)
    return replace(
        site,
        out=replace(site.out, node=out),
        products=(replace(product, node=scores, out=own),),
        v=v,
        probs=Operand(probs, tuple((a,) for a in writer.atoms)),
    )


class _Writer:
    """The nodes of one attention, with one axis for each of ``atoms``: lead, queries, keys.

    The product of q and K has those it depends on (``present``); the values may have a lead axis of their own.
    """

    def __init__(self, site: AttentionSite, fake_mode: FakeTensorMode | None) -> None:
        self.site = site
        self.builder = Builder(site.node, fake_mode)
        (self.product,) = site.products
        operands = (self.product.q, self.product.k, site.v)
        self.sizes = Sizes(self.builder, [(o.node, o.axes) for o in operands])
        self.atoms: tuple[Atom, ...] = (*site.lead, *site.queries, *site.keys)
        known = {*flatten(self.product.q.axes), *flatten(self.product.k.axes)}
        self.present = tuple(a for a in self.atoms if a in known)
        self.dtype = wide(val(site.node).dtype)

    def scores(self) -> fx.Node:
        """The plain product: what a rewrite of the keys replaces."""
        (q, q_atoms), (k, k_atoms) = self._by_atoms(self.product.q), self._by_atoms(self.product.k)
        lq, lk, lo = letters(q_atoms, k_atoms, self.present)
        return self.builder.call(aten.einsum.default, f"{lq},{lk}->{lo}", [q, k])

    def probabilities(self, scores: fx.Node) -> fx.Node:
        call, site = self.builder.call, self.site
        if (flex := flex_of(site.node)) is not None and flex.score_mod is not None:
            return self._modified(flex, scores)
        own = tuple((a,) for a in self.present)
        scores = arrange(self.builder, self.sizes, scores, own, [(a,) for a in self.atoms])
        scores = call(aten.mul.Tensor, scores, site.scale)
        for mask in site.masks:
            scores = self._masked(scores, mask)
        if site.causal:
            scores = call(aten.masked_fill.Scalar, scores, self._future(), float("-inf"))
        # One axis for the keys, however many factors its size has.
        long = self._joined(scores)
        probs = call(aten.softmax.int, long, -1)
        if site.masks:
            empty = call(aten.eq.Scalar, call(aten.amax.default, long, [-1], True), float("-inf"))
            probs = call(aten.masked_fill.Scalar, probs, empty, 0.0)
        outer = (*site.lead, *site.queries)
        axes = (*((a,) for a in outer), site.keys)
        probs = arrange(self.builder, self.sizes, probs, axes, [(a,) for a in self.atoms])
        return spread(self.builder, self.sizes, probs, self.atoms)

    def _modified(self, flex: Flex, scores: fx.Node) -> fx.Node:
        """The weights where ``score_mod`` makes something else of the scores [B,H,S,T] before the softmax."""
        call, site = self.builder.call, self.site
        batch, heads = site.out.axes[:2]
        target = (batch, heads, site.queries, site.keys)
        each = [(a,) for a in self.atoms]
        own = tuple((a,) for a in self.present)
        scores = arrange(self.builder, self.sizes, scores, own, each)
        scores = arrange(self.builder, self.sizes, scores, tuple(each), target)
        scores = call(aten.mul.Tensor, scores, site.scale)
        scores = self.builder.trace(flex.modified, [scores, *flex.buffers])
        probs = call(aten._safe_softmax.default, scores, -1)
        return arrange(self.builder, self.sizes, probs, target, each)

    def output(self, probs: fx.Node) -> tuple[Operand, fx.Node]:
        site = self.site
        v = Operand(self.builder.cast(site.v.node, self.dtype), site.v.axes)
        node, v_atoms = self._by_atoms(v)
        inner = set(self.atoms)
        out_atoms = [*site.lead, *site.queries, *(a for a in flatten(site.out.axes) if a not in inner)]
        lp, lv, lo = letters(self.atoms, v_atoms, out_atoms)
        out = self.builder.call(aten.einsum.default, f"{lp},{lv}->{lo}", [probs, node])
        out = arrange(self.builder, self.sizes, out, tuple((a,) for a in out_atoms), site.out.axes)
        out = same_layout(self.builder, out, site.node)
        site.node.replace_all_uses_with(out)
        return v, out

    def _by_atoms(self, operand: Operand) -> tuple[fx.Node, tuple[Atom, ...]]:
        atoms = flatten(operand.axes)
        node = arrange(self.builder, self.sizes, operand.node, operand.axes, [(a,) for a in atoms])
        return self.builder.cast(node, self.dtype), atoms

    def _joined(self, scores: fx.Node) -> fx.Node:
        outer = (*self.site.lead, *self.site.queries)
        target = (*((a,) for a in outer), self.site.keys)
        return arrange(self.builder, self.sizes, scores, tuple((a,) for a in self.atoms), target)

    def _masked(self, scores: fx.Node, mask: MaskTerm) -> fx.Node:
        target = [(a,) for a in self.atoms]
        node = arrange(self.builder, self.sizes, mask.operand.node, mask.operand.axes, target)
        if mask.kind == "add":
            return self.builder.call(aten.add.Tensor, scores, self.builder.cast(node, self.dtype))
        hidden = self.builder.call(aten.logical_not.default, node)
        return self.builder.call(aten.masked_fill.Scalar, scores, hidden, float("-inf"))

    def _future(self) -> fx.Node:
        """True where a key lies after the query; there are as many of the one as of the other."""
        call, device = self.builder.call, val(self.site.node).device
        # Queries and keys are the last axis but one of q and k.
        s, t = (self.builder.size(o.node, val(o.node).dim() - 2) for o in (self.product.q, self.product.k))
        rows = call(aten.unsqueeze.default, call(aten.arange.default, s, device=device), 1)
        future = call(aten.gt.Tensor, call(aten.arange.default, t, device=device), rows)
        axes = (self.site.queries, self.site.keys)
        return arrange(self.builder, self.sizes, future, axes, [(a,) for a in self.atoms])
