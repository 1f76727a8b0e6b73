"""What an attention looks like once it is found: the records that every later pass reads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import sympy
import torch
from torch import fx

from mla_compile.passes.ir.axes import Axes, Axis, Split, axis_size, substitute
from mla_compile.passes.ir.sizes import Size, same
from mla_compile.passes.ir.stop import Stop

NEGLIGIBLE = -1e8
"""A fill below this leaves no weight to a score in float32; above, it is a number like any other."""
VANISHING = -1e29
"""Beside a fill below this any score vanishes, in float64 too: a row of such fills weighs all its keys alike."""


@dataclass(frozen=True)
class Operand:
    """A tensor of the attention, its axes written in the site's atoms (a size-1 axis broadcasts)."""

    node: fx.Node
    axes: Axes

    def split(self, split: Split) -> Operand:
        return replace(self, axes=tuple(substitute(a, split) for a in self.axes))


@dataclass(frozen=True)
class Product:
    """One query-key product, ``scores = q . k``; ``node``, with axes ``out``, is None inside a fused attention."""

    q: Operand
    k: Operand
    features: Axis
    node: fx.Node | None = None
    out: Axes = ()

    def split(self, split: Split) -> Product:
        return replace(
            self,
            q=self.q.split(split),
            k=self.k.split(split),
            features=substitute(self.features, split),
            out=tuple(substitute(a, split) for a in self.out),
        )


@dataclass(frozen=True)
class MaskTerm:
    """A term of the scores that does not depend on q and k.

    ``add``: the tensor times ``scale`` is added. ``keep``: scores stay where the boolean is True, elsewhere ``fill``.
    ``drop``: the opposite. ``dtype``: one the masked scores are converted to that cannot hold every number of the
    operand's, so that a finite mask may become infinite.
    """

    kind: Literal["add", "keep", "drop"]
    operand: Operand
    scale: float = 1.0
    fill: float = float("-inf")
    dtype: torch.dtype | None = None

    def split(self, split: Split) -> MaskTerm:
        return replace(self, operand=self.operand.split(split))


@dataclass(frozen=True)
class Block:
    """The position along ``axis`` divided by ``size`` and rounded down: which block of so many it is in."""

    axis: Axis
    size: int


@dataclass(frozen=True)
class Affine:
    """``const + sum of step * position along an axis + sum of factor * tensor``; equal sums are equal records."""

    const: Size = 0
    steps: dict[Axis | Block, int] = field(default_factory=dict)
    terms: dict[Operand, int] = field(default_factory=dict)

    def __add__(self, other: Affine) -> Affine:
        const = self.const + other.const
        if isinstance(const, sympy.Expr):
            const = sympy.expand(const)
            const = int(const) if const.is_Integer else const
        return Affine(const, _sum(self.steps, other.steps), _sum(self.terms, other.terms))

    def __mul__(self, factor: int) -> Affine:
        if factor == 0:
            return Affine()
        steps = {a: s * factor for a, s in self.steps.items()}
        return Affine(self.const * factor, steps, {t: f * factor for t, f in self.terms.items()})

    def __sub__(self, other: Affine) -> Affine:
        return self + other * -1

    @property
    def position(self) -> Axis | Block | None:
        """The axis, or the blocks of one, whose position this is; ``()`` for position 0; None for any other number."""
        if self.terms or not same(self.const, 0):
            return None
        if not self.steps:
            return ()
        (along, step), *more = self.steps.items()
        return along if step == 1 and not more else None

    @property
    def axis(self) -> Axis | None:
        """The axis whose position this is; ``()`` for position 0; None for any other number."""
        along = self.position
        return None if isinstance(along, Block) else along


def _sum(a: dict[Any, int], b: dict[Any, int]) -> dict[Any, int]:
    total = {key: a.get(key, 0) + b.get(key, 0) for key in (*a, *b)}
    return {key: n for key, n in total.items() if n}


@dataclass(frozen=True)
class Chosen:
    """The keys that each query sees are those that a list names.

    Attributes:
        indices: whole numbers, with the axes of batch and queries (or none of one) and ``count``.
        count: the axis along which they are listed.
        keys: the axis of the keys that they name.
        distinct: none is named twice by one query.
        names: how many there are to name, from 0 on: at least T, or its blocks.
        block: how many keys an entry names, side by side: ``block * i`` and those after it.
        any_number: an entry may be any number, and one below 0 or past what there is to name names none.
        flags: an entry counts only where this is not 0; None: all do.
        scores: where the best of what a query sees were chosen, so that it sees one of these: by which numbers.
    """

    indices: Operand
    count: Axis
    keys: Axis
    distinct: bool
    names: Size
    block: int = 1
    any_number: bool = False
    flags: Operand | None = None
    scores: fx.Node | None = None

    @property
    def size(self) -> Size:
        """How many keys are listed for each query."""
        return axis_size(self.count) * self.block

    @property
    def decides(self) -> tuple[fx.Node, ...]:
        """The nodes that decide which keys are listed."""
        if self.scores is not None:
            return (self.scores,)
        return (self.indices.node,) if self.flags is None else (self.indices.node, self.flags.node)


@dataclass(frozen=True)
class Visible:
    """What query s sees: key t where every mask lets it, and within the following.

    Attributes:
        masks: what is left over, or all masks where nothing could be explained.
        lengths: t < each of them; a length has no steps, and tensors with batch axes at most.
        numbers: nodes for the sizes that the lengths are made of.
        causal: t <= T - S + s; never beside lengths.
        window: t > T - S + s - window, where it is not 0; never beside lengths.
        chosen: t is in a list, where there is one.
        masked: the same without a list, where there is one.
        always: every query sees a key, whatever the tensors hold.
        alike: a query that sees no key weighs all of them alike; beside a list and a mask that is added, those with the
            greatest number, which is the mask's at listed keys and ``fill`` at all others.
        left: why each of ``masks`` is left over, where masks were looked at.
    """

    masks: tuple[MaskTerm, ...] = ()
    lengths: tuple[Affine, ...] = ()
    numbers: tuple[tuple[Size, fx.Node], ...] = ()
    causal: bool = False
    window: int = 0
    chosen: Chosen | None = None
    masked: Visible | None = None
    always: bool = True
    alike: bool = False
    fill: float = float("-inf")
    left: tuple[str, ...] = ()

    @property
    def dense(self) -> Visible:
        """The same without a list of keys."""
        return self.masked or self

    @property
    def counts(self) -> tuple[fx.Node, ...]:
        """The tensors that the lengths are made of."""
        return tuple(o.node for length in self.lengths for o in length.terms)

    @property
    def given(self) -> tuple[fx.Node, ...]:
        """What decides, besides positions, which keys are seen: the masks that are left over, counts and lists."""
        lists = () if self.chosen is None else self.chosen.decides
        return (*(m.operand.node for m in self.masks), *self.counts, *lists)


@dataclass(frozen=True)
class AttentionSite:
    """One attention: ``out = P v`` with ``P = softmax(scale * sum of products + masks)`` over the keys.

    Attributes:
        out: the node whose value the rewrite replaces, axes in atoms.
        products: the query-key products that are added up.
        v: the values.
        lead: atoms shared by queries, keys and output (batch, heads), in the order of the output.
        queries: the atoms of the query tokens.
        keys: the atoms of the key tokens.
        masks: terms added to the scaled scores or cut out of them, in the order they apply.
        causal: additionally query s sees key t only if t <= s (square, top-left aligned).
        scale: factor of the products.
        sinks: one score more for each query, in the softmax's sum only: it has no value.
        empty: what a row without a visible key gives: "zero" in PyTorch's fused attention, "nan" in a plain softmax.
        probs: the second operand of the value product, where the attention is written out.
        open_core: why the part between the products is not the plain formula above (then only the products are
            rewritten, and everything between them stays as the user wrote it); None where it is.
        problem: why this attention cannot be rewritten at all.
        call: the operator that computes all of it and has several results, of which ``out`` is one.
    """

    out: Operand
    products: tuple[Product, ...]
    v: Operand
    lead: Axis
    queries: Axis
    keys: Axis
    masks: tuple[MaskTerm, ...] = ()
    causal: bool = False
    scale: float = 1.0
    sinks: Operand | None = None
    empty: Literal["zero", "nan"] = "zero"
    probs: Operand | None = None
    open_core: str | None = None
    problem: Stop | None = None
    call: fx.Node | None = None

    @property
    def node(self) -> fx.Node:
        return self.out.node

    @property
    def between(self) -> tuple[Operand, ...]:
        """What stands between the products besides numbers."""
        return (*(m.operand for m in self.masks), *(() if self.sinks is None else (self.sinks,)))

    @property
    def operator(self) -> fx.Node:
        """What a report names: the operator that the user called."""
        return self.call or self.node

    def split(self, split: Split) -> AttentionSite:
        """The same attention with some atoms written as products of smaller ones."""
        return replace(
            self,
            out=self.out.split(split),
            products=tuple(p.split(split) for p in self.products),
            v=self.v.split(split),
            lead=substitute(self.lead, split),
            queries=substitute(self.queries, split),
            keys=substitute(self.keys, split),
            masks=tuple(m.split(split) for m in self.masks),
            sinks=None if self.sinks is None else self.sinks.split(split),
            probs=None if self.probs is None else self.probs.split(split),
        )
