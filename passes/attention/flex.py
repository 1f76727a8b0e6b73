"""flex_attention as it stands in a graph: what of it can be read as an attention, and its score_mod for all scores.

``score_mod`` is a function of one score and its indices; vectorised it is the same operators on all scores. A call with
a block mask, or of which more than the result is used, is not taken apart.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from mla_compile.passes.ir.graph import args_of, packet, shape
from mla_compile.passes.ir.sizes import same

aten = torch.ops.aten
_ONE_BLOCK = 1 << 30
"""The block size that PyTorch gives a mask without blocks."""


@dataclass(frozen=True)
class Flex:
    """One call of flex_attention. ``score_mod`` is None where it returns the score; ``buffers`` are its operands."""

    call: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    scale: float
    score_mod: fx.GraphModule | None
    buffers: tuple[fx.node.Argument, ...]

    def modified(self, scores: torch.Tensor, *buffers: torch.Tensor) -> torch.Tensor:
        """``score_mod`` of all scores [B,H,S,T] at once."""
        assert self.score_mod is not None
        indices = (torch.arange(n, device=scores.device) for n in scores.shape)
        return _for_all(self.score_mod, buffers)(scores, *indices, *buffers)


def is_flex(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.HigherOrderOperator)
        and node.target.name() == "flex_attention"
    )


def flex_of(node: fx.Node) -> Flex | None:
    """The call of which ``node`` is the result, where nothing else of it is used and it can be read as an attention."""
    call = args_of(node)[0] if packet(node) is operator.getitem else None
    # The second result is the logarithm of the sums, which a rewrite does not give.
    if call is None or not is_flex(call) or call.kwargs or len(call.users) != 1 or node.args[1] != 0:
        return None
    q, k, v, score_mod, block_mask, scale, _, buffers, _ = args_of(call)
    owner = call.graph.owning_module
    # Higher-order operators are given graphs by the name of a submodule; the last entry of the block mask is mask_mod.
    score_graph, mask_graph = (getattr(owner, str(n.target)) for n in (score_mod, block_mask[-1]))
    if (
        not _one_block(block_mask)
        or not _is_true(mask_graph)
        or not isinstance(scale, (int, float))
        or not all(isinstance(shape(x)[1], int) for x in (q, k))
        or not same(shape(q)[0], shape(k)[0])
    ):
        return None
    return Flex(call, q, k, v, float(scale), None if _returns_the_score(score_graph) else score_graph, tuple(buffers))


def _one_block(block_mask: tuple[object, ...]) -> bool:
    """Whether no block is left out: blocks and mask_mod may say different things, and the blocks are values."""
    partial, full = block_mask[2:4], block_mask[4:6]
    large = all(isinstance(size, int) and size >= _ONE_BLOCK for size in block_mask[-3:-1])
    return large and full[0] is None and packet(partial[0]) in (aten.ones, aten.new_ones)


def _for_all(function: Callable[..., torch.Tensor], buffers: Sequence[object]) -> Callable[..., torch.Tensor]:
    """``function`` of one score and its place, for the scores of all places [B,H,S,T]."""
    # The innermost axis first: the last wrapper is the outermost, the batch.
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=(0, *dims, *(None for _ in buffers)))
    return function


def _returns_the_score(graph: fx.GraphModule) -> bool:
    return bool(graph.graph.output_node().args[0] is next(iter(graph.graph.nodes)))


def _is_true(graph: fx.GraphModule) -> bool:
    """Whether mask_mod is the one that hides nothing."""
    # The default mask_mod is traced to one constant; what computes anything may hide something.
    result = graph.graph.output_node().args[0]
    if isinstance(result, fx.Node) and packet(result) in (aten.full, aten.new_full):
        return args_of(result)[-1] is True or result.kwargs.get("fill_value") is True
    return packet(result) in (aten.ones, aten.new_ones)
