"""Read masks as conjunctions of parts: comparisons of positions, index lists, and other booleans.

A key is seen where all parts of a mask hold. A part is a boolean that is read at a place (``affine.Index``). A
comparison of numbers that are affine in positions is expressed as ``bound >= 0``. An additive mask is 0 where all its
parts hold. Elsewhere, the mask is one number: minus infinity, or a very low number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import fx

from mla_compile.passes.attention.affine import (
    Index,
    IndexReader,
    OpaqueError,
    as_in,
    asked,
    broadcast,
    constant,
    moved,
    operand_at,
    place_of,
    scattered,
)
from mla_compile.passes.attention.site import NEGLIGIBLE, Affine, MaskTerm
from mla_compile.passes.ir.graph import argument, is_tensor, operator_name, packet, shape, val
from mla_compile.passes.ir.labels import LABELLED
from mla_compile.passes.ir.locate import locate
from mla_compile.passes.ir.moves import Copy, Join, Rearrange, Select, Slice
from mla_compile.passes.ir.operators import behind, decode
from mla_compile.passes.ir.walk import reachable

aten = torch.ops.aten


@dataclass(frozen=True)
class Condition:
    """A boolean that has to be True (False if ``negated``) for a key to be seen.

    ``bound``: if set, the condition is equivalent to ``bound >= 0``. ``added``: ``node`` holds no booleans, but numbers
    that are added to the scores where the other conditions hold. ``outside``: an equivalent condition on a later
    tensor that can be a mask, if ``node`` cannot be one.
    """

    node: fx.Node
    place: Index
    negated: bool
    bound: Affine | None = None
    added: bool = False
    outside: Condition | None = None

    def mask(self) -> MaskTerm:
        """Return a mask for this part alone. Raises :class:`OpaqueError` if the part's tensor cannot be a mask."""
        if self.outside is not None:
            return self.outside.mask()
        if self.added:
            return MaskTerm("add", operand_at(self.node, self.place, longer=True))
        return MaskTerm("drop" if self.negated else "keep", operand_at(self.node, self.place, longer=True))

    @property
    def why(self) -> str:
        """Explain why the part remains a mask."""
        if self.bound is None:
            return said(self.node)
        return f"{operator_name(self.node)} is neither a length nor a diagonal that ends at the last key"

    @property
    def named(self) -> bool:
        """Whether the part is read along axes of the attention, so that its tensor can be a mask by itself."""
        try:
            node = self.mask().operand.node
        except OpaqueError:
            return False
        return self.added or val(node).dtype == torch.bool


class Masks(IndexReader):
    """Splits masks into parts that all have to hold. If ``any_numbers``, a part may be an arbitrary additive mask."""

    def __init__(self, *, any_numbers: bool = False) -> None:
        super().__init__()
        self.any_numbers = any_numbers

    def term(self, term: MaskTerm) -> tuple[list[Condition], float]:
        """Return the parts of a mask, and the number that the mask adds or fills in where a part does not hold."""
        node, place = term.operand.node, place_of(term.operand.axes)
        if term.kind != "add":
            return self.parts(node, place, negated=term.kind == "drop"), term.fill
        parts, fill = self.added(node, place)
        if any(part.added for part in parts) and (term.scale != 1.0 or term.dtype is not None):
            raise OpaqueError
        fill *= term.scale
        # An added number acts as a fill only if it is very low. If the sum is converted to a narrower dtype, the number
        # must also become infinite in that dtype.
        if fill < NEGLIGIBLE and term.dtype is not None:
            fill = float(torch.tensor(fill, dtype=torch.float64).to(term.dtype))
        if not fill < NEGLIGIBLE or (term.dtype is not None and fill > float("-inf")):
            raise OpaqueError
        return parts, fill

    def parts(self, given: object, place: Index, *, negated: bool) -> list[Condition]:
        """Read the tensor ``given`` at ``place`` as parts. Raises :class:`OpaqueError` if it is not boolean."""
        if not is_tensor(given) or val(given).dtype != torch.bool:
            raise OpaqueError
        try:
            return self._inside(given, place, negated=negated)
        except OpaqueError:
            return [Condition(given, place, negated)]

    def _inside(self, node: fx.Node, place: Index, *, negated: bool) -> list[Condition]:
        rule = _BOOLEAN.get(packet(node))
        if rule is not None:
            return rule(self, node, place, negated=negated)
        found = moved(node, place)
        if found is not None:
            return [_named_by(Condition(node, place, negated), part) for part in self.parts(*found, negated=negated)]
        number = constant(node)
        if number is None or bool(number) == negated:
            raise OpaqueError
        return []

    def added(self, node: fx.Node, place: Index) -> tuple[list[Condition], float]:
        """Return the parts of an additive mask and its number.

        Where all parts hold, the mask is 0. Elsewhere, the mask is the number.
        """
        parts, number = self._added(node, place)
        fill = as_in(node, number)
        if fill is None:
            raise OpaqueError
        return parts, fill

    def _added(self, node: fx.Node, place: Index) -> tuple[list[Condition], float]:
        if packet(node) is aten.where:
            condition, yes, no = (argument(node, k, name) for k, name in enumerate(("condition", "self", "other")))
            negated = constant(yes) not in (None, 0)
            shown, value = (no, yes) if negated else (yes, no)
            return self._filled(shown, condition, value, place, negated=negated)
        if packet(node) is aten.masked_fill:
            shown, condition, value = (argument(node, k, name) for k, name in enumerate(("self", "mask", "value")))
            if constant(value) == 0:
                return self._filled(value, condition, shown, place, negated=False)
            return self._filled(shown, condition, value, place, negated=True)
        if packet(node) is aten.add and argument(node, 2, "alpha", 1) == 1:
            return self._summed([argument(node, k, name) for k, name in enumerate(("self", "other"))], place)
        if packet(node) is aten.triu and (fill := constant(argument(node, 0, "self"))) is not None:
            return [Condition(node, place, negated=False, bound=Affine(-1) - _beyond(node, place))], fill
        if (numbers := scattered(node)) is not None and numbers[1] == 0:
            return [Condition(node, place, negated=False)], numbers[0]
        if (found := moved(node, place)) is not None:
            return self.added(*found)
        raise OpaqueError

    def _filled(
        self, shown: object, condition: object, value: object, place: Index, *, negated: bool
    ) -> tuple[list[Condition], float]:
        """Read a mask that is ``shown`` (0 or another mask) where ``condition`` holds, and ``value`` elsewhere.

        With ``negated``, the mask is ``shown`` where ``condition`` fails.
        """
        fill = constant(value)
        if fill is None or not is_tensor(condition):
            raise OpaqueError
        parts = self.parts(condition, broadcast(shape(condition), place), negated=negated)
        if constant(shown) == 0:
            return parts, fill
        if not is_tensor(shown):
            raise OpaqueError
        try:
            more, other = self.added(shown, broadcast(shape(shown), place))
        except OpaqueError:
            if not self.any_numbers:
                raise
            return [Condition(shown, broadcast(shape(shown), place), negated=False, added=True), *parts], fill
        # With two different fills, a fully masked row would not weigh all keys equally.
        if other != fill:
            raise OpaqueError
        return [*more, *parts], fill

    def _summed(self, masks: Sequence[object], place: Index) -> tuple[list[Condition], float]:
        """Read a sum of masks, each of which fills in minus infinity."""
        parts: list[Condition] = []
        for one in masks:
            if not is_tensor(one):
                raise OpaqueError
            more, fill = self.added(one, broadcast(shape(one), place))
            if fill != float("-inf"):
                raise OpaqueError
            parts += more
        return parts, float("-inf")

    def hidden(self, scores: fx.Node, place: Index) -> tuple[list[Condition], fx.Node]:
        """Return the conditions by which ``scores`` were masked, and the scores before masking."""
        how = decode(scores)
        if isinstance(how, Copy) and val(how.x).dtype.is_floating_point and val(scores).dtype.is_floating_point:
            return self.hidden(how.x, place)
        if packet(scores) is aten.add and argument(scores, 2, "alpha", 1) == 1:
            for mask, rest in (scores.args[:2], scores.args[1::-1]):
                if not is_tensor(mask) or not is_tensor(rest):
                    continue
                try:
                    parts, fill = self.added(mask, broadcast(shape(mask), place))
                except OpaqueError:
                    continue
                told = fill < NEGLIGIBLE and not any(part.added for part in parts)
                return self._also(parts, rest, place) if told else ([], scores)
        if packet(scores) is aten.masked_fill and (constant(argument(scores, 2, "value")) or 0) < NEGLIGIBLE:
            rest, condition = argument(scores, 0, "self"), argument(scores, 1, "mask")
            parts = self.parts(condition, broadcast(shape(condition), place), negated=True)
            return self._also(parts, rest, place)
        return [], scores

    def _also(self, parts: list[Condition], rest: fx.Node, place: Index) -> tuple[list[Condition], fx.Node]:
        more, scores = self.hidden(rest, broadcast(shape(rest), place))
        return [*parts, *more], scores


def _named_by(outside: Condition, part: Condition) -> Condition:
    known = part.bound is not None or part.named or not outside.named
    return part if known else replace(part, outside=outside)


def _beyond(node: fx.Node, place: Index) -> Affine:
    """Return ``column - row - diagonal`` of ``tril`` and ``triu``."""
    diagonal = argument(node, 1, "diagonal", 0)
    return place[-1] - place[-2] - IndexReader().read(diagonal, ())


def _both(masks: Masks, node: fx.Node, place: Index, *, negated: bool) -> list[Condition]:
    """Read ``a and b`` or ``a or b``."""
    operands = [(argument(node, k, name), False) for k, name in enumerate(("self", "other"))]
    return _joined(masks, operands, place, negated=negated, either=packet(node) in _OR)


def _joined(
    masks: Masks, operands: Iterable[tuple[object, bool]], place: Index, *, negated: bool, either: bool
) -> list[Condition]:
    """Read ``a and b``, or ``a or b`` if ``either``. Each operand has a flag that says whether it is negated."""
    # A constant operand that does not decide the result is dropped.
    unknown = [
        (x, inverse) for x, inverse in operands if (n := constant(x)) is None or (bool(n) is not inverse) is either
    ]
    # An `or` (or a negated `and`) of several operands is not a conjunction. An `or` of no operands never holds.
    if negated is not either and len(unknown) != 1:
        raise OpaqueError
    found: list[Condition] = []
    for x, inverse in unknown:
        if not is_tensor(x):
            raise OpaqueError
        found += masks.parts(x, broadcast(shape(x), place), negated=negated is not inverse)
    return found


def _chosen_of(masks: Masks, node: fx.Node, place: Index, *, negated: bool) -> list[Condition]:
    """Read ``where(c, a, b)`` and ``masked_fill(b, c, a)`` of booleans, where a or b is constant."""
    if packet(node) is aten.where:
        c, a, b = (argument(node, k, name) for k, name in enumerate(("condition", "self", "other")))
    else:
        b, c, a = (argument(node, k, name) for k, name in enumerate(("self", "mask", "value")))
    yes, no = constant(a), constant(b)
    if no is not None:  # c and a; (not c) or a
        operands, either = ((c, bool(no)), (a, False)), bool(no)
    elif yes is not None:  # (not c) and b; c or b
        operands, either = ((c, not yes), (b, False)), bool(yes)
    else:
        raise OpaqueError
    return _joined(masks, operands, place, negated=negated, either=either)


def _not(masks: Masks, node: fx.Node, place: Index, *, negated: bool) -> list[Condition]:
    return masks.parts(argument(node, 0, "self"), place, negated=not negated)


def _asked(masks: Masks, node: fx.Node, place: Index, *, negated: bool) -> list[Condition]:
    """Read a comparison of positions, or a comparison of a cast boolean with a number."""
    found = asked(node)
    x = None if found is None else _boolean(found[0])
    if found is None or x is None:
        return _compared(masks, node, place, negated=negated)
    no, yes = found[1](0.0), found[1](1.0)
    if bool(no) is bool(yes):
        raise OpaqueError
    return masks.parts(x, place, negated=negated is not bool(no))


def _boolean(node: fx.Node) -> fx.Node | None:
    """Return the boolean tensor from which ``node`` was cast, or ``node`` if it is boolean; None otherwise."""
    while val(node).dtype != torch.bool:
        how = decode(node)
        if not isinstance(how, Copy):
            return None
        node = how.x
    return node


def _compared(masks: Masks, node: fx.Node, place: Index, *, negated: bool) -> list[Condition]:
    """Read ``a <= b`` as ``b - a >= 0``, and ``a < b`` as ``b - a - 1 >= 0`` or, if negated, as ``a - b >= 0``."""
    a, b = (masks.at_operand(node, k, name, place) for k, name in enumerate(("self", "other")))
    op = packet(node)
    if op not in _ORDERS:
        raise OpaqueError
    if op in (aten.gt, aten.ge):
        a, b = b, a
    strict = op in (aten.lt, aten.gt)
    if negated:
        a, b, strict = b, a, not strict
    return [Condition(node, place, negated, b - a - Affine(int(strict)))]


def _triangle(masks: Masks, node: fx.Node, place: Index, *, negated: bool) -> list[Condition]:
    """Read ``tril`` or ``triu`` of a boolean, which is False on one side of a diagonal."""
    inner = masks.parts(argument(node, 0, "self"), place, negated=False)
    beyond = _beyond(node, place)
    bound = beyond if packet(node) is aten.triu else beyond * -1
    if not negated:
        return [*inner, Condition(node, place, negated=False, bound=bound)]
    if inner:
        raise OpaqueError
    return [Condition(node, place, negated=True, bound=Affine(-1) - bound)]


class _Rule(Protocol):
    def __call__(self, masks: Masks, node: fx.Node, place: Index, *, negated: bool) -> list[Condition]: ...


_ORDERS = (aten.le, aten.lt, aten.ge, aten.gt)
_OR = {aten.logical_or, aten.bitwise_or, aten.__or__}
_BOOLEAN: dict[object, _Rule] = {
    **dict.fromkeys((aten.logical_and, aten.bitwise_and, aten.__and__, aten.mul, *_OR), _both),
    **dict.fromkeys((aten.logical_not, aten.bitwise_not), _not),
    **dict.fromkeys((aten.where, aten.masked_fill), _chosen_of),
    **dict.fromkeys((*_ORDERS, aten.eq, aten.ne), _asked),
    **dict.fromkeys((aten.tril, aten.triu), _triangle),
}


def said(node: fx.Node, why: str = "") -> str:
    """Describe a mask that does not compare positions: name its operator and the reason ``why`` it stays a mask."""
    node = behind(node, (Copy, Rearrange))[-1]
    if node.op != "call_function":
        return f"{node.name} is {'an input' if node.op == 'placeholder' else 'a buffer'}"
    numbers = scattered(node)
    if not why and numbers is not None and val(node).dtype.is_floating_point:
        why = "adds {1:g} to the scores of listed keys and {0:g} to all others".format(*numbers)
    if not why:
        why = "shows a key if either mask does" if packet(node) in _OR else "compares no positions"
    source = locate(node).source
    return f"{operator_name(node)}{'' if source is None else f' at {source}'} {why}"


def equal(a: Condition, b: Condition) -> bool:
    """Whether two parts are the same condition."""
    if a.bound is not None and b.bound is not None:
        return a.bound == b.bound
    return (a.node, a.negated, a.added, list(a.place)) == (b.node, b.negated, b.added, list(b.place))


_PLAIN = {aten.relu, aten.mul, aten.div, aten.add, aten.sub, aten.neg, aten.sigmoid, aten.tanh}
"""Operators that turn finite numbers into finite numbers."""
_MOVES = (Copy, Rearrange, Slice, Select, Join)


def hides_nothing(scores: fx.Node) -> bool:
    """Whether all operators between the products and ``scores`` keep scores finite, so that none can hide a key."""

    def behind(node: fx.Node) -> Iterable[fx.Node]:
        made = packet(node) in LABELLED or node.op == "placeholder"
        return () if made else node.all_input_nodes

    steps = (n for n in reachable([scores], behind) if n.op == "call_function" and is_tensor(n))
    return all(packet(n) in _PLAIN or packet(n) in LABELLED or isinstance(decode(n), _MOVES) for n in steps)
