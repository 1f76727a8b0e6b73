"""Adds nodes for the plain attention that a library's fused operator computes.

Before: ``out = flash_attention(q, k, v, scale, causal, window, softcap, lengths)``, with tokens before heads

After: ``scaled_dot_product_attention`` of permuted operands, with a mask that compares positions. If the scores are
modified or there are sinks, two products with a softmax between them are added instead. Both products are in float32 or
wider, like in the kernels.

Query s sees key t if ``s + T - S - left <= t <= s + T - S + right`` (FlashAttention's documentation). S and T are the
numbers of queries and keys of one sequence. For a query that sees no key, the result is zero, as in PyTorch's fused
attention.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.canonical.factored import viewed
from mla_compile.passes.ir.arrange import same_layout
from mla_compile.passes.ir.expr import wide
from mla_compile.passes.ir.graph import Builder, shape, val
from mla_compile.passes.ir.sizes import same
from mla_compile.passes.rewrite.plain import masked_scores, probabilities

aten = torch.ops.aten


class UntoldError(Exception):
    """A call is not a plain attention. The message says why."""

    def __init__(self, why: str, code: str = "unsupported_op") -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True)
class Plain:
    """``softmax(modify(scale q k) + bias) v`` over the keys that are seen.

    Attributes:
        q: [B,S,H,D], or [B,H,S,D] if ``heads_first``; without heads [B,S,D]; packed [S,H,D].
        k, v: in the layout of ``q``, with T tokens. If ``k`` and ``v`` have fewer heads, each of their heads serves
            several neighbouring heads of ``q``.
        heads_first: whether the heads come before the tokens in the shapes.
        scale: the factor of the scores.
        modify: a function that adds nodes to change the scores [B,H,S,T]; None: scores stay as they are.
        left, right: how many keys before and after the diagonal are seen; None: all.
        first: whether the diagonal begins at the first key. Otherwise, it ends at the last key.
        starts: where each packed sequence starts among the queries, and among the keys; integers [n+1].
        used: the number of keys of each batch entry or packed sequence; integers [n].
        bias: a tensor that is added to the scores, or a boolean mask that is True where a key is seen.
        sinks: an additional score, without a value, for each head of ``q`` [H] or for each query [B|1,H|1,S|1,1].
            Sinks are not scaled, modified or masked.
        views: nodes that permute or reshape the result, one after the other.
    """

    q: fx.Node
    k: fx.Node
    v: fx.Node
    heads_first: bool
    scale: float
    modify: Callable[[Builder, fx.Node], fx.Node] | None = None
    left: int | None = None
    right: int | None = None
    first: bool = False
    starts: tuple[fx.Node, fx.Node] | None = None
    used: fx.Node | None = None
    bias: fx.Node | None = None
    sinks: fx.Node | None = None
    views: tuple[fx.Node, ...] = ()


@dataclass(frozen=True)
class PlainNodes:
    """The nodes of a plain attention.

    ``core``: its two products, or its fused call. ``out``: the result in the memory layout of the library's operator.
    """

    core: tuple[fx.Node, ...]
    out: fx.Node
    builder: Builder


def capped(softcap: float, builder: Builder, scores: fx.Node) -> fx.Node:
    """Return the scores as ``softcap * tanh(scores / softcap)``."""
    scores = builder.call(aten.tanh.default, builder.call(aten.div.Tensor, scores, softcap))
    return builder.call(aten.mul.Tensor, scores, softcap)


def write(anchor: fx.Node, plain: Plain, fake_mode: FakeTensorMode | None) -> PlainNodes:
    """Add the nodes of ``plain`` before ``anchor``. The result has the dtype of ``anchor``."""
    return _PlainWriter(anchor, plain, fake_mode).write()


class _PlainWriter:
    def __init__(self, anchor: fx.Node, plain: Plain, fake_mode: FakeTensorMode | None) -> None:
        self.plain = plain
        self.builder = Builder(anchor, fake_mode)
        self.call = self.builder.call
        self.anchor = anchor

    def write(self) -> PlainNodes:
        plain = self.plain
        q, k, v = (self._heads_first(x) for x in (plain.q, plain.k, plain.v))
        keep, causal = self._seen(q, k)
        core: tuple[fx.Node, ...]
        if plain.modify is not None or plain.sinks is not None:
            core, attention = self._in_two_products(q, k, v, keep, causal=causal)
        else:
            grouped = len(shape(q)) > 3 and not same(shape(q)[-3], shape(k)[-3])
            mask = plain.bias if keep is None else self._with_bias(keep)
            fused = aten.scaled_dot_product_attention.default
            attention = self.call(fused, q, k, v, mask, 0.0, causal, scale=plain.scale, enable_gqa=grouped)
            core = (attention,)
        out = viewed(self.builder, self._as_given(attention), plain.views)
        out = self.builder.cast(out, val(self.anchor).dtype)
        # The memory layout of the library's operator is kept, because existing views of the result were traced on it.
        return PlainNodes(core, same_layout(self.builder, out, self.anchor), self.builder)

    def _heads_first(self, x: fx.Node) -> fx.Node:
        if self.plain.starts is not None:
            return self.call(aten.unsqueeze.default, self.call(aten.permute.default, x, [1, 0, 2]), 0)
        order = self._order(x)
        return x if order is None else self.call(aten.permute.default, x, order)

    def _as_given(self, x: fx.Node) -> fx.Node:
        if self.plain.starts is not None:
            return self.call(aten.permute.default, self.call(aten.squeeze.dim, x, 0), [1, 0, 2])
        order = self._order(x)
        if order is None:
            return x
        return self.call(aten.permute.default, x, [order.index(d) for d in range(len(order))])

    def _order(self, x: fx.Node) -> list[int] | None:
        """Return the permutation to the order batch, heads (several axes for groups), tokens, width.

        Return None if ``x`` already has this order.
        """
        rank = len(shape(x))
        if self.plain.heads_first or rank == 3:
            return None
        return [0, *range(2, rank - 1), 1, rank - 1]

    def _with_bias(self, keep: fx.Node) -> fx.Node:
        """Return a mask that adds the bias where ``keep`` is True and minus infinity elsewhere."""
        if self.plain.bias is None:
            return keep
        dropped = self.call(aten.logical_not.default, keep)
        return self.call(aten.masked_fill.Scalar, self.plain.bias, dropped, float("-inf"))

    def _seen(self, q: fx.Node, k: fx.Node) -> tuple[fx.Node | None, bool]:
        """Return a boolean mask of the keys that are seen (None: no mask), and whether the attention is causal."""
        plain = self.plain
        if plain.starts is not None:
            return self._seen_packed(q, k, *plain.starts), False
        left, right = plain.left, plain.right
        square = same(shape(q)[-2], shape(k)[-2])
        if plain.used is None:
            # A single query is at the position of the last key, so no key comes after it.
            if same(shape(q)[-2], 1) and not plain.first:
                right = None
            if left is None and right is None:
                return None, False
            # The fused operator does not accept both a mask and `is_causal`, so a model's bias rules out `is_causal`.
            if left is None and right == 0 and square and plain.bias is None:
                return None, True
        s, t = self.builder.size(q, -2), self.builder.size(k, -2)
        rows, columns = self._counted(q, s), self._counted(q, t)
        rows = self.call(aten.unsqueeze.default, rows, 1)
        parts: list[fx.Node] = []
        if plain.used is not None:
            used = plain.used
            for _ in range(len(shape(q)) - 1):
                used = self.call(aten.unsqueeze.default, used, 1)
            parts.append(self.call(aten.lt.Tensor, columns, used))
            rows = self.call(aten.add.Tensor, rows, self.call(aten.sub.Tensor, used, s))
        elif not square and not plain.first:
            nodes = isinstance(s, fx.Node) or isinstance(t, fx.Node)
            shift = self.call(operator.sub, t, s) if nodes else t - s  # type: ignore[operator]
            rows = self.call(aten.add.Tensor, rows, shift)
        return self._all([*parts, *self._around(rows, columns, left, right)]), False

    def _seen_packed(self, q: fx.Node, k: fx.Node, starts_q: fx.Node, starts_k: fx.Node) -> fx.Node:
        plain, call = self.plain, self.call
        rows = self._counted(q, self.builder.size(q, -2))
        columns = self._counted(q, self.builder.size(k, -2))
        rows = call(aten.unsqueeze.default, rows, 1)
        ends = call(aten.slice.Tensor, starts_q, 0, 1, None)
        # The index of a query's sequence is the number of sequences that ended before the query. After the last
        # sequence, results are undefined, and the index only has to stay in bounds.
        own = call(aten.sum.dim_IntList, call(aten.ge.Tensor, rows, ends), [1])
        last = self.builder.size(ends, 0)
        most = call(operator.sub, last, 1) if isinstance(last, fx.Node) else last - 1
        own = call(aten.clamp.default, own, None, most)

        def of_own(x: fx.Node) -> fx.Node:
            return call(aten.unsqueeze.default, call(aten.index_select.default, x, 0, own), 1)

        def lengths(starts: fx.Node) -> fx.Node:
            n = call(aten.slice.Tensor, starts, 0, 1, None)
            return of_own(call(aten.sub.Tensor, n, call(aten.slice.Tensor, starts, 0, 0, -1)))

        keys = lengths(starts_k) if plain.used is None else of_own(plain.used)
        column = call(aten.sub.Tensor, columns, of_own(starts_k))
        parts = [call(aten.ge.Scalar, column, 0), call(aten.lt.Tensor, column, keys)]
        row = call(aten.sub.Tensor, rows, of_own(starts_q))
        row = call(aten.add.Tensor, row, call(aten.sub.Tensor, keys, lengths(starts_q)))
        return self._all([*parts, *self._around(row, column, plain.left, plain.right)])

    def _counted(self, of: fx.Node, n: int | fx.Node) -> fx.Node:
        return self.call(aten.arange.default, n, device=val(of).device)

    def _around(self, rows: fx.Node, columns: fx.Node, left: int | None, right: int | None) -> list[fx.Node]:
        found = []
        if right is not None:
            end = self.call(aten.add.Tensor, rows, right) if right else rows
            found.append(self.call(aten.le.Tensor, columns, end))
        if left is not None:
            start = self.call(aten.sub.Tensor, rows, left) if left else rows
            found.append(self.call(aten.ge.Tensor, columns, start))
        return found

    def _all(self, parts: list[fx.Node]) -> fx.Node:
        keep, *others = parts
        for part in others:
            keep = self.call(aten.logical_and.default, keep, part)
        return keep

    def _in_two_products(
        self, q: fx.Node, k: fx.Node, v: fx.Node, keep: fx.Node | None, *, causal: bool
    ) -> tuple[tuple[fx.Node, fx.Node], fx.Node]:
        """Add two products and a softmax, and return the products and the result. K and V may have fewer heads."""
        call, plain = self.call, self.plain
        dtype = wide(val(q).dtype)
        group = 1
        if len(shape(q)) > 3 and not same(shape(q)[-3], shape(k)[-3]):
            group = int(shape(q)[-3]) // int(shape(k)[-3])
        q, k, v = (self.builder.cast(x, dtype) for x in (q, k, v))
        masks = [m for m in (plain.bias, keep) if m is not None]
        if causal:
            rows, columns = (self._counted(q, self.builder.size(x, -2)) for x in (q, k))
            masks.append(call(aten.le.Tensor, columns, call(aten.unsqueeze.default, rows, 1)))
        if group > 1:
            q = call(aten.unflatten.int, q, -3, [-1, group])
            k, v = (call(aten.unsqueeze.default, x, -3) for x in (k, v))
            masks = [self._grouped(m, group) for m in masks]
        product = call(aten.matmul.default, q, call(aten.transpose.int, k, -2, -1))

        modify = None if plain.modify is None else partial(self._modified, modify=plain.modify, group=group)
        scores = masked_scores(self.builder, product, plain.scale, masks, modify)
        if plain.sinks is None:
            probs = probabilities(self.builder, scores, some_empty=bool(masks))
        else:
            probs = self._beside_sinks(scores, plain.sinks, group)
        out = call(aten.matmul.default, probs, v)
        return (product, out), call(aten.flatten.using_ints, out, -4, -3) if group > 1 else out

    def _modified(self, scores: fx.Node, modify: Callable[[Builder, fx.Node], fx.Node], group: int) -> fx.Node:
        if group == 1:
            return modify(self.builder, scores)
        scores = modify(self.builder, self.call(aten.flatten.using_ints, scores, -4, -3))
        return self.call(aten.unflatten.int, scores, -3, [-1, group])

    def _beside_sinks(self, scores: fx.Node, sinks: fx.Node, group: int) -> fx.Node:
        call, dtype = self.call, val(scores).dtype
        # A sink of minus infinity is clamped to a finite number. The sink then takes no share from visible keys. In a
        # row without visible keys, the sink takes the whole share, so the result is zero.
        column = call(aten.clamp.default, self.builder.cast(sinks, dtype), torch.finfo(dtype).min)
        if len(shape(column)) == 1:
            column = call(aten.view.default, column, [-1, 1, 1])
        if group > 1:
            column = self._grouped(column, group)
        sizes = [self.builder.size(scores, d) for d in range(len(shape(scores)) - 1)]
        both = call(aten.cat.default, [scores, call(aten.expand.default, column, [*sizes, 1])], -1)
        return call(aten.slice.Tensor, call(aten.softmax.int, both, -1), -1, 0, -1)

    def _grouped(self, mask: fx.Node, group: int) -> fx.Node:
        """Split the heads of a mask [..., H, S, T] into key heads and groups. The mask may lack leading axes."""
        if len(shape(mask)) < 3:
            return mask
        if same(shape(mask)[-3], 1):
            return self.call(aten.unsqueeze.default, mask, -3)
        return self.call(aten.unflatten.int, mask, -3, [-1, group])
