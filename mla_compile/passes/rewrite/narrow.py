"""Compute only K or only V if nothing reads the other half of a shared up-projection.

Before: ``k, v = split(view(linear(c, W)))`` with ``v`` absorbed. After: ``k = view(linear(c, W[rows of k]))``.

The linear map of ``k`` tells which rows of the weight make ``k``. Every number remains the same dot product. If ``k``
is a sum of maps of several row tensors, each summand is computed separately.
:mod:`mla_compile.passes.sources.readers` decides which nodes qualify.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.arrange import SizeSources, arrange, same_layout
from mla_compile.passes.ir.axes import Atom, fixed_size
from mla_compile.passes.ir.expr import Expr, Factor
from mla_compile.passes.ir.factors import aligned
from mla_compile.passes.ir.graph import Builder, materialize, val
from mla_compile.passes.ir.sizes import hint, size
from mla_compile.passes.linear.records import Maps, Piece
from mla_compile.passes.sources.readers import images_of, length_of, of_few_rows

aten = torch.ops.aten


def narrow(nodes: Iterable[tuple[fx.Node, tuple[fx.Node, ...]]], maps: Maps) -> int:
    """Compute each node directly from its sources, not from the shared product; return how many were replaced."""
    done = 0
    # The order is reversed so that a slice of another node is replaced before the other node. The tokens of the slice
    # are then made from rows, as the verdict assumed.
    for node, sources in sorted(dict.fromkeys(nodes), key=lambda pair: pair[0], reverse=True):
        # Rewrites of other sites may have removed the readers of this node.
        if not node.users:
            continue
        if (known := length_of(node, sources)) is not None:
            node.replace_all_uses_with(Builder(node, maps.fake_mode).call(aten.sym_size.int, *known))
        else:
            pieces = of_few_rows(node, sources, maps) or images_of(node, sources, maps.with_sources(sources))
            assert pieces
            node.replace_all_uses_with(_made_alone(node, pieces, maps.fake_mode))
        done += 1
    return done


def _made_alone(node: fx.Node, pieces: Sequence[Piece], fake_mode: FakeTensorMode | None) -> fx.Node:
    builder = Builder(node, fake_mode)
    new, *others = (_image(node, piece, builder) for piece in pieces)
    for other in others:
        new = builder.call(aten.add.Tensor, new, other)
    # The memory order of the old node is kept, so that its views stay views.
    return new if _same_order(new, node) else same_layout(builder, new, node)


def _image(node: fx.Node, piece: Piece, builder: Builder) -> fx.Node:
    """Compute one summand of ``node``. Axes along which the summand is constant get size 1."""
    assert piece.source is not None
    source = materialize(piece.source, builder, {})
    sizes = SizeSources(builder, [(source, piece.source_axes)])
    if piece.weight is None:
        x = arrange(builder, sizes, source, piece.source_axes, piece.axes)
        return x if piece.scale == 1.0 else builder.call(aten.mul.Tensor, x, piece.scale)
    memo: dict[Expr, fx.Node] = {}
    order = _memory_order(node, piece)
    tokens = [a for a in order if a in piece.source_atoms]
    features = [a for a in order if a not in piece.source_atoms]
    x = arrange(builder, sizes, source, piece.source_axes, [*((a,) for a in tokens), piece.contracted])
    x = x if piece.scale == 1.0 else builder.call(aten.mul.Tensor, x, piece.scale)
    weight = _matrix(piece.weight, features, piece.contracted)
    bias = None if piece.bias is None else _vector(piece.bias, features).emit(builder, memo)
    new = builder.call(aten.linear.default, x, weight.emit(builder, memo), bias)
    new = arrange(builder, sizes, new, (*((a,) for a in tokens), tuple(features)), [(a,) for a in order])
    return arrange(builder, sizes, new, tuple((a,) for a in order), piece.axes)


def _memory_order(node: fx.Node, piece: Piece) -> list[Atom]:
    """Return the atoms of ``node`` in memory order, outermost first."""
    strides = [hint(size(s), s) for s in val(node).stride()]
    axes = sorted(range(len(strides)), key=lambda d: -strides[d])
    return [a for d in axes for a in piece.axes[d]]


def _same_order(new: fx.Node, old: fx.Node) -> bool:
    def order(node: fx.Node) -> list[int]:
        shown = [d for d, s in enumerate(val(node).shape) if size(s) != 1]
        return sorted(shown, key=lambda d: -hint(size(val(node).stride()[d]), val(node).stride()[d]))

    return order(new) == order(old) and val(new).dtype == val(old).dtype


def _matrix(factor: Factor, rows: Sequence[Atom], columns: Sequence[Atom]) -> Expr:
    """Lay out a weight as [rows, columns]."""
    ordered = factor.expr.permute([factor.atoms.index(a) for a in (*rows, *columns)])
    return ordered.view([-1, fixed_size(columns)])


def _vector(factor: Factor, features: Sequence[Atom]) -> Expr:
    """Lay out a bias as one row over all ``features``, including features along which the bias is constant."""
    sizes = [fixed_size([a]) for a in features]
    return aligned(factor, features).call(aten.expand.default, sizes).view([-1])
