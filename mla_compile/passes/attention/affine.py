"""Integers that are affine in positions: ``const + sum of step * position + sum of factor * tensor``.

Masks compare the positions of queries and keys, which are tensors made by ``arange``, additions and views.
:class:`IndexReader` finds the value of such a tensor at a place. A place is given as one affine integer per dimension.
A slice or a look-up (``x[index]``) only changes the place at which its operand is read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add

import torch
from torch import fx

from mla_compile.passes.attention.site import Affine, Block, Operand
from mla_compile.passes.ir.axes import Atom, Axis, IndexMap, axis_size, flatten
from mla_compile.passes.ir.graph import argument, axis, is_tensor, packet, shape, val
from mla_compile.passes.ir.moves import Copy, Fill, Rearrange, Select, Slice
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import Size, at_least, same, same_sizes, size

aten = torch.ops.aten

WHOLE = (torch.int64, torch.int32)
"""Dtypes in which positions do not overflow."""


class OpaqueError(Exception):
    """Raised if a number is not affine in positions, a place does not run along axes, or a mask is not understood."""


Index = Sequence[Affine]
"""A place in a tensor: the index along each of its dimensions."""


def place_of(axes: Sequence[Axis]) -> Index:
    """Return the place whose coordinates are the positions along ``axes``: 0 for ``()``, an axis of size 1."""
    return [Affine(steps={a: 1}) if a else Affine() for a in axes]


def operand_at(node: fx.Node, place: Index, *, longer: bool = False) -> Operand:
    """Return ``node`` as an operand, with the axes along which the coordinates of ``place`` run.

    Raises :class:`OpaqueError` if a coordinate runs along no axis, if two coordinates run along the same axis, or if a
    dimension of ``node`` and its axis differ in length. With ``longer``, a dimension may be longer than its axis, if
    only its beginning is read.
    """
    axes = []
    for at, length in zip(place, shape(node), strict=True):
        axis = () if same(length, 1) else at.axis
        if axis is None or (not axis and not same(length, 1)):
            raise OpaqueError
        if not longer and not same(length, axis_size(axis)):
            raise OpaqueError
        axes.append(axis)
    if len(flatten(axes)) != len({*flatten(axes)}):  # two dimensions follow the same axis: a diagonal
        raise OpaqueError
    return Operand(node, tuple(axes))


def moved(node: fx.Node, place: Index) -> tuple[fx.Node, Index] | None:
    """Return the tensor and place from which ``node`` copies its value at ``place``; None if ``node`` does not copy."""
    how = decode(node)
    if isinstance(how, Copy):
        return how.x, place
    if isinstance(how, Rearrange):
        return how.x, _before(how.map, place)
    if isinstance(how, Slice):
        start, step = _start(how)
        return how.x, [at * step + Affine(start) if k == how.dim else at for k, at in enumerate(place)]
    if isinstance(how, Select) and how.index is not None:
        return how.x, [*place[: how.dim], Affine(how.index), *place[how.dim :]]
    rule = _LOOK_UPS.get(packet(node))
    return None if rule is None else rule(node, place)


def broadcast(own: Sequence[Size], place: Index) -> Index:
    """Return the place in a tensor of sizes ``own`` from which broadcasting takes the value at ``place``."""
    return [Affine() if same(s, 1) else at for s, at in zip(own, place[len(place) - len(own) :], strict=True)]


def _before(index: IndexMap | None, place: Index) -> Index:
    """Return the place from which an operator that rearranges axes takes the value at ``place``."""
    if index is None:
        raise OpaqueError
    read, found = {*flatten(index.before)}, dict[Atom, Affine]()
    for own, along in zip(index.after, place, strict=True):
        rest = along
        for k, atom in enumerate(own):
            unread = atom.size == 1 or read.isdisjoint(own[k:])
            found[atom] = Affine() if unread else in_blocks(rest, axis_size(own[k + 1 :]))
            rest -= _times(found[atom], axis_size(own[k + 1 :]))
    return [_row_major(own, found) for own in index.before]


def _row_major(own: Axis, found: Mapping[Atom, Affine]) -> Affine:
    return reduce(add, (_times(found[atom], axis_size(own[k + 1 :])) for k, atom in enumerate(own)), Affine())


def _times(at: Affine, size: Size) -> Affine:
    """Return ``at * size``. Raises :class:`OpaqueError` if the size is not a number."""
    if not isinstance(size, int):
        raise OpaqueError
    return at * size


def in_blocks(at: Affine, size: Size) -> Affine:
    """Return ``at // size``.

    If the size is not 1, raises :class:`OpaqueError` if ``at`` is no position or ``size`` is no positive number.
    """
    if same(size, 1):
        return at
    along = at.position
    if along is None or not isinstance(size, int) or size < 1:
        raise OpaqueError
    if not along:
        return Affine()
    block = Block(along.axis, along.size * size) if isinstance(along, Block) else Block(along, size)
    return Affine(steps={block: 1})


def _start(how: Slice) -> tuple[int, int]:
    if how.taken is not None:
        return how.taken.start, how.taken.step
    start, _, step = how.bounds or (None, None, None)
    start = 0 if start is None else start
    if not isinstance(start, int) or start < 0 or not isinstance(step, int):
        raise OpaqueError
    return start, step


def _looked_up(node: fx.Node, place: Index) -> tuple[fx.Node, Index]:
    """Follow ``x[:, i, j, ...]``, where each index tensor holds positions."""
    x, given = argument(node, 0, "self"), list(argument(node, 1, "indices"))
    given += [None] * (len(shape(x)) - len(given))
    dims = [k for k, index in enumerate(given) if index is not None]
    if not all(is_tensor(given[k]) for k in dims):
        raise OpaqueError
    rank = max(len(shape(given[k])) for k in dims)
    # The axes of the index tensors replace the indexed dimensions. If the indexed dimensions are not neighbours, the
    # index axes come first.
    first = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    own, rest = place[first : first + rank], iter([*place[:first], *place[first + rank :]])
    return x, [next(rest) if i is None else _found(i, broadcast(shape(i), own)) for i in given]


def _selected(node: fx.Node, place: Index) -> tuple[fx.Node, Index]:
    """Follow ``index_select(x, dim, index)``."""
    x, dim = argument(node, 0, "self"), axis(argument(node, 1, "dim"), len(place))
    return x, [_found(argument(node, 2, "index"), [at]) if k == dim else at for k, at in enumerate(place)]


def _gathered(node: fx.Node, place: Index) -> tuple[fx.Node, Index]:
    """Follow ``gather(x, dim, index)``, and ``take_along_dim(x, index, dim)``, which broadcasts."""
    x = argument(node, 0, "self")
    along = packet(node) is aten.take_along_dim
    index = argument(node, 1 if along else 2, "indices" if along else "index")
    dim = argument(node, 2 if along else 1, "dim")
    if dim is None or not is_tensor(index) or not len(shape(index)) == len(shape(x)) == len(place):
        raise OpaqueError
    inner = list(broadcast(shape(x), place))
    inner[axis(dim, len(place))] = _found(index, broadcast(shape(index), place))
    return x, inner


def _found(index: fx.Node, place: Index) -> Affine:
    """Return the position that ``index`` holds at ``place``.

    Raises :class:`OpaqueError` if the number is not a position, because a negative index counts from the end.
    """
    at = IndexReader().read(index, place) if val(index).dtype in WHOLE else Affine(-1)
    if at.position is None:
        raise OpaqueError
    return at


_LOOK_UPS: dict[object, Callable[[fx.Node, Index], tuple[fx.Node, Index]]] = {
    aten.index: _looked_up,
    aten.index_select: _selected,
    aten.gather: _gathered,
    aten.take_along_dim: _gathered,
}


def never_negative(bound: Affine) -> bool:
    """Whether ``bound`` is known to be at least 0 at every position along its axes."""
    least = bound.const
    for along, step in bound.steps.items():
        if isinstance(along, Block):
            return False
        least = least + min(step, 0) * (axis_size(along) - 1)
    return not bound.terms and at_least(least, 0)


def constant(given: object) -> float | None:
    """Return the number that every element of ``given`` equals, if it is known."""
    if isinstance(given, (bool, int, float)):
        return float(given)
    if not isinstance(given, fx.Node) or not is_tensor(given):
        return None
    if packet(given) in (aten.ones, aten.new_ones, aten.ones_like):
        return 1.0
    how = decode(given)
    if isinstance(how, (Copy, Rearrange)):
        return as_in(given, constant(how.x))
    return as_in(given, constant(how.value)) if isinstance(how, Fill) else None


def as_in(node: fx.Node, number: float | None) -> float | None:
    """Convert a number to the dtype of ``node``; None if that dtype cannot hold it."""
    dtype = val(node).dtype
    if number is None or dtype.is_complex:
        return None
    if not dtype.is_floating_point and dtype != torch.bool:
        limits = torch.iinfo(dtype)
        return float(int(number)) if limits.min <= number <= limits.max else None
    return float(torch.tensor(number, dtype=torch.float64).to(dtype))


def scattered(node: fx.Node) -> tuple[float, float] | None:
    """Return the numbers a and b of ``scatter(a, dim, index, b)``, if both are constant."""
    if packet(node) is not aten.scatter or argument(node, 4, "reduce") is not None:
        return None
    given = argument(node, 3, "value", argument(node, 3, "src"))
    rest, there = constant(argument(node, 0, "self")), as_in(node, constant(given))
    return None if rest is None or there is None else (rest, there)


_COMPARED: dict[object, Callable[[float, float], bool]] = {
    aten.eq: operator.eq,
    aten.ne: operator.ne,
    aten.lt: operator.lt,
    aten.le: operator.le,
    aten.gt: operator.gt,
    aten.ge: operator.ge,
}


def asked(node: fx.Node) -> tuple[fx.Node, Callable[[float], float]] | None:
    """Return the operand of a cast or of a comparison with a number, and the function that maps each element.

    The function raises :class:`OpaqueError` if its result is not known.
    """
    compare = _COMPARED.get(packet(node))
    if compare is None:
        how = decode(node)
        return (how.x, lambda of: _the_one({as_in(node, of)})) if isinstance(how, Copy) else None
    x, other = argument(node, 0, "self"), argument(node, 1, "other")
    if not is_tensor(x) or not same_sizes(shape(x), shape(node)) or (number := constant(other)) is None:
        return None
    # The dtype of the comparison depends on both operands. In this dtype, the number may be rounded, or an integer may
    # wrap around.
    numbers = {number}
    if val(x).dtype.is_floating_point:
        numbers.add(float(torch.tensor(number, dtype=torch.float64).to(val(x).dtype)))
    elif not (0 <= number < 128 and (2 * number).is_integer()):  # other numbers are not exact in every dtype
        return None
    return x, lambda of: _the_one({compare(of, n) for n in numbers})


def _the_one(results: set[float | None]) -> float:
    """Return the only result. Raises :class:`OpaqueError` if it is None or there are several."""
    (result, *more) = results
    if result is None or more:
        raise OpaqueError
    return result


class IndexReader:
    """Reads integers as affine sums. ``numbers`` maps each symbolic size to the node from which it was read."""

    def __init__(self) -> None:
        self.numbers: dict[Size, fx.Node] = {}

    def read(self, given: object, place: Index) -> Affine:
        """Read ``given``, a number or an integer tensor, at ``place``. Raises :class:`OpaqueError` if that fails."""
        if isinstance(given, int) and not isinstance(given, bool):
            return Affine(given)
        if not isinstance(given, fx.Node):
            raise OpaqueError
        if isinstance(given.meta.get("val"), (int, torch.SymInt)):
            self.numbers.setdefault(size(given.meta["val"]), given)
            return Affine(size(given.meta["val"]))
        if not is_tensor(given) or val(given).dtype not in WHOLE:
            raise OpaqueError
        try:
            return self._computed(given, place)
        except OpaqueError:  # any other tensor becomes a term of the sum, if its place runs along axes
            return Affine(terms={operand_at(given, place): 1})

    def _computed(self, node: fx.Node, place: Index) -> Affine:
        how = decode(node)
        if isinstance(how, Fill):
            return self.read(how.value, ())
        found = moved(node, place)
        if found is not None:
            return self.read(*found)
        rule = _RULES.get(packet(node))
        if rule is None:
            raise OpaqueError
        return rule(self, node, place)

    def at_operand(self, node: fx.Node, position: int, name: str, place: Index) -> Affine:
        """Read the operand from which the elementwise ``node`` computes its result at ``place``."""
        given = argument(node, position, name)
        return self.read(given, broadcast(shape(given), place) if is_tensor(given) else ())


def _arange(reader: IndexReader, node: fx.Node, place: Index) -> Affine:
    numbers = [reader.read(a, ()) for a in node.args]
    # arange(end), arange(start, end), arange(start, end, step)
    start = numbers[0] if len(numbers) > 1 else Affine()
    step = numbers[2].const if len(numbers) > 2 else 1
    if not isinstance(step, int):
        raise OpaqueError
    return start + place[0] * step


def _add(reader: IndexReader, node: fx.Node, place: Index) -> Affine:
    alpha = argument(node, 2, "alpha", 1)
    if not isinstance(alpha, int):
        raise OpaqueError
    sign = -alpha if packet(node) is aten.sub else alpha
    return reader.at_operand(node, 0, "self", place) + reader.at_operand(node, 1, "other", place) * sign


def _rsub(reader: IndexReader, node: fx.Node, place: Index) -> Affine:
    if argument(node, 2, "alpha", 1) != 1:
        raise OpaqueError
    return reader.at_operand(node, 1, "other", place) - reader.at_operand(node, 0, "self", place)


def _mul(reader: IndexReader, node: fx.Node, place: Index) -> Affine:
    a, b = reader.at_operand(node, 0, "self", place), reader.at_operand(node, 1, "other", place)
    for one, other in ((a, b), (b, a)):
        if not one.steps and not one.terms and isinstance(one.const, int):
            return other * one.const
    raise OpaqueError


def _divided(reader: IndexReader, node: fx.Node, place: Index) -> Affine:
    """Read a position divided by a number and rounded. Positions are not negative, so truncating rounds down."""
    by = reader.at_operand(node, 1, "other", place)
    rounds = packet(node) is aten.floor_divide or argument(node, 2, "rounding_mode") in ("floor", "trunc")
    if by.steps or by.terms or not isinstance(by.const, int) or not rounds:
        raise OpaqueError
    return in_blocks(reader.at_operand(node, 0, "self", place), by.const)


def _neg(reader: IndexReader, node: fx.Node, place: Index) -> Affine:
    return reader.at_operand(node, 0, "self", place) * -1


_RULES: dict[object, Callable[[IndexReader, fx.Node, Index], Affine]] = {
    aten.arange: _arange,
    aten.add: _add,
    aten.sub: _add,
    aten.rsub: _rsub,
    aten.mul: _mul,
    aten.floor_divide: _divided,
    aten.div: _divided,
    aten.neg: _neg,
}
