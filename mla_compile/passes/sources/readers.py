"""Remaining readers of an up-projection that makes K and V in one product, and whether they can have their own product.

In ``k, v = split(view(linear(c, W)))`` with ``v`` absorbed, ``k`` still needs all of ``linear(c, W)``, and nothing is
saved unless ``k`` can be made alone, as ``linear(c, W[rows of k])`` (:mod:`mla_compile.passes.rewrite.narrow`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import chain

import torch
from torch import fx

from mla_compile.core.program import view_source
from mla_compile.passes.ir.axes import flatten
from mla_compile.passes.ir.graph import args_of, bytes_hint, is_tensor, is_tuple, is_virtual, packet, shape, val
from mla_compile.passes.ir.moves import Select, Slice
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import same
from mla_compile.passes.ir.walk import reachable
from mla_compile.passes.linear.records import Maps, Piece, VirtualSources
from mla_compile.passes.linear.rows import taken_of
from mla_compile.passes.sources.row_slices import with_slices_of

aten = torch.ops.aten


def narrower_readers(
    expansion: fx.Node,
    source: fx.Node,
    maps: Maps,
    reads: Callable[[fx.Node], Collection[fx.Node]],
    alive: Collection[fx.Node],
    absorbed: Collection[fx.Node],
    *,
    columns: bool = True,
) -> tuple[fx.Node, ...] | None:
    """Return the narrower nodes through which alone ``expansion``, a product of the rows ``source``, is still read.

    These include its lengths, if the rows have them too (:func:`length_of`), and parts of a few tokens
    (:func:`of_few_rows`). None if a reader needs all of it, or columns that were ``absorbed`` (nodes on their way to
    the site): then nothing is saved. ``columns``: whether some columns of all tokens may still be read. ``reads`` says
    what a node reads, and ``alive`` which nodes are needed, once all sites are rewritten.
    """
    at_source = maps.with_sources([source])
    whole = bytes_hint(expansion)

    def users(node: fx.Node) -> Iterable[fx.Node]:
        """Return the readers of ``expansion``, of its views, of tuples that a split makes, and of absorbed nodes."""
        if is_tuple(node) or (is_tensor(node) and (bytes_hint(node) >= whole or node in absorbed)):
            return (u for u in node.users if u in alive and node in reads(u))
        return ()

    found: list[fx.Node] = []
    for node in reachable([expansion], users):
        if node is expansion or is_tuple(node):
            continue
        if not is_tensor(node):
            if length_of(node, source) is None:
                return None
            found.append(node)
        elif of_few_rows(node, source, maps) is not None:
            found.append(node)
        elif bytes_hint(node) >= whole:
            # Of keys that are joined from several rows, only lengths may be read, perhaps behind other moves.
            moved = decode(node) is not None
            only_lengths = (length_of(u, source) is not None or (moved and decode(u) is not None) for u in users(node))
            if projection_of(node, source, at_source) is None and not all(only_lengths):
                return None
        elif node in absorbed:
            continue  # its readers were absorbed too, or they are visited
        elif not columns or any(n in absorbed and bytes_hint(n) < whole for n in node.all_input_nodes):
            return None
        elif _can_be_made_alone(node, projection_of(node, source, at_source)):
            found.append(node)
        else:
            return None
    return tuple(found)


def tokens_read(
    expansion: fx.Node,
    source: fx.Node,
    maps: Maps,
    reads: Callable[[fx.Node], Collection[fx.Node]],
    alive: Collection[fx.Node],
) -> fx.Node | None:
    """Return a slice that reads tokens of ``expansion`` if nothing reads all of them; None otherwise.

    The arguments are those of :func:`narrower_readers`.
    """
    at_source = maps.with_sources([source])

    def cuts(node: fx.Node) -> bool:
        how = decode(node)
        if not isinstance(how, (Slice, Select)) or bytes_hint(node) >= bytes_hint(how.x):
            return False
        return any(a in p.source_atoms for p in at_source.map(how.x).pieces for a in p.axes[how.dim])

    def users(node: fx.Node) -> Iterable[fx.Node]:
        moves = node is expansion or is_tuple(node) or (decode(node) is not None and not cuts(node))
        return (u for u in node.users if u in alive and node in reads(u)) if moves else ()

    found = list(reachable([expansion], users))
    if any((is_tensor(n) and decode(n) is None and n is not expansion) or n.op == "output" for n in found):
        return None
    return next((n for n in found if is_tensor(n) and cuts(n)), None)


def other_reader(
    expansion: fx.Node,
    reads: Callable[[fx.Node], Collection[fx.Node]],
    alive: Collection[fx.Node],
    absorbed: Collection[fx.Node],
) -> fx.Node:
    """Return the first operator that computes with ``expansion``, or with moved, cut or joined parts of it.

    What makes K or V of it, the nodes ``absorbed``, is passed. If there is none, return the output of the graph, else
    a reader of a length. The other arguments are those of :func:`narrower_readers`.
    """

    def moves(node: fx.Node) -> bool:
        return node is expansion or is_tuple(node) or decode(node) is not None or node in absorbed

    def users(node: fx.Node) -> Iterable[fx.Node]:
        return (u for u in node.users if u in alive and node in reads(u)) if moves(node) else ()

    found = [n for n in reachable([expansion], users) if n is not expansion]
    computes = (n for n in found if is_tensor(n) and not moves(n))
    returns = (n for n in found if n.op == "output")
    return next(chain(computes, returns, found))


def length_of(node: fx.Node, source: fx.Node) -> int | None:
    """Return the axis of ``source`` whose length ``node`` holds; None if ``node`` holds no such length."""
    if packet(node) is not aten.sym_size:
        return None
    x, dim = args_of(node)
    return next((k for k, length in enumerate(shape(source)) if same(length, shape(x)[dim])), None)


def projection_of(node: fx.Node, source: fx.Node, maps: Maps) -> Piece | None:
    """Return the linear map of ``node`` if it is a single projection of ``source``."""
    pieces = maps.map(node).pieces
    return pieces[0] if len(pieces) == 1 and pieces[0].source is source and pieces[0].projected else None


def of_few_rows(node: fx.Node, source: fx.Node, maps: Maps) -> Piece | None:
    """Return the linear map of ``node`` over a few rows, if it is a projection of ``source`` for few tokens."""
    taken = taken_of(node)
    if taken is None or taken.padded is not None:
        return None
    # The slices known for K and V are left out, so that the pass that makes `node` alone finds the same map.
    maps = with_slices_of([[node]], maps.with_virtual(VirtualSources()).with_sources([source]))
    pieces = maps.map(node).pieces
    if len(pieces) != 1 or pieces[0].source is None or not is_virtual(pieces[0].source) or not pieces[0].projected:
        return None
    rows = pieces[0].source
    # A slice whose length may grow with the context may take many rows.
    fixed = all(isinstance(s, int) or any(same(s, t) for t in shape(source)[:1]) for s in shape(rows))
    few = 2 * bytes_hint(rows) <= bytes_hint(source)
    return pieces[0] if args_of(rows)[0] is source and fixed and few and _can_be_made_alone(node, pieces[0]) else None


def _can_be_made_alone(node: fx.Node, piece: Piece | None) -> bool:
    """Whether one product with some rows of the weight, in its dtype, gives exactly the values of ``node``."""
    if piece is None or piece.weight is None:
        return False
    # A separate product has its own strides; a split of the whole has those of the whole.
    if _strides_show(node):
        return False
    tokens = [a for a in flatten(piece.axes) if a in piece.source_atoms]
    features = [a for a in flatten(piece.axes) if a not in piece.source_atoms]
    if set(piece.weight.atoms) != {*features, *piece.contracted}:
        return False
    if set(tokens) | set(piece.contracted) != piece.source_atoms:
        return False
    # In half precision, a computed weight would be rounded at another place than the product that it replaces, and so
    # would rows times a number that may have followed the product.
    views = all(f.expr.is_view for f in (piece.weight, piece.bias) if f is not None)
    exact = val(node).dtype.itemsize >= 4 or (views and piece.scale == 1.0)
    assert piece.source is not None
    return exact and val(piece.source).dtype == val(node).dtype == piece.weight.expr.value.dtype


def _strides_show(node: fx.Node) -> bool:
    """Whether the memory layout of ``node`` is visible to the caller or to an operator that takes strides."""

    def views(node: fx.Node) -> Iterable[fx.Node]:
        return (u for u in node.users if view_source(u) is not None)

    return any(u.op == "output" or packet(u) is aten.as_strided for n in reachable([node], views) for u in n.users)
