"""Which keys the masks of an attention let through, proved from how the masks are made.

Most masks are no data. They are comparisons of positions, ``t <= past + s``, joined with one that says which tokens are
padding. Comparisons become arguments of the attention: a length for each batch entry, causality, a window. A kernel
reads no key beyond the length, and no mask to learn that. What no comparison explains is left over as a mask.

With ``p`` and ``f`` whole numbers that do not depend on query ``s`` and key ``t``, and S queries of T keys:

    t <= p                      length p + 1
    t <= p + s                  causal, and length p + S: where S = 1, or p + S is T; else it stays a mask, because a
                                length beyond T counts as T and would move the diagonal
    t >  p + s - window         beside t <= p + s where that is causal: a window
    any of them, for all s, t   nothing
    t is in a list              the list (:mod:`mla_compile.passes.attention.chosen`)

A mask that fills in a finite number instead of minus infinity makes a query that sees no key weigh all keys alike. It
is only explained where every query is known to see a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from mla_compile.passes.attention.affine import (
    OpaqueError,
    Place,
    Reader,
    broadcast,
    constant,
    moved,
    operand_at,
    place_of,
)
from mla_compile.passes.attention.chosen import chosen, ranked, scattered
from mla_compile.passes.attention.site import NEGLIGIBLE, Affine, AttentionSite, Chosen, MaskTerm, Visible
from mla_compile.passes.ir.axes import Axis, axis_size, flatten
from mla_compile.passes.ir.graph import argument, is_tensor, operator_name, packet, shape, val
from mla_compile.passes.ir.operators import Copy, decode
from mla_compile.passes.ir.sizes import Size, at_least, same

aten = torch.ops.aten


def visible(site: AttentionSite, batch: Axis) -> Visible:
    """What the masks of ``site`` let through; ``batch``: the atoms that a length may differ along."""
    seen = _visible(site, batch, lists=True)
    return seen if seen.chosen is None else replace(seen, masked=_visible(site, batch, lists=False))


def _visible(site: AttentionSite, batch: Axis, *, lists: bool) -> Visible:
    reader = _Masks()
    read: list[tuple[MaskTerm, list[_Part]]] = []
    left: list[tuple[MaskTerm, str]] = []
    finite = False
    for term in site.masks:
        try:
            parts, fill = reader.term(term)
        except OpaqueError:
            left.append((term, _said(term.operand.node)))
            continue
        read.append((term, parts))
        finite = finite or fill > float("-inf")
    explained = _Explained(site, batch, reader.numbers)
    every = [part for _, parts in read for part in parts]
    rest = explained.take(every)
    for _, parts in read:
        for part in parts:
            if lists and part in rest and explained.choose(part):
                rest.remove(part)
                explained.sees(reader, [p for p in every if p is not part])
    for term, parts in read:
        unexplained = [part for part in parts if part in rest]
        # A part that is no boolean of its own stays as the mask that it is read from.
        named = all(p.named for p in unexplained)
        left += [(part.mask() if named else term, part.why) for part in unexplained[: None if named else 1]]
    found = explained.visible(left)
    if finite and not found.always:
        why = "fills in a finite number, and a query may see no key"
        return Visible(site.masks, causal=site.causal, always=False, left=(why,))
    if len(rest) == len(every):
        return Visible(site.masks, causal=site.causal, always=not site.masks, left=found.left)
    return found


@dataclass(frozen=True)
class _Part:
    """A boolean that has to be True (``negated``: False) for a key to be seen: ``bound`` >= 0, where it is read."""

    node: fx.Node
    place: Place
    negated: bool
    bound: Affine | None = None

    def mask(self) -> MaskTerm:
        """What is left of a mask of which only this part was not explained. Raises :class:`OpaqueError`."""
        return MaskTerm("drop" if self.negated else "keep", operand_at(self.node, self.place))

    @property
    def why(self) -> str:
        """Why it is left over."""
        if self.bound is None:
            return _said(self.node)
        return f"{operator_name(self.node)} is no length, and no diagonal that ends at the last key"

    @property
    def named(self) -> bool:
        """Whether it is a boolean tensor read along the axes of the attention, which can be a mask by itself."""
        try:
            return val(self.mask().operand.node).dtype == torch.bool
        except OpaqueError:
            return False


class _Masks(Reader):
    """Reads masks as parts that all have to hold."""

    def term(self, term: MaskTerm) -> tuple[list[_Part], float]:
        """The parts of a mask, and what it adds or fills in elsewhere."""
        node, place = term.operand.node, place_of(term.operand.axes)
        if term.kind != "add":
            return self.parts(node, place, term.kind == "drop"), term.fill
        parts, fill = self.added(node, place)
        fill *= term.scale
        # What is added to a score is a fill where no score shows beside it, in no dtype that it goes through.
        if not fill < NEGLIGIBLE or (term.dtype is not None and fill > float("-inf")):
            raise OpaqueError
        return parts, fill

    def parts(self, given: object, place: Place, negated: bool) -> list[_Part]:
        """``given``, a boolean tensor at ``place``, as parts. Raises :class:`OpaqueError` where it is none."""
        if not is_tensor(given) or val(given).dtype != torch.bool:
            raise OpaqueError
        try:
            return self._inside(given, place, negated)
        except OpaqueError:
            return [_Part(given, place, negated)]

    def _inside(self, node: fx.Node, place: Place, negated: bool) -> list[_Part]:
        rule = _BOOLEAN.get(packet(node))
        if rule is not None:
            return rule(self, node, place, negated)
        found = moved(node, place)
        if found is not None:
            return self.parts(*found, negated)
        number = constant(node)
        if number is None or bool(number) == negated:
            raise OpaqueError
        return []

    def added(self, node: fx.Node, place: Place) -> tuple[list[_Part], float]:
        """A mask that is added: its parts, and the number that it is where they do not hold; it is 0 where they do."""
        if packet(node) is aten.where:
            condition, yes, no = (argument(node, k, name) for k, name in enumerate(("condition", "self", "other")))
            negated = constant(yes) not in (None, 0)
            shown, value = (no, yes) if negated else (yes, no)
            return self._filled(shown, condition, value, place, negated)
        if packet(node) is aten.masked_fill:
            shown, condition, value = (argument(node, k, name) for k, name in enumerate(("self", "mask", "value")))
            return self._filled(shown, condition, value, place, negated=True)
        if packet(node) is aten.add and argument(node, 2, "alpha", 1) == 1:
            return self._summed([argument(node, k, name) for k, name in enumerate(("self", "other"))], place)
        if packet(node) is aten.triu and (fill := constant(argument(node, 0, "self"))) is not None:
            return [_Part(node, place, False, Affine(-1) - _beyond(node, place))], fill
        if (numbers := scattered(node)) is not None and numbers[1] == 0:
            return [_Part(node, place, False)], numbers[0]
        if (found := moved(node, place)) is not None:
            return self.added(*found)
        raise OpaqueError

    def _filled(
        self, shown: object, condition: object, value: object, place: Place, negated: bool
    ) -> tuple[list[_Part], float]:
        """``shown``, 0 or itself a mask, where the condition holds (``negated``: does not), ``value`` elsewhere."""
        fill = constant(value)
        if fill is None or not is_tensor(condition):
            raise OpaqueError
        parts = self.parts(condition, broadcast(shape(condition), place), negated)
        if constant(shown) == 0:
            return parts, fill
        if not is_tensor(shown):
            raise OpaqueError
        more, other = self.added(shown, broadcast(shape(shown), place))
        # Which of two numbers stands where shows in a row of nothing else.
        if other != fill:
            raise OpaqueError
        return [*more, *parts], fill

    def _summed(self, masks: Sequence[object], place: Place) -> tuple[list[_Part], float]:
        """Masks that are added up, all of them of minus infinity."""
        parts: list[_Part] = []
        for one in masks:
            if not is_tensor(one):
                raise OpaqueError
            more, fill = self.added(one, broadcast(shape(one), place))
            if fill != float("-inf"):
                raise OpaqueError
            parts += more
        return parts, float("-inf")

    def hidden(self, scores: fx.Node, place: Place) -> tuple[list[_Part], fx.Node]:
        """The parts that have to hold for a number of ``scores`` not to be hidden beside all others, and the numbers.

        Only those that are known.
        """
        how = decode(scores)
        if isinstance(how, Copy):
            return self.hidden(how.x, place)
        if packet(scores) is aten.add:
            for mask, rest in (scores.args[:2], scores.args[1::-1]):
                if not is_tensor(mask) or not is_tensor(rest):
                    continue
                try:
                    parts, fill = self.added(mask, broadcast(shape(mask), place))
                except OpaqueError:
                    continue
                return self._also(parts, rest, place) if fill < NEGLIGIBLE else ([], scores)
        if packet(scores) is aten.masked_fill and (constant(argument(scores, 2, "value")) or 0) < NEGLIGIBLE:
            rest, condition = argument(scores, 0, "self"), argument(scores, 1, "mask")
            parts = self.parts(condition, broadcast(shape(condition), place), negated=True)
            return self._also(parts, rest, place)
        return [], scores

    def _also(self, parts: list[_Part], rest: fx.Node, place: Place) -> tuple[list[_Part], fx.Node]:
        more, scores = self.hidden(rest, broadcast(shape(rest), place))
        return [*parts, *more], scores


def _beyond(node: fx.Node, place: Place) -> Affine:
    """``column - row - diagonal`` of ``tril`` and ``triu``."""
    diagonal = argument(node, 1, "diagonal", 0)
    return place[-1] - place[-2] - Reader().read(diagonal, ())


def _both(masks: _Masks, node: fx.Node, place: Place, negated: bool) -> list[_Part]:
    """``a and b``; under a ``not``, ``a or b``."""
    # `a or b`, and a negated `and`, hold in too many ways for parts that all have to hold.
    if negated != (packet(node) in _OR):
        raise OpaqueError
    return [
        part
        for k, name in enumerate(("self", "other"))
        for x in (argument(node, k, name),)
        for part in masks.parts(x, broadcast(shape(x), place), negated)
    ]


def _not(masks: _Masks, node: fx.Node, place: Place, negated: bool) -> list[_Part]:
    return masks.parts(argument(node, 0, "self"), place, not negated)


def _compared(masks: _Masks, node: fx.Node, place: Place, negated: bool) -> list[_Part]:
    """``a <= b`` is ``b - a >= 0``, and ``a < b`` is ``b - a - 1 >= 0``; its negation is ``a - b >= 0``."""
    a, b = (masks.at_operand(node, k, name, place) for k, name in enumerate(("self", "other")))
    op = packet(node)
    if op in (aten.gt, aten.ge):
        a, b = b, a
    strict = op in (aten.lt, aten.gt)
    if negated:
        a, b, strict = b, a, not strict
    return [_Part(node, place, negated, b - a - Affine(int(strict)))]


def _triangle(masks: _Masks, node: fx.Node, place: Place, negated: bool) -> list[_Part]:
    """``tril`` and ``triu`` of a boolean: what it says on one side of a diagonal, False on the other."""
    inner = masks.parts(argument(node, 0, "self"), place, negated=False)
    beyond = _beyond(node, place)
    bound = beyond if packet(node) is aten.triu else beyond * -1
    if not negated:
        return [*inner, _Part(node, place, False, bound)]
    if inner:
        raise OpaqueError
    return [_Part(node, place, True, Affine(-1) - bound)]


_OR = {aten.logical_or, aten.bitwise_or, aten.__or__}
_BOOLEAN: dict[object, Callable[[_Masks, fx.Node, Place, bool], list[_Part]]] = {
    **dict.fromkeys((aten.logical_and, aten.bitwise_and, aten.__and__, aten.mul, *_OR), _both),
    **dict.fromkeys((aten.logical_not, aten.bitwise_not), _not),
    **dict.fromkeys((aten.le, aten.lt, aten.ge, aten.gt), _compared),
    **dict.fromkeys((aten.tril, aten.triu), _triangle),
}


def _said(node: fx.Node) -> str:
    """What a mask is that is no comparison of positions."""
    if node.op == "call_function":
        return f"{operator_name(node)} compares no positions"
    return f"{node.name} is {'an input' if node.op == 'placeholder' else 'a buffer'}"


def _some(count: Size) -> bool:
    counts = count.args if isinstance(count, sympy.Min) else (count,)
    return all(at_least(n, 1) for n in counts)


def _equal(a: _Part, b: _Part) -> bool:
    if a.bound is not None and b.bound is not None:
        return a.bound == b.bound
    return (a.node, a.negated, list(a.place)) == (b.node, b.negated, list(b.place))


class _Explained:
    """What the parts that were understood so far say."""

    def __init__(self, site: AttentionSite, batch: Axis, numbers: dict[Size, fx.Node]) -> None:
        self.S, self.T = axis_size(site.queries), axis_size(site.keys)
        self.queries, self.keys, self.batch = site.queries, site.keys, set(batch)
        self.numbers = numbers
        self.causal = site.causal
        self.lengths: list[Affine] = []
        self.window = 0
        self.chosen: Chosen | None = None
        self.sees_one = True

    def take(self, parts: list[_Part]) -> list[_Part]:
        """Explains what it can of ``parts`` and returns the others."""
        # A window is told from the end, so ends come first.
        for rule in (self._always, self._diagonal, self._length, self._start):
            parts = [
                part for part in parts if part.bound is None or not self._within(part.bound) or not rule(part.bound)
            ]
        return parts

    def choose(self, part: _Part) -> bool:
        """Takes ``part``, of a mask, as a choice of keys if it is the first one."""
        if self.chosen is not None:
            return False
        self.chosen = chosen(self.queries, self.keys, self.batch, part.node, part.place, negated=part.negated)
        return self.chosen is not None

    def sees(self, masks: _Masks, others: Sequence[_Part]) -> None:
        """Finds out whether a query that sees a key by the ``others`` sees a chosen one.

        It does where the best of scores were chosen, and these were hidden by the same masks.
        """
        assert self.chosen is not None
        self.sees_one = False
        best = ranked(self.chosen)
        if best is None or not _some(self.chosen.size):
            return
        hidden, scores = masks.hidden(*best)
        within = all(any(_equal(a, b) for b in hidden) for a in others)
        self.sees_one = within and all(any(_equal(a, b) for b in others) for a in hidden)
        if self.sees_one:
            self.chosen = replace(self.chosen, scores=scores)

    def visible(self, left: Sequence[tuple[MaskTerm, str]]) -> Visible:
        always = not left and not self.lengths and (not self.causal or at_least(self.T, self.S)) and self.sees_one
        numbers = tuple(self.numbers.items())
        masks = tuple(mask for mask, _ in left)
        why = tuple(dict.fromkeys(why for _, why in left))
        return Visible(masks, tuple(self.lengths), numbers, self.causal, self.window, self.chosen, None, always, why)

    def _within(self, bound: Affine) -> bool:
        """Whether it is of this query, this key and this batch entry only."""
        axes = {a for operand in bound.terms for a in flatten(operand.axes)}
        return set(bound.steps) <= {self.queries, self.keys} and axes <= self.batch

    def _step(self, bound: Affine) -> tuple[int, int]:
        """By how much the bound grows from one query to the next, and from one key to the next."""
        return bound.steps.get(self.queries, 0), bound.steps.get(self.keys, 0)

    def _always(self, bound: Affine) -> bool:
        least = bound.const
        for step, count in zip(self._step(bound), (self.S, self.T), strict=True):
            least = least + min(step, 0) * (count - 1)
        return not bound.terms and at_least(least, 0)

    def _diagonal(self, bound: Affine) -> bool:
        """Whether it is ``t <= p + s``."""
        if self._step(bound) != (1, -1) or bound.terms or not same(bound.const + self.S, self.T):
            return False
        self.causal = True
        return True

    def _length(self, bound: Affine) -> bool:
        """Whether it is ``t <= p``."""
        # Beside a diagonal a length would move it.
        if self._step(bound) != (0, -1) or self.causal:
            return False
        length = Affine(bound.const + 1, {}, bound.terms)
        if self._number(length.const) is None:
            return False
        if length not in self.lengths:
            self.lengths.append(length)
        return True

    def _start(self, bound: Affine) -> bool:
        """Whether it is ``t >= s - c``, or ``t >= f`` for the one query there is: so many keys back from the last."""
        along = (-1, 1) if self.queries else (0, 1)
        # A window is counted from a length, and what a length of more than T counts as is not what the mask meant.
        if self._step(bound) != along or self.lengths or not (self.causal or same(self.S, 1)):
            return False
        # t > T - S + s - window is t - s + (window - 1 - T + S) >= 0.
        window = Affine(bound.const, {}, bound.terms) + Affine(self.T) - Affine(self.S - 1)
        if window.terms or not isinstance(window.const, int) or window.const <= 0:
            return False
        self.window = min(self.window or window.const, window.const)
        return True

    def _number(self, const: Size) -> int | None:
        """What is to be added to a size that a node of the graph holds (or to 0) to get ``const``; None: not known."""
        return offset_of(const, self.numbers)[1]


def offset_of(const: Size, numbers: dict[Size, fx.Node]) -> tuple[fx.Node | None, int | None]:
    """``const`` as a size that a node holds, if it is no number, and what is to be added to it; None: not known."""
    if isinstance(const, int):
        return None, const
    for value, node in numbers.items():
        rest = sympy.expand(const - value)
        if rest.is_Integer:
            return node, int(rest)
    return None, None
