"""Writes calls of flex_attention as plain attention, if they have a block mask or their log-sum-exp is used.

The log-sum-exp may only be used to multiply the output by ``sigmoid(lse - sink)``, in any spelling. The call and this
factor together are an attention with a sink. Other calls stay, because later passes read them directly.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.attention.flex import Flex, FlexMask, read_flex
from mla_compile.passes.canonical.factored import Factored, factored
from mla_compile.passes.canonical.row_factors import DivisorTerm, RowFactors, row_axes
from mla_compile.passes.canonical.sink_columns import dtype_of_terms, sink_column
from mla_compile.passes.fused.plain import Plain, UntoldError
from mla_compile.passes.ir.axes import Axes
from mla_compile.passes.ir.expr import wide
from mla_compile.passes.ir.graph import Builder, args_of, packet, shape, val
from mla_compile.passes.ir.walk import REACH, depends_on, reachable

aten = torch.ops.aten


def plain_flex(
    call: fx.Node, alive: Collection[fx.Node], fake_mode: FakeTensorMode | None
) -> tuple[fx.Node, Plain] | None:
    """Return the node to replace, and the plain attention that computes it.

    The node is the output of ``call``, or the product of this output with a factor for sinks. ``alive``: the nodes that
    the graph's outputs need. Return None if later passes read ``call`` itself, or if :func:`read_flex` cannot read
    ``call``. Raises ``UntoldError`` if ``call`` is not a plain attention.
    """
    flex = read_flex(call)
    if flex is None:
        return None
    if not all(packet(n) is operator.getitem for n in call.users):
        raise UntoldError("its results are used as a whole")
    read = {args_of(n)[1]: n for n in call.users if n in alive}
    if read.keys() == {0}:
        return None if flex.mask is None else (read[0], _plain(flex, read[0], fake_mode))
    others = sorted(read.keys() - {0, 1})
    if others or 0 not in read:
        raise UntoldError(f"result {others[0]} is used" if others else "its output is not used")
    sunk = _sunk(call, read[0], read[1], alive)
    if sunk is None:
        raise UntoldError("the log-sum-exp, besides the output, is used for more than sinks")
    return sunk.result, _with_sinks(flex, sunk, fake_mode)


def _plain(flex: Flex, anchor: fx.Node, fake_mode: FakeTensorMode | None) -> Plain:
    seen = None if flex.mask is None else _seen(flex, flex.mask, Builder(anchor, fake_mode))
    modify = None if flex.score_mod is None else partial(_modified, flex)
    return Plain(flex.q, flex.k, flex.v, heads_first=True, scale=flex.scale, bias=seen, modify=modify)


def _modified(flex: Flex, builder: Builder, scores: fx.Node) -> fx.Node:
    return builder.trace(flex.modified, [scores, *flex.buffers])


def _seen(flex: Flex, mask: FlexMask, builder: Builder) -> fx.Node:
    # A mask that does not read the batch or head index is computed once for all batch entries or heads.
    lead = [builder.size(flex.q, d) if read else 1 for d, read in enumerate(mask.indexed)]
    sizes = (*lead, builder.size(flex.q, 2), builder.size(flex.k, 2))
    indices = [builder.call(aten.arange.default, n, device=val(flex.q).device) for n in sizes]
    return builder.trace(mask.seen, [*indices, *mask.blocks, *mask.buffers])


@dataclass(frozen=True)
class _Sunk:
    """The output of a call times a factor for sinks.

    ``result``: this product, perhaps permuted. ``steps``: the steps from the output to ``result``. ``axes``: the axes
    of the scores, in the atoms of ``terms``. These are the axes of the output, but the last axis represents the keys.
    """

    result: fx.Node
    steps: Factored
    terms: tuple[DivisorTerm, ...]
    axes: Axes


def _with_sinks(flex: Flex, sunk: _Sunk, fake_mode: FakeTensorMode | None) -> Plain:
    builder, dtype = Builder(sunk.result, fake_mode), dtype_of_terms(sunk.terms, wide(val(flex.q).dtype))
    sinks = sink_column(builder, sunk.terms, sunk.steps.of, sunk.axes, 3, dtype)
    return replace(_plain(flex, sunk.result, fake_mode), sinks=sinks, views=sunk.steps.views)


def _sunk(call: fx.Node, out: fx.Node, log2_of_sum: fx.Node, alive: Collection[fx.Node]) -> _Sunk | None:
    def readers(node: fx.Node) -> list[fx.Node]:
        return [n for n in node.users if n in alive]

    # The last node is tried first, because a product without the last factor would leave the log-sum-exp in use.
    for node in reversed(list(reachable([out], readers, REACH))):
        steps = factored(node, lambda n: n is out)
        sunk = None if steps is None or not steps.ends_with_a_factor else _read(node, steps, log2_of_sum)
        if sunk is not None and not any(depends_on(n.node, {call}) for term in sunk.terms for n, _ in term.powers):
            besides = reachable([out, log2_of_sum], partial(_before, node, readers))
            return None if any(n.op == "output" for n in besides) else sunk
    return None


def _before(end: fx.Node, readers: Callable[[fx.Node], list[fx.Node]], node: fx.Node) -> list[fx.Node]:
    return [] if node is end else readers(node)


def _read(result: fx.Node, steps: Factored, log2_of_sum: fx.Node) -> _Sunk | None:
    axes = row_axes(shape(steps.of), 3)
    followed = steps.follow(axes)
    if followed is None:
        return None
    rows = RowFactors(axes, 3, log2_of_sum=log2_of_sum)
    whole = rows.whole(rows.softmax(), followed[0])
    terms = None if whole is None else rows.divisor(whole)
    return _Sunk(result, steps, terms, axes) if terms else None
