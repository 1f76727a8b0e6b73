"""Replace the attention operator by plain ATen, for packages and exporters that must run without this library.

Before: ``out, lse = mla_compile.decode_attention(q, c, k_rope, values, mask, seq_lens, scale, causal, window)``

After: two products for the scores, a softmax in float32 (or wider) and one product with the values. The formulas come
from :mod:`mla_compile.kernels.reference`. If the operator has a sparse index list (``indices``), the rows of the
listed keys are first gathered for each query.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.ir.expr import wide
from mla_compile.passes.ir.graph import Builder, args_of, argument, packet, shape, val
from mla_compile.passes.ir.sizes import at_least, same
from mla_compile.passes.rewrite.plain import future, hidden, masked_scores, positions, probabilities

aten = torch.ops.aten
_TENSORS = ("query", "latent", "rope", "values", "mask", "seq_lens")


def lower_to_aten(graph: fx.Graph, fake_mode: FakeTensorMode | None) -> int:
    """Expand every attention operator of ``graph``; return how many were expanded."""
    nodes = [n for n in graph.nodes if packet(n) is torch.ops.mla_compile.decode_attention]
    for node in nodes:
        _expand(node, Builder(node, fake_mode))
    for node in [n for n in graph.nodes if packet(n) is torch.ops.mla_compile.weigh_alike]:
        node.replace_all_uses_with(_alike(Builder(node, fake_mode), *args_of(node)))
        graph.erase_node(node)
    return len(nodes)


def _alike(
    builder: Builder,
    out: fx.Node,
    lse: fx.Node,
    rows: fx.Node,
    lowest: float,
    mask: fx.Node | None = None,
    indices: fx.Node | None = None,
    fill: float = 0.0,
) -> fx.Node:
    """Emit ``weigh_alike`` as :mod:`mla_compile.kernels.alike` defines it."""
    values = builder.cast(rows, wide(val(rows).dtype))
    if mask is not None and indices is not None:
        mean = _greatest(builder, values, mask, indices, fill)
    else:
        mean = builder.call(aten.mean.dim, values, [1])
        for dim in (1, 2):
            mean = builder.call(aten.unsqueeze.default, mean, dim)
    hidden = builder.call(aten.unsqueeze.default, builder.call(aten.le.Scalar, lse, lowest), -1)
    return builder.call(aten.where.self, hidden, builder.cast(mean, val(out).dtype), out)


def _greatest(builder: Builder, values: fx.Node, mask: fx.Node, indices: fx.Node, fill: float) -> fx.Node:
    """Return the mean [B,S,H|1,Lv] of the rows with the greatest mask value. Unlisted rows have the value ``fill``."""
    call = builder.call
    B, S, k = (builder.size(indices, dim) for dim in range(3))
    heads = shape(mask)[1]
    given = call(aten.expand.default, mask, [B, heads, S, -1])
    others = call(aten.full_like.default, given, fill)
    at = call(aten.clamp_min.default, call(aten.add.Tensor, builder.cast(indices, torch.int64), 1), 0)
    # An entry that names no key refers to an extra first column, which is dropped later.
    at = call(aten.masked_fill.Scalar, at, call(aten.gt.Scalar, at, builder.size(values, 1)), 0)
    at = call(aten.expand.default, call(aten.unsqueeze.default, at, 1), [B, heads, S, k])
    before = call(aten.slice.Tensor, others, 3, 0, 1)
    listed = call(aten.gather.default, call(aten.cat.default, [before, given], 3), 3, at)
    numbers = call(aten.scatter.src, call(aten.cat.default, [before, others], 3), 3, at, listed)
    numbers = call(aten.slice.Tensor, numbers, 3, 1)
    top = call(aten.eq.Tensor, numbers, call(aten.amax.default, numbers, [3], keepdim=True))
    weights = builder.cast(top, val(values).dtype)
    total = call(aten.einsum.default, "bhst,btv->bshv", [weights, values])
    count = call(aten.transpose.int, call(aten.sum.dim_IntList, weights, [3], keepdim=True), 1, 2)
    return call(aten.div.Tensor, total, count)


def _expand(node: fx.Node, builder: Builder) -> None:
    call = builder.call
    query, latent, rope, values, mask, lengths = (argument(node, i, n) for i, n in enumerate(_TENSORS))
    picked = None if node.kwargs.get("indices") is None else _Picked(builder, node)
    each = "s" if picked else ""  # with a sparse index list, each query has its own rows
    scale = node.kwargs["scale"]
    assert isinstance(scale, (int, float, fx.Node))
    dtype = wide(val(latent).dtype)
    width = int(val(latent).shape[-1])

    def scores_of(rows: fx.Node, start: int, stop: int) -> fx.Node:
        q = call(aten.slice.Tensor, query, 3, start, stop) if rope is not None else query
        q, r = builder.cast(q, dtype), builder.cast(picked.rows(rows) if picked else rows, dtype)
        return call(aten.einsum.default, f"bshl,b{each}tl->bhst", [q, r])

    scores = scores_of(latent, 0, width)
    if rope is not None:
        total = int(val(query).shape[-1])
        scores = call(aten.add.Tensor, scores, scores_of(rope, width, total))
    if mask is not None and picked is not None:
        mask = picked.mask(mask)
    scores = masked_scores(builder, scores, scale, [] if mask is None else [mask])
    if picked is not None:
        scores = hidden(builder, scores, picked.none)
    causal, window = node.kwargs.get("causal", False), node.kwargs.get("window", 0)
    if causal or window or lengths is not None:
        rows, columns = positions(builder, (scores, 2), (latent, 1), lengths)
        columns = columns if picked is None else picked.keys
        if causal:
            scores = hidden(builder, scores, future(builder, rows, columns))
        elif lengths is not None:
            last = call(aten.slice.Tensor, rows, 2, -1)
            scores = hidden(builder, scores, future(builder, last, columns))
        if window:
            scores = hidden(builder, scores, call(aten.le.Tensor, columns, call(aten.sub.Tensor, rows, window)))
    # In causal attention with more queries than keys, the first queries see no key.
    more = bool(causal) and not at_least(shape(latent)[1], shape(query)[1])
    some_empty = more or not all(x is None for x in (mask, lengths, picked))
    probs = probabilities(builder, scores, some_empty=some_empty)
    rows = latent if values is None else values
    rows = rows if picked is None else picked.rows(rows)
    out = call(aten.einsum.default, f"bhst,b{each}tl->bshl", [probs, builder.cast(rows, dtype)])
    out = builder.cast(out, val(query).dtype)
    for user in list(node.users):
        assert user.target is operator.getitem
        if user.args[1] == 0:
            user.replace_all_uses_with(out)
        else:
            # The operator's layout is [B, S, H]; scores are [B, H, S, T].
            lse = call(aten.logsumexp.default, scores, [-1])
            user.replace_all_uses_with(call(aten.transpose.int, lse, 1, 2))
        node.graph.erase_node(user)
    node.graph.erase_node(node)


class _Picked:
    """Gathers the rows, mask entries and positions of the keys in each query's sparse index list."""

    def __init__(self, builder: Builder, node: fx.Node) -> None:
        self.builder = builder
        self.S = builder.size(args_of(node)[0], 1)
        T = builder.size(args_of(node)[1], 1)
        whole = builder.cast(argument(node, len(node.args), "indices"), torch.int64)
        # An entry that names no key is clamped to a valid position, and hidden later.
        last = builder.call(operator.sub, T, 1) if isinstance(T, fx.Node) else T - 1
        self.at = builder.call(aten.clamp.default, whole, 0, last)
        self.keys = builder.call(aten.unsqueeze.default, self.at, 1)  # [B,1,S,k]
        none = builder.call(aten.ne.Tensor, whole, self.at)
        self.none = builder.call(aten.unsqueeze.default, none, 1)
        self._taken: dict[fx.Node, fx.Node] = {}

    def rows(self, of: fx.Node) -> fx.Node:
        """Gather [B,S,k,width] from rows [B,T,width]."""
        if of not in self._taken:
            call = self.builder.call
            batch = call(aten.arange.default, self.builder.size(of, 0), device=val(of).device)
            for dim in (1, 2):
                batch = call(aten.unsqueeze.default, batch, dim)
            self._taken[of] = call(aten.index.Tensor, of, [batch, self.at])
        return self._taken[of]

    def mask(self, mask: fx.Node) -> fx.Node:
        """Gather the mask [B|1,H|1,S|1,T|1] at the listed keys."""
        if same(shape(mask)[3], 1):
            return mask
        call, heads = self.builder.call, self.builder.size(mask, 1)
        wide = call(aten.expand.default, mask, [self.builder.size(self.at, 0), heads, self.S, -1])
        return call(aten.gather.default, wide, 3, call(aten.expand.default, self.keys, [-1, heads, -1, -1]))
