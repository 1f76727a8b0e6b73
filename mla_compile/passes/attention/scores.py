"""Records of what is known about attention scores between the query-key product and the value product."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from mla_compile.passes.attention.site import MaskTerm, Operand, Product
from mla_compile.passes.ir.axes import Atom, Axes, Axis, Split, common_factors, flatten, substitute
from mla_compile.passes.ir.graph import shape
from mla_compile.passes.ir.sizes import same
from mla_compile.passes.ir.stop import Stop


@dataclass(frozen=True)
class Padded:
    """An axis of scores to which columns were joined.

    The axis ``own`` became a range of ``longer`` that begins at ``start``. ``sink``: the new column, if there is only
    one and the scores were not :attr:`Scores.settled` before.
    """

    longer: Atom
    own: Axis
    start: int
    sink: Operand | None = None

    def split(self, split: Split) -> Padded:
        sink = None if self.sink is None else self.sink.split(split)
        return replace(self, own=substitute(self.own, split), sink=sink)


@dataclass(frozen=True)
class Scores:
    """``scale * sum(products)`` with masks, possibly ``normalized`` by a softmax over the atoms ``softmax``.

    ``exponential``: the scores were exponentiated, but not by a known softmax. ``mapped``: the first nonlinear
    elementwise function that was applied to the scores. ``below_top``: the axis along which the maximum was subtracted.
    ``sinks``: an additional score per query, which has no value.
    """

    axes: Axes
    products: tuple[Product, ...]
    scale: float = 1.0
    masks: tuple[MaskTerm, ...] = ()
    softmax: Axis = ()
    normalized: bool = False
    exponential: bool = False
    mapped: fx.Node | None = None
    open_core: str | None = None
    problem: Stop | None = None
    padded: tuple[Padded, ...] = ()
    below_top: Axis | None = None
    sinks: Operand | None = None

    @property
    def settled(self) -> bool:
        """Whether only a softmax may follow, because a sink was joined or the maximum was subtracted."""
        return not self.normalized and (bool(self.padded) or self.below_top is not None)

    def changed(self) -> Scores:
        """Return the scores after an operator changes their values. If they were settled, the core becomes open."""
        return self.opened("scores change after a sink or below their subtracted maximum") if self.settled else self

    def opened(self, why: str) -> Scores:
        return self if self.open_core else replace(self, open_core=why)

    def split(self, split: Split) -> Scores:
        if not split:
            return self
        return replace(
            self,
            axes=tuple(substitute(a, split) for a in self.axes),
            products=tuple(p.split(split) for p in self.products),
            masks=tuple(m.split(split) for m in self.masks),
            softmax=substitute(self.softmax, split),
            padded=tuple(p.split(split) for p in self.padded),
            below_top=None if self.below_top is None else substitute(self.below_top, split),
            sinks=None if self.sinks is None else self.sinks.split(split),
        )


def converted(scores: Scores, old: torch.dtype, new: torch.dtype) -> Scores:
    """Convert scores to another dtype. Some fills become infinite, such as float64's lowest value in float32."""
    # Probabilities lie between 0 and 1, which every floating dtype can hold, and masks were applied before the softmax.
    # Once the maximum is subtracted, a row that is wholly hidden holds only zeros.
    if old == new or scores.normalized or scores.below_top is not None:
        return scores
    # In float16 a mask of -1e9 becomes minus infinity, and a fully masked row then gives NaN.
    narrower = new if torch.finfo(new).max < torch.finfo(old).max else None
    masks = (replace(m, fill=rounded(m.fill, new), dtype=narrower or m.dtype) for m in scores.masks)
    return replace(scores, masks=tuple(masks))


def rounded(fill: float, dtype: torch.dtype) -> float:
    """Round a number to a dtype."""
    return float(torch.tensor(fill, dtype=torch.float64).to(dtype))


def added_up(a: Scores, b: Scores) -> Scores | None:
    """Add two products, such as ``q_nope . k_nope + q_rope . k_rope``, or the results of two softmaxes.

    Return None if the sum cannot be described.
    """
    if a.normalized != b.normalized or a.settled or b.settled or len(a.axes) != len(b.axes):
        return None
    if a.normalized and (a.padded or b.padded):
        return None
    for k in range(len(a.axes)):
        splits = common_factors(a.axes[k], b.axes[k])
        if splits is None:
            return None
        a, b = a.split(splits[0]), b.split(splits[1])
    # The second product takes the atoms of the first, because the sum has one set of axes.
    rename: Split = {y: (x,) for x, y in zip(flatten(a.axes), flatten(b.axes), strict=True) if y is not x}
    if not set(flatten(a.axes)).isdisjoint(rename):
        return None  # the same product twice, the second time with permuted axes
    renamed = b.split(rename)
    if a.normalized and (a.softmax != renamed.softmax or _twice(a, renamed)):
        return None
    joined = replace(
        a,
        # If `a` and `b` were selected from one softmax, their common product is listed once.
        products=(*a.products, *(p for p in renamed.products if not a.normalized or p not in a.products)),
        masks=(*a.masks, *renamed.masks),
        mapped=a.mapped or b.mapped,
        open_core=a.open_core or b.open_core,
        problem=a.problem or b.problem,
    )
    if a.normalized:
        return joined.opened("the weights of several softmaxes are added up")
    if a.masks or b.masks:
        joined = joined.opened("the products are masked separately")
    return joined if a.scale == b.scale else joined.opened("products with different scales are added up")


def _twice(a: Scores, b: Scores) -> bool:
    """Whether ``a`` and ``b`` contain the same product with different axes."""
    return any(p.node is q.node and p != q for p in a.products for q in b.products)


def oriented(product: Product, keys: Axis) -> Product:
    """Swap the operands if only the query operand has the axis ``keys``."""
    if set(keys) & set(flatten(product.q.axes)) and not set(keys) & set(flatten(product.k.axes)):
        return replace(product, q=product.k, k=product.q)
    return product


def align_right(node: fx.Node, axes: Axes) -> Axes:
    """Return the axes of a tensor that broadcasts against ``axes`` from the right."""
    own = shape(node)
    return tuple(() if same(s, 1) else a for s, a in zip(own, axes[len(axes) - len(own) :], strict=True))
