"""Combines the recipes of K and V, or of all layers, that are stacked in one buffer (``kv[0]``, ``kv[1]``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from torch import fx

from mla_compile.passes.cache.recipe import Apply, Formula, Ingredient, Leaf, Recipe

FullRecipe = tuple[Recipe, tuple[Ingredient, ...], tuple[fx.Node, ...]]
"""A recipe, with the rows and the weights that it reads."""


def stacked(parts: Sequence[FullRecipe], axes: Sequence[int], counts: Sequence[int]) -> FullRecipe | None:
    """Return the recipe of ``parts`` stacked along new axes of lengths ``counts``; None if layouts or dtypes differ."""
    first, _, _ = parts[0]
    rows: dict[tuple[object, ...], tuple[int, Ingredient]] = {}
    leaves: dict[fx.Node, int] = {}
    blocks, widths, packed = [], list[int](), list[bool]()
    for stack, (recipe, ingredients, own) in zip(product(*map(range, counts)), parts, strict=True):
        if (recipe.kinds, recipe.tokens, recipe.columns, recipe.dtype) != (
            first.kinds, first.tokens, first.columns, first.dtype,
        ):  # fmt: skip
            return None
        places = []
        for index, (one, width) in enumerate(zip(ingredients, recipe.widths, strict=True)):
            place, _ = rows.setdefault((one.node, one.target), (len(rows), one))
            if place == len(widths):
                widths.append(width)
                packed.append(recipe.is_packed(index))
            places.append(place)
        numbers = [leaves.setdefault(leaf, len(leaves)) for leaf in own]
        blocks += [
            replace(
                part,
                rows=places[part.rows],
                weight=_renumbered(part.weight, numbers),
                bias=_renumbered(part.bias, numbers),
                factor=_renumbered(part.factor, numbers),
                stack=stack,
            )
            for part in recipe.parts
        ]
    kinds, tokens, columns = [*first.kinds], first.tokens, first.columns
    for axis, count in sorted(zip(axes, counts, strict=True)):
        kinds.insert(axis, count)
        tokens += tokens >= axis
        columns += columns >= axis
    made = replace(
        first,
        kinds=tuple(kinds),
        tokens=tokens,
        columns=columns,
        parts=tuple(blocks),
        widths=tuple(widths),
        leaves=len(leaves),
        packed=tuple(packed),
        stacked=tuple(axes),
    )
    return made, tuple(one for _, one in rows.values()), tuple(leaves)


def _renumbered(formula: Formula | None, numbers: Sequence[int]) -> Formula | None:
    if isinstance(formula, Leaf):
        return Leaf(numbers[formula.index])
    if not isinstance(formula, Apply):
        return formula

    def each(value: object) -> object:
        if isinstance(value, (Leaf, Apply)):
            return _renumbered(value, numbers)
        return tuple(map(each, value)) if isinstance(value, tuple) else value

    return Apply(formula.op, tuple(map(each, formula.args)), tuple((k, each(v)) for k, v in formula.kwargs))
