"""Attention over rows shared by ranks: each rank attends to its own rows, and the results are merged.

Before: ``out, lse = decode_attention(q, rows, mask, length)``. After, between the collectives of :mod:`exchange
<mla_compile.passes.cache.exchange>`::

    out, lse = decode_attention(q', own, mask', own_length)            # own rows: T / C
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.core.sharing import Sharing
from mla_compile.passes.cache.exchange import Exchange
from mla_compile.passes.ir.graph import Builder, args_of, argument, axis, packet, shape, val
from mla_compile.passes.ir.sizes import same

aten = torch.ops.aten
_ROWS = ((1, "latent"), (2, "rope"), (3, "values"))
_SETTINGS = ("scale", "softcap", "num_splits", "deterministic")
_NEVER = ((6, "sinks"), (7, "kv_scale"), (8, "indices"), (9, "schedule"))


@dataclass(frozen=True)
class OwnRows:
    """This rank's rows of a cache along axis ``dim``. All ranks together have ``total`` rows."""

    node: fx.Node
    dim: int
    total: fx.Node | int


def readers(joined: fx.Node, dims: Mapping[fx.Node, int], sharing: Sharing) -> list[fx.Node] | str:
    """Return the attentions that read a cache, or a message that names a reader of all rows.

    ``dims``: the shared caches, each with its token axis.
    """
    found: list[fx.Node] = []
    waiting = [joined]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user.op == "output":
                if node is not joined:
                    return f"{node.name}, a view of {joined.name}, is returned"
            elif is_view(user):
                waiting.append(user)
            elif packet(user) is torch.ops.mla_compile.decode_attention:
                problem = _problem(user, dims, sharing)
                if problem:
                    return problem
                found.append(user)
            else:
                return f"{user.name} reads all of them"
    return found


def is_view(node: object) -> bool:
    """Whether ``node`` only adds or drops axes of size 1."""
    return packet(node) in (aten.squeeze, aten.unsqueeze)


def _problem(node: fx.Node, dims: Mapping[fx.Node, int], sharing: Sharing) -> str | None:
    """Explain why ranks cannot share the rows of an attention; None if they can."""
    for position, name in _NEVER:
        if argument(node, position, name) is not None:
            return f"{node.name} has {name}"
    given = [argument(node, position, name) for position, name in _ROWS]
    if any(row is not None and _token_axis(row, dims) != 1 for row in given):
        return f"{node.name} reads other rows too, or reads along another axis"
    mask = argument(node, 4, "mask")
    if any(_viewed(n) in dims for n in (argument(node, 0, "query"), mask)):
        return f"{node.name} reads them as a query or a mask"
    if sharing.heads and mask is not None and not same(shape(mask)[1], 1):
        return f"{node.name} has a mask for each head"
    return None


def _viewed(node: Any) -> object:
    """Return the tensor of which ``node`` is a view."""
    while is_view(node):
        node = args_of(node)[0]
    return node


def _token_axis(rows: fx.Node, dims: Mapping[fx.Node, int]) -> int | None:
    """Return the token axis of ``rows``, a cache or a view of one; None if ``rows`` is neither."""
    if rows in dims:
        return dims[rows]
    if not is_view(rows):
        return None
    of, *where = args_of(rows)
    before = _token_axis(of, dims)
    if before is None or not where:
        return None
    given = where[0] if isinstance(where[0], (list, tuple)) else [where[0]]
    if packet(rows) is aten.unsqueeze:
        return before + (axis(given[0], val(rows).dim()) <= before)
    places = [axis(d, val(of).dim()) for d in given]
    return None if before in places else before - sum(d < before for d in places)


def attend(node: fx.Node, own: Mapping[fx.Node, OwnRows], sharing: Sharing, fake_mode: FakeTensorMode | None) -> None:
    """Replace an attention over all rows by an attention over this rank's rows and a merge of all ranks' results."""
    _SharedAttention(node, own, sharing, fake_mode).run()


class _SharedAttention:
    """The rewrite of one attention."""

    def __init__(
        self, node: fx.Node, own: Mapping[fx.Node, OwnRows], sharing: Sharing, fake_mode: FakeTensorMode | None
    ) -> None:
        self.node, self.own, self.sharing = node, own, sharing
        self.builder = Builder(node, fake_mode)
        self.call = self.builder.call
        self.ranks = Exchange(self.builder, sharing)
        self.query: fx.Node = argument(node, 0, "query")
        self.given_mask: fx.Node | None = argument(node, 4, "mask")
        self.lengths: fx.Node | None = argument(node, 5, "seq_lens")
        self.causal = bool(node.kwargs.get("causal", False)) and not same(shape(self.query)[1], 1)
        window = node.kwargs.get("window", 0)
        assert isinstance(window, int)
        self.window = window

    def run(self) -> None:
        given = [argument(self.node, position, name) for position, name in _ROWS]
        latent, *others = (None if row is None else self._own(row) for row in given)
        assert latent is not None
        query = self.ranks.queries(self.query)
        settings = {k: v for k, v in self.node.kwargs.items() if k in _SETTINGS}
        result = self.call(
            torch.ops.mla_compile.decode_attention.default,
            query, latent, *others, self._mask(latent), self._own_lengths(), **settings,
        )  # fmt: skip
        self.ranks.replace(self.node, result)

    def _own(self, rows: fx.Node) -> fx.Node:
        """Return the view of this rank's rows that corresponds to ``rows``, a view of all rows."""
        if rows in self.own:
            self.total = self.own[rows].total
            return self.own[rows].node
        of, *where = args_of(rows)
        assert callable(rows.target)
        return self.call(rows.target, self._own(of), *where)

    def _own_lengths(self) -> fx.Node:
        """Return the number of this rank's rows within the sequence lengths, int32 [B]."""
        ahead, ranks = self.sharing.size - 1 - self.sharing.rank, self.sharing.size
        if self.lengths is not None:
            longer = self.call(aten.add.Tensor, self.lengths, ahead)
            return self.call(aten.div.Tensor_mode, longer, ranks, rounding_mode="floor")
        own = number(self.builder, operator.floordiv, number(self.builder, operator.add, self.total, ahead), ranks)
        B = self.builder.size(self.query, 0)
        return self.call(aten.full.default, [B], own, dtype=torch.int32, device=val(self.query).device)

    def _mask(self, latent: fx.Node) -> fx.Node | None:
        """Return the mask's columns for this rank's tokens, combined with causality and window."""
        mask, near = self.given_mask, self.causal or self.window > 0
        every = mask is not None and same(shape(mask)[3], 1) and not same(shape(latent)[1], 1)
        if not near and (mask is None or every):
            return mask
        count = self.builder.size(latent, 1)
        place = self.call(aten.arange.default, count, device=val(latent).device)
        place = self.call(aten.add.Tensor, self.call(aten.mul.Tensor, place, self.sharing.size), self.sharing.rank)
        if mask is not None and not every:
            # The last row may not hold a token yet. The lengths exclude this row, so any mask value will do.
            last = number(self.builder, operator.sub, self.total, 1)
            mask = self.call(aten.index_select.default, mask, 3, self.call(aten.clamp.default, place, None, last))
        if not near:
            return mask
        keep = self._near(place)
        if mask is None:
            return keep
        if val(mask).dtype == torch.bool:
            return self.call(aten.logical_and.default, mask, keep)
        return self.call(aten.masked_fill.Scalar, mask, self.call(aten.logical_not.default, keep), float("-inf"))

    def _near(self, place: fx.Node) -> fx.Node:
        """Return a boolean [B|1,1,S,own rows]: whether a query sees a token under causality and window.

        ``place``: the positions of the tokens.
        """
        S = self.builder.size(self.query, 1)
        at = self.call(aten.unsqueeze.default, self.call(aten.arange.default, S, device=val(place).device), -1)
        if self.lengths is None:
            at = self.call(aten.reshape.default, at, [1, 1, S, 1])
            at = self.call(aten.add.Tensor, at, number(self.builder, operator.sub, self.total, S))
        else:
            ends = self.call(aten.reshape.default, self.lengths, [-1, 1, 1, 1])
            at = self.call(aten.sub.Tensor, self.call(aten.add.Tensor, ends, at), S)
        seen = [self.call(aten.le.Tensor, place, at)] if self.causal else []
        if self.window:
            seen.append(self.call(aten.gt.Tensor, place, self.call(aten.sub.Tensor, at, self.window)))
        return seen[0] if len(seen) == 1 else self.call(aten.logical_and.default, *seen)


def number(
    builder: Builder, op: Callable[[object, object], object], a: fx.Node | int, b: fx.Node | int
) -> fx.Node | int:
    """Apply ``op`` to two sizes. The result is a number if both are numbers, or else a new node."""
    if isinstance(a, int) and isinstance(b, int):
        return op(a, b)  # type: ignore[return-value]  # a number of two numbers
    return builder.call(op, a, b)
