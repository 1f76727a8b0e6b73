"""Write out a fused attention as two products with a softmax between them, so that one product can be rewritten.

Before: ``out = scaled_dot_product_attention(q, K, V, mask, scale)``

After: ``scores = q K^T; P = softmax(scale * scores + mask); out = P V``. As inside fused kernels, all operators run in
float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.attention.flex import Flex, flex_of
from mla_compile.passes.attention.site import AttentionSite, Operand
from mla_compile.passes.ir.arrange import SizeSources, arrange, einsum, same_layout, spread
from mla_compile.passes.ir.axes import Atom, Axis, flatten
from mla_compile.passes.ir.expr import wide
from mla_compile.passes.ir.graph import Builder, val
from mla_compile.passes.rewrite.plain import future, hidden, masked_scores, positions, probabilities


def written_out(site: AttentionSite, fake_mode: FakeTensorMode | None) -> AttentionSite:
    """Replace the fused attention of ``site``; return the site with the new nodes."""
    writer = _UnfusedWriter(site, fake_mode)
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


class _UnfusedWriter:
    """Emits the nodes of one attention. Scores and probabilities have one axis per atom: lead, queries, keys.

    The product of q and K has only the atoms of q and K (``present``). A lead axis may belong to the values alone.
    """

    def __init__(self, site: AttentionSite, fake_mode: FakeTensorMode | None) -> None:
        self.site = site
        self.builder = Builder(site.node, fake_mode)
        (self.product,) = site.products
        operands = (self.product.q, self.product.k, site.v)
        self.sizes = SizeSources(self.builder, [(o.node, o.axes) for o in operands])
        self.atoms: tuple[Atom, ...] = (*site.lead, *site.queries, *site.keys)
        known = {*flatten(self.product.q.axes), *flatten(self.product.k.axes)}
        self.present = tuple(a for a in self.atoms if a in known)
        self.dtype = wide(val(site.node).dtype)

    def scores(self) -> fx.Node:
        """Emit the plain product of queries and keys, which a rewrite of the keys replaces later."""
        (q, q_atoms), (k, k_atoms) = self._by_atoms(self.product.q), self._by_atoms(self.product.k)
        return einsum(self.builder, q, q_atoms, k, k_atoms, self.present)

    def probabilities(self, scores: fx.Node) -> fx.Node:
        if (flex := flex_of(self.site.node)) is not None and flex.score_mod is not None:
            return self._modified(flex, scores)
        site, each = self.site, [(a,) for a in self.atoms]
        scores = self._arranged(scores, [(a,) for a in self.present], each)
        masks = (self._arranged(m.operand.node, m.operand.axes, each) for m in site.masks)
        scores = masked_scores(self.builder, scores, site.scale, masks)
        if site.causal:
            # Queries and keys are the second-to-last axes of q and k.
            s, t = ((o.node, val(o.node).dim() - 2) for o in (self.product.q, self.product.k))
            later = self._arranged(
                future(self.builder, *positions(self.builder, s, t)), (site.queries, site.keys), each
            )
            scores = hidden(self.builder, scores, later)
        # The keys, which may consist of several atoms, become one axis.
        joined = [*((a,) for a in (*site.lead, *site.queries)), site.keys]
        scores = self._arranged(scores, each, joined)
        probs = probabilities(self.builder, scores, some_empty=bool(site.masks))
        return spread(self.builder, self.sizes, self._arranged(probs, joined, each), self.atoms)

    def _modified(self, flex: Flex, scores: fx.Node) -> fx.Node:
        """Return the probabilities if ``score_mod`` changes the scores [B,H,S,T] before the softmax."""
        site, each = self.site, [(a,) for a in self.atoms]
        target = (*site.out.axes[:2], site.queries, site.keys)
        scores = self._arranged(scores, [(a,) for a in self.present], each)
        # `score_mod` takes the indices of batch, head, query and key, so each must be one axis.
        scores = self._arranged(scores, each, target)
        scores = masked_scores(
            self.builder, scores, site.scale, modify=lambda s: self.builder.trace(flex.modified, [s, *flex.buffers])
        )
        return self._arranged(probabilities(self.builder, scores, some_empty=True), target, each)

    def output(self, probs: fx.Node) -> tuple[Operand, fx.Node]:
        site = self.site
        v = Operand(self.builder.cast(site.v.node, self.dtype), site.v.axes)
        node, v_atoms = self._by_atoms(v)
        inner = set(self.atoms)
        out_atoms = [*site.lead, *site.queries, *(a for a in flatten(site.out.axes) if a not in inner)]
        out = einsum(self.builder, probs, self.atoms, node, v_atoms, out_atoms)
        out = same_layout(self.builder, self._arranged(out, [(a,) for a in out_atoms], site.out.axes), site.node)
        site.node.replace_all_uses_with(out)
        return v, out

    def _by_atoms(self, operand: Operand) -> tuple[fx.Node, tuple[Atom, ...]]:
        atoms = flatten(operand.axes)
        return self.builder.cast(self._arranged(operand.node, operand.axes, [(a,) for a in atoms]), self.dtype), atoms

    def _arranged(self, node: fx.Node, axes: Sequence[Axis], target: Sequence[Axis]) -> fx.Node:
        return arrange(self.builder, self.sizes, node, tuple(axes), target)
