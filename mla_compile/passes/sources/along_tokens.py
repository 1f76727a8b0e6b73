"""Record how the model updates a buffer of K with new keys, so that a buffer of rows can be updated in this way.

Two kinds of operators update a buffer of full length. Some move values along the tokens (``index_copy``,
``slice_scatter``). Others multiply tokens by factors that all heads and columns share, and add the products, as in
``buffer * (1 - one_hot) + k * one_hot``. If ``K = rows W`` has no bias, each of these operators ``f`` can be applied to
the rows instead: ``f(old W, new W) = f(old, new) W``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from string import ascii_letters
from typing import Any, TypeAlias, TypeVar

import torch
from torch import fx

from mla_compile.passes.ir.graph import Builder, shape, val

aten = torch.ops.aten
X = TypeVar("X")


@dataclass(frozen=True)
class Given:
    """An input of a record. Number 0 is the buffer, and higher numbers are the new tensors."""

    number: int


OLD = Given(0)


@dataclass(frozen=True)
class Dim:
    """The number of an axis that is passed to an operator."""

    at: int


@dataclass(frozen=True)
class Indices:
    """The indices of an ``index_put``: the tensor ``at[i]`` indexes axis ``dim + i``."""

    dim: int
    at: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Shared:
    """A tensor whose values vary only along some axes of K.

    ``axes``: the axis of K for each dimension of the tensor; None for dimensions along which all values are equal.
    """

    node: fx.Node
    axes: tuple[int | None, ...]


@dataclass(frozen=True)
class Mix:
    """A product of ``matrix`` and ``x`` that replaces each token by a weighted sum of tokens.

    The sum runs over dimension ``summed`` of the matrix and axis ``dim`` of ``x``. Another dimension of the matrix
    becomes axis ``dim`` of the result.
    """

    x: Writing
    matrix: Shared
    summed: int
    dim: int


@dataclass(frozen=True)
class Applied:
    """An operator applied to records. Other arguments (such as constants) stay unchanged, but lists become tuples."""

    op: Callable[..., object]
    args: tuple[object, ...]

    @property
    def parts(self) -> Iterator[object]:
        """The arguments, with each list replaced by its members."""
        for arg in self.args:
            yield from arg if isinstance(arg, tuple) else (arg,)


Writing: TypeAlias = "Given | Mix | Applied"


def axes_of(made: object, *, factors: bool = True) -> Iterator[int]:
    """Yield the axes along which ``made`` moves values. Axes of inner operators come last.

    ``factors``: whether to include the axes along which factors vary.
    """
    if isinstance(made, Applied):
        plain = [a for a in made.parts if not isinstance(a, (Mix, Applied))]
        for arg in (*plain, *(a for a in made.parts if isinstance(a, (Mix, Applied)))):
            yield from axes_of(arg, factors=factors)
    elif isinstance(made, Mix):
        yield from axes_of(made.matrix, factors=factors)
        yield made.dim
        yield from axes_of(made.x, factors=factors)
    elif isinstance(made, Shared):
        yield from (a for a in made.axes if a is not None and factors)
    elif isinstance(made, Dim):
        yield made.at
    elif isinstance(made, Indices):
        yield from range(made.dim, made.dim + len(made.at))


def nodes_of(made: object) -> Iterator[fx.Node]:
    """Yield the nodes that hold the positions and factors of a record."""
    match made:
        case fx.Node():
            yield made
        case Applied():
            yield from (node for arg in made.parts for node in nodes_of(arg))
        case Mix():
            yield from (made.matrix.node, *nodes_of(made.x))
        case Shared():
            yield made.node
        case Indices():
            yield from made.at


def computes(made: object) -> bool:
    """Whether ``made`` multiplies or adds values, instead of only moving them."""
    if isinstance(made, Applied):
        return made.op not in _MOVES or made.args[-1] is True or any(map(computes, made.parts))
    return isinstance(made, Mix)


_MOVES = {
    aten.slice.Tensor, aten.slice_scatter.default, aten.index_copy.default, aten.index_put.default,
    aten.scatter.src, aten.expand_as.default, aten.where.self, aten.cat.default, aten.roll.default,
}  # fmt: skip


def moved(made: X, axis: Callable[[int], int], same: Callable[[fx.Node], fx.Node]) -> X:
    """Return ``made`` with each axis ``k`` replaced by ``axis(k)``, and each node ``n`` by ``same(n)``."""

    def on(one: object) -> Any:
        match one:
            case Applied():
                return Applied(one.op, tuple(map(on, one.args)))
            case Mix():
                return replace(one, x=on(one.x), matrix=on(one.matrix), dim=axis(one.dim))
            case Shared():
                return Shared(same(one.node), tuple(None if a is None else axis(a) for a in one.axes))
            case Indices():
                return Indices(axis(one.dim), tuple(map(same, one.at)))
            case Dim():
                return Dim(axis(one.at))
            case tuple():
                return tuple(map(on, one))
        return same(one) if isinstance(one, fx.Node) else one

    made = on(made)
    return made


def with_given(made: X, given: Sequence[Writing]) -> X:
    """Return ``made`` with each ``Given(n)`` replaced by ``given[n]``."""

    def on(one: object) -> Any:
        match one:
            case Given():
                return given[one.number]
            case Mix():
                return replace(one, x=on(one.x))
            case Applied():
                return Applied(one.op, tuple(map(on, one.args)))
            case tuple():
                return tuple(map(on, one))
        return one

    result: X = on(made)
    return result


def make(made: Writing, builder: Builder, given: Sequence[fx.Node]) -> fx.Node:
    """Add nodes that compute ``made`` from the tensors ``given``."""
    if isinstance(made, Given):
        return given[made.number]
    if isinstance(made, Mix):
        return _mixed(made, builder, make(made.x, builder, given))
    own: list[object] = [_made_of(arg, builder, given) for arg in made.args]
    first = next(one for arg in own for one in (arg if isinstance(arg, list) else [arg]) if isinstance(one, fx.Node))
    return builder.call(made.op, *(_argument(a, builder, val(first).dtype, len(shape(first))) for a in own))


def _made_of(arg: object, builder: Builder, given: Sequence[fx.Node]) -> object:
    """Return ``arg`` with each inner record replaced by the node that computes the record."""
    if isinstance(arg, tuple):
        return [_made_of(one, builder, given) for one in arg]
    return make(arg, builder, given) if isinstance(arg, (Given, Mix, Applied)) else arg


def _argument(given: object, builder: Builder, dtype: torch.dtype, rank: int) -> Any:
    """Convert an argument for an operator on tensors of this ``dtype`` and ``rank``."""
    match given:
        case list():
            return [_argument(one, builder, dtype, rank) for one in given]
        case Dim():
            return given.at
        case Indices():
            return [*[None] * given.dim, *given.at]
        case Shared():
            factor = _broadcast(builder, given, rank)
            return builder.cast(factor, dtype) if val(factor).is_floating_point() else factor
    return given


def _broadcast(builder: Builder, shared: Shared, rank: int) -> fx.Node:
    """Return a shared tensor in a shape that broadcasts with tensors of ``rank`` axes."""
    node, axes = _reduced(builder, shared), [a for a in shared.axes if a is not None]
    for k in range(min(axes, default=rank), rank):
        if k not in axes:
            node = builder.call(aten.unsqueeze.default, node, k - min(axes))
    return node


def _reduced(builder: Builder, shared: Shared) -> fx.Node:
    """Return a shared tensor without the dimensions along which the tensor is constant."""
    node = shared.node
    for k in reversed(range(len(shared.axes))):
        if shared.axes[k] is None:
            node = builder.call(aten.select.int, node, k, 0)
    return node


def _mixed(made: Mix, builder: Builder, x: fx.Node) -> fx.Node:
    axes = [made.dim if k == made.summed else a for k, a in enumerate(made.matrix.axes)]
    own = ascii_letters[: len(shape(x))]
    read = own.replace(own[made.dim], "Z")
    left = ("Z" if k == made.summed else own[a] for k, a in enumerate(axes) if a is not None)
    matrix = builder.cast(_reduced(builder, Shared(made.matrix.node, tuple(axes))), val(x).dtype)
    return builder.call(aten.einsum.default, f"{''.join(left)},{read}->{own}", [matrix, x])
