"""Whether keys and values are fixed linear images of one narrow row per token, told from numbers alone.

If they are, then K and V of all heads and a one, side by side, with one line per token of many random calls, are a
matrix whose rank is at most the width of that row and one, however many lines it has. A factor or a summand that
depends on the position, mixed tokens, a row of each head, a nonlinearity: each of them makes the rank grow. Nothing
here uses the analysis of ``passes``; which nodes hold K and V is known from the legal graph that was mutated. Of what
is absorbed, :func:`claimed_rank` tests what the plan says: that rows of such a width make it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mla_compile.core.program import Program
from mla_compile.passes.attention.site import Operand
from mla_compile.passes.ir.axes import Atom, flatten
from mla_compile.passes.ir.graph import packet
from mla_compile.passes.ir.walk import weight_nodes
from mla_compile.passes.sources.records import AbsorbPlan
from tests.adversary.bases import Base, behind
from tests.support.row_changes import by_atoms

aten = torch.ops.aten
PRODUCTS = (aten.matmul, aten.mm, aten.bmm, aten.baddbmm, aten.einsum)
SOFTMAX = (aten.softmax, aten._softmax)
SPARE = 4  # columns and lines more than the rank that is tested
NEGLIGIBLE = 1e-9


BOTH = ("keys", "values")


def rank(base: Base, program: Program, limit: int) -> int:
    """The rank of [K | V | 1] over the tokens of random calls; at most ``limit + SPARE``."""
    return rank_of((rows(base, program, base.inputs(draw)) for draw in range(400)), limit)


def claimed_rank(base: Base, program: Program, plan: AbsorbPlan, limit: int) -> int:
    """The same of what ``plan`` absorbs, with the axes it takes for batch, tokens and heads.

    One side by itself may have other axes for its batch and heads than both have, so they are the plan's to say.
    """
    return rank_of((_claimed_rows(program, plan, base.inputs(draw)) for draw in range(400)), limit)


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


def rows(base: Base, program: Program, inputs: Sequence[Any]) -> Tensor:
    """K and V of one call as [tokens of the whole batch, their values in all heads]."""
    return torch.cat(list(sides(base, program, inputs).values()), 1)


def sides(
    base: Base, program: Program, inputs: Sequence[Any], given: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """K and V each; ``given``: values of some nodes, instead of what they compute."""
    site = base.plan.site
    values = recorded(program, inputs, given)
    named = {n.name: n for n in program.gm.graph.nodes}
    keys = []
    for product in site.products:
        user = product.node or site.node
        keys.append(_lines(values[_leaf(named[user.name], _position(user, product.k.node))], product.k, base))
    value = values[_leaf(named[site.node.name], _position(site.node, site.v.node, last=True))]
    return {"keys": torch.cat(keys, 1), "values": _lines(value, site.v, base)}


def _claimed_rows(program: Program, plan: AbsorbPlan, inputs: Sequence[Any]) -> Tensor:
    """What ``plan`` absorbs, one line for each of what it takes for a token, all that is to be made of it beside."""
    site = plan.site
    outer = (*plan.batch, *site.keys, *plan.heads)
    values = recorded(program, inputs)
    found: list[tuple[Tensor, tuple[Atom, ...]]] = []
    sizes: dict[Atom, int] = {}
    for operand in (*((p.k for p in site.products) if plan.keys else ()), *((site.v,) if plan.vals else ())):
        value, atoms = by_atoms(values[operand.node], operand.axes), flatten(operand.axes)
        sizes |= dict(zip(atoms, value.shape, strict=True))
        found.append((value, atoms))
    parts = []
    for value, atoms in found:
        shared = [a for a in outer if a not in atoms]
        atoms = (*shared, *atoms)
        order = [atoms.index(a) for a in (*outer, *(a for a in atoms if a not in outer))]
        value = value.expand(*(sizes.get(a, 1) for a in shared), *value.shape).permute(order)
        tokens = math.prod(value.shape[: len(plan.batch) + len(site.keys)])
        parts.append(value.reshape(tokens, -1))
    return torch.cat(parts, 1)


def recorded(program: Program, inputs: Sequence[Any], given: Mapping[str, Tensor] | None = None) -> dict[fx.Node, Any]:
    """What every node computes; those named in ``given`` have those values instead."""
    seen: dict[fx.Node, Any] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            computed = super().run_node(n)
            seen[n] = computed if given is None else given.get(n.name, computed)
            return seen[n]

    with torch.no_grad():
        Recorder(program.gm).run(*inputs)
    return seen


def _leaf(user: fx.Node, position: int) -> fx.Node:
    """One of the leaves of a node's arguments."""
    leaf: fx.Node = torch.utils._pytree.tree_leaves((user.args, user.kwargs))[position]
    return leaf


def _position(user: fx.Node, operand: fx.Node, last: bool = False) -> int:
    """Which of the leaves of the base's arguments ``operand`` is."""
    leaves = torch.utils._pytree.tree_leaves((user.args, user.kwargs))
    found = [k for k, leaf in enumerate(leaves) if leaf is operand]
    return found[-1 if last else 0]


def _lines(value: Tensor, operand: Operand, base: Base) -> Tensor:
    """An operand of the core as [tokens, values]: batch is outermost, then heads; keys are one of the last two axes."""
    keys = next((d for d, own in enumerate(operand.axes) if own and own == base.plan.site.keys), None)
    rank = value.dim()
    if keys is None:  # a single key: the axis is the one of size 1 among the last two
        keys = rank - 2 if value.shape[rank - 2] == 1 else rank - 1
    features = next(d for d in (rank - 1, rank - 2) if d != keys)
    lead = [d for d in range(rank) if d not in (keys, features)]
    value = value.permute(*lead, keys, features)
    value = value.reshape(base.case.B, -1, *value.shape[-2:])
    return value.transpose(1, 2).flatten(2).flatten(0, 1)


def attends(program: Program) -> bool:
    """Whether a softmax that is needed reads a product of two tensors of no weights, and one reads what it makes."""
    graph = program.gm.graph
    weights = weight_nodes(graph, program.weights)
    needed = {n for n in (*graph.output_node().all_input_nodes,) for n in behind(n)}

    def product(node: fx.Node) -> bool:
        return packet(node) in PRODUCTS and sum(n not in weights for n in node.all_input_nodes) > 1

    def attention(node: fx.Node) -> bool:
        if packet(node) is aten.scaled_dot_product_attention:
            return True
        after = (n for n in needed if product(n) and node in behind(n))
        return packet(node) in SOFTMAX and any(map(product, behind(node))) and any(after)

    return any(attention(n) for n in needed)
