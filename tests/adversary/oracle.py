"""Whether keys and values are fixed linear images of one narrow row per token, told from numbers alone.

If they are, then K and V of all heads and a one, side by side, with one line per token of many random calls, are a
matrix whose rank is at most the width of that row and one, however many lines it has. A factor or a summand that
depends on the position, mixed tokens, a row of each head, a nonlinearity: each of them makes the rank grow. Nothing
here uses the analysis of ``passes``; which nodes hold K and V is known from the legal graph that was mutated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mla_compile.passes.site import Operand
from mla_compile.program import Program
from tests.adversary.bases import Base

SPARE = 4  # columns and lines more than the rank that is tested
NEGLIGIBLE = 1e-9


BOTH = ("keys", "values")


def rank(base: Base, program: Program, limit: int, sides: Sequence[str] = BOTH) -> int:
    """The rank of [K | V | 1], or of one of the sides, over the tokens of random calls; at most ``limit + SPARE``.

    One side by itself may have any of the two for its heads, batch and heads: what is one for both sides is free there.
    """

    def found(swapped: bool) -> int:
        return rank_of((rows(base, program, base.inputs(draw), sides, swapped) for draw in range(400)), limit)

    have = found(False)
    return have if have <= limit or len(sides) == 2 else min(have, found(True))


def rank_of(calls: Iterable[Tensor], limit: int) -> int:
    """The rank of the lines of ``calls``, a one joined to each; at most ``limit + SPARE``."""
    lines: list[Tensor] = []
    for value in calls:
        lines.append(value)
        if sum(len(one) for one in lines) >= 2 * (limit + SPARE) + 8 and len(lines) >= 3:
            break
    matrix = torch.cat(lines)
    matrix = matrix[matrix.isfinite().all(1)]
    matrix = torch.cat([matrix, matrix.new_ones(len(matrix), 1)], 1)
    matrix = matrix / matrix.norm(dim=0).clamp(min=1e-30)  # a rotary key of any size counts
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(matrix.shape[1], limit + SPARE, generator=generator, dtype=matrix.dtype)
    values = torch.linalg.svdvals(matrix @ mix)
    return int((values > NEGLIGIBLE * values.max()).sum()) if len(values) else 0


def rows(
    base: Base, program: Program, inputs: Sequence[Any], sides: Sequence[str] = BOTH, swapped: bool = False
) -> Tensor:
    """K and V of one call as [tokens of the whole batch, their values in all heads], or one of them.

    ``swapped``: the heads are taken for the batch and the batch for the heads.
    """
    site = base.plan.site
    values = _Recorder(program.gm, {site.node.name, *(p.node.name for p in site.products if p.node)})
    with torch.no_grad():
        values.run(*inputs)
    parts = []
    for product in site.products if "keys" in sides else ():
        user = product.node or site.node
        parts.append(_lines(values.seen[user.name][_position(user, product.k.node)], product.k, base, swapped))
    if "values" in sides:
        value = values.seen[site.node.name][_position(site.node, site.v.node, last=True)]
        parts.append(_lines(value, site.v, base, swapped))
    return torch.cat(parts, 1)


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps the tensors that some nodes read."""

    def __init__(self, gm: fx.GraphModule, wanted: set[str]) -> None:
        super().__init__(gm)
        self.wanted = wanted
        self.seen: dict[str, list[Any]] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.name in self.wanted:
            self.seen[n.name] = torch.utils._pytree.tree_leaves(self.fetch_args_kwargs_from_env(n))
        return super().run_node(n)


def _position(user: fx.Node, operand: fx.Node, last: bool = False) -> int:
    """Which of the leaves of the base's arguments ``operand`` is."""
    leaves = torch.utils._pytree.tree_leaves((user.args, user.kwargs))
    found = [k for k, leaf in enumerate(leaves) if leaf is operand]
    return found[-1 if last else 0]


def _lines(value: Tensor, operand: Operand, base: Base, swapped: bool) -> Tensor:
    """An operand of the core as [tokens, values]: batch is outermost, then heads; keys are one of the last two axes."""
    keys = next((d for d, own in enumerate(operand.axes) if own and own == base.plan.site.keys), None)
    rank = value.dim()
    if keys is None:  # a single key: the axis is the one of size 1 among the last two
        keys = rank - 2 if value.shape[rank - 2] == 1 else rank - 1
    features = next(d for d in (rank - 1, rank - 2) if d != keys)
    lead = [d for d in range(rank) if d not in (keys, features)]
    value = value.permute(*lead, keys, features)
    value = value.reshape(base.case.B, -1, *value.shape[-2:])
    value = value.transpose(0, 1) if swapped else value
    return value.transpose(1, 2).flatten(2).flatten(0, 1)
