"""Analyse the operators that make an attention's masks, to find out which keys the masks show.

Most masks are comparisons of positions, such as ``t <= past + s``, combined with a mask of padding tokens. The
comparisons become arguments of the attention operator: a length for each batch entry, causality, or a window. A kernel
then reads no mask, and no keys past the length. A mask that is neither a comparison nor an index list stays a mask.

``p`` is an integer that depends on neither query ``s`` nor key ``t``. There are S queries and T keys:

    t <= p                      length p + 1
    t <= p + s                  length p + 1 if S = 1; causal if p + S = T; otherwise a mask, because kernels treat
                                lengths greater than T as T, which would move the diagonal
    t >  p + s - window         a window, if t <= p + s is causal, or if S = 1 and there is no length
    a condition always met      nothing
    t is in an index list       the list (:mod:`mla_compile.passes.attention.chosen`)

If a mask fills in a finite number instead of minus infinity, a query that sees no key weighs all keys equally. Such a
mask is replaced in two cases: every query is known to see a key, or there is an index list and the rewrite reproduces
the equal weights. An additive mask over the listed keys stays a mask and may hold any numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import sympy
from torch import fx

from mla_compile.passes.attention.affine import OpaqueError, never_negative
from mla_compile.passes.attention.chosen import chosen, ranked
from mla_compile.passes.attention.masks import Condition, Masks, equal, hides_nothing, said
from mla_compile.passes.attention.site import VANISHING, Affine, AttentionSite, Chosen, MaskTerm, Visible
from mla_compile.passes.ir.axes import Axis, axis_size, flatten
from mla_compile.passes.ir.sizes import Size, at_least, least_of, same


def visible(site: AttentionSite, batch: Axis) -> Visible:
    """Analyse the masks of ``site``. Lengths may differ along the atoms ``batch``."""
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
    """Analyse the masks.

    ``lists``: whether a mask may become an index list. ``any_numbers``: whether an arbitrary additive mask is accepted
    (``lists`` by default). ``whole``: masks that must stay, each with the reason.
    """
    reader = Masks(any_numbers=lists if any_numbers is None else any_numbers)
    read: list[tuple[MaskTerm, list[Condition]]] = []
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
        # If the tensor of an unexplained part cannot be a mask by itself, the whole mask stays.
        if unnamed := [p for p in unexplained if not p.named]:
            return _visible(
                site, batch, lists=lists, any_numbers=any_numbers, whole={**whole, term: explained.why(unnamed[0])}
            )
        left += [(part.mask(), explained.why(part)) for part in unexplained]
    found = explained.visible(left)
    # An arbitrary additive mask is accepted only if there is an index list and nothing else hides keys.
    if any(part.added for part in every) and (
        found.chosen is None or len(every) > 2 or len(site.masks) > 1 or site.causal or not all(p.added for p in rest)
    ):
        return _visible(site, batch, lists=lists, any_numbers=False, whole=whole)
    if any(fill > float("-inf") for fill in fills) and not found.always:
        # Several masks are excluded, because their finite fills could add up to another number. is_causal is excluded,
        # because it gives some keys no weight.
        if found.chosen is not None and len(site.masks) == 1 and not site.causal and fills[0] < VANISHING:
            return replace(found, alike=True, fill=fills[0])
        why = "fills in a finite number, and a query may see no key"
        return Visible(site.masks, causal=site.causal, always=False, left=(why,))
    if len(rest) == len(every):
        return Visible(site.masks, causal=site.causal, always=not site.masks, left=found.left)
    return found


class _Explained:
    """Collects what the explained parts say about the visible keys."""

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

    def take(self, parts: list[Condition]) -> list[Condition]:
        """Explain as many of ``parts`` as possible and return the others."""
        # A window is measured from a diagonal or from the last key, so diagonals and lengths come first.
        for rule in (never_negative, self._diagonal, self._length, self._start):
            parts = [
                part for part in parts if part.bound is None or not self._within(part.bound) or not rule(part.bound)
            ]
        return parts

    def choose(self, part: Condition) -> bool:
        """Use ``part`` as the index list, if ``part`` is an index list and none has been found yet."""
        if self.chosen is not None:
            return False
        found = chosen(self.queries, self.keys, self.batch, part.node, part.place, negated=part.negated)
        if isinstance(found, str):
            self.no_list[part.node] = said(part.node, found)
            return False
        self.chosen = found
        return found is not None

    def why(self, part: Condition) -> str:
        """Explain why a part remains a mask."""
        return self.no_list.get(part.node, part.why)

    def sees(self, masks: Masks, others: Sequence[Condition]) -> None:
        """Set ``sees_one``: whether every query that sees any key under the conditions ``others`` sees a chosen key.

        This holds if equal conditions masked the scores that decided the choice.
        """
        assert self.chosen is not None
        self.sees_one = False
        best = ranked(self.chosen)
        # A list shows no key if it is empty or if all its flags are off.
        some = all(at_least(n, 1) for n in least_of(self.chosen.size))
        if best is None or self.chosen.flags is not None or not some:
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
        """Whether ``bound`` depends only on the positions of queries and keys, and on tensors with only batch axes."""
        axes = {a for operand in bound.terms for a in flatten(operand.axes)}
        return set(bound.steps) <= {self.queries, self.keys} and axes <= self.batch

    def _step(self, bound: Affine) -> tuple[int, int]:
        """Return by how much the bound grows from one query to the next, and from one key to the next."""
        return bound.steps.get(self.queries, 0), bound.steps.get(self.keys, 0)

    def _diagonal(self, bound: Affine) -> bool:
        """Record causality and return True if ``bound`` is a diagonal ``t <= p + s`` that ends at the last key."""
        if self._step(bound) != (1, -1) or bound.terms or not same(bound.const + self.S, self.T):
            return False
        self.causal = True
        return True

    def _length(self, bound: Affine) -> bool:
        """Record a length and return True if ``bound`` is ``t <= p``."""
        # If the mask is causal, a length would move the diagonal.
        if self._step(bound) != (0, -1) or self.causal:
            return False
        length = Affine(bound.const + 1, {}, bound.terms)
        if self._number(length.const) is None:
            return False
        if length not in self.lengths:
            self.lengths.append(length)
        return True

    def _start(self, bound: Affine) -> bool:
        """Record a window and return True if ``bound`` is ``t >= s - c``, or ``t >= c`` for a single query."""
        along = (-1, 1) if self.queries else (0, 1)
        # If there is a length, the operator counts the window back from the length. A length greater than T is treated
        # as T, so the operator's window could differ from the mask's window.
        if self._step(bound) != along or self.lengths or not (self.causal or same(self.S, 1)):
            return False
        # `t > T - S + s - window` is equivalent to `t - s + (window - 1 - T + S) >= 0`.
        window = Affine(bound.const, {}, bound.terms) + Affine(self.T) - Affine(self.S - 1)
        if window.terms or not isinstance(window.const, int) or window.const <= 0:
            return False
        self.window = min(self.window or window.const, window.const)
        return True

    def _number(self, const: Size) -> int | None:
        """Return the integer by which ``const`` exceeds a known symbolic size or 0; None if there is none."""
        return offset_of(const, self.numbers)[1]


def offset_of(const: Size, numbers: dict[Size, fx.Node]) -> tuple[fx.Node | None, int | None]:
    """Return a node and an integer that add up to ``const``.

    If ``const`` is a number, the node is None. If no node of ``numbers`` fits, both results are None.
    """
    if isinstance(const, int):
        return None, const
    for value, node in numbers.items():
        rest = sympy.expand(const - value)
        if rest.is_Integer:
            return node, int(rest)
    return None, None
