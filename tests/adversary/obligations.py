"""Which obligation a mutant breaks, told by what its keys and values do when the rows they come from are changed.

In the legal graph K and V are made of rows, one for each token of each sequence. In the mutant those rows are given
numbers of our own: K and V may depend on nothing else, on every row alone, and by one affine map for all rows. Nothing
here uses the analysis of ``passes``, except for where the rows of the *legal* graph are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mla_compile.codes import Code
from mla_compile.core.program import Program
from mla_compile.passes.ir.axes import flatten
from mla_compile.passes.sources.records import Rows
from mla_compile.report.report import SiteReport
from tests.adversary.bases import Base
from tests.adversary.oracle import BOTH, by_atoms, recorded, sides

NEGLIGIBLE = 1e-9

TRUE: dict[str, set[Code]] = {
    "random": {Code.DROPOUT},
    "nonlinear": {Code.NONLINEAR},
    "mixed": {Code.TOKEN_MIXING},
    "sequences mixed": {Code.TOKEN_MIXING, Code.HEAD_DEPENDENT_LATENT, Code.PER_HEAD_ROPE},
    "position": {Code.POSITION_DEPENDENT},
    "elsewhere": set(Code) - {Code.ABSORBED},
}
"""The codes that are true where an obligation is broken.

Equal sizes: what reads the rows of another sequence may have batch and heads swapped. What comes from elsewhere than
the rows may be wide, a hidden state, of every head: any code may be true of it.
"""

ALWAYS = {Code.UNSUPPORTED_OP, Code.KEYS_USED_ELSEWHERE, Code.VALUES_USED_ELSEWHERE}
"""Nothing is known of an operator; what breaks the obligation makes rows for all heads, and reads the expanded ones."""


def said(site: SiteReport) -> list[tuple[str, Code, str]]:
    """The codes of what is not absorbed: of which part, the code, and in words."""
    if site.verdict != "absorbed":
        return [("both", site.code, f"{site.reason} at {site.blame}")]
    return [(kept.part, kept.code, f"{kept.reason} at {kept.blame}") for kept in site.kept]


def check_codes(base: Base, site: SiteReport, breaks: dict[str, set[str]], also: Sequence[Code] = ()) -> None:
    """Raises AssertionError where the report says of K or V what is not so; ``also``: further codes that are true."""
    case = base.case
    # The same rows by two ways, of which one is changed: another source, or something that is added.
    of_base = {Code.TOO_MANY_SOURCES, Code.POSITION_DEPENDENT} if case.lora else set()
    if case.R and case.D <= case.R:  # what makes the rotary key of the hidden state is an up-projection too
        of_base |= {Code.POSITION_DEPENDENT, Code.COST_LATENT_WIDE, Code.NONLINEAR}
    if case.D <= case.L:  # a latent that is no narrower may be the hidden state: x + f(x), or a convolution of it
        of_base.add(Code.NOT_MLA)
    for part, code, words in said(site):
        # "values", "some columns of the keys"; some heads of both where an attention was split.
        what = breaks.get(part.split()[-1], set().union(*breaks.values()))
        true = {*ALWAYS, *of_base, *also}.union(*(TRUE[w] for w in what))
        if part.startswith("some columns") and "random" not in what:
            true.add(Code.PER_HEAD_ROPE)  # they are rows of every head, whatever was done to them
        assert not what or code in true, f"{code} ({words}) of {part}, but broken is: {', '.join(sorted(what))}"


class Obligations:
    """K and V of a mutant as functions of the rows of its base, [tokens, width] each."""

    def __init__(self, base: Base, program: Program) -> None:
        self.base, self.program = base, program
        self.inputs = base.inputs(0)
        self.values = recorded(base.program, self.inputs)
        self.shapes = {r: by_atoms(self.values[r.node], r.axes).permute(_order(base, r)).shape for r in base.plan.rows}

    def broken(self) -> dict[str, set[str]]:
        """The obligations that K and V break, by their names in :data:`TRUE`."""
        one, other = self._draw(1), self._draw(2)
        of_one = self._of(one)
        count = len(of_one["keys"])
        tokens = count // self.base.case.B
        found: dict[str, set[str]] = {}
        for side in BOTH:
            found[side] = {"random"} if _differ(self._of(one, seed=1)[side], of_one[side]) else set()
            if any(_differ(self._of(one, inputs=self.base.inputs(draw))[side], of_one[side]) for draw in (1, 2)):
                found[side].add("elsewhere")
            if not _differ(self._of(other)[side], of_one[side]):  # the rows have no part in it
                found[side].add("elsewhere")
            zero = self._of({r: 0 * one[r] for r in one})[side]
            for size in (1.0, 30.0):  # what is bounded may seem linear while the rows are small
                big, more = ({r: size * x[r] for r in x} for x in (one, other))
                total = self._of({r: big[r] + more[r] for r in one})[side]
                if _differ(total + zero, self._of(big)[side] + self._of(more)[side]):
                    found[side].add("nonlinear")
            for m in range(count):
                at = torch.arange(count)[:, None] == m
                some = self._of({r: torch.where(at, other[r], one[r]) for r in one})[side]
                changed = (some - of_one[side]).abs().amax(1) > NEGLIGIBLE * of_one[side].abs().amax()
                changed[m] = False
                found[side] |= {"mixed" if m // tokens == k // tokens else "sequences mixed" for k in changed.nonzero()}
            # Where every row is by itself it can be told whether all are treated alike.
            moved = self._of({r: one[r].roll(1, 0) for r in one})[side]
            if not found[side] & {"mixed", "sequences mixed"} and _differ(moved, of_one[side].roll(1, 0)):
                found[side].add("position")
        return found

    def _draw(self, seed: int) -> dict[Rows, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        outer = len(self.base.plan.batch) + len(self.base.plan.site.keys)
        sizes = {r: (math.prod(s[:outer]), math.prod(s[outer:])) for r, s in self.shapes.items()}
        return {r: torch.randn(s, generator=generator, dtype=torch.float64) for r, s in sizes.items()}

    def _of(self, rows: dict[Rows, Tensor], inputs: list[Any] | None = None, seed: int = 0) -> dict[str, Tensor]:
        """K and V as [tokens, values]."""
        torch.manual_seed(seed)
        given = {}
        for r, x in rows.items():
            order = _order(self.base, r)
            back = [order.index(k) for k in range(len(order))]
            given[r.node.name] = x.reshape(self.shapes[r]).permute(back).reshape(self.values[r.node].shape)
        return sides(self.base, self.program, self.inputs if inputs is None else inputs, given)


def _order(base: Base, rows: Rows) -> list[int]:
    """The axes of ``rows`` by atoms, those of tokens first."""
    atoms = flatten(rows.axes)
    outer = (*base.plan.batch, *base.plan.site.keys)
    return [atoms.index(a) for a in (*outer, *(a for a in atoms if a not in outer))]


def _differ(a: Tensor, b: Tensor) -> bool:
    scale = b.nan_to_num(1.0).abs().amax().clamp(min=1e-6)
    return bool((a - b).nan_to_num(1.0).abs().amax() > NEGLIGIBLE * scale)
