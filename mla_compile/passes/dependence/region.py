"""Finds the operators that keep the heads of an attention apart.

Consider ``o_proj(merge(softmax(q k^T) v))`` with ``q = heads(linear(x, W))``. Head h of the merged output depends on
head h of q, K and V. Head h of q depends on the rows of W for head h, and K and V depend on their weights in the same
way. :func:`find_region` follows the head axis downstream to the last operator that keeps heads apart. From this
operator, it follows the axis upstream to tensors that have no heads or have other readers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx

from mla_compile.passes.dependence.parts import AxisParts
from mla_compile.passes.dependence.steps import BackwardStep, Blind, Joined, step
from mla_compile.passes.ir.graph import is_tensor, is_tuple, shape
from mla_compile.passes.ir.moves import Fill
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.ir.walk import REACH

MOST_STEPS = 4 * REACH
"""The most operators of a region: the paths of one attention's queries, keys, values and output.

A longer walk does not follow heads. It follows a batch axis, which leads back to the first layer of the model.
"""


@dataclass(frozen=True)
class Region:
    """Operators that can be computed for some positions of axis ``dim`` of ``out`` at a time.

    Attributes:
        out: the last operator that keeps the heads apart.
        dim: the axis of ``out`` that has the heads as its outer factor.
        heads: the number of heads.
        parts: the analysis that knows where the walk ends.
        core: the operators that are computed in parts, each with an axis of its result. The values are steps, which say
            how operators read their operands.
        whole: operands that are not computed in parts. Each part reads these operands whole or sliced.
    """

    out: fx.Node
    dim: int
    heads: int
    parts: AxisParts
    core: Mapping[tuple[fx.Node, int], BackwardStep]
    whole: tuple[fx.Node, ...]

    @property
    def inside(self) -> set[fx.Node]:
        """The nodes that are computed in parts and no longer as a whole."""
        return {node for node, _ in self.core}

    def bounds(self, most: int) -> tuple[int, ...] | None:
        """Return the bounds that cut axis ``dim`` into at most ``most`` groups of heads; None if this is impossible.

        The bounds include both ends of the axis. No cut separates positions that an operator computes together, such as
        query heads that share a key head.
        """
        length = shape(self.out)[self.dim]
        assert isinstance(length, int)
        head, rest = divmod(length, self.heads)
        if rest:
            return None
        for size in range(math.ceil(self.heads / most), self.heads):
            ends = (*range(0, length, size * head), length)
            if all(self._is_aligned(start, stop) for start, stop in pairwise(ends)):
                return ends
        return None

    def _is_aligned(self, start: int, stop: int) -> bool:
        queue, seen = [(self.out, self.dim, start, stop)], set[tuple[fx.Node, int, int, int]]()
        while queue:
            one = queue.pop()
            node, dim, start, stop = one
            how = self.core.get((node, dim))
            if one in seen or how is None:
                continue
            seen.add(one)
            if isinstance(how, Joined):
                for p in how.parts:
                    low, high = max(start, p.start), min(stop, p.stop)
                    if low < high:
                        queue.append((p.node, p.dim, low - p.start + p.offset, high - p.start + p.offset))
                continue
            if start % how.unit or stop % how.unit:
                return False
            for n, place in how.reads.items():
                queue.append((n, place.dim, start // how.unit * place.inner, stop // how.unit * place.inner))
        return True


def find_region(attention: fx.Node, dim: int, weights: Collection[fx.Node]) -> Region | Stop:
    """Return the region of ``attention`` along axis ``dim`` of its result, or the reason why there is none.

    The length of the axis must be known.
    """
    heads = shape(attention)[dim]
    assert isinstance(heads, int)
    out, along = _last(attention, dim)
    ends: set[fx.Node] = set()
    while True:
        parts = AxisParts(weights, ends, lambda _: frozenset())
        core = _followed(parts, out, along)
        if len(core) > MOST_STEPS:
            return Stop(attention, "unsupported_op", "the axis of the heads leads too far back")
        read = _read_whole(core, out)
        if out in read or (out, along) not in core:
            return Stop(attention, "unsupported_op", "it mixes the heads")
        if not read:
            inside = {node for node, _ in core}
            operands = dict.fromkeys(n for node, _ in core for n in node.all_input_nodes)
            # A split is not a tensor, so it is left out. Its results refer to the tensor that was split.
            whole = tuple(n for n in operands if n not in inside and is_tensor(n))
            return Region(out, along, heads, parts, core, whole)
        ends |= read


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read values of ``node``, perhaps through a split.

    Nodes that read only the size or dtype are left out.
    """
    for user in node.users:
        if is_tuple(user):
            yield from user.users
        elif not isinstance(user.meta.get("val"), (int, torch.SymInt)) and not isinstance(decode(user), Fill):
            yield user


def _last(node: fx.Node, dim: int) -> tuple[fx.Node, int]:
    """Follow the axis downstream while each node has exactly one reader; return the last node and its axis."""
    for _ in range(REACH):
        following = list(readers(node))
        if len(following) != 1 or not is_tensor(following[0]):
            break
        (user,) = following
        places = [k for k in range(len(shape(user))) if _has_axis(user, k, node, dim)]
        if len(places) != 1:
            break
        node, dim = user, places[0]
    return node, dim


def _has_axis(user: fx.Node, at: int, node: fx.Node, dim: int) -> bool:
    how = step(user, at)
    return isinstance(how, Blind) and node in how.reads and how.reads[node].dim == dim


def _followed(parts: AxisParts, out: fx.Node, dim: int) -> dict[tuple[fx.Node, int], BackwardStep]:
    found: dict[tuple[fx.Node, int], BackwardStep] = {}
    queue = [(out, dim)]
    while queue and len(found) <= MOST_STEPS:
        one = queue.pop()
        how = None if one in found else parts.step(*one)
        if how is not None:
            found[one] = how
            queue += _operands(how)
    return found


def _operands(how: BackwardStep) -> list[tuple[fx.Node, int]]:
    if isinstance(how, Joined):
        return [(p.node, p.dim) for p in how.parts]
    return [(n, p.dim) for n, p in how.reads.items()]


def _read_whole(core: Mapping[tuple[fx.Node, int], BackwardStep], out: fx.Node) -> set[fx.Node]:
    """Return the nodes of ``core`` that are read whole, outside of ``core`` or by an operator that mixes heads."""
    in_parts: dict[fx.Node, set[fx.Node]] = {}
    mixes: set[fx.Node] = set()
    for (node, _), how in core.items():
        parts = {n for n, _ in _operands(how)}
        in_parts.setdefault(node, set()).update(parts)
        mixes |= {n for n in node.all_input_nodes if n not in parts and not is_tuple(n)}
    inside = in_parts.keys()
    outside = {n for n in inside if n is not out and any(user not in inside for user in readers(n))}
    return (mixes & inside) | outside
