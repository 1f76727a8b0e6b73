"""Compute the probabilities of each head from the scores of this head, if a loop handles the heads one by one.

Before::

    scores[:, h] = q_h @ k_h.mT                 # for each h: `select_scatter`, or one `stack` of all heads
    p = softmax(masked_fill(scores / a, m, -inf), -1)
    out_h = p[:, h] @ v_h                       # for each h

After: ``out_h = softmax(masked_fill(q_h @ k_h.mT / a, m, -inf), -1) @ v_h``. Each head is now a separate attention.
Nothing changes if anything but selections of one head reads ``p``.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_compile.passes.attention.score_tracer import SOFTMAX, ScoreTracer
from mla_compile.passes.ir.arrange import same_layout
from mla_compile.passes.ir.graph import Builder, args_of, axis, is_tensor, packet, shape, val
from mla_compile.passes.ir.moves import Copy, Select, Stack, WriteOne
from mla_compile.passes.ir.operators import decode, is_contraction
from mla_compile.passes.ir.sizes import at_least, same, same_sizes, size
from mla_compile.passes.ir.walk import nearest, remove_dead_code

aten = torch.ops.aten
_ELEMENTWISE = {aten.masked_fill, aten.where, aten._to_copy}
"""Elementwise operators that torch does not tag as pointwise in all their overloads."""


def read_heads(graph: fx.Graph, weights: Collection[fx.Node], fake_mode: FakeTensorMode | None) -> int:
    """Replace selections of one head from the probabilities of all heads; return how many."""
    tracer = ScoreTracer(weights)
    found = 0
    for softmax in [n for n in graph.nodes if packet(n) in SOFTMAX]:
        stacks, _ = nearest(softmax, lambda n: n.all_input_nodes, lambda n: _stacked(n) is not None, is_contraction)
        for stack in stacks:
            parts, dim = _stacked(stack) or ((), 0)
            selections = _selections(softmax, dim) if all(tracer.trace(x) is not None for x in parts) else []
            heads = [_Head(stack, parts[k], dim, k) for _, k in selections]
            if not selections or not all(h.reaches(n) for h, (n, _) in zip(heads, selections, strict=True)):
                continue
            for head, (node, _) in zip(heads, selections, strict=True):
                builder = Builder(node, fake_mode)
                new = head.read(args_of(node)[0], builder)
                ordered = val(new).is_contiguous() and _outermost_first(node)
                node.replace_all_uses_with(new if ordered else same_layout(builder, new, node))
            found += len(selections)
            break
    if found:
        remove_dead_code(graph)
    return found


def _outermost_first(node: fx.Node) -> bool:
    return all(at_least(size(a), size(b)) for a, b in pairwise(val(node).stride()))


def _stacked(node: fx.Node) -> tuple[tuple[fx.Node, ...], int] | None:
    """Return the tensors that ``node`` stacks along an axis, and the axis; None if ``node`` stacks nothing."""
    how = decode(node)
    if isinstance(how, Stack):
        return how.parts, how.dim
    if not isinstance(how, WriteOne):
        return None
    dim, length, written = how.dim, shape(node)[how.dim], dict[int | None, fx.Node]()
    while isinstance(how, WriteOne) and how.dim == dim:
        written.setdefault(how.index, how.x)  # the last write to a position is the one that stays
        how = decode(how.base)
    if not isinstance(length, int) or set(written) != {*range(length)}:
        return None
    return tuple(written[k] for k in range(length)), dim


def _selections(softmax: fx.Node, dim: int) -> list[tuple[fx.Node, int]]:
    """Return the selections along ``dim`` that read the probabilities; empty if anything else reads them."""
    found: list[tuple[fx.Node, int]] = []
    queue = [softmax]
    for node in queue:
        for user in node.users:
            how = decode(user)
            if isinstance(how, Select) and how.dim == dim and how.index is not None:
                if any(u.op == "output" for u in user.users):
                    return []
                found.append((user, how.index))
            elif _is_elementwise(user) and same_sizes(shape(user), shape(softmax)):
                queue.append(user)
            else:
                return []
    return found


def _is_elementwise(node: fx.Node) -> bool:
    """Whether each number of the result depends only on the numbers at the same place, without randomness."""
    if not is_tensor(node) or any(isinstance(a, (list, tuple)) for a in args_of(node)):
        return False
    tags = getattr(node.target, "tags", ())
    tagged = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    plain = node.kwargs.get("memory_format") in (None, torch.contiguous_format, torch.preserve_format)
    return plain and (tagged or packet(node) in _ELEMENTWISE or isinstance(decode(node), Copy))


class _Head:
    """The computation of one head. Its scores are ``part``, at position ``at`` along axis ``dim`` of ``stack``."""

    def __init__(self, stack: fx.Node, part: fx.Node, dim: int, at: int) -> None:
        self.dim, self.at, self.rank = dim, at, len(shape(stack))
        self._made = {stack: part}

    def reaches(self, selection: fx.Node) -> bool:
        """Whether every operator from the stack to ``selection`` keeps the positions along the axis separate."""
        queue, ends = [args_of(selection)[0]], False
        for node in queue:
            if node in self._made:
                ends = True
                continue
            if len(shape(node)) != self.rank or (packet(node) not in SOFTMAX and not _is_elementwise(node)):
                return False
            if packet(node) in SOFTMAX and axis(args_of(node)[1], self.rank) == self.dim:
                return False
            queue += [n for n in node.all_input_nodes if self._follows(n)]
        return ends

    def _follows(self, node: fx.Node) -> bool:
        return any(n in self._made for n in (node, *nearest(node, _inputs, self._made.__contains__, is_contraction)[0]))

    def read(self, node: fx.Node, builder: Builder) -> fx.Node:
        """Return position ``at`` of ``node``, computed from ``part`` if ``node`` depends on the stack."""
        if node not in self._made:
            self._made[node] = self._again(node, builder) if self._follows(node) else self._selected(node, builder)
        return self._made[node]

    def _selected(self, node: fx.Node, builder: Builder) -> fx.Node:
        # Operands are aligned from the right. All heads share an operand that lacks the axis or has size 1 along it.
        dim = self.dim - self.rank + (len(shape(node)) if is_tensor(node) else 0)
        if not is_tensor(node) or dim < 0:
            return node
        return builder.call(aten.select.int, node, dim, 0 if same(shape(node)[dim], 1) else self.at)

    def _again(self, node: fx.Node, builder: Builder) -> fx.Node:
        args, kwargs = fx.map_arg((args_of(node), node.kwargs), lambda n: self.read(n, builder))
        if packet(node) in SOFTMAX:
            over = axis(args[1], self.rank)
            args = (args[0], over - (over > self.dim), *args[2:])
        assert callable(node.target)
        new = builder.call(node.target, *args, **kwargs)
        assert val(new).dtype == val(node).dtype
        new.meta.update({k: v for k, v in node.meta.items() if k not in new.meta or k in _ORIGINS})
        return new


def _inputs(node: fx.Node) -> Collection[fx.Node]:
    return node.all_input_nodes


_ORIGINS = ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr")
