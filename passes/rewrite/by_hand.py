"""The rewrite of attention that is absorbed by hand: the operator alone, with no weight on either side of it."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.decide.records import Fusion
from mla_compile.passes.rewrite.absorb import Operands, Whole
from mla_compile.passes.rewrite.lengths import Lengths
from mla_compile.passes.rewrite.records import Absorbed

aten = torch.ops.aten


def fuse(fusion: Fusion, fake_mode: FakeTensorMode | None, lengths: Lengths) -> Absorbed:
    """Rewrites one site. The nodes it no longer needs are left to dead code removal."""
    rewriter = _ByHand(fusion, fake_mode, lengths)
    given = () if fusion.whole is None else (fusion.whole,)
    out = rewriter.run()
    views = tuple(rewriter.views.values())  # those that it added
    return Absorbed(fusion.plan, out, (), None, views, given=given, columns=fusion.columns)


class _ByHand(Whole):
    def __init__(self, fusion: Fusion, fake_mode: FakeTensorMode | None, lengths: Lengths) -> None:
        super().__init__(fusion.plan, fake_mode, lengths)
        self.columns = fusion.columns

    def _operands(self) -> Operands:
        """Where the values are columns of the keys' rows: those, and the rest of them, as the operator takes them."""
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
