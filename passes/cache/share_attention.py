"""Attention over rows that ranks share: each attends to its own, and the results are put together.

Where all ranks of the group compute the same heads::

    out, lse = decode_attention(q, own, mask', own_length)             # own rows: T / C
    parts = all_gather([out | lse])                                    # [C, B, S, H, L + 1]
    out, lse = merge(parts)

Where each has heads of its own, their queries are brought together first, and the results go back to the owners::

    q' = all_gather(q)                                                 # [B, S, C H, L + R]
    out, lse = decode_attention(q', own, mask', own_length)
    parts = all_to_all([out | lse])                                    # [C, B, S, H, L + 1]: this rank's heads
    out, lse = merge(parts)

The second one is right for equal heads too. ``merge`` is that of :mod:`mla_compile.kernels.merge`, as operators. A rank
that sees no key of a query gives it minus infinity for ``lse``, and no weight.
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
from mla_compile.passes.ir.graph import Builder, args_of, argument, axis, packet, shape, val
from mla_compile.passes.ir.sizes import same

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_ROWS = ((1, "latent"), (2, "rope"), (3, "values"))
_SETTINGS = ("scale", "softcap", "num_splits", "deterministic")
_NEVER = ((6, "sinks"), (7, "kv_scale"), (8, "indices"), (9, "schedule"))


@dataclass(frozen=True)
class OwnRows:
    """This rank's rows of a cache along axis ``dim``; all ranks together have ``total``."""

    node: fx.Node
    dim: int
    total: fx.Node | int


def readers(joined: fx.Node, dims: Mapping[fx.Node, int], sharing: Sharing) -> list[fx.Node] | str:
    """The attentions that read a cache, or what else needs all of its rows, in words.

    ``dims``: the caches that are shared, and the axis of their tokens.
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
                return f"{user.name} reads them all"
    return found


def is_view(node: object) -> bool:
    """Whether axes of length 1 come or go, and nothing else."""
    return packet(node) in (aten.squeeze, aten.unsqueeze)


def _problem(node: fx.Node, dims: Mapping[fx.Node, int], sharing: Sharing) -> str | None:
    """What keeps an attention from being computed in parts."""
    for position, name in _NEVER:
        if argument(node, position, name) is not None:
            return f"{node.name} has {name}"
    given = [argument(node, position, name) for position, name in _ROWS]
    if any(row is not None and _token_axis(row, dims) != 1 for row in given):
        return f"{node.name} reads other rows besides, or along another axis"
    mask = argument(node, 4, "mask")
    if any(_viewed(n) in dims for n in (argument(node, 0, "query"), mask)):
        return f"{node.name} reads them as something else"
    if sharing.heads and mask is not None and not same(shape(mask)[1], 1):
        return f"{node.name} has a mask for each head"
    return None


def _viewed(node: Any) -> Any:
    """What ``node`` is a view of."""
    while is_view(node):
        node = args_of(node)[0]
    return node


def _token_axis(rows: fx.Node, dims: Mapping[fx.Node, int]) -> int | None:
    """The axis of ``rows`` that is the tokens' in the cache they are a view of; None where there is none."""
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
    """Replaces an attention over all rows by one over those of this rank, and what puts the ranks' results together."""
    _Shared(node, own, sharing, fake_mode).run()


class _Shared:
    """One attention on its way."""

    def __init__(
        self, node: fx.Node, own: Mapping[fx.Node, OwnRows], sharing: Sharing, fake_mode: FakeTensorMode | None
    ) -> None:
        self.node, self.own, self.sharing = node, own, sharing
        self.builder = Builder(node, fake_mode)
        self.call = self.builder.call
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
        query = self._all_heads(self.query) if self.sharing.heads else self.query
        settings = {k: v for k, v in self.node.kwargs.items() if k in _SETTINGS}
        result = self.call(
            torch.ops.mla_compile.decode_attention.default,
            query, latent, *others, self._mask(latent), self._own_lengths(), **settings,
        )  # fmt: skip
        out, lse = (self.call(operator.getitem, result, k) for k in (0, 1))
        merged = self._merged(self._exchanged(self._packed(out, lse)), out, lse)
        for user in list(self.node.users):
            user.replace_all_uses_with(merged[user.args[1]])  # type: ignore[index]  # the number of the result
            self.node.graph.erase_node(user)
        self.node.graph.erase_node(self.node)

    def _own(self, rows: fx.Node) -> fx.Node:
        """The same view of this rank's rows."""
        if rows in self.own:
            self.total = self.own[rows].total
            return self.own[rows].node
        of, *where = args_of(rows)
        assert callable(rows.target)
        return self.call(rows.target, self._own(of), *where)

    def _own_lengths(self) -> fx.Node:
        """int32 [B]: how many of this rank's rows are tokens that are visible at all."""
        ahead, ranks = self.sharing.size - 1 - self.sharing.rank, self.sharing.size
        if self.lengths is not None:
            longer = self.call(aten.add.Tensor, self.lengths, ahead)
            return self.call(aten.div.Tensor_mode, longer, ranks, rounding_mode="floor")
        own = number(self.builder, operator.floordiv, number(self.builder, operator.add, self.total, ahead), ranks)
        B = self.builder.size(self.query, 0)
        return self.call(aten.full.default, [B], own, dtype=torch.int32, device=val(self.query).device)

    def _mask(self, latent: fx.Node) -> fx.Node | None:
        """The columns of the mask that are this rank's tokens, and what causality and a window hide of these."""
        mask, near = self.given_mask, self.causal or self.window > 0
        every = mask is not None and same(shape(mask)[3], 1) and not same(val(latent).shape[1], 1)
        if not near and (mask is None or every):
            return mask
        count = self.builder.size(latent, 1)
        place = self.call(aten.arange.default, count, device=val(latent).device)
        place = self.call(aten.add.Tensor, self.call(aten.mul.Tensor, place, self.sharing.size), self.sharing.rank)
        if mask is not None and not every:
            # The last row may be no token yet. The lengths leave it out, whatever it reads here.
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
        """Which of the tokens at ``place`` each query sees by its own place, [B|1,1,S,own rows]."""
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

    # What ranks tell each other. All tensors that are sent are dense: collectives take them as they lie.

    def _all_heads(self, query: fx.Node) -> fx.Node:
        """[B,S,C H,L+R] of each rank's [B,S,H,L+R], the heads of one rank after those of another."""
        dense = self.call(aten.clone.default, query, memory_format=torch.contiguous_format)
        gathered = self._gathered(self.call(aten.unsqueeze.default, dense, 0))
        return self.call(aten.flatten.using_ints, self.call(aten.permute.default, gathered, [1, 2, 0, 3, 4]), 2, 3)

    def _gathered(self, x: fx.Node) -> fx.Node:
        size, group = self.sharing.size, self.sharing.group
        return self.call(_c10d.wait_tensor.default, self.call(_c10d.all_gather_into_tensor.default, x, size, group))

    def _packed(self, out: fx.Node, lse: fx.Node) -> fx.Node:
        """[B,S,H,L+1]: one tensor to send. ``lse`` keeps all its bits, as several of smaller numbers."""
        last = self.call(aten.unsqueeze.default, lse, -1)
        if val(out).dtype != val(lse).dtype:
            last = self.call(aten.view.dtype, last, val(out).dtype)
        return self.call(aten.cat.default, [out, last], -1)

    def _exchanged(self, packed: fx.Node) -> fx.Node:
        """[C,B,S,H,L+1]: what each rank found for the heads of this one."""
        if not self.sharing.heads:
            return self._gathered(self.call(aten.unsqueeze.default, packed, 0))
        ranks = self.sharing.size
        by_owner = self.call(aten.unflatten.int, packed, 2, [ranks, -1])
        by_owner = self.call(aten.permute.default, by_owner, [2, 0, 1, 3, 4])
        dense = self.call(aten.clone.default, by_owner, memory_format=torch.contiguous_format)
        one_each = [1] * ranks
        sent = self.call(_c10d.all_to_all_single.default, dense, one_each, one_each, self.sharing.group)
        return self.call(_c10d.wait_tensor.default, sent)

    def _merged(self, parts: fx.Node, out: fx.Node, lse: fx.Node) -> tuple[fx.Node, fx.Node]:
        """``out`` and ``lse`` over the rows of all ranks."""
        call, width = self.call, int(val(out).shape[3])
        outs, sums = call(aten.slice.Tensor, parts, 4, 0, width), call(aten.slice.Tensor, parts, 4, width)
        if val(out).dtype != val(lse).dtype:
            sums = call(aten.clone.default, sums, memory_format=torch.contiguous_format)
            sums = call(aten.view.dtype, sums, val(lse).dtype)
        sums = call(aten.squeeze.dim, sums, 4)
        empty = call(aten.eq.Scalar, sums, float("-inf"))
        weight = call(aten.masked_fill.Scalar, call(aten.softmax.int, sums, 0), empty, 0.0)
        outs = self.builder.cast(outs, val(lse).dtype)
        outs = call(aten.masked_fill.Scalar, outs, call(aten.unsqueeze.default, empty, -1), 0.0)
        total = call(aten.mul.Tensor, outs, call(aten.unsqueeze.default, weight, -1))
        total = call(aten.sum.dim_IntList, total, [0])
        return self.builder.cast(total, val(out).dtype), call(aten.logsumexp.default, sums, [0])


def number(builder: Builder, op: Callable[[Any, Any], object], a: fx.Node | int, b: fx.Node | int) -> fx.Node | int:
    """Arithmetic of sizes, done at once where both are numbers."""
    if isinstance(a, int) and isinstance(b, int):
        return op(a, b)  # type: ignore[return-value]  # a number of two numbers
    return builder.call(op, a, b)
