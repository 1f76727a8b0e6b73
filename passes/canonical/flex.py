"""flex_attention, written as an attention the other passes know, while they decide about it.

before:  flex_attention(q, k, v, score_mod, block_mask, scale)
after:   scaled_dot_product_attention(q, k, v)                where score_mod returns the score
         _safe_softmax(score_mod(q @ k.mT * scale)) @ v       else

score_mod is a function of one score and its indices; vectorised it is the same operators on all scores. One with a
block mask is left as it is. A written one that is not absorbed becomes flex_attention again, for its kernel: until that
is known, its node stays in the graph, where nothing reads it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.passes.ir.arrange import same_layout
from mla_compile.passes.ir.graph import WAITS, Builder, args_of, packet, shape, splice, val
from mla_compile.passes.ir.sizes import same

aten = torch.ops.aten
WRITTEN = "mla_compile_written_flex"
"""The key in the meta of a node that stands for a fused kernel."""
_ONE_BLOCK = 1 << 30  # the block size that PyTorch gives a mask without blocks


@dataclass(frozen=True)
class Written:
    """One flex_attention that was written out: ``out`` is its value product, ``result`` what is read in its place."""

    node: fx.Node
    out: fx.Node
    result: fx.Node
    meta: dict[str, Any]


def is_flex(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.HigherOrderOperator)
        and node.target.name() == "flex_attention"
    )


def write_flex(gm: fx.GraphModule, fake_mode: FakeTensorMode | None) -> list[Written]:
    """Writes out every flex_attention of which only the result is used, and once."""
    written: list[Written] = []
    for node in gm.graph.nodes:
        parts = list(node.users)
        if not is_flex(node) or node.kwargs or [(p.target, p.args[1:]) for p in parts] != [(operator.getitem, (0,))]:
            continue
        builder = Builder(node, fake_mode)
        out = _write(gm, node, builder)
        if out is None:
            continue
        (part,) = parts
        out.meta[WRITTEN] = True
        result = same_layout(builder, out, part)
        part.replace_all_uses_with(result)
        gm.graph.erase_node(part)
        node.meta[WAITS] = True
        written.append(Written(node, out, result, part.meta))
    return written


def restore_flex(graph: fx.Graph, written: Sequence[Written], absorbed: Collection[fx.Node]) -> int:
    """Makes those flex_attentions again whose value product is not among ``absorbed``; returns how many."""
    left = [w for w in written if w.out not in absorbed]
    for w in written:
        del w.node.meta[WAITS]
    for w in left:
        with graph.inserting_after(w.node):
            part = graph.call_function(operator.getitem, (w.node, 0))
        part.meta = w.meta
        w.result.replace_all_uses_with(part)
    return len(left)


def _write(gm: fx.GraphModule, node: fx.Node, builder: Builder) -> fx.Node | None:
    q, k, v, score_mod, block_mask, scale, _, score_buffers, _ = args_of(node)
    score_graph, mask_graph = (getattr(gm, str(n.target)) for n in (score_mod, block_mask[-1]))
    heads, kv_heads = shape(q)[1], shape(k)[1]
    if (
        not _one_block(block_mask)
        or not _is_true(mask_graph)
        or not isinstance(scale, (int, float))
        or not isinstance(heads, int)
        or not isinstance(kv_heads, int)
        or not same(shape(q)[0], shape(k)[0])
    ):
        return None
    if _returns_the_score(score_graph):
        return builder.call(
            aten.scaled_dot_product_attention.default, q, k, v, scale=float(scale), enable_gqa=heads != kv_heads
        )
    if heads != kv_heads:
        k, v = (builder.call(aten.repeat_interleave.self_int, x, heads // kv_heads, 1) for x in (k, v))
    wide = torch.float64 if val(q).dtype == torch.float64 else torch.float32
    keys = builder.call(aten.transpose.int, builder.cast(k, wide), -2, -1)
    scores = builder.call(aten.matmul.default, builder.cast(q, wide), keys)
    scores = builder.call(aten.mul.Tensor, scores, float(scale))

    def modified(scores: torch.Tensor, *buffers: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _for_all(score_graph, buffers)(scores, *_indices(scores), *buffers)
        return result

    scores = _traced(builder, gm, modified, [scores, *score_buffers])
    weights = builder.cast(builder.call(aten._safe_softmax.default, scores, -1), val(q).dtype)
    return builder.call(aten.matmul.default, weights, v)


def _one_block(block_mask: tuple[Any, ...]) -> bool:
    """Whether no block is left out: blocks and mask_mod may say different things, and the blocks are values."""
    partial, full = block_mask[2:4], block_mask[4:6]
    large = all(isinstance(size, int) and size >= _ONE_BLOCK for size in block_mask[-3:-1])
    return large and full[0] is None and packet(partial[0]) in (aten.ones, aten.new_ones)


def _indices(scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.arange(n, device=scores.device) for n in scores.shape)


def _for_all(function: Callable[..., Any], buffers: Sequence[Any]) -> Callable[..., Any]:
    """``function`` of one score and its place, for the scores of all places [B,H,S,T]."""
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=(0, *dims, *(None for _ in buffers)))
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
