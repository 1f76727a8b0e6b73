"""Find the remaining readers of an up-projection that K and V share, and whether smaller products can serve them.

Suppose that ``v`` is absorbed in ``k, v = split(view(linear(c, W)))``. Then ``k`` still needs all of ``linear(c, W)``.
Nothing is saved unless ``k`` can be computed alone, as ``linear(c, W[rows of k])``
(:mod:`mla_compile.passes.rewrite.narrow`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain

import torch
from torch import fx

from mla_compile.core.program import view_source
from mla_compile.passes.ir.axes import flatten
from mla_compile.passes.ir.graph import (
    args_of,
    bytes_hint,
    is_tensor,
    is_tuple,
    is_virtual,
    packet,
    shape,
    val,
    whole_rows,
)
from mla_compile.passes.ir.moves import Select, Slice
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import same
from mla_compile.passes.ir.walk import reachable
from mla_compile.passes.linear.records import LinearMap, Maps, Piece, VirtualSources
from mla_compile.passes.linear.rows import taken_of
from mla_compile.passes.sources.row_slices import with_slices_of

aten = torch.ops.aten


def narrower_readers(
    expansion: fx.Node,
    sources: Sequence[fx.Node],
    maps: Maps,
    reads: Callable[[fx.Node], Collection[fx.Node]],
    alive: Collection[fx.Node],
    absorbed: Collection[fx.Node],
    *,
    columns: bool = True,
) -> tuple[fx.Node, ...] | None:
    """Return the narrower nodes through which all remaining readers read ``expansion``, a projection of rows.

    A narrower node holds some columns, a few tokens (:func:`of_few_rows`), or a length that the rows also have
    (:func:`length_of`). Return None if a reader needs all of ``expansion`` or absorbed columns, because nothing is
    saved then.

    ``sources``: the rows of ``expansion``, and the rows of other images that are added to ``expansion``. ``absorbed``:
    the nodes between the rows and absorbed K and V. ``columns``: whether nodes with some columns of all tokens are
    allowed. ``reads``: returns what a node reads after all rewrites. ``alive``: the nodes needed after all rewrites.
    """
    at_sources = maps.with_sources(sources)
    whole = bytes_hint(expansion)

    def users(node: fx.Node) -> Iterable[fx.Node]:
        """Return the readers of ``node``; none if ``node`` is narrower than ``expansion`` and not absorbed."""
        if is_tuple(node) or (is_tensor(node) and (bytes_hint(node) >= whole or node in absorbed)):
            return (u for u in node.users if u in alive and node in reads(u))
        return ()

    found: list[fx.Node] = []
    for node in reachable([expansion], users):
        if node is expansion or is_tuple(node):
            continue
        if not is_tensor(node):
            if length_of(node, sources) is None:
                return None
            found.append(node)
        elif of_few_rows(node, sources, maps):
            found.append(node)
        elif bytes_hint(node) >= whole:
            # A join of keys from several tensors is no image of rows. Readers may only move the join or read a length.
            moved = decode(node) is not None
            only_lengths = (length_of(u, sources) is not None or (moved and decode(u) is not None) for u in users(node))
            if not images_of(node, sources, at_sources) and not all(only_lengths):
                return None
        elif node in absorbed:
            continue  # `users` yields the remaining readers
        elif not columns or any(n in absorbed and bytes_hint(n) < whole for n in node.all_input_nodes):
            return None
        elif not any(map(is_virtual, sources)) and _can_be_made_alone(node, images_of(node, sources, at_sources)):
            found.append(node)
        else:
            return None
    return tuple(found)


def tokens_read(
    expansion: fx.Node,
    sources: Sequence[fx.Node],
    maps: Maps,
    reads: Callable[[fx.Node], Collection[fx.Node]],
    alive: Collection[fx.Node],
) -> fx.Node | None:
    """Return a slice that reads some tokens of ``expansion``; None if all tokens are read or there is no slice.

    The arguments are those of :func:`narrower_readers`.
    """
    at_sources = maps.with_sources(sources)

    def cuts(node: fx.Node) -> bool:
        how = decode(node)
        if not isinstance(how, (Slice, Select)) or bytes_hint(node) >= bytes_hint(how.x):
            return False
        return any(a in p.source_atoms for p in at_sources.map(how.x).pieces for a in p.axes[how.dim])

    def computes(node: fx.Node) -> bool:
        return is_tensor(node) and not _carries(node, expansion, sources, at_sources)

    def users(node: fx.Node) -> Iterable[fx.Node]:
        moves = not (is_tensor(node) and (cuts(node) or computes(node)))
        return (u for u in node.users if u in alive and node in reads(u)) if moves else ()

    found = list(reachable([expansion], users))
    if any(computes(n) or n.op == "output" for n in found):
        return None
    return next((n for n in found if is_tensor(n) and cuts(n)), None)


def other_reader(
    expansion: fx.Node,
    sources: Sequence[fx.Node],
    maps: Maps,
    reads: Callable[[fx.Node], Collection[fx.Node]],
    alive: Collection[fx.Node],
    absorbed: Collection[fx.Node],
) -> fx.Node:
    """Return the first operator that computes with the values of ``expansion``.

    The search continues through ``absorbed`` nodes, and through operators that only move, slice, join or add these
    values. If no operator computes with the values, return the graph's output if it is found, and otherwise the nearest
    reader. The arguments are those of :func:`narrower_readers`.
    """
    at_sources = maps.with_sources(sources)

    def moves(node: fx.Node) -> bool:
        carries = node in absorbed or (is_tensor(node) and _carries(node, expansion, sources, at_sources))
        return is_tuple(node) or carries

    def users(node: fx.Node) -> Iterable[fx.Node]:
        return (u for u in node.users if u in alive and node in reads(u)) if moves(node) else ()

    found = [n for n in reachable([expansion], users) if n is not expansion]
    computes = (n for n in found if is_tensor(n) and not moves(n))
    returns = (n for n in found if n.op == "output")
    return next(chain(computes, returns, found))


def _carries(node: fx.Node, expansion: fx.Node, sources: Sequence[fx.Node], maps: Maps) -> bool:
    """Whether ``node`` only moves values of ``expansion``, or adds images of ``sources`` to them."""
    if node is expansion or decode(node) is not None:
        return True
    added = packet(node) in (aten.add, aten.sub)
    return added and all(p.source is None or p.source in sources for p in maps.map(node).pieces)


def length_of(node: fx.Node, sources: Sequence[fx.Node]) -> tuple[fx.Node, int] | None:
    """If ``node`` reads a size, return a source and an axis of the source with this size; otherwise None."""
    if packet(node) is not aten.sym_size:
        return None
    x, dim = args_of(node)
    found = ((rows, k) for rows in sources for k, length in enumerate(shape(rows)) if same(length, shape(x)[dim]))
    return next(found, None)


def images_of(node: fx.Node, sources: Collection[fx.Node], maps: Maps) -> tuple[Piece, ...]:
    """Return the summands of the map of ``node`` (:func:`_summands`); () if a source is not in ``sources``."""
    found = _summands(maps.map(node))
    return found if all(p.source in sources for p in found) else ()


def _summands(lmap: LinearMap) -> tuple[Piece, ...]:
    """Return the summands of ``lmap``.

    The result is empty if ``lmap`` has segments, if two summands have the same source, or if no summand is projected.
    """
    found = () if lmap.axis is not None else lmap.pieces
    apart = len({p.source for p in found}) == len(found)
    return found if apart and any(p.projected for p in found) else ()


def of_few_rows(node: fx.Node, sources: Collection[fx.Node], maps: Maps) -> tuple[Piece, ...]:
    """Return the maps that add up to ``node``, if each map reads only a few rows of a source in ``sources``.

    The result is empty if ``node`` is not a slice or cannot be made alone.
    """
    taken = taken_of(node)
    if taken is None or taken.padded is not None or taken.at is not None:
        return ()
    # Known slices of K and V are ignored, so that the pass that later makes `node` alone finds the same map.
    maps = with_slices_of([[node]], maps.with_virtual(VirtualSources()).with_sources(sources))
    pieces = _summands(maps.map(node))
    few = all(p.source is not None and _few_of(p.source, sources) for p in pieces)
    return pieces if few and _can_be_made_alone(node, pieces) else ()


def _few_of(rows: fx.Node, sources: Collection[fx.Node]) -> bool:
    """Whether ``rows`` are at most half of a source in ``sources`` for every context length; factors are ignored."""
    source = args_of(rows)[0] if is_virtual(rows) else rows
    if without_factors(source) not in map(without_factors, sources):
        return False
    # A slice whose length may grow with the context may take many rows.
    fixed = all(isinstance(s, int) or any(same(s, t) for t in shape(source)[:1]) for s in shape(rows))
    return source is not rows and fixed and 2 * bytes_hint(rows) <= bytes_hint(source)


def without_factors(rows: fx.Node) -> fx.Node:
    """Return ``rows`` without the factors that virtual rows may have."""
    return args_of(rows)[0] if has_factors(rows) else rows


def has_factors(rows: fx.Node) -> bool:
    """Whether ``rows`` are virtual rows, made by a multiplication or division of each row by a factor."""
    return is_virtual(rows) and packet(rows) in (aten.mul, aten.div)


def _can_be_made_alone(node: fx.Node, pieces: Sequence[Piece]) -> bool:
    """Whether a sum of separate products, one per piece, has exactly the values and strides of ``node``."""
    # A separate product has other strides than a slice of the shared product.
    if not pieces or strides_show(node):
        return False
    # In half precision, a sum of three terms (a bias included) depends on the order of the terms.
    ordered = len(pieces) == 1 or (len(pieces) == 2 and pieces[0].bias is None)
    exact = val(node).dtype.itemsize >= 4 or (ordered and all(_is_exact(p) for p in pieces))
    return exact and all(_has_own_product(node, p) for p in pieces)


def _is_exact(piece: Piece) -> bool:
    """Whether a half-precision product for ``piece`` rounds at the places where the graph rounds.

    A weight that is computed from other weights is rounded elsewhere. Rows with factors are also rounded elsewhere,
    because the graph multiplies by the factors after the product.
    """
    source = None if piece.source is None else whole_rows(piece.source)
    plain = piece.scale in (1.0, -1.0) and not (source is not None and has_factors(source))
    return plain and all(f.expr.is_view for f in (piece.weight, piece.bias) if f is not None)


def _has_own_product(node: fx.Node, piece: Piece) -> bool:
    """Whether ``piece`` is unchanged rows or one product of rows and a weight, in the dtype of ``node``."""
    if piece.source is None or val(piece.source).dtype != val(node).dtype:
        return False
    tokens = {a for a in flatten(piece.axes) if a in piece.source_atoms}
    if piece.weight is None:
        return tokens == piece.source_atoms and piece.bias is None
    features = {a for a in flatten(piece.axes) if a not in piece.source_atoms}
    whole = {*piece.weight.atoms} == {*features, *piece.contracted} and tokens | {
        *piece.contracted
    } == piece.source_atoms
    return whole and piece.weight.expr.value.dtype == val(node).dtype


def strides_show(node: fx.Node) -> bool:
    """Whether the memory layout of ``node`` is visible to the caller or to an operator that takes strides."""

    def views(node: fx.Node) -> Iterable[fx.Node]:
        return (u for u in node.users if view_source(u) is not None)

    return any(u.op == "output" or packet(u) is aten.as_strided for n in reachable([node], views) for u in n.users)
