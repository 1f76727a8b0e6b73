"""How K or V of a cache is made from narrow rows, apart from any graph.

A linear map belongs to the graph it was found in. A cache outlives that graph: its rows are written by one graph and
read by another, maybe of other sizes, so the way from the rows to K is written down here as plain data. Two recipes
that are equal, over the same weight tensors, make the same K from the same rows; that is the whole proof that the rows
of one graph may be joined to those of another.

Rows have one layout, ``[batch..., tokens, width]``: the axes of K that are neither heads nor features, in K's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import fx

from mla_compile.passes.atoms import Axis, axis_size, flatten
from mla_compile.passes.expr import Expr
from mla_compile.passes.factors import aligned
from mla_compile.passes.graph import args_of, val
from mla_compile.passes.linear_map import Factor, LinearMap, Piece, Stop

aten = torch.ops.aten
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
Call: TypeAlias = Callable[..., Any]
"""Applies an operator: to tensors, or by adding a node to a graph."""


@dataclass(frozen=True)
class Leaf:
    """A weight tensor, by its number."""

    index: int


@dataclass(frozen=True)
class Apply:
    """An operator over constants and other formulas."""

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


Formula: TypeAlias = "Leaf | Apply"


@dataclass(frozen=True)
class Part:
    """Columns of K: ``scale * rows W + b``, or the rows themselves where there is no weight.

    ``heads``: for the axes of K that are heads, whether the weight has them (else its values are shared by the heads).
    The weight is [heads..., columns, width], the bias broadcasts to K.
    """

    rows: int
    width: int
    weight: Formula | None
    heads: tuple[bool, ...]
    scale: float
    bias: Formula | None


@dataclass(frozen=True)
class Recipe:
    """K from its rows.

    Attributes:
        kinds: what each axis of K is: a number of heads, or of the columns; or an axis of the rows.
        tokens, columns: the axes of K that count the cached tokens and the features.
        parts: one after another along ``columns``.
        widths: of the rows.
        dtype: of K.
        leaves: how many weight tensors the parts read.
    """

    kinds: tuple[int | Literal["row"], ...]
    tokens: int
    columns: int
    parts: tuple[Part, ...]
    widths: tuple[int, ...]
    dtype: torch.dtype
    leaves: int

    @property
    def token_axis(self) -> int:
        """The axis of the rows that counts tokens."""
        return sum(kind == "row" for kind in self.kinds[: self.tokens])

    def shape(self, rows: Sequence[Any]) -> tuple[Any, ...]:
        """K's shape from that of some rows."""
        outer = iter(rows[:-1])
        return tuple(next(outer) if kind == "row" else kind for kind in self.kinds)

    def row_shape(self, shape: Sequence[Any], width: int) -> tuple[Any, ...]:
        """The shape of rows from K's."""
        return (*(s for s, kind in zip(shape, self.kinds, strict=True) if kind == "row"), width)


@dataclass(frozen=True)
class Ingredient:
    """Rows as they stand in a graph: a node, its axes in atoms, and the layout that a recipe wants them in."""

    node: fx.Node
    axes: tuple[Axis, ...]
    target: tuple[Axis, ...]


def make_recipe(lmap: LinearMap, tokens: int) -> tuple[Recipe, tuple[Ingredient, ...], tuple[fx.Node, ...]] | Stop:
    """The recipe of a tensor whose axis ``tokens`` counts tokens, its rows and the weights it reads."""
    rank = len(lmap.pieces[0].axes)
    sourced = [p for p in lmap.pieces if p.source is not None]
    where = sourced[0].path[-1].node if sourced else lmap.pieces[0].path[-1].node
    if len(sourced) != len(lmap.pieces) or not all(p.defined for p in sourced):
        return Stop(where, "unsupported_op", "columns of the cache that come from no rows")
    columns = lmap.axis if lmap.axis is not None else _columns(sourced[0], tokens)
    kinds: list[int | Literal["row"]] = []
    for k in range(rank):
        kind = _kind(sourced, k, tokens) if k != columns else sum(s.stop - s.start for s in lmap.segments)
        if kind is None:
            return Stop(where, "unsupported_op", "an axis of the cache is neither tokens, heads nor features")
        kinds.append(kind)
    if columns == tokens or columns is None:
        return Stop(where, "unsupported_op", "the cache has no axis of features")
    ingredients: dict[fx.Node, tuple[int, Ingredient]] = {}
    leaves: dict[fx.Node, int] = {}
    parts: list[Part] = []
    widths: list[int] = []
    for piece in sourced:
        outer = tuple(piece.axes[k] for k in range(rank) if kinds[k] == "row")
        inner = piece.contracted if piece.weight is not None else piece.axes[columns]
        wide = axis_size(inner)
        own = {*flatten(outer), *inner}
        if own != piece.source_atoms or len(own) != len(flatten(piece.source_axes)) or not isinstance(wide, int):
            return Stop(where, "unsupported_op", "rows in a layout that a cache cannot be kept in")
        assert piece.source is not None
        if piece.source not in ingredients:
            ingredients[piece.source] = len(widths), Ingredient(piece.source, piece.source_axes, (*outer, inner))
            widths.append(wide)
        index, _ = ingredients[piece.source]
        part = _part(piece, index, wide, inner, kinds, columns, leaves)
        if isinstance(part, Stop):
            return part
        parts.append(part)
    if lmap.axis is None:
        kinds[columns] = _int(axis_size(sourced[0].axes[columns]))
    recipe = Recipe(tuple(kinds), tokens, columns, tuple(parts), tuple(widths), sourced[0].dtype, len(leaves))
    return recipe, tuple(i for _, i in ingredients.values()), tuple(leaves)


def _columns(piece: Piece, tokens: int) -> int | None:
    """The axis of features of an unsegmented map: the last one a weight makes, which is how rows are written."""
    made = set(piece.weight.atoms) if piece.weight is not None else set(flatten(piece.axes))
    found = [k for k, own in enumerate(piece.axes) if k != tokens and own and set(own) <= made]
    return found[-1] if found else None


def _kind(pieces: Sequence[Piece], k: int, tokens: int) -> int | Literal["row"] | None:
    """What axis ``k`` is to all pieces: an axis of the rows (or of size 1), or heads."""
    if k == tokens or all(not p.axes[k] for p in pieces):
        return "row"
    if all(p.axes[k] and set(p.axes[k]) <= p.source_atoms for p in pieces):
        return "row"
    if any(a in p.source_atoms for p in pieces for a in p.axes[k]):
        return None
    total = axis_size(next(p.axes[k] for p in pieces if p.axes[k]))
    return total if isinstance(total, int) else None


def _part(
    piece: Piece,
    rows: int,
    width: int,
    inner: Axis,
    kinds: Sequence[int | Literal["row"]],
    columns: int,
    leaves: dict[fx.Node, int],
) -> Part | Stop:
    heads = [k for k, kind in enumerate(kinds) if kind != "row" and k != columns]
    has: tuple[bool, ...] = ()
    weight: Formula | None = None
    node = piece.path[-1].node
    if piece.weight is not None:
        present = set(piece.weight.atoms)
        if not set(piece.axes[columns]) <= present or not present <= {*inner, *flatten(piece.axes)}:
            return Stop(node, "unsupported_op", "columns of the cache that no weight makes")
        has = tuple(bool(piece.axes[k]) and set(piece.axes[k]) <= present for k in heads)
        order = [piece.axes[k] for k, there in zip(heads, has, strict=True) if there]
        kept = [*order, piece.axes[columns], inner]
        if set(flatten(kept)) != present:
            return Stop(node, "unsupported_op", "heads that a weight has in part")
        matrix = aligned(piece.weight, flatten(kept)).view([_int(axis_size(a)) for a in kept])
        found = _formula(matrix, leaves)
        if isinstance(found, Stop):
            return found
        weight = found
    bias: Formula | None = None
    if piece.bias is not None:
        found = _formula(_broadcast(piece.bias, piece.axes), leaves)
        if isinstance(found, Stop):
            return found
        bias = found
    return Part(rows, width, weight, has, piece.scale, bias)


def _broadcast(bias: Factor, axes: Sequence[Axis]) -> Expr:
    """The bias with an axis for each of K's, size 1 where it does not depend on it."""
    expr = aligned(bias, tuple(a for a in flatten(axes) if a in bias.atoms))
    return expr.view([_int(axis_size(tuple(a for a in own if a in bias.atoms))) for own in axes])


def _int(size: Any) -> int:
    assert isinstance(size, int), "weights have fixed sizes"
    return size


def _formula(value: Any, leaves: dict[fx.Node, int]) -> Any:
    """An expression of weights, or a node of the graph that is one, down to the weight tensors."""
    if isinstance(value, Expr):
        if value.node is not None:
            return _formula(value.node, leaves)
        return _apply(value.op, value.args, value.kwargs, leaves, None)
    if isinstance(value, fx.Node):
        if value.op in ("placeholder", "get_attr"):
            return Leaf(leaves.setdefault(value, len(leaves)))
        return _apply(value.target, args_of(value), value.kwargs, leaves, value)
    if isinstance(value, (list, tuple)):
        items = [_formula(v, leaves) for v in value]
        return next((i for i in items if isinstance(i, Stop)), tuple(items))
    return value


def _apply(op: Any, args: Any, kwargs: Any, leaves: dict[fx.Node, int], node: fx.Node | None) -> Apply | Stop:
    given = _formula(tuple(args), leaves)
    named = tuple((name, _formula(value, leaves)) for name, value in sorted(kwargs.items()))
    stop = next((g for g in (given, *(v for _, v in named)) if isinstance(g, Stop)), None)
    return stop if stop is not None else Apply(op, given, named)


def at_once(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The :data:`Call` that computes."""
    return op(*args, **kwargs)


def expand(recipe: Recipe, rows: Sequence[Any], leaves: Sequence[Any], call: Call) -> Any:
    """K: computed from tensors, or added to a graph, depending on what ``call`` does with an operator."""
    memo: dict[Formula, Any] = {}
    parts = [_expand_part(recipe, part, rows[part.rows], leaves, call, memo) for part in recipe.parts]
    if len(parts) == 1:
        return parts[0]
    return call(aten.cat.default, parts, recipe.columns)


def _expand_part(recipe: Recipe, part: Part, rows: Any, leaves: Any, call: Call, memo: dict[Formula, Any]) -> Any:
    names = dict(zip(range(len(recipe.kinds)), _LETTERS, strict=False))
    outer = [k for k, kind in enumerate(recipe.kinds) if kind == "row"]
    heads = [k for k, kind in enumerate(recipe.kinds) if kind != "row" and k != recipe.columns]
    if part.weight is None:
        present = sorted([*outer, recipe.columns])
        order = [([*outer, recipe.columns]).index(k) for k in present]
        x = rows if order == sorted(order) else call(aten.permute.default, rows, order)
    else:
        weight = evaluate(part.weight, leaves, call, memo)
        own = [k for k, there in zip(heads, part.heads, strict=True) if there]
        present = sorted([*outer, *own, recipe.columns])
        left = "".join(names[k] for k in outer) + "z"
        right = "".join(names[k] for k in (*own, recipe.columns)) + "z"
        out = "".join(names[k] for k in present)
        operands = [_cast(rows, recipe.dtype, call), _cast(weight, recipe.dtype, call)]
        x = call(aten.einsum.default, f"{left},{right}->{out}", operands)
    for k in range(len(recipe.kinds)):
        if k not in present:
            x = call(aten.unsqueeze.default, x, k)
    x = _cast(x, recipe.dtype, call)
    if part.scale != 1.0:
        x = call(aten.mul.Tensor, x, part.scale)
    if part.bias is not None:
        x = call(aten.add.Tensor, x, _cast(evaluate(part.bias, leaves, call, memo), recipe.dtype, call))
    sizes = [-1 if kind == "row" or k == recipe.columns else kind for k, kind in enumerate(recipe.kinds)]
    return x if all(k in present for k in heads) else call(aten.expand.default, x, sizes)


def _cast(x: Any, dtype: torch.dtype, call: Call) -> Any:
    own = val(x).dtype if isinstance(x, fx.Node) else x.dtype
    return x if own == dtype else call(aten._to_copy.default, x, dtype=dtype)


def evaluate(formula: Any, leaves: Sequence[Any], call: Call, memo: dict[Formula, Any]) -> Any:
    """A weight expression over ``leaves``."""
    if isinstance(formula, Leaf):
        return leaves[formula.index]
    if isinstance(formula, tuple):
        return type(formula)(evaluate(f, leaves, call, memo) for f in formula)
    if not isinstance(formula, Apply):
        return formula
    if formula not in memo:
        args = [_listed(evaluate(a, leaves, call, memo)) for a in formula.args]
        memo[formula] = call(formula.op, *args, **{k: evaluate(v, leaves, call, memo) for k, v in formula.kwargs})
    return memo[formula]


def _listed(value: Any) -> Any:
    return list(value) if type(value) is tuple else value
