"""A mask that shows each query the keys of a list, and no others: the choice of an indexer, proved from how it is made.

Sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1) chooses k keys for each query, and models then write the
choice as a mask over all keys. The forms that are read, with ``index`` [..,k] and keys along ``dim``:

    scatter(all True, dim, index, False), negated;  scatter(all False, dim, index, True)
    scatter(all -inf, dim, index, 0), added to the scores
    scatter(all a, dim, index, b) compared with a number that lies between
    scatter_add(zeros, dim, index, flags) != 0, > 0, >= 1    an entry counts where its flag is set

The operators refuse an index outside of the keys, so each entry names one. That no key is named twice follows where the
entries are the places that a ``topk`` or a sort found; else repeated ones are dropped by the rewrite. A list has to be
one for each query and batch entry, and the same for all heads.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import fx

from mla_compile.passes.attention.affine import (
    OpaqueError,
    Place,
    asked,
    constant,
    moved,
    operand_at,
    place_of,
    scattered,
)
from mla_compile.passes.attention.site import Chosen, Operand
from mla_compile.passes.ir.axes import Atom, Axis, axis_size, flatten, fresh_axis
from mla_compile.passes.ir.graph import argument, axis, is_tensor, packet, shape, val
from mla_compile.passes.ir.operators import Copy, decode
from mla_compile.passes.ir.sizes import same, same_sizes

aten = torch.ops.aten

_Shows = Callable[[float], bool]
_WHOLE = (torch.int64, torch.int32)
_COUNTS = (*_WHOLE, torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ORDERS = {aten.topk: 2, aten.sort: 1}
"""Operators whose second result names places along an axis, each at most once, and where they are told the axis."""


def chosen(
    queries: Axis, keys: Axis, batch: Collection[Atom], node: fx.Node, place: Place, *, negated: bool
) -> Chosen | None:
    """What ``node``, a boolean (or a mask that is added) read at ``place``, chooses; None where it is no choice.

    ``negated``: a key is seen where the boolean is False.
    """
    try:
        found = _listed_by(node, place, negated)
    except OpaqueError:
        return None
    if found is None:
        return None
    outer = set(flatten(found.indices.axes)) - set(found.count)
    # Of the keys the list has none, and of heads none, or each head would have one of its own.
    return found if outer <= {*batch, *queries} and found.keys == keys else None


def _listed_by(node: fx.Node, place: Place, negated: bool) -> Chosen | None:
    boolean = val(node).dtype == torch.bool
    # Whether a number of `node` shows a key. What is added hides one by all other numbers that were let through.
    shows: _Shows = (lambda number: bool(number) is not negated) if boolean else (lambda number: number == 0)
    while True:
        if (numbers := scattered(node)) is not None:
            rest, there = numbers
            return _listed(node, place) if shows(there) and not shows(rest) else None
        if packet(node) is aten.scatter_add:
            return _counted(node, place, shows)
        if (step := asked(node)) is not None:
            node, shows = step[0], _after(step[1], shows)
        elif (inner := moved(node, place)) is not None:
            node, place = inner
        else:
            return None


def _after(step: Callable[[float], float], shows: _Shows) -> _Shows:
    return lambda number: shows(step(number))


def _counted(node: fx.Node, place: Place, shows: _Shows) -> Chosen | None:
    """``scatter_add(zeros, dim, index, flags)``, of which a count of 0 hides a key, and every other shows it."""
    flags = argument(node, 3, "src")
    flag = _flag(flags)
    # In a smaller dtype counts come round to 0 again.
    if constant(argument(node, 0, "self")) != 0 or flag is None or val(node).dtype not in _COUNTS:
        return None
    one = flag if isinstance(flag, float) else 1.0
    # Of one comparison with a number: what it says of 0, of the least and of the largest count it says of all.
    if shows(0.0) or not shows(one) or not shows(float("inf")):
        return None
    found = _listed(node, place)
    if found is None or not same_sizes(shape(flags), shape(argument(node, 2, "index"))):
        return None
    return found if isinstance(flag, float) else replace(found, flags=Operand(flag, found.indices.axes))


def _flag(node: object) -> fx.Node | float | None:
    """The number that counts, or the boolean of which 1 or 0 does; None for others, of which counts could cancel."""
    if (number := constant(node)) is not None:
        return float(number) if number > 0 else None
    if is_tensor(node) and val(node).dtype == torch.bool:
        return node
    how = decode(node)
    return _flag(how.x) if isinstance(how, Copy) else None


def _listed(node: fx.Node, place: Place) -> Chosen | None:
    """The list that a ``scatter`` or ``scatter_add`` at ``place`` is told."""
    dim, index = axis(argument(node, 1, "dim"), len(place)), argument(node, 2, "index")
    if not is_tensor(index) or len(shape(index)) != len(place) or val(index).dtype not in _WHOLE:
        return None
    others = [(own, of) for k, (own, of) in enumerate(zip(shape(index), shape(node), strict=True)) if k != dim]
    if not all(same(own, of) for own, of in others):  # the rest of the rows is not written to
        return None
    count, keys = fresh_axis(shape(index)[dim]), place[dim].axis
    # Of a slice, an entry may name none.
    if keys is None or not same(shape(node)[dim], axis_size(keys)):
        return None
    listed = operand_at(index, [place_of([count])[0] if k == dim else at for k, at in enumerate(place)])
    return Chosen(listed, count, keys, _names_once(index, place_of(listed.axes), count))


def _names_once(index: fx.Node, place: Place, count: Axis) -> bool:
    """Whether no two entries along ``count`` are equal."""
    if not count:
        return True
    found = _ordered(index, place)
    if found is None:
        return False
    _, place, along = found
    # Entry i is the place of an element that i alone determines, in a row that i does not determine.
    apart = all(count not in at.steps for k, at in enumerate(place) if k != along)
    return count in place[along].steps and not place[along].terms and apart


def _ordered(index: fx.Node, place: Place) -> tuple[fx.Node, Place, int] | None:
    """The places found by an operator that ``index`` only moves, where they are read, and along which axis they are."""
    while (along := _order(index)) is None:
        try:
            found = moved(index, place)
        except OpaqueError:
            return None
        # A number of another dtype may be a rounded one.
        if found is None or val(found[0]).dtype not in _WHOLE:
            return None
        index, place = found
    return index, place, along


def _order(node: fx.Node) -> int | None:
    """The axis along which ``node`` holds places, each at most once; None where it is not known to."""
    if packet(node) is aten.argsort:
        return axis(argument(node, 1, "dim", -1), len(shape(node)))
    if packet(node) is not operator.getitem or node.args[1] != 1:
        return None
    of = node.args[0]
    position = _ORDERS.get(packet(of))
    if position is None or not isinstance(of, fx.Node):
        return None
    return axis(argument(of, position, "dim", -1), len(shape(node)))


def ranked(chosen: Chosen) -> tuple[fx.Node, Place] | None:
    """What a ``topk`` chose the largest of, and where: along the keys for each query. None where no topk chose."""
    found = _ordered(chosen.indices.node, place_of(chosen.indices.axes))
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
