"""Find parts of a buffer that are selected and written one by one, such as ``kv[0]``, ``k[layer]``, ``kv[layer, 0]``.

A write into a part returns a new buffer, ``select_scatter(k, index_copy(select(k, layer), ...), layer)``, and the next
part is selected from this new buffer. This module looks through all these writes. Each part then comes from the first
buffer, or is the tensor that was written last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from mla_compile.passes.ir.graph import shape, val
from mla_compile.passes.ir.moves import Permute, Select, Slice, WriteOne
from mla_compile.passes.ir.operators import decode


@dataclass(frozen=True)
class Selected:
    """The part of ``node`` at the pairs (axis, index) in ``at``. If ``at`` is empty, the part is all of ``node``."""

    node: fx.Node
    at: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Parts:
    """The parts of a tensor along ``axes``, each written by a separate operator.

    ``nodes``: the parts, in the order of their positions. ``chain``: the result of each write.
    """

    axes: tuple[int, ...] = ()
    nodes: tuple[fx.Node, ...] = ()
    chain: frozenset[fx.Node] = frozenset()


NO_PARTS = Parts()


def place_of(node: fx.Node, at: tuple[tuple[int, int], ...] = (), *, shown: bool = False) -> Selected:
    """Look through selections and writes of parts; return where the part ``at`` of ``node`` comes from.

    ``shown``: also look through slices and permutations. The result may then be larger or laid out differently.
    """
    fixed = dict(at)
    while True:
        how = decode(node)
        if isinstance(how, Select) and how.index is not None:
            fixed = {k + (k >= how.dim): index for k, index in fixed.items()} | {how.dim: how.index}
            node = how.x
        elif shown and isinstance(how, Slice) and how.dim not in fixed:
            node = how.x
        elif shown and isinstance(how, Permute) and how.map is not None:
            fixed = {how.map.read_along(k)[0]: index for k, index in fixed.items()}
            node = how.x
        elif not isinstance(how, WriteOne) or how.index is None or how.dim not in fixed:
            break
        elif fixed[how.dim] != how.index:
            node = how.base
        elif val(how.x).dtype != val(node).dtype:
            break
        else:
            fixed = {k - (k > how.dim): index for k, index in fixed.items() if k != how.dim}
            node = how.x
    return Selected(node, tuple(sorted(fixed.items())))


def parts_of(node: fx.Node) -> Parts:
    """Return the parts of ``node`` if all were written one by one; otherwise ``node`` as the only part."""
    whole, how = Parts(nodes=(node,)), decode(node)
    if not isinstance(how, WriteOne) or how.index is None:
        return whole
    length, inner = shape(node)[how.dim], list[Parts]()
    for index in range(length if isinstance(length, int) else 0):
        place = place_of(node, ((how.dim, index),))
        if place.at:
            return whole
        inner.append(parts_of(place.node))
    if len({part.axes for part in inner}) != 1:
        return whole
    axes = (how.dim, *(k + (k >= how.dim) for k in inner[0].axes))
    chain = frozenset({*_chain(node, how.dim)}.union(*(part.chain for part in inner)))
    return Parts(axes, tuple(n for part in inner for n in part.nodes), chain)


def _chain(node: fx.Node, dim: int) -> Iterator[fx.Node]:
    while isinstance(how := decode(node), WriteOne) and how.dim == dim:
        yield node
        base = place_of(how.base)
        if base.at:
            break
        node = base.node
