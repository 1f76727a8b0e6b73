"""Recognise calls of flex_attention that can be analysed, and vectorise their functions.

``score_mod`` is a function of one score and its indices. The vectorised function applies to all scores at once. If
there is a block mask, a query sees only keys of the listed blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import fx

from mla_compile.passes.ir.graph import args_of, packet, shape
from mla_compile.passes.ir.sizes import same

aten = torch.ops.aten
_ONE_BLOCK = 1 << 30
"""The block size that PyTorch gives a mask without blocks."""


@dataclass(frozen=True)
class Flex:
    """One call of flex_attention.

    ``score_mod`` may read ``buffers``, and is None if it changes no score. ``mask`` is None if all keys are seen.
    """

    call: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    scale: float
    score_mod: fx.GraphModule | None
    buffers: tuple[fx.node.Argument, ...]
    mask: FlexMask | None

    def modified(self, scores: torch.Tensor, *buffers: torch.Tensor) -> torch.Tensor:
        """Apply ``score_mod`` to all scores [B,H,S,T] at once."""
        assert self.score_mod is not None
        indices = (torch.arange(n, device=scores.device) for n in scores.shape)
        return _for_all(self.score_mod, 1, buffers)(scores, *indices, *buffers)


@dataclass(frozen=True)
class FlexMask:
    """A block mask.

    ``blocks``: for each block of queries, the number [B|1,H|1,n] and the indices [B|1,H|1,n,m] of the key blocks that
    are partly seen. If wholly seen key blocks are listed, two more such tensors follow. ``sizes``: the number of tokens
    in a block of queries and in a block of keys. ``mask_mod`` tells which keys of the partly seen blocks are seen, and
    may read ``buffers``.
    """

    blocks: tuple[fx.Node, ...]
    sizes: tuple[int, int]
    mask_mod: fx.GraphModule
    buffers: tuple[fx.node.Argument, ...]

    @property
    def indexed(self) -> tuple[bool, ...]:
        """Whether ``mask_mod`` reads the batch index, and whether it reads the head index."""
        return tuple(bool(node.users) for node in islice(self.mask_mod.graph.nodes, 2))

    def seen(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return a boolean [B|1,H|1,S,T] that tells which query sees which key.

        ``tensors``: the batch, head, query and key indices, then the tensors of ``blocks``, then the buffers.
        """
        indices, blocks, buffers = tensors[:4], tensors[4 : 4 + len(self.blocks)], tensors[4 + len(self.blocks) :]
        seen = _for_all(self.mask_mod, 0, buffers)(*indices, *buffers) & self._listed(*blocks[:2], *indices[2:])
        return seen | self._listed(*blocks[2:], *indices[2:]) if blocks[2:] else seen

    def _listed(
        self, count: torch.Tensor, index: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """Whether a key's block is listed for a query's block, among the first ``count`` entries of ``index``."""
        of_queries, of_keys = self.sizes
        number = -(-keys.shape[0] // of_keys)
        listed = torch.arange(index.shape[-1], device=index.device) < count[..., None]
        at = torch.where(listed & (index < number), index, number).long()
        blocks = torch.zeros((*index.shape[:-1], number + 1), dtype=torch.bool, device=index.device)
        blocks = blocks.scatter(-1, at, torch.ones_like(at, dtype=torch.bool))
        return blocks.index_select(-2, queries // of_queries).index_select(-1, keys // of_keys)


def is_flex(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.HigherOrderOperator)
        and node.target.name() == "flex_attention"
    )


def flex_of(node: fx.Node) -> Flex | None:
    """Return the call that computes ``node``, if it can be analysed, has no mask and has no other used result."""
    call: fx.Node | None = args_of(node)[0] if packet(node) is operator.getitem else None
    if call is None or not is_flex(call) or set(call.users) != {node} or node.args[1] != 0:
        return None
    flex = read_flex(call)
    return flex if flex is not None and flex.mask is None else None


def read_flex(call: fx.Node) -> Flex | None:
    """Return a record of ``call``; None if it cannot be analysed. Any of its results may be used."""
    if not is_flex(call) or call.kwargs:
        return None
    q, k, v, score_mod, block_mask, scale, _, buffers, mask_buffers = args_of(call)
    # A rewrite needs a constant scale and constant numbers of heads.
    known = isinstance(scale, (int, float)) and all(isinstance(shape(x)[1], int) for x in (q, k))
    if not known or not same(shape(q)[0], shape(k)[0]):
        return None
    mask: FlexMask | None = None
    if not (_one_block(block_mask) and _is_true(_graph(block_mask[-1]))):
        blocks, sizes = tuple(b for b in block_mask[2:6] if b is not None), tuple(block_mask[-3:-1])
        if len(blocks) not in (2, 4) or not all(isinstance(n, int) for n in sizes):
            return None
        mask = FlexMask(blocks, sizes, _graph(block_mask[-1]), tuple(mask_buffers))
    graph = _graph(score_mod)
    return Flex(call, q, k, v, float(scale), None if _returns_the_score(graph) else graph, tuple(buffers), mask)


def _graph(name: fx.Node) -> fx.GraphModule:
    """Return the graph module to which the node ``name`` refers."""
    found: fx.GraphModule = getattr(name.graph.owning_module, str(name.target))
    return found


def _one_block(block_mask: tuple[object, ...]) -> bool:
    """Whether one listed block covers all keys. Other lists are known only at run time, and may hide keys."""
    partial, full = block_mask[2:4], block_mask[4:6]
    large = all(isinstance(size, int) and size >= _ONE_BLOCK for size in block_mask[-3:-1])
    return large and full[0] is None and packet(partial[0]) in (aten.ones, aten.new_ones)


def _for_all(
    function: Callable[..., torch.Tensor], scores: int, buffers: Sequence[object]
) -> Callable[..., torch.Tensor]:
    """Vectorise ``function`` over [B,H,S,T]. ``function`` takes ``scores`` (0 or 1) scores, 4 indices and buffers."""
    # The innermost axis is wrapped first, so that the batch becomes the outermost axis.
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=(*[0] * scores, *dims, *(None for _ in buffers)))
    return function


def _returns_the_score(graph: fx.GraphModule) -> bool:
    return bool(graph.graph.output_node().args[0] is next(iter(graph.graph.nodes)))


def _is_true(graph: fx.GraphModule) -> bool:
    """Whether the mask_mod ``graph`` always returns True."""
    # The default mask_mod is traced to one constant. Any other mask_mod may hide keys.
    result = graph.graph.output_node().args[0]
    if isinstance(result, fx.Node) and packet(result) in (aten.full, aten.new_full):
        return args_of(result)[-1] is True or result.kwargs.get("fill_value") is True
    return packet(result) in (aten.ones, aten.new_ones)
