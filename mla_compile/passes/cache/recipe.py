"""Recipes that describe how K or V of a cache is made from narrow rows, independently of any graph.

A linear map belongs to one graph. A cache outlives the graph that writes its rows: another graph reads the rows,
perhaps with other sizes. A recipe therefore describes the computation of K from rows as plain data. Two equal recipes
over the same weight tensors make equal K from equal rows. This proves that the rows of two graphs may be joined.

Rows have the layout ``[batch..., tokens, width]``. The axes before the width are the axes of K that are neither heads
nor features, in K's order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import fx

from mla_compile.passes.cache.packed import packed_width
from mla_compile.passes.ir.axes import Axis, axis_size, fixed_size, flatten
from mla_compile.passes.ir.collectives import gathered
from mla_compile.passes.ir.expr import Expr, Factor
from mla_compile.passes.ir.factors import aligned
from mla_compile.passes.ir.graph import shape, val
from mla_compile.passes.ir.sizes import Size
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.linear.records import LinearMap, Piece

aten = torch.ops.aten


@dataclass(frozen=True)
class Leaf:
    """A weight tensor, by its number."""

    index: int


@dataclass(frozen=True)
class Apply:
    """An operator over constants and other formulas."""

    op: object
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...] = ()


Formula: TypeAlias = "Leaf | Apply"


@dataclass(frozen=True)
class ColumnBlock:
    """A block of K's columns: ``scale * rows W + b``, or ``scale * rows * factor + b`` if there is no weight.

    ``rows``: the index of the rows that the block reads. ``heads``: for each head axis of K, whether the weight has
    this axis. If not, the heads share the weight. The weight is [heads..., columns, width]; factor and bias broadcast
    to K. ``added``: whether the block is added to the previous block. Otherwise, the block follows the previous block.
    ``padded``: the number of zero columns that follow the block. ``stack``: the block's positions along the stacked
    axes of K.
    """

    rows: int
    width: int
    weight: Formula | None
    heads: tuple[bool, ...]
    scale: float
    bias: Formula | None
    added: bool = False
    padded: int = 0
    stack: tuple[int, ...] = ()
    factor: Formula | None = None


@dataclass(frozen=True)
class Recipe:
    """The computation of K from its rows.

    Attributes:
        kinds: for each axis of K, "row" if the rows have this axis. For heads, columns and stacked axes, the size.
        tokens, columns: the axes of K that count the cached tokens and the features.
        parts: the column blocks. Each block follows the previous one along ``columns`` or is added to it.
        widths: the width, in values, of each tensor of rows.
        packed: whether each tensor of rows is kept in float8 (:mod:`mla_compile.passes.cache.packed`).
        marked: whether each tensor of rows ends with a mark. A mark is a column of ones by which the bias is
            multiplied, so that rows of zeros make zeros.
        dtype: the dtype of K.
        leaves: the number of weight tensors that the parts read.
        stacked: the axes of K along which tensors with different column blocks are stacked (K and V, or all layers).
    """

    kinds: tuple[int | Literal["row"], ...]
    tokens: int
    columns: int
    parts: tuple[ColumnBlock, ...]
    widths: tuple[int, ...]
    dtype: torch.dtype
    leaves: int
    packed: tuple[bool, ...] = ()
    stacked: tuple[int, ...] = ()
    marked: tuple[bool, ...] = ()

    @property
    def outer(self) -> list[int]:
        """The axes of K that are axes of the rows."""
        return [k for k, kind in enumerate(self.kinds) if kind == "row"]

    @property
    def heads(self) -> list[int]:
        return [k for k, kind in enumerate(self.kinds) if kind != "row" and k not in (self.columns, *self.stacked)]

    def each(self, axes: Sequence[int]) -> tuple[Recipe, ...]:
        """Return the recipes of the tensors that are stacked along ``axes``, in row-major order."""
        if not axes:
            return (self,)
        first, inner = axes[0], [k - (k > axes[0]) for k in axes[1:]]
        count = self.kinds[first]
        assert isinstance(count, int)
        return tuple(one for k in range(count) for one in self.part(first, k).each(inner))

    def part(self, axis: int, index: int) -> Recipe:
        """Return the recipe of the tensor at position ``index`` of a stacked ``axis``, without this axis."""
        at = self.stacked.index(axis)
        parts = (replace(p, stack=(*p.stack[:at], *p.stack[at + 1 :])) for p in self.parts if p.stack[at] == index)
        return replace(
            self,
            kinds=(*self.kinds[:axis], *self.kinds[axis + 1 :]),
            tokens=self.tokens - (self.tokens > axis),
            columns=self.columns - (self.columns > axis),
            parts=tuple(parts),
            stacked=tuple(k - (k > axis) for k in self.stacked if k != axis),
        )

    @property
    def values(self) -> int:
        """The number of values of K per token."""
        return math.prod(1 if kind == "row" else kind for kind in self.kinds)

    @property
    def token_axis(self) -> int:
        """The axis of the rows that counts tokens."""
        return self.row_axis(self.tokens)

    def row_axis(self, dim: int) -> int:
        """Return the axis of the rows that corresponds to axis ``dim`` of K."""
        return sum(kind == "row" for kind in self.kinds[:dim])

    def is_packed(self, index: int) -> bool:
        return self.packed != () and self.packed[index]

    def is_marked(self, index: int) -> bool:
        return self.marked != () and self.marked[index]

    def row_values(self, index: int) -> int:
        """Return the number of values of a row, including its mark."""
        return self.widths[index] + self.is_marked(index)

    def held_width(self, index: int) -> int:
        """Return the width of the tensor that holds the rows ``index``: in values, or in bytes if they are packed."""
        return packed_width(self.widths[index]) if self.is_packed(index) else self.row_values(index)

    def held_dtype(self, index: int, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the tensor that holds the rows ``index``, if a graph computes these rows in ``dtype``."""
        return torch.uint8 if self.is_packed(index) else dtype

    def shape(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return K's shape from the shape of some rows."""
        outer = iter(rows[:-1])
        return tuple(next(outer) if kind == "row" else kind for kind in self.kinds)

    def row_shape(self, shape: Sequence[int], width: int) -> tuple[int, ...]:
        """Return the shape of rows of ``width`` from K's shape."""
        return (*(s for s, kind in zip(shape, self.kinds, strict=True) if kind == "row"), width)


@dataclass(frozen=True)
class Ingredient:
    """Rows in a graph: a node, its axes in atoms, and the layout ``target`` that a recipe needs."""

    node: fx.Node
    axes: tuple[Axis, ...]
    target: tuple[Axis, ...]


def make_recipe(
    node: fx.Node, lmap: LinearMap, tokens: int, *, packs: bool = False
) -> tuple[Recipe, tuple[Ingredient, ...], tuple[fx.Node, ...]] | Stop:
    """Return the recipe of ``node``, and the rows and the weights that the recipe reads.

    Axis ``tokens`` of ``node`` counts tokens. With ``packs``, rows that a weight expands are kept in float8.
    """
    lmap, zeros = _without_zeros(lmap)
    pieces = [p for p in lmap.pieces if p.source is not None and p.defined]
    if len(pieces) != len(lmap.pieces) or not pieces:
        return Stop(node, "unsupported_op", "columns of the cache that are not made from rows")
    columns = _columns(lmap, tokens)
    if columns is None or columns == tokens:
        return Stop(node, "unsupported_op", "the cache has no axis of features")
    kinds: list[int | Literal["row"]] = []
    for k, count in enumerate(shape(node)):
        kind = count if k == columns else _kind(pieces, k, tokens)
        if kind != "row" and not isinstance(kind, int):
            return Stop(node, "unsupported_op", "an axis of the cache is neither tokens, heads nor features")
        kinds.append(kind)
    factors = [f for p in pieces for f in (p.weight, p.bias) if f is not None]
    if gathered(leaf for f in factors for leaf in f.expr.leaves()):
        return Stop(node, "collective", "a weight that is gathered from other ranks in every call")
    ingredients: dict[fx.Node, tuple[int, Ingredient]] = {}
    leaves: dict[fx.Node, int] = {}
    parts: list[ColumnBlock] = []
    widths: list[int] = []
    for piece, added in ((p, k > 0) for s in lmap.segments for k, p in enumerate(s.piece.summands)):
        outer = tuple(own for own, kind in zip(piece.axes, kinds, strict=True) if kind == "row")
        inner = piece.axes[columns] if _are_columns(piece, columns) else piece.contracted
        wide = axis_size(inner)
        # The layout of rows allows no axes other than batch, tokens and width.
        if {*flatten(outer), *inner} != piece.source_atoms or not isinstance(wide, int):
            return Stop(node, "unsupported_op", "rows in a layout that a cache cannot have")
        assert piece.source is not None
        if piece.source not in ingredients:
            ingredients[piece.source] = len(widths), Ingredient(piece.source, piece.source_axes, (*outer, inner))
            widths.append(wide)
        index, _ = ingredients[piece.source]
        part = _part(piece, index, wide, inner, kinds, columns, leaves)
        if part is None:
            return Stop(node, "unsupported_op", "a weight that differs along an axis of its rows")
        parts.append(replace(part, added=added))
    parts[-1] = replace(parts[-1], padded=zeros)
    expanded = {part.rows for part in parts if part.weight is not None}
    packed = tuple(packs and k in expanded for k in range(len(widths)))
    recipe = Recipe(tuple(kinds), tokens, columns, tuple(parts), tuple(widths), val(node).dtype, len(leaves), packed)
    return recipe, tuple(i for _, i in ingredients.values()), tuple(leaves)


def _without_zeros(lmap: LinearMap) -> tuple[LinearMap, int]:
    """Return the map without the zero columns at its end, and the number of these columns."""
    *others, last = lmap.segments
    zero = last.piece.source is None and last.piece.defined and last.piece.bias is None and not last.piece.added
    return (replace(lmap, segments=tuple(others)), last.stop - last.start) if others and zero else (lmap, 0)


def _columns(lmap: LinearMap, tokens: int) -> int | None:
    """Return the feature axis: the axis along which segments are joined, or the last axis that comes from a weight."""
    if lmap.axis is not None:
        return lmap.axis
    found: list[int] = []
    for piece in lmap.pieces:
        made = set() if piece.weight is None else set(piece.weight.atoms)
        found += [k for k, own in enumerate(piece.axes) if k != tokens and own and made.issuperset(own)]
    return max(found, default=None)


def _kind(pieces: Sequence[Piece], k: int, tokens: int) -> Size | Literal["row"] | None:
    """Return the kind of axis ``k`` of K for :attr:`Recipe.kinds`; None if only some rows have the axis.

    If all rows have the axis or its size is 1, the kind is "row". If no rows have the axis (heads), the kind is the
    size.
    """
    if k == tokens or all(p.source_atoms.issuperset(p.axes[k]) for p in pieces):
        return "row"
    if any(a in p.source_atoms for p in pieces for a in p.axes[k]):
        return None
    return axis_size(pieces[0].axes[k])


def _are_columns(piece: Piece, columns: int) -> bool:
    """Whether the columns of ``piece`` are the source's columns, perhaps multiplied by factors."""
    own = piece.source_atoms.issuperset(piece.axes[columns]) and not piece.contracted
    return piece.weight is None or own


def _part(
    piece: Piece,
    rows: int,
    width: int,
    inner: Axis,
    kinds: Sequence[int | Literal["row"]],
    columns: int,
    leaves: dict[fx.Node, int],
) -> ColumnBlock | None:
    heads = [k for k, kind in enumerate(kinds) if kind != "row" and k != columns]
    has: tuple[bool, ...] = ()
    weight = factor = bias = None
    if piece.weight is not None:
        present = set(piece.weight.atoms)
        own = [k for k in heads if present.intersection(piece.axes[k])]
        each = _are_columns(piece, columns)
        kept = [*(piece.axes[k] for k in own), piece.axes[columns], () if each else inner]
        if not present.issubset(flatten(kept)):
            return None
        if each:
            factor = _broadcast(piece.weight, piece, leaves)
        else:
            has = tuple(k in own for k in heads)
            weight = _formula(_whole(piece.weight, kept), leaves)
    if piece.bias is not None:
        bias = _broadcast(piece.bias, piece, leaves)
    return ColumnBlock(rows, width, weight, has, piece.scale, bias, factor=factor)


def _broadcast(factor: Factor, piece: Piece, leaves: dict[fx.Node, int]) -> Formula:
    """Return the formula of ``factor`` with the axes of K. Axes on which ``factor`` does not depend have size 1."""
    has = set(factor.atoms)
    return _formula(_whole(factor, [own if has.intersection(own) else () for own in piece.axes]), leaves)


def _whole(factor: Factor, axes: Sequence[Axis]) -> Expr:
    """Return ``factor`` with ``axes``. A weight that several heads share is expanded to each head."""
    atoms = flatten(axes)
    expr = aligned(factor, atoms)
    if set(atoms) != set(factor.atoms):
        expr = expr.call(aten.expand.default, expr, [fixed_size((a,)) for a in atoms])
    return expr.view([fixed_size(a) for a in axes])


def _formula(value: Expr | fx.Node, leaves: dict[fx.Node, int]) -> Formula:
    """Turn a weight expression or a weight node into a formula over weight tensors."""
    if isinstance(value, Expr) and value.node is not None:
        return _formula(value.node, leaves)
    if isinstance(value, fx.Node) and value.op in ("placeholder", "get_attr"):
        return Leaf(leaves.setdefault(value, len(leaves)))
    op = value.op if isinstance(value, Expr) else value.target
    args = tuple(_written(a, leaves) for a in value.args)
    return Apply(op, args, tuple((name, _written(v, leaves)) for name, v in sorted(value.kwargs.items())))


def _written(value: object, leaves: dict[fx.Node, int]) -> object:
    """Convert an argument of an operator. Lists become tuples, so that a recipe can be hashed."""
    if isinstance(value, (Expr, fx.Node)):
        return _formula(value, leaves)
    return tuple(_written(v, leaves) for v in value) if isinstance(value, (list, tuple)) else value
