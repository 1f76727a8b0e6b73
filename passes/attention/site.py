"""What an attention looks like once it is found: the records that every later pass reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

from mla_compile.passes.ir.axes import Axes, Axis, Split, substitute
from mla_compile.passes.ir.stop import Stop


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
    empty: Literal["zero", "nan"] = "zero"
    probs: Operand | None = None
    open_core: str | None = None
    problem: Stop | None = None
    call: fx.Node | None = None

    @property
    def node(self) -> fx.Node:
        return self.out.node

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
            probs=None if self.probs is None else self.probs.split(split),
        )
