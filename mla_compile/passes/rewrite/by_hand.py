"""Replace an attention by the operator if it already reads shared rows. No weights are involved."""

from __future__ import annotations

from dataclasses import replace
from functools import partial, reduce

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.graph import val
from mla_compile.passes.ir.merging import weights_of
from mla_compile.passes.proof.memories import together
from mla_compile.passes.rewrite.absorb import Operands, Whole
from mla_compile.passes.rewrite.lengths import Lengths
from mla_compile.passes.rewrite.records import Absorbed
from mla_compile.passes.sources.records import Fusion

aten = torch.ops.aten


def fuse(fusion: Fusion, fake_mode: FakeTensorMode | None, lengths: Lengths) -> Absorbed:
    """Rewrite one site. Dead code removal deletes the nodes that are no longer needed."""
    if fusion.memories:
        several = _Memories(fusion, fake_mode, lengths)
        out = several.run()
        given = tuple(plan.latent.node for plan in fusion.memories)
        return Absorbed(several.plan, out, (), None, tuple(several.views.values()), given=given)
    rewriter = _ByHand(fusion, fake_mode, lengths)
    given = () if fusion.whole is None else (fusion.whole,)
    out = rewriter.run()
    views = tuple(rewriter.views.values())  # the nodes that the rewriter added for virtual sources
    return Absorbed(fusion.plan, out, (), None, views, given=given, columns=fusion.columns)


class _ByHand(Whole):
    def __init__(self, fusion: Fusion, fake_mode: FakeTensorMode | None, lengths: Lengths) -> None:
        super().__init__(fusion.plan, fake_mode, lengths)
        self.columns = fusion.columns

    def _operands(self) -> Operands:
        """If the values are columns of the rows, pass them as the latent and all other columns as rotary keys."""
        if self.columns is None:
            return super()._operands()
        query, rows = self._query(self.plan.latent), self._rows(self.plan.latent)
        start, stop = self.columns
        rest = (stop, self.plan.latent.size) if start == 0 else (0, start)
        if start:
            query = self.builder.call(aten.cat.default, [self._cut(query, start, stop), self._cut(query, *rest)], -1)
        return Operands(query, self._cut(rows, start, stop), self._cut(rows, *rest), None)

    def _cut(self, x: fx.Node, start: int, stop: int) -> fx.Node:
        return self.builder.call(aten.slice.Tensor, x, -1, start, stop)


class _Memories(Whole):
    """Calls the operator once for each memory, and merges the results as in :mod:`mla_compile.kernels.merge`."""

    def __init__(self, fusion: Fusion, fake_mode: FakeTensorMode | None, lengths: Lengths) -> None:
        super().__init__(replace(fusion.plan, visible=together(fusion.memories)), fake_mode, lengths)
        self.each = [Whole(plan, fake_mode, lengths) for plan in fusion.memories]

    def attend(self) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        call, (outs, each) = self.builder.call, zip(*(one.attend()[:2] for one in self.each), strict=True)
        sums = call(aten.stack.default, each)
        weights, _ = weights_of(self.builder, sums)
        terms = []
        for part, out in enumerate(outs):  # stacking would copy the outputs, which are large in a prompt
            weight = call(aten.unsqueeze.default, call(aten.select.int, weights, 0, part), -1)
            terms.append(call(aten.mul.Tensor, self.builder.cast(out, val(weight).dtype), weight))
        total = reduce(partial(call, aten.add.Tensor), terms)
        return total, call(aten.logsumexp.default, sums, [0]), None
