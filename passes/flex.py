"""flex_attention, written as an attention the other passes know, while they decide about it.

before:  flex_attention(q, k, v, score_mod, block_mask, scale)
after:   scaled_dot_product_attention(q, k, v, mask)                       where score_mod returns the score
         _safe_softmax(where(mask, score_mod(q @ k.mT * scale), -inf)) @ v  else

score_mod and mask_mod are functions of one score and its indices; vectorised they are the same operators on all scores.
One with a block mask is left as it is. A written one that is not absorbed becomes flex_attention again, for its kernel.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.passes.graph import Builder, args_of, packet, same, shape, splice, val

aten = torch.ops.aten
WRITTEN = "mla_compile_written_flex"
"""The key in the meta of a node that stands for a fused kernel."""
_ONE_BLOCK = 1 << 30  # the block size that PyTorch gives a mask without blocks


@dataclass(frozen=True)
class Written:
    """One flex_attention that was written out: what it was, and what stands for its result."""

    target: Any
    args: tuple[Any, ...]
    meta: dict[str, Any]
    out: fx.Node


def is_flex(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.HigherOrderOperator)
        and node.target.name() == "flex_attention"
    )


def write_flex(gm: fx.GraphModule, fake_mode: FakeTensorMode | None) -> list[Written]:
    """Writes out every flex_attention of which only the result is used."""
    written: list[Written] = []
    for node in list(gm.graph.nodes):
        if is_flex(node) and all(user.target is operator.getitem and user.args[1] == 0 for user in node.users):
            if len(node.users) != 1 or node.kwargs:
                continue
            out = _write(gm, node, fake_mode)
            if out is None:
                continue
            (part,) = node.users
            out.meta[WRITTEN] = True
            out.meta["tensor_meta"] = part.meta.get("tensor_meta")
            part.replace_all_uses_with(out)
            written.append(Written(node.target, args_of(node), dict(node.meta), out))
            gm.graph.erase_node(part)
            gm.graph.erase_node(node)
    return written


def restore_flex(graph: fx.Graph, written: Sequence[Written], absorbed: Collection[fx.Node]) -> int:
    """Makes those flex_attentions again whose value product is not among ``absorbed``; returns how many."""
    left = [w for w in written if w.out not in absorbed]
    for w in left:
        with graph.inserting_before(w.out):
            node = graph.call_function(w.target, w.args)
            part = graph.call_function(operator.getitem, (node, 0))
        node.meta, part.meta = w.meta, dict(w.out.meta)
        w.out.replace_all_uses_with(part)
    return len(left)


def _write(gm: fx.GraphModule, node: fx.Node, fake_mode: FakeTensorMode | None) -> fx.Node | None:
    q, k, v, score_mod, block_mask, scale, _, score_buffers, mask_buffers = args_of(node)
    if (
        not _one_block(block_mask)
        or not isinstance(scale, (int, float))
        or len(shape(q)) != 4
        or not same(shape(q)[0], shape(k)[0])
    ):
        return None
    score_graph, mask_graph = (getattr(gm, str(n.target)) for n in (score_mod, block_mask[-1]))
    builder = Builder(node, fake_mode)
    visible = _visible(builder, gm, q, k, mask_graph, mask_buffers)
    if _returns_the_score(score_graph):
        grouped = not same(shape(q)[1], shape(k)[1])
        return builder.call(
            aten.scaled_dot_product_attention.default, q, k, v, visible, scale=float(scale), enable_gqa=grouped
        )
    heads, kv_heads = shape(q)[1], shape(k)[1]
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        return None
    if heads != kv_heads:
        k, v = (builder.call(aten.repeat_interleave.self_int, x, heads // kv_heads, 1) for x in (k, v))
    wide = torch.float64 if val(q).dtype == torch.float64 else torch.float32
    keys = builder.call(aten.transpose.int, builder.cast(k, wide), -2, -1)
    scores = builder.call(aten.matmul.default, builder.cast(q, wide), keys)
    scores = builder.call(aten.mul.Tensor, scores, float(scale))

    def modified(scores: torch.Tensor, *buffers: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _for_all(score_graph, scores, buffers)(scores, *_indices(scores), *buffers)
        return result

    scores = _traced(builder, gm, modified, [scores, *score_buffers])
    if visible is not None:
        hidden = builder.call(aten.logical_not.default, visible)
        scores = builder.call(aten.masked_fill.Scalar, scores, hidden, -math.inf)
    weights = builder.cast(builder.call(aten._safe_softmax.default, scores, -1), val(q).dtype)
    return builder.call(aten.matmul.default, weights, v)


def _visible(
    builder: Builder,
    gm: fx.GraphModule,
    q: fx.Node,
    k: fx.Node,
    mask_graph: fx.GraphModule,
    buffers: Sequence[Any],
) -> fx.Node | None:
    """[B,H,S,T], True where a query sees a key; None where it sees all of them."""
    if _is_true(mask_graph):
        return None

    def allowed(q: torch.Tensor, k: torch.Tensor, *buffers: Any) -> torch.Tensor:
        places = q.new_empty(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        seen: torch.Tensor = _for_all(mask_graph, None, buffers)(*_indices(places), *buffers)
        return seen

    return _traced(builder, gm, allowed, [q, k, *buffers])


def _one_block(block_mask: tuple[Any, ...]) -> bool:
    """Whether no block is left out: blocks and mask_mod may say different things, and the blocks are values."""
    partial, full = block_mask[2:4], block_mask[4:6]
    large = all(isinstance(size, int) and size >= _ONE_BLOCK for size in block_mask[-3:-1])
    return large and full[0] is None and packet(partial[0]) in (aten.ones, aten.new_ones)


def _indices(scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.arange(n, device=scores.device) for n in scores.shape)


def _for_all(function: Callable[..., Any], scores: object, buffers: Sequence[Any]) -> Callable[..., Any]:
    """``function`` of one place, for all places [B,H,S,T]; with ``scores`` its first argument is the score there."""
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        own = () if scores is None else (0,)
        function = torch.vmap(function, in_dims=(*own, *dims, *(None for _ in buffers)))
    return function


def _traced(builder: Builder, gm: fx.GraphModule, function: Callable[..., Any], operands: Sequence[Any]) -> fx.Node:
    """The operators of ``function``, added before the anchor of ``builder``. Operands are nodes, or numbers."""
    nodes = [n for n in operands if isinstance(n, fx.Node)]

    def of_nodes(*values: Any) -> Any:
        given = iter(values)
        return function(*(next(given) if isinstance(n, fx.Node) else n for n in operands))

    with builder.fake_mode or contextlib.nullcontext(), torch.no_grad():
        traced = make_fx(of_nodes)(*(n.meta["val"] for n in nodes))
    (result,) = splice(gm, builder.anchor, traced, nodes)
    return result


def _returns_the_score(graph: fx.GraphModule) -> bool:
    return bool(graph.graph.output_node().args[0] is next(iter(graph.graph.nodes)))


def _is_true(graph: fx.GraphModule) -> bool:
    """Whether mask_mod is the one that hides nothing."""
    result = graph.graph.output_node().args[0]
    if isinstance(result, fx.Node) and packet(result) in (aten.full, aten.new_full):
        return args_of(result)[-1] is True or result.kwargs.get("fill_value") is True
    return packet(result) in (aten.ones, aten.new_ones)
