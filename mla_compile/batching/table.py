"""Passes that make a step read and write pages. They run after the passes of :mod:`mla_compile.pipeline.table`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from mla_compile.capture.causal_lm import CausalLM
from mla_compile.capture.causal_step import INPUTS
from mla_compile.core.program import Program
from mla_compile.core.sharing import Sharing
from mla_compile.errors import CaptureError
from mla_compile.passes.cache.pages import PagedRows, Unpaged, find_pages, read_batch_from, step_over_pages
from mla_compile.passes.ir.sizes import holds
from mla_compile.passes.ir.walk import remove_dead_code
from mla_compile.pipeline.manager import GraphState, Pass

TOKENS, POSITIONS = INPUTS
_ASSERTS = (
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
    torch.ops.aten.sym_constrain_range.default,
)


@dataclass
class PagesState(GraphState):
    """The input and results of these passes.

    Attributes:
        lm: the model that the step belongs to.
        pools: the pools [P,page,width] that the step reads and writes, one per cache.
        packed: whether latent rows are kept in float8.
        sharing: how ranks share the rows.
        rows: the caches that were found.
        names: the new inputs: the block table, the lengths, then one pool per cache.
    """

    lm: CausalLM
    pools: Sequence[torch.Tensor] = ()
    packed: bool = False
    sharing: Sharing | None = None
    rows: tuple[PagedRows, ...] = ()
    names: tuple[str, ...] = ()


def cache_inputs(program: Program, count: int) -> list[fx.Node]:
    """Return the caches: the first ``count`` placeholders that are not ids, positions, weights or folds."""
    given = [n for n in program.placeholders if n.name not in program.weights]
    folds = {fold.placeholder for fold in program.folds}
    return [n for n in given if n.name not in (TOKENS, POSITIONS, *folds)][:count]


def drop_asserts(program: Program) -> int:
    """Remove assertions that only tracing needed, for example that each unrolled expert has tokens.

    Raises :class:`CaptureError` if an assertion about input sizes does not hold for all sizes.
    """
    graph = program.gm.graph
    found = [node for node in graph.nodes if node.target in _ASSERTS and not node.users]
    for node in found:
        (said, *_) = node.args
        value = said.meta.get("val") if isinstance(said, fx.Node) else None
        if isinstance(value, torch.SymBool) and not free_unbacked_symbols(value) and not holds(value.node.expr):
            raise CaptureError(f"the model can only be traced for sizes with {value.node.expr}")
        graph.erase_node(node)
    remove_dead_code(graph)
    return len(found)


def _find(state: PagesState) -> int:
    """Find the caches of a decode step; raise :class:`CaptureError` if they cannot be paged."""
    names = [node.name for node in cache_inputs(state.program, len(state.lm.caches))]
    found = find_pages(state.program, names)
    if isinstance(found, Unpaged):
        raise CaptureError(f"{type(state.lm.model).__name__} cannot be decoded over pages: {found.reason}")
    state.rows = found
    return len(found)


def _over_pages(state: PagesState) -> int:
    state.names = step_over_pages(
        state.program, state.rows, state.pools, TOKENS, packed=state.packed, sharing=state.sharing
    )
    return len(state.rows)


TIDY: tuple[Pass[PagesState], ...] = (
    Pass("drop_asserts", "the rewritten graph", "assertions that always hold", lambda s: drop_asserts(s.program)),
)
FIND: tuple[Pass[PagesState], ...] = (
    Pass(
        "read_batch",
        "sizes of inputs",
        "the number of sequences, to that of the token ids",
        lambda s: read_batch_from(s.program, TOKENS),
    ),
    Pass("find_pages", "caches, attentions", "", _find),
)
OVER_PAGES: tuple[Pass[PagesState], ...] = (
    *FIND,
    Pass("over_pages", "caches, attentions", "caches, to rows of pools at the places of a block table", _over_pages),
)
