"""An up-projection that makes K and V in one product, of which only one is still read, makes only that.

Before: ``k, v = split(view(linear(c, W)))`` with ``v`` absorbed. After: ``k = view(linear(c, W[rows of k]))``.

The weight's rows are the ones the linear map of ``k`` names, so the numbers are those of the same dot products.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.core.program import view_source
from mla_compile.passes.ir.arrange import Sizes, arrange, same_layout
from mla_compile.passes.ir.axes import Atom, flatten
from mla_compile.passes.ir.expr import Expr
from mla_compile.passes.ir.graph import Builder, bytes_hint, is_tensor, packet, val
from mla_compile.passes.ir.sizes import hint, size
from mla_compile.passes.linear.records import Maps, Piece

aten = torch.ops.aten


def readers(
    expansion: fx.Node,
    source: fx.Node,
    maps: Maps,
    reads: Callable[[fx.Node], Collection[fx.Node]],
    alive: Collection[fx.Node],
    absorbed: Collection[fx.Node],
) -> tuple[fx.Node, ...] | None:
    """The narrower nodes through which alone ``expansion``, a product of the rows ``source``, is still read.

    None where there is a reader of all of it, or of columns that were ``absorbed`` (nodes on their way to the site):
    then nothing is saved. ``reads``: what a node reads once all sites are rewritten.
    """
    found: dict[fx.Node, None] = {}
    at_source = maps.with_stops([source])
    queue = [expansion]
    while queue:
        node = queue.pop()
        for user in node.users:
            if user not in alive or node not in reads(user):
                continue
            if isinstance(user.meta.get("val"), (tuple, list)):
                queue.append(user)
            elif not is_tensor(user) or (user in absorbed and bytes_hint(user) < bytes_hint(expansion)):
                return None
            elif bytes_hint(user) >= bytes_hint(expansion):
                if _piece(user, source, at_source) is None:
                    return None
                queue.append(user)
            elif not _can_be_made_alone(user, source, at_source):
                return None
            else:
                found[user] = None
    return tuple(found)


def narrow(nodes: Iterable[tuple[fx.Node, fx.Node]], maps: Maps) -> int:
    """Makes each node of ``(node, source)`` from the rows of its source alone; returns how many."""
    done = 0
    for node, source in dict.fromkeys(nodes):
        if not node.users:
            continue
        piece = _piece(node, source, maps.with_stops([source]))
        assert piece is not None
        node.replace_all_uses_with(_made_alone(node, piece, maps.fake_mode))
        done += 1
    return done


def _piece(node: fx.Node, source: fx.Node, maps: Maps) -> Piece | None:
    pieces = maps.map(node).pieces
    return pieces[0] if len(pieces) == 1 and pieces[0].source is source and pieces[0].projected else None


def _can_be_made_alone(node: fx.Node, source: fx.Node, maps: Maps) -> bool:
    """Whether one product with a part of the weight, in the dtype it has, gives what ``node`` is."""
    piece = _piece(node, source, maps)
    if piece is None or piece.weight is None or piece.scale != 1.0:
        return False
    if _strides_show(node):
        return False
    tokens = [a for a in flatten(piece.axes) if a in piece.source_atoms]
    features = [a for a in flatten(piece.axes) if a not in piece.source_atoms]
    if set(piece.weight.atoms) != {*features, *piece.contracted}:
        return False
    if set(tokens) | set(piece.contracted) != piece.source_atoms:
        return False
    # A product of weights would be rounded once more than the products that it stands for.
    picked = all(f.expr.is_view for f in (piece.weight, piece.bias) if f is not None)
    exact = val(node).dtype.itemsize >= 4 or picked
    return exact and val(source).dtype == val(node).dtype == piece.weight.expr.value.dtype


def _strides_show(node: fx.Node) -> bool:
    """Whether someone sees how ``node`` lies in memory: the caller, to whom a view of it is returned."""
    queue = [node]
    while queue:
        for user in queue.pop().users:
            if user.op == "output" or packet(user) is aten.as_strided:
                return True
            if view_source(user) is not None:
                queue.append(user)
    return False


def _made_alone(node: fx.Node, piece: Piece, fake_mode: FakeTensorMode | None) -> fx.Node:
    assert piece.source is not None
    assert piece.weight is not None
    builder = Builder(node, fake_mode)
    memo: dict[Expr, fx.Node] = {}
    sizes = Sizes(builder, [(piece.source, piece.source_axes)])
    order = _memory_order(node, piece)
    tokens = [a for a in order if a in piece.source_atoms]
    features = [a for a in order if a not in piece.source_atoms]
    x = arrange(builder, sizes, piece.source, piece.source_axes, [*((a,) for a in tokens), piece.contracted])
    weight = _flat(piece.weight.expr, piece.weight.atoms, features, piece.contracted)
    bias = None
    if piece.bias is not None:
        bias = _spread(piece.bias.expr, piece.bias.atoms, features).emit(builder, memo)
    new = builder.call(aten.linear.default, x, weight.emit(builder, memo), bias)
    new = arrange(builder, sizes, new, (*((a,) for a in tokens), tuple(features)), [(a,) for a in order])
    new = arrange(builder, sizes, new, tuple((a,) for a in order), piece.axes)
    return new if _same_order(new, node) else same_layout(builder, new, node)


def _memory_order(node: fx.Node, piece: Piece) -> list[Atom]:
    """The atoms of ``node`` as they lie in memory, outermost first."""
    strides = [hint(size(s), s) for s in val(node).stride()]
    axes = sorted(range(len(strides)), key=lambda d: -strides[d])
    return [a for d in axes for a in piece.axes[d]]


def _same_order(new: fx.Node, old: fx.Node) -> bool:
    def order(node: fx.Node) -> list[int]:
        shown = [d for d, s in enumerate(val(node).shape) if size(s) != 1]
        return sorted(shown, key=lambda d: -hint(size(val(node).stride()[d]), val(node).stride()[d]))

    return order(new) == order(old) and val(new).dtype == val(old).dtype


def _flat(expr: Expr, atoms: Sequence[Atom], rows: Sequence[Atom], columns: Sequence[Atom]) -> Expr:
    """A weight as [rows, columns]."""
    ordered = expr.permute([atoms.index(a) for a in (*rows, *columns)])
    width = 1
    for a in columns:
        assert isinstance(a.size, int)
        width *= a.size
    return ordered.view([-1, width])


def _spread(expr: Expr, atoms: Sequence[Atom], features: Sequence[Atom]) -> Expr:
    """A bias as one row over all ``features``, also those it does not depend on."""
    own = [a for a in features if a in atoms]
    sizes = [int(a.size) for a in features if isinstance(a.size, int)]
    expr = expr.permute([atoms.index(a) for a in own])
    expr = expr.view([s if a in atoms else 1 for a, s in zip(features, sizes, strict=True)])
    return expr.call(aten.expand.default, sizes).view([-1])
