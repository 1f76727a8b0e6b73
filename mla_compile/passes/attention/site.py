"""Records that describe an attention in a graph. Every later pass reads these records."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import sympy
import torch
from torch import fx

from mla_compile.passes.ir.axes import Axes, Axis, Split, axis_size, substitute
from mla_compile.passes.ir.sizes import Size, same
from mla_compile.passes.ir.stop import Stop

NEGLIGIBLE = -1e8
"""If a mask fills in a number below this limit, the key gets no weight in float32.

A number above the limit acts as an ordinary score.
"""
VANISHING = -1e29
"""Adding a score to a number below this limit does not change the number, even in float64.

A row of only such numbers therefore weighs all keys equally.
"""


@dataclass(frozen=True)
class Operand:
    """A tensor of the attention, with its axes written in the site's atoms. An axis of size 1 broadcasts."""

    node: fx.Node
    axes: Axes

    def split(self, split: Split) -> Operand:
        return replace(self, axes=tuple(substitute(a, split) for a in self.axes))


@dataclass(frozen=True)
class Product:
    """One query-key product, ``scores = q . k``.

    ``node`` computes the product and has the axes ``out``. Inside a fused attention, ``node`` is None.
    """

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
    """A mask that is added to the scores or replaces some scores.

    ``add``: the tensor times ``scale`` is added. ``keep``: scores stay where the boolean is True and become ``fill``
    elsewhere. ``drop``: scores become ``fill`` where the boolean is True. ``dtype``: if set, the masked scores are
    later converted to this dtype, which has a smaller range. A finite mask may then become infinite.
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
    """The index of a block of ``size`` positions: the position along ``axis`` divided by ``size``, rounded down."""

    axis: Axis
    size: int


@dataclass(frozen=True)
class Affine:
    """The sum ``const + sum of step * position along an axis + sum of factor * tensor``. Equal sums compare equal."""

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
        """The axis if this number is a position along an axis, or the block if this number is a block's index.

        ``()`` for position 0; None for other numbers.
        """
        if self.terms or not same(self.const, 0):
            return None
        if not self.steps:
            return ()
        (along, step), *more = self.steps.items()
        return along if step == 1 and not more else None

    @property
    def axis(self) -> Axis | None:
        """The axis if this number is a position along an axis; ``()`` for position 0; None for other numbers."""
        along = self.position
        return None if isinstance(along, Block) else along


_Key = TypeVar("_Key")


def _sum(a: dict[_Key, int], b: dict[_Key, int]) -> dict[_Key, int]:
    total = {key: a.get(key, 0) + b.get(key, 0) for key in (*a, *b)}
    return {key: n for key, n in total.items() if n}


@dataclass(frozen=True)
class Chosen:
    """An index list: the keys that each query sees.

    Attributes:
        indices: the integer entries. Their axes are ``count`` and any of the batch and query axes.
        count: the axis along which the entries are listed.
        keys: the axis of the keys that the entries name.
        distinct: whether each list names each key at most once.
        names: how many keys (or blocks) the entries can name; perhaps more than the attention has.
        block: the number of neighbouring keys that an entry names. Key ``block * i`` is the first that entry i names.
        any_number: whether an entry may be any number. A number that is negative or too large names no key.
        flags: if set, an entry is valid only where its flag is not 0. If None, all entries are valid.
        scores: the unmasked scores that decided the choice. Set only if the choice and the attention apply equal
            masks. A query that sees any key then also sees a chosen key.
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
        """The number of keys listed for each query."""
        return axis_size(self.count) * self.block

    @property
    def decides(self) -> tuple[fx.Node, ...]:
        """The nodes that decide which keys are listed."""
        if self.scores is not None:
            return (self.scores,)
        return (self.indices.node,) if self.flags is None else (self.indices.node, self.flags.node)


@dataclass(frozen=True)
class Visible:
    """The keys t that query s sees. All ``masks`` show such a key, and the key meets the conditions below.

    Attributes:
        masks: the masks that the other attributes do not express, or all masks if none could be explained.
        lengths: t is less than each length. A length depends on neither s nor t. Tensors in it have only batch axes.
        numbers: symbolic sizes that occur in the lengths, each with a node that holds the size.
        causal: if set, t <= T - S + s. Never set together with lengths.
        window: if not 0, t > T - S + s - window. Never set together with lengths.
        chosen: if set, t is in this index list.
        masked: if ``chosen`` is set, a description of the same keys without an index list.
        always: whether every query sees a key, whatever the tensors hold.
        alike: whether a query that sees no key weighs all keys equally. If there is an additive mask over listed keys,
            such a query weighs only the keys with the greatest mask value. Unlisted keys have the value ``fill``.
        fill: the finite number that the masks fill in, if ``alike``.
        left: the reasons why ``masks`` remain. Empty if no mask was analysed.
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
        """A description of the same keys without an index list."""
        return self.masked or self

    @property
    def counts(self) -> tuple[fx.Node, ...]:
        """The tensors that occur in the lengths."""
        return tuple(o.node for length in self.lengths for o in length.terms)

    @property
    def given(self) -> tuple[fx.Node, ...]:
        """The tensors that decide which keys are seen: remaining masks, lengths and index lists."""
        lists = () if self.chosen is None else self.chosen.decides
        return (*(m.operand.node for m in self.masks), *self.counts, *lists)


@dataclass(frozen=True)
class AttentionSite:
    """One attention: ``out = P v`` with ``P = softmax(scale * sum of products + masks)`` over the keys.

    Attributes:
        out: the node whose value the rewrite replaces, with its axes in atoms.
        products: the query-key products that are added up.
        v: the values.
        lead: atoms shared by queries, keys and output (batch, heads), in the order of the output.
        queries: the atoms of the query tokens.
        keys: the atoms of the key tokens.
        masks: terms that are added to the scaled scores or replace some scores, in the order in which they apply.
        causal: in addition, query s sees key t only if t <= s (square, aligned top-left).
        scale: the factor of the products.
        sinks: an additional score for each query, which enters only the sum of the softmax.
        empty: the result for a query that sees no key: "zero" in PyTorch's fused attention, "nan" in a plain softmax.
        probs: if the attention is written out, the probabilities by which the value product multiplies ``v``.
        open_core: why the computation between the products is not the plain formula above; None if it is. If the core
            is open, only the products are rewritten, and the operators between the products stay.
        problem: why this attention cannot be rewritten at all.
        call: the operator that computes the whole attention, if ``out`` is only one of its results.
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
        """The tensors between the products: masks and sinks."""
        return (*(m.operand for m in self.masks), *(() if self.sinks is None else (self.sinks,)))

    @property
    def operator(self) -> fx.Node:
        """The operator that the user called, which a report names."""
        return self.call or self.node

    def split(self, split: Split) -> AttentionSite:
        """Return the same attention with some atoms written as products of smaller ones."""
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
