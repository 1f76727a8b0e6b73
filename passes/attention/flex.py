"""Calls of flex_attention: which of them can be read as an attention, and their score_mod applied to all scores.

``score_mod`` is a function of one score and its indices; vectorised, the same operators apply to all scores. A call
with a block mask, or with more than one used result, is left as it is.
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
    """One call of flex_attention. ``score_mod``, with operands ``buffers``, is None if it returns the score."""

    call: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    scale: float
    score_mod: fx.GraphModule | None
    buffers: tuple[fx.node.Argument, ...]

    def modified(self, scores: torch.Tensor, *buffers: torch.Tensor) -> torch.Tensor:
        """Apply ``score_mod`` to all scores [B,H,S,T] at once."""
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
    """Return the call whose only used result is ``node``, if the call can be read as an attention."""
    call = args_of(node)[0] if packet(node) is operator.getitem else None
    # The second result is the log-sum-exp, which a rewrite does not produce.
    if call is None or not is_flex(call) or call.kwargs or len(call.users) != 1 or node.args[1] != 0:
        return None
    q, k, v, score_mod, block_mask, scale, _, buffers, _ = args_of(call)
    owner = call.graph.owning_module
    # A higher-order operator names its graphs as submodules; the last entry of the block mask is mask_mod.
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
    """Whether no block is left out: the blocks are runtime values, and may contradict mask_mod."""
    partial, full = block_mask[2:4], block_mask[4:6]
    large = all(isinstance(size, int) and size >= _ONE_BLOCK for size in block_mask[-3:-1])
    return large and full[0] is None and packet(partial[0]) in (aten.ones, aten.new_ones)


def _for_all(function: Callable[..., torch.Tensor], buffers: Sequence[object]) -> Callable[..., torch.Tensor]:
    """Vectorise ``function`` of one score and its indices over all scores [B,H,S,T]."""
    # The innermost axis is wrapped first, so that the batch becomes the outermost one.
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=(0, *dims, *(None for _ in buffers)))
    return function


def _returns_the_score(graph: fx.GraphModule) -> bool:
    return bool(graph.graph.output_node().args[0] is next(iter(graph.graph.nodes)))


def _is_true(graph: fx.GraphModule) -> bool:
    """Whether mask_mod hides nothing."""
    # The default mask_mod is traced to one constant; a mask_mod that computes anything may hide something.
    result = graph.graph.output_node().args[0]
    if isinstance(result, fx.Node) and packet(result) in (aten.full, aten.new_full):
        return args_of(result)[-1] is True or result.kwargs.get("fill_value") is True
    return packet(result) in (aten.ones, aten.new_ones)
