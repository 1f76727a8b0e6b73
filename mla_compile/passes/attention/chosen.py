"""Recognise masks that show each query exactly the keys of an index list, such as the choice of an indexer.

Sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1) chooses k keys for each query, and models then write the
choice as a mask over all keys. These forms are recognised, where ``index`` is [..,k] and the keys lie along ``dim``:

    scatter(all True, dim, index, False), negated;  scatter(all False, dim, index, True)
    scatter(all -inf, dim, index, 0), added to the scores
    scatter(all a, dim, index, b) compared with a number between a and b
    scatter_add(zeros, dim, index, flags) != 0, > 0, >= 1    an entry is valid where its flag is set
    any, sum or amax along the list, of (index == position) or one_hot(index); compared with a number if not boolean

An entry may also name a block of keys. The model then repeats the mask over blocks ``block`` times, or looks it up at
``position // block``.

If a ``topk`` or a sort returned the entries, no key is named twice. Otherwise, the rewrite drops repeated entries. Each
query has one list, which all heads share.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import replace

import sympy
import torch
from torch import fx

from mla_compile.passes.attention.affine import (
    Index,
    IndexReader,
    OpaqueError,
    asked,
    broadcast,
    constant,
    moved,
    operand_at,
    place_of,
    scattered,
)
from mla_compile.passes.attention.site import Affine, Block, Chosen, Operand
from mla_compile.passes.ir.axes import Atom, Axis, axis_size, flatten, fresh_axis
from mla_compile.passes.ir.graph import argument, axis, is_tensor, packet, shape, val
from mla_compile.passes.ir.moves import Copy, Fill, Rearrange
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import Size, at_least, same, same_sizes, size

aten = torch.ops.aten

_Shows = Callable[[float], bool]
_WHOLE = (torch.int64, torch.int32)
_COUNTS = (*_WHOLE, torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ORDERS = {aten.topk: 2, aten.sort: 1}
"""Operators whose second result holds distinct indices along an axis.

The dictionary's values are the positions of this axis among the arguments.
"""


def chosen(
    queries: Axis, keys: Axis, batch: Collection[Atom], node: fx.Node, place: Index, *, negated: bool
) -> Chosen | str | None:
    """Return the index list from which the mask ``node``, read at ``place``, was made.

    ``negated``: a key is seen where the boolean is False. Returns None if the mask was not made from a list, and a
    reason if the attention cannot use the list.
    """
    try:
        found = _listed_by(node, place, negated=negated)
    except OpaqueError:
        return None
    if not isinstance(found, Chosen):
        return found
    if found.keys != keys:
        return "chooses queries, not keys" if set(found.keys) <= set(queries) else "chooses heads, not keys"
    outer = set(flatten(found.indices.axes)) - {*found.count, *batch, *queries}
    # All keys and all heads must have the same list.
    return found if not outer else "lists other keys for each head" if not outer & set(keys) else None


def _listed_by(node: fx.Node, place: Index, *, negated: bool) -> Chosen | str | None:
    boolean = val(node).dtype == torch.bool
    # Whether a value of `node` shows a key. In an additive mask, only 0 does.
    shows: _Shows = (lambda number: bool(number) is not negated) if boolean else (lambda number: number == 0)
    while True:
        if (numbers := scattered(node)) is not None:
            rest, there = numbers
            if shows(there) and not shows(rest):
                return _written(node, place)
            return "hides the keys of a list and shows all others" if shows(rest) and not shows(there) else None
        if packet(node) is aten.scatter_add:
            return _counted(node, place, shows)
        if packet(node) in _REDUCTIONS:
            return _matched(node, place, shows)
        if (step := asked(node)) is not None:
            node, shows = step[0], _after(step[1], shows)
        elif (inner := moved(node, place)) is not None:
            node, place = inner
        else:
            return None


def _after(step: Callable[[float], float], shows: _Shows) -> _Shows:
    return lambda number: shows(step(number))


def _counted(node: fx.Node, place: Index, shows: _Shows) -> Chosen | None:
    """Read ``scatter_add(zeros, dim, index, flags)``, where a count of 0 hides a key and every other count shows it."""
    flags = argument(node, 3, "src")
    flag = _flag(flags)
    # In a smaller dtype, counts could wrap around to 0.
    if constant(argument(node, 0, "self")) != 0 or flag is None or val(node).dtype not in _COUNTS:
        return None
    one = flag if isinstance(flag, float) else 1.0
    if not _shows_counts(shows, one):
        return None
    found = _written(node, place)
    if found is None or not same_sizes(shape(flags), shape(argument(node, 2, "index"))):
        return None
    return found if isinstance(flag, float) else replace(found, flags=Operand(flag, found.indices.axes))


def _shows_counts(shows: _Shows, least: float = 1.0) -> bool:
    """Whether a count of 0 hides a key and every positive count shows it.

    The mask compares the count with one number, so it is enough to test 0, the ``least`` positive count and infinity.
    """
    return not shows(0.0) and shows(least) and shows(float("inf"))


def _flag(node: object) -> fx.Node | float | None:
    """Return the positive number that each entry adds, or the boolean that is added as 0 or 1.

    Return None for other values, because their sum could be 0 for a listed key.
    """
    if (number := constant(node)) is not None:
        return float(number) if number > 0 else None
    if is_tensor(node) and val(node).dtype == torch.bool:
        return node
    how = decode(node)
    return _flag(how.x) if isinstance(how, Copy) else None


def _written(node: fx.Node, place: Index) -> Chosen | None:
    """Return the list that a ``scatter`` or ``scatter_add``, read at ``place``, writes."""
    dim, index = axis(argument(node, 1, "dim"), len(place)), argument(node, 2, "index")
    if not is_tensor(index) or len(shape(index)) != len(place):
        return None
    others = [(own, of) for k, (own, of) in enumerate(zip(shape(index), shape(node), strict=True)) if k != dim]
    if not all(same(own, of) for own, of in others):  # the index has fewer rows than the mask
        return None
    count = fresh_axis(shape(index)[dim])
    where = [place_of([count])[0] if k == dim else at for k, at in enumerate(place)]
    return _list(index, where, count, place[dim], shape(node)[dim])


def _list(index: fx.Node, where: Index, count: Axis, key: Affine, names: Size | None) -> Chosen | None:
    """Return ``index``, read at ``where``, as a list of keys.

    ``key``: the position of a key, which is seen if an entry equals this position. ``names``: as in :class:`Chosen`;
    None if an entry may be any number.
    """
    along = key.position
    if not along or val(index).dtype not in _WHOLE:
        return None
    keys, block = (along.axis, along.size) if isinstance(along, Block) else (along, 1)
    listed = operand_at(index, where)
    once = _names_once(index, place_of(listed.axes), count, (axis_size(keys) + block - 1) // block)
    there_are = (axis_size(keys) + block - 1) // block if names is None else names
    return Chosen(listed, count, keys, once, there_are, block, any_number=names is None)


_REDUCTIONS = (aten.any, aten.sum, aten.amax)


def _matched(node: fx.Node, place: Index, shows: _Shows) -> Chosen | None:
    """Read ``any``, ``sum`` or ``amax``, over all entries, of ``eq(entry, key)`` or ``one_hot(entry)``."""
    dims = argument(node, 1, "dim")
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    x = argument(node, 0, "self")
    # In a smaller dtype, counts could wrap around to 0.
    if len(dims) != 1 or val(node).dtype not in (torch.bool, *_COUNTS) or not _shows_counts(shows):
        return None
    dim, kept = axis(dims[0], len(shape(x))), len(shape(x)) == len(place)
    count = fresh_axis(shape(x)[dim])
    place = [*place[:dim], place_of([count])[0], *place[dim + kept :]]
    while packet(x) not in (aten.eq, aten.one_hot):
        if (inner := moved(x, place)) is None:
            return None
        x, place = inner
    if packet(x) is aten.one_hot:
        classes = shape(x)[-1]
        return _list(argument(x, 0, "self"), place[:-1], count, place[-1], classes)
    for key, index in (x.args[:2], x.args[1::-1]):
        if not is_tensor(key) or not is_tensor(index):
            return None
        at = IndexReader().read(key, broadcast(shape(key), place)) if val(key).dtype in _WHOLE else Affine()
        if at.position and at.position != count:
            return _list(index, broadcast(shape(index), place), count, at, None)
    return None


def _names_once(index: fx.Node, place: Index, count: Axis, there_are: Size) -> bool:
    """Whether all entries along ``count`` name different keys (or blocks). ``there_are``: the number of keys."""
    if not count:
        return True
    found = _ordered(index, place, there_are)
    if found is None:
        return False
    _, place, along = found
    # No index is read twice if coordinate `along` differs from entry to entry and no other coordinate does.
    apart = all(count not in at.steps for k, at in enumerate(place) if k != along)
    return count in place[along].steps and not place[along].terms and apart


def _ordered(index: fx.Node, place: Index, there_are: Size | None = None) -> tuple[fx.Node, Index, int] | None:
    """Return the topk or sort result from which ``index`` was copied, the place to read there, and the sorted axis.

    If ``there_are`` is given, some entries may have been replaced by a number outside of 0 to ``there_are`` - 1.
    """
    while (along := _order(index)) is None:
        try:
            found = moved(index, place) or (None if there_are is None else _unless_none(index, place, there_are))
        except OpaqueError:
            return None
        # A cast from another dtype may have rounded the indices.
        if found is None or val(found[0]).dtype not in _WHOLE:
            return None
        index, place = found
    return index, place, along


def _unless_none(node: fx.Node, place: Index, there_are: Size) -> tuple[fx.Node, Index] | None:
    """Return the list in which ``node`` replaces some entries by an invalid number, and the place to read there.

    An invalid number names no key: it is negative or at least ``there_are``.
    """
    if packet(node) is aten.where:
        one, other = argument(node, 1, "self"), argument(node, 2, "other")
    elif packet(node) is aten.masked_fill:
        one, other = argument(node, 0, "self"), argument(node, 2, "value")
    else:
        return None
    for entries, number in ((one, other), (other, one)):
        if is_tensor(entries) and _names_none(number, there_are):
            return entries, broadcast(shape(entries), place)
    return None


def _names_none(given: object, there_are: Size) -> bool:
    """Whether all elements of ``given`` equal one number that is negative or at least ``there_are``."""
    how = decode(given)
    if isinstance(how, (Copy, Rearrange)):
        return _names_none(how.x, there_are)
    value = how.value if isinstance(how, Fill) else given
    if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), (int, torch.SymInt)):
        value = size(value.meta["val"])
    if isinstance(value, (bool, float, fx.Node)) or not isinstance(value, (int, sympy.Expr)):
        return False
    return (isinstance(value, int) and value < 0) or at_least(value, there_are)


def _order(node: fx.Node) -> int | None:
    """Return the axis along which ``node`` holds distinct indices; None if no such axis is known."""
    if packet(node) is aten.argsort:
        return axis(argument(node, 1, "dim", -1), len(shape(node)))
    if packet(node) is not operator.getitem or node.args[1] != 1:
        return None
    of = node.args[0]
    position = _ORDERS.get(packet(of))
    if position is None or not isinstance(of, fx.Node):
        return None
    return axis(argument(of, position, "dim", -1), len(shape(node)))


def ranked(chosen: Chosen, *, some: bool = False) -> tuple[fx.Node, Index] | None:
    """Return the scores from which a ``topk`` made the list, and the place of the scores of all keys.

    Return None if no ``topk`` made the list. If ``some``, entries may since have been replaced by invalid numbers.
    """
    there_are = axis_size(chosen.keys) if some else None
    found = _ordered(chosen.indices.node, place_of(chosen.indices.axes), there_are)
    if found is None:
        return None
    index, place, along = found
    of = argument(index, 0, "self")
    if packet(of) is not aten.topk or argument(of, 3, "largest", True) is not True or place[along].axis != chosen.count:
        return None
    scores = argument(of, 0, "self")
    if not same(shape(scores)[along], axis_size(chosen.keys)):
        return None
    return scores, [place_of([chosen.keys])[0] if k == along else at for k, at in enumerate(place)]
