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
is only explained where every query is known to see a key, or, beside a list, where that is made up for afterwards.
What a mask from outside adds to the listed keys is left over as a mask, and there it may be any number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import sympy
from torch import fx

from mla_compile.passes.attention.affine import OpaqueError, never_negative
from mla_compile.passes.attention.chosen import chosen, ranked
from mla_compile.passes.attention.masks import Masks, Part, equal, hides_nothing, said
from mla_compile.passes.attention.site import VANISHING, Affine, AttentionSite, Chosen, MaskTerm, Visible
from mla_compile.passes.ir.axes import Axis, axis_size, flatten
from mla_compile.passes.ir.sizes import Size, at_least, least_of, same


def visible(site: AttentionSite, batch: Axis) -> Visible:
    """What the masks of ``site`` let through; ``batch``: the atoms that a length may differ along."""
    seen = _visible(site, batch, lists=True)
    return seen if seen.chosen is None else replace(seen, masked=_visible(site, batch, lists=False))


def _visible(
    site: AttentionSite,
    batch: Axis,
    *,
    lists: bool,
    any_numbers: bool | None = None,
    whole: Mapping[MaskTerm, str] = MappingProxyType({}),
) -> Visible:
    """``whole``: masks of which nothing is to be told, and why."""
    reader = Masks(any_numbers=lists if any_numbers is None else any_numbers)
    read: list[tuple[MaskTerm, list[Part]]] = []
    left: list[tuple[MaskTerm, str]] = []
    fills: list[float] = []
    for term in site.masks:
        if term in whole:
            left.append((term, whole[term]))
            continue
        try:
            parts, fill = reader.term(term)
        except OpaqueError:
            left.append((term, said(term.operand.node)))
            continue
        read.append((term, parts))
        fills.append(fill)
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
        # A part that is no boolean of its own stays as the mask that it is read from, which says all of its parts.
        if unnamed := [p for p in unexplained if not p.named]:
            return _visible(
                site, batch, lists=lists, any_numbers=any_numbers, whole={**whole, term: explained.why(unnamed[0])}
            )
        left += [(part.mask(), explained.why(part)) for part in unexplained]
    found = explained.visible(left)
    # Numbers of any kind are looked up where a list names a key, and then nothing else may say what is seen.
    if any(part.added for part in every) and (
        found.chosen is None or len(every) > 2 or len(site.masks) > 1 or site.causal or not all(p.added for p in rest)
    ):
        return _visible(site, batch, lists=lists, any_numbers=False, whole=whole)
    if any(fill > float("-inf") for fill in fills) and not found.always:
        # Several masks that each fill in a number could add up to others, and beside is_causal some keys weigh nothing.
        if found.chosen is not None and len(site.masks) == 1 and not site.causal and fills[0] < VANISHING:
            return replace(found, alike=True, fill=fills[0])
        why = "fills in a finite number, and a query may see no key"
        return Visible(site.masks, causal=site.causal, always=False, left=(why,))
    if len(rest) == len(every):
        return Visible(site.masks, causal=site.causal, always=not site.masks, left=found.left)
    return found


def _some(count: Size) -> bool:
    return all(at_least(n, 1) for n in least_of(count))


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
        self.no_list: dict[fx.Node, str] = {}
        self.sees_one = True

    def take(self, parts: list[Part]) -> list[Part]:
        """Explains what it can of ``parts`` and returns the others."""
        # A window is told from the end, so ends come first.
        for rule in (never_negative, self._diagonal, self._length, self._start):
            parts = [
                part for part in parts if part.bound is None or not self._within(part.bound) or not rule(part.bound)
            ]
        return parts

    def choose(self, part: Part) -> bool:
        """Takes ``part``, of a mask, as a choice of keys if it is the first one."""
        if self.chosen is not None:
            return False
        found = chosen(self.queries, self.keys, self.batch, part.node, part.place, negated=part.negated)
        if isinstance(found, str):
            self.no_list[part.node] = said(part.node, found)
            return False
        self.chosen = found
        return found is not None

    def why(self, part: Part) -> str:
        """Why a part is left over."""
        return self.no_list.get(part.node, part.why)

    def sees(self, masks: Masks, others: Sequence[Part]) -> None:
        """Finds out whether a query that sees a key by the ``others`` sees a chosen one.

        It does where the best of scores were chosen, and these were hidden by the same masks.
        """
        assert self.chosen is not None
        self.sees_one = False
        best = ranked(self.chosen)
        # Of flags all may be off.
        if best is None or self.chosen.flags is not None or not _some(self.chosen.size):
            return
        hidden, scores = masks.hidden(*best)
        alike = all(any(equal(a, b) for b in hidden) for a in others)
        alike = alike and all(any(equal(a, b) for b in others) for a in hidden)
        self.sees_one = alike and hides_nothing(scores)
        if self.sees_one:
            self.chosen = replace(self.chosen, scores=scores)

    def visible(self, left: Sequence[tuple[MaskTerm, str]]) -> Visible:
        always = not left and not self.lengths and (not self.causal or at_least(self.T, self.S)) and self.sees_one
        numbers = tuple(self.numbers.items())
        masks = tuple(mask for mask, _ in left)
        why = tuple(dict.fromkeys(why for _, why in left))
        lengths = tuple(self.lengths)
        return Visible(masks, lengths, numbers, self.causal, self.window, self.chosen, always=always, left=why)

    def _within(self, bound: Affine) -> bool:
        """Whether it is of this query, this key and this batch entry only."""
        axes = {a for operand in bound.terms for a in flatten(operand.axes)}
        return set(bound.steps) <= {self.queries, self.keys} and axes <= self.batch

    def _step(self, bound: Affine) -> tuple[int, int]:
        """By how much the bound grows from one query to the next, and from one key to the next."""
        return bound.steps.get(self.queries, 0), bound.steps.get(self.keys, 0)

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
