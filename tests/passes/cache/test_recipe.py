"""How K and V are made from rows, apart from any graph: against the numbers, and what must not be a recipe."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mla_compile.passes.cache.expansion import expand
from mla_compile.passes.cache.recipe import make_recipe
from mla_compile.passes.ir.stop import Stop
from mla_compile.runtime.ranges import range_of
from tests.support.programs import error, linear_map, seeded, trace

B, T, L, R, H, N = 2, 5, 8, 4, 3, 6


def apply(op, *args, **kwargs):
    return op(*args, **kwargs)


def rows_of(tensor: torch.Tensor, ingredient) -> torch.Tensor:
    """A source as a recipe wants it, by brute force: its axes are found by their atoms."""
    flat = [a for axis in ingredient.axes for a in axis]
    wanted = [a for axis in ingredient.target for a in axis]
    split = tensor.reshape([int(a.size) for a in flat]).permute([flat.index(a) for a in wanted])
    sizes = [1] * len(ingredient.target)
    for k, axis in enumerate(ingredient.target):
        for a in axis:
            sizes[k] *= int(a.size)
    return split.reshape(sizes)


def recipe_of(fn, inputs, weights, tokens):
    program = trace(fn, inputs, weights)
    (result,) = program.gm.graph.output_node().args[0]
    return program, make_recipe(result, linear_map(program), tokens)


def check(fn, inputs, weights, tokens):
    """The recipe of ``fn`` makes again what ``fn`` returns."""
    program, made = recipe_of(fn, inputs, weights, tokens)
    assert not isinstance(made, Stop), made
    recipe, ingredients, leaves = made
    names = [n.name for n in program.placeholders]
    given = dict(zip(names, (*inputs, *weights), strict=True))
    rows = [rows_of(given[i.node.name], i) for i in ingredients]
    expected = fn(*inputs, *weights)
    assert recipe.shape(rows[0].shape) == expected.shape
    assert all(tuple(r.shape) == recipe.row_shape(expected.shape, r.shape[-1]) for r in rows)
    assert rows[0].shape[recipe.token_axis] == expected.shape[tokens]
    assert error(expand(recipe, rows, [given[n.name] for n in leaves], apply), expected) < 1e-12
    return recipe


def c(seed=1):
    return seeded(B, T, L, seed=seed)


def w(*shape):
    return seeded(*shape, seed=2)


def heads_first(c, w):
    return F.linear(c, w).view(B, T, H, N).transpose(1, 2)


def with_rope(c, r, w):
    return torch.cat([heads_first(c, w), r[:, None].expand(B, H, T, R)], -1)


RECIPES = {
    "heads first": (heads_first, [c()], [w(H * N, L)], 2),
    "heads last": (lambda c, w: F.linear(c, w).view(B, T, H, N), [c()], [w(H * N, L)], 1),
    "heads in the features": (F.linear, [c()], [w(H * N, L)], 1),
    "tokens first": (lambda c, w: F.linear(c, w).view(B, T, H, N).permute(1, 0, 2, 3), [c()], [w(H * N, L)], 0),
    "features before tokens": (
        lambda c, w: F.linear(c, w).view(B, T, H, N).permute(0, 2, 3, 1), [c()], [w(H * N, L)], 3,
    ),
    "rotary rows": (with_rope, [c(), seeded(B, T, R)], [w(H * N, L)], 2),
    "rotary rows first": (
        lambda c, r, w: torch.cat([r[:, None].expand(B, H, T, R), heads_first(c, w)], -1),
        [c(), seeded(B, T, R)], [w(H * N, L)], 2,
    ),
    "a bias": (lambda c, w, b: F.linear(c, w, b).view(B, T, H, N).transpose(1, 2), [c()], [w(H * N, L), w(H * N)], 2),
    "a scale and a share": (lambda c, w: heads_first(c * 0.3, w)[..., 1:4], [c()], [w(H * N, L)], 2),
    "one weight for all heads": (
        lambda c, w, b: (F.linear(c, w)[:, None].expand(B, H, T, N) + b), [c()], [w(N, L), w(H, 1, N)], 2,
    ),
    "columns with a bias of their own": (
        lambda c, r, w, b: torch.cat([heads_first(c, w) + b, r[:, None].expand(B, H, T, R)], -1),
        [c(), seeded(B, T, R)], [w(H * N, L), w(N)], 2,
    ),
    "a dequantized weight": (
        lambda c, w, s: heads_first(c, (w.view(H, N, L) * s).reshape(H * N, L)), [c()], [w(H * N, L), w(H, 1, 1)], 2,
    ),
    "rows of a narrower dtype": (lambda c, w: heads_first(c.double(), w), [c().float()], [w(H * N, L)], 2),
    "a scale of two": (lambda c, w: heads_first(c, w) * 2, [c()], [w(H * N, L)], 2),
    "rotary rows, features before tokens": (
        lambda c, r, w: torch.cat([heads_first(c, w).mT, r.mT[:, None].expand(B, H, R, T)], 2),
        [c(), seeded(B, T, R)], [w(H * N, L)], 3,
    ),
    "heads that share a weight in groups": (
        lambda c, w: heads_first(c, w)[:, :, None].expand(B, H, 2, T, N), [c()], [w(H * N, L)], 3,
    ),
    "heads that share a weight in groups, in one axis": (
        lambda c, w: heads_first(c, w)[:, :, None].expand(B, H, 2, T, N).reshape(B, H * 2, T, N),
        [c()], [w(H * N, L)], 2,
    ),
    "heads that share a weight and a bias in groups, beside rotary rows": (
        lambda c, r, w, b: torch.cat(
            [
                (heads_first(c, w) + b)[:, :, None].expand(B, H, 2, T, N).reshape(B, H * 2, T, N),
                r[:, None].expand(B, H * 2, T, R),
            ],
            -1,
        ),
        [c(), seeded(B, T, R)], [w(H * N, L), w(H, 1, N)], 2,
    ),
    "columns that are repeated": (
        lambda c, w: heads_first(c, w)[..., None].expand(B, H, T, N, 2).reshape(B, H, T, 2 * N),
        [c()], [w(H * N, L)], 2,
    ),
    "a last axis of size 1": (lambda c, w: F.linear(c, w).view(B, T, H, N, 1), [c()], [w(H * N, L)], 1),
    "one column, from one": (lambda z, w: z[:, :, None] * w, [seeded(B, T)], [w(N)], 1),
    "columns of zeros behind": (lambda c, w: F.pad(heads_first(c, w), (0, 2)), [c()], [w(H * N, L)], 2),
    "columns of zeros behind a sum, before tokens": (
        lambda c, r, w, u: F.pad(heads_first(c, w) + heads_first(r, u), (0, 2)).mT,
        [c(), seeded(B, T, R)], [w(H * N, L), w(H * N, R)], 3,
    ),
    "a row that is added, times a factor for each column": (
        lambda c, r, w, g: (heads_first(c, w) + r[:, None]) * g, [c(), seeded(B, T, N)], [w(H * N, L), w(N)], 2,
    ),
    "a row that is added, over a factor for each head and column, before tokens": (
        lambda c, r, w, g: ((heads_first(c, w) + r[:, None]) / g).mT,
        [c(), seeded(B, T, N)], [w(H * N, L), w(H, 1, N)], 3,
    ),
    "rotary rows, times a factor for each head": (
        lambda c, r, w, g: with_rope(c, r, w) * g, [c(), seeded(B, T, R)], [w(H * N, L), w(H, 1, 1)], 2,
    ),
    "rotary rows, times one factor for the columns": (
        lambda c, r, w, g: with_rope(c, r * g, w), [c(), seeded(B, T, R)], [w(H * N, L), w(R)], 2,
    ),
    "one token of one batch": (
        lambda c, w: F.linear(c, w).view(1, 1, H, N).transpose(1, 2), [seeded(1, 1, L)], [w(H * N, L)], 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_makes_the_tensor_again(name):
    check(*RECIPES[name])


@pytest.mark.parametrize(
    ("name", "columns"),
    [("heads first", 3), ("heads last", 3), ("features before tokens", 2), ("a last axis of size 1", 3)],
)
def test_the_columns_are_the_last_axis_a_weight_makes(name, columns):
    assert recipe_of(*RECIPES[name])[1][0].columns == columns


@pytest.mark.parametrize("name", ["heads first", "rotary rows first", "a bias", "rows of a narrower dtype"])
def test_nothing_is_computed_that_changes_nothing(name):
    """One product and one place for each part; no copy to the dtype it has, no factor of one, nothing joined alone."""
    recipe, ingredients, leaves = recipe_of(*RECIPES[name])[1]
    given = [seeded(*(2 for _ in i.target[:-1]), width) for i, width in zip(ingredients, recipe.widths, strict=True)]
    made = []

    def call(op, *args, **kwargs):
        made.append(str(op).removeprefix("aten."))
        return op(*args, **kwargs)

    fn, inputs, weights, _ = RECIPES[name]
    program = trace(fn, inputs, weights)
    values = dict(zip([n.name for n in program.placeholders], (*inputs, *weights), strict=True))
    expand(recipe, [g.to(x.dtype) for g, x in zip(given, inputs, strict=True)], [values[n.name] for n in leaves], call)
    rest = [op for op in made if op.partition(".")[0] not in ("view", "reshape", "permute", "transpose", "slice")]
    assert (
        rest
        == {
            "heads first": ["einsum.default"],
            "rotary rows first": ["unsqueeze.default", "expand.default", "einsum.default", "cat.default"],
            "a bias": ["einsum.default", "add.Tensor"],
            "rows of a narrower dtype": ["_to_copy.default", "einsum.default"],
        }[name]
    )


LAYOUT = "rows in a layout that a cache cannot have"
NOTHING = "columns of the cache that are not made from rows"
NEITHER = "an axis of the cache is neither tokens, heads nor features"
FEATURES = "the cache has no axis of features"
NO_RECIPE = {
    "rows of every head": (
        lambda c, r, w: torch.cat([heads_first(c, w), r], -1), [c(), seeded(B, H, T, R)], [w(H * N, L)], 2, NEITHER,
    ),
    "batch and heads in one axis": (
        lambda c, w: heads_first(c, w).reshape(B * H, T, N), [c()], [w(H * N, L)], 1, NEITHER,
    ),
    "columns of nothing in front": (
        lambda c, w: F.pad(heads_first(c, w), (2, 0)), [c()], [w(H * N, L)], 2, NOTHING,
    ),
    "columns that are never written": (
        lambda c, w: torch.slice_scatter(c.new_empty(B, H, T, N + 2), heads_first(c, w), 3, 0, N),
        [c()], [w(H * N, L)], 2, NOTHING,
    ),
    "no features": (lambda c, w: c @ w, [c()], [w(L)], 1, FEATURES),
    "features for tokens": (with_rope, [c(), seeded(B, T, R)], [w(H * N, L)], 3, FEATURES),
    "heads for tokens": (heads_first, [c()], [w(H * N, L)], 1, LAYOUT),
    "rows as they are": (lambda r: r[:, None].expand(B, H, T, R).clone(), [seeded(B, T, R)], [], 2, FEATURES),
    "a sum over the batch": (
        lambda c, w: heads_first(c, w).sum(0, keepdim=True), [c()], [w(H * N, L)], 2, FEATURES,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_RECIPE)
def test_what_is_no_recipe(name):
    *case, why = NO_RECIPE[name]
    program, made = recipe_of(*case)
    assert isinstance(made, Stop)
    assert (made.detail, made.node) == (why, program.gm.graph.output_node().args[0][0])


def test_recipes_are_equal_where_the_way_is_and_whatever_the_sizes():
    long = recipe_of(heads_first, [c()], [w(H * N, L)], 2)[1][0]

    def one(c, w):
        return F.linear(c, w).view(B, 1, H, N).transpose(1, 2)

    assert recipe_of(one, [seeded(B, 1, L)], [w(H * N, L)], 2)[1][0] == long
    assert hash(long) == hash(recipe_of(heads_first, [c()], [w(H * N, L)], 2)[1][0])

    def flipped(c, w):
        return F.linear(c, w.flip(0)).view(B, T, H, N).transpose(1, 2)

    def scaled(c, w):
        return heads_first(c, w) * 2

    def last(c, w):
        return F.linear(c, w).view(B, T, N, H).permute(0, 3, 1, 2)

    for other in (flipped, scaled, last):
        assert recipe_of(other, [c()], [w(H * N, L)], 2)[1][0] != long


def test_sizes_that_are_all_equal_are_not_confused():
    n = 3
    x, weight = seeded(n, n, n), seeded(n * n, n, seed=2)
    for order, tokens in (((0, 2, 1, 3), 2), ((0, 1, 2, 3), 1), ((1, 2, 0, 3), 0), ((0, 2, 3, 1), 3)):

        def permuted(c, w):
            return F.linear(c, w).view(n, n, n, n).permute(order)  # noqa: B023  called in this round

        check(permuted, [x], [weight], tokens)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ((slice(None), slice(None), slice(2, 4)), slice(2, 4)),
        ((..., slice(None, 3), slice(None)), slice(None, 3)),
        (..., slice(None)),
        (slice(None), slice(None)),
        ((slice(0, 1), ...), None),
        ((slice(None), slice(None), slice(None, None, 2)), None),
        ((slice(None), slice(None), 1), None),
        ((slice(None), None, slice(2)), None),
        ((..., slice(2), ..., slice(None)), None),
        (torch.tensor([0]), None),
        ((slice(None),) * 5, None),
    ],
)
def test_which_index_takes_tokens(index, expected):
    assert range_of(index, 4, 2) == expected
