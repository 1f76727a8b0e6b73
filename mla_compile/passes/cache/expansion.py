"""Computes cached K or V from rows by a recipe, either on tensors or as nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import fx

from mla_compile.passes.cache.packed import unpack
from mla_compile.passes.cache.recipe import Apply, ColumnBlock, Formula, Leaf, Recipe
from mla_compile.passes.ir.graph import val

aten = torch.ops.aten
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
X = TypeVar("X", bound="torch.Tensor | fx.Node")
Call: TypeAlias = Callable[..., X]
"""Applies an operator to tensors, or adds a node with this operator to a graph."""


def expand(recipe: Recipe, rows: Sequence[X], leaves: Sequence[X], call: Call[X]) -> X:
    """Make K from its rows. ``call`` decides whether K is computed from tensors or added to a graph."""
    # `rows` may end with tensors of another K or V, which this recipe does not read.
    if any(recipe.packed):
        held = zip(rows, recipe.widths, recipe.packed, strict=False)
        rows = [unpack(x, width, recipe.dtype, call) if packed else x for x, width, packed in held]
    return _expand_each(recipe, rows, leaves, call)


def _expand_each(recipe: Recipe, rows: Sequence[X], leaves: Sequence[X], call: Call[X]) -> X:
    if not recipe.stacked:
        return _expand(recipe, rows, leaves, call)
    axis = recipe.stacked[0]
    made = [_expand_each(part, rows, leaves, call) for part in recipe.each([axis])]
    return call(aten.stack.default, made, axis)


def _expand(recipe: Recipe, rows: Sequence[X], leaves: Sequence[X], call: Call[X]) -> X:
    memo: dict[Formula, X] = {}
    parts: list[X] = []
    for part in recipe.parts:
        made = _expand_part(recipe, part, rows[part.rows], leaves, call, memo)
        if part.added:
            parts[-1] = call(aten.add.Tensor, parts[-1], made)
        else:
            parts.append(made)
        if part.padded:
            behind = [0] * (2 * (len(recipe.kinds) - recipe.columns) - 1) + [part.padded]
            parts[-1] = call(aten.constant_pad_nd.default, parts[-1], behind)
    if len(parts) == 1:
        return parts[0]
    return call(aten.cat.default, parts, recipe.columns)


def _expand_part(
    recipe: Recipe, part: ColumnBlock, rows: X, leaves: Sequence[X], call: Call[X], memo: dict[Formula, X]
) -> X:
    names = dict(zip(range(len(recipe.kinds)), _LETTERS, strict=False))
    outer, heads = recipe.outer, recipe.heads
    mark: X | None = None
    if recipe.is_marked(part.rows):
        mark = call(aten.slice.Tensor, rows, len(outer), part.width, part.width + 1)
        rows = call(aten.slice.Tensor, rows, len(outer), 0, part.width)
    if part.weight is None:
        present = sorted([*outer, recipe.columns])
        x = _as_columns(recipe, rows, call)
    else:
        weight = evaluate(part.weight, leaves, call, memo)
        own = [k for k, there in zip(heads, part.heads, strict=True) if there]
        present = sorted([*outer, *own, recipe.columns])
        left = "".join(names[k] for k in outer) + "z"
        right = "".join(names[k] for k in (*own, recipe.columns)) + "z"
        out = "".join(names[k] for k in present)
        # The product has K's dtype, as in the model's own projection.
        operands = [_cast(rows, recipe.dtype, call), _cast(weight, recipe.dtype, call)]
        x = call(aten.einsum.default, f"{left},{right}->{out}", operands)
    for k in range(len(recipe.kinds)):
        if k not in present:
            x = call(aten.unsqueeze.default, x, k)
    x = _cast(x, recipe.dtype, call)
    if part.scale != 1.0:
        x = call(aten.mul.Tensor, x, part.scale)
    if part.factor is not None:
        x = call(aten.mul.Tensor, x, _cast(evaluate(part.factor, leaves, call, memo), recipe.dtype, call))
    if part.bias is not None:
        bias = _cast(evaluate(part.bias, leaves, call, memo), recipe.dtype, call)
        if mark is not None:
            mark = _cast(_as_columns(recipe, mark, call), recipe.dtype, call)
            for k in heads:
                mark = call(aten.unsqueeze.default, mark, k)
            bias = call(aten.mul.Tensor, mark, bias)
        x = call(aten.add.Tensor, x, bias)
    sizes = [-1 if kind == "row" or k == recipe.columns else kind for k, kind in enumerate(recipe.kinds)]
    return x if all(k in present for k in heads) else call(aten.expand.default, x, sizes)


def _as_columns(recipe: Recipe, rows: X, call: Call[X]) -> X:
    """Return ``rows`` with their axes in the order of K's axes. The result has no axes of heads."""
    axes = [*recipe.outer, recipe.columns]
    order = sorted(range(len(axes)), key=axes.__getitem__)
    return rows if order == sorted(order) else call(aten.permute.default, rows, order)


def _cast(x: X, dtype: torch.dtype, call: Call[X]) -> X:
    own = val(x).dtype if isinstance(x, fx.Node) else x.dtype
    return x if own == dtype else call(aten._to_copy.default, x, dtype=dtype)


def evaluate(formula: Formula, leaves: Sequence[X], call: Call[X], memo: dict[Formula, X]) -> X:
    """Evaluate a weight expression over ``leaves``."""
    if isinstance(formula, Leaf):
        return leaves[formula.index]
    if formula not in memo:

        def given(value: object) -> object:
            if isinstance(value, (Leaf, Apply)):
                return evaluate(value, leaves, call, memo)
            return tuple(map(given, value)) if isinstance(value, tuple) else value

        # Recipes hold tuples where operators take lists.
        args = [list(a) if type(a) is tuple else a for a in map(given, formula.args)]
        memo[formula] = call(formula.op, *args, **{k: given(v) for k, v in formula.kwargs})
    return memo[formula]
