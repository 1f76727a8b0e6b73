"""Find repetitions in a graph: stretches of calls that differ only in the tensors they receive."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise

import torch
from torch import fx

from mla_compile.core.alike import constant_of, each, known_of

CallSequence = Sequence[fx.Node]
"""Calls in the order of the graph."""

LEAST_TIMES = 3
"""The minimum number of repetitions. Each call of a compiled part costs some microseconds in every step."""
LEAST_LENGTH = 64
"""The minimum number of calls in a repetition. Layers have at least a hundred calls; experts and heads have fewer."""


def cut(steps: CallSequence) -> list[list[CallSequence]]:
    """Cut ``steps`` into lists of stretches, in order. A list holds repetitions, or one stretch that does not repeat.

    Repetitions have equal calls, but their inputs may differ: see :func:`form`.
    """
    known: dict[Hashable, int] = {}
    labels = torch.tensor([known.setdefault(_label(node), len(known)) for node in steps])
    return _cut(steps, labels, _last_uses(steps), 0)


def form(steps: CallSequence) -> tuple[Hashable, list[fx.Node]]:
    """Return a key of the function that a stretch computes, and the stretch's inputs in order of their first use."""
    places = {node: place for place, node in enumerate(steps)}
    inputs: dict[fx.Node, int] = {}

    def read(value: object) -> Hashable:
        if not isinstance(value, fx.Node):
            return constant_of(value)
        return places[value] if value in places else ("input", inputs.setdefault(value, len(inputs)))

    calls = tuple((_label(node), each(node.args, read), each(node.kwargs, read)) for node in steps)
    return (calls, tuple(known_of(node.meta.get("val")) for node in inputs)), list(inputs)


def _cut(steps: CallSequence, labels: torch.Tensor, last_uses: list[int], first: int) -> list[list[CallSequence]]:
    """Cut ``steps`` at the most repeated stretch. ``first`` is the position of ``steps`` in the whole sequence."""
    if not steps:
        return []
    found = _most_repeated(labels)
    if found is None:
        return [[steps]]
    start, length, times = _at_ends(*found, last_uses, first)
    ends = [start + i * length for i in range(times + 1)]
    before = _cut(steps[:start], labels[:start], last_uses, first)
    behind = _cut(steps[ends[-1] :], labels[ends[-1] :], last_uses, first + ends[-1])
    return [*before, [steps[a:b] for a, b in pairwise(ends)], *behind]


def _most_repeated(labels: torch.Tensor) -> tuple[int, int, int] | None:
    """Find the repetitions that save most. Return their start, the length of one repetition, and the total length."""
    best: tuple[int, int, int] | None = None
    saved = 0
    for length in range(LEAST_LENGTH, len(labels) // LEAST_TIMES + 1):
        differs = (labels[:-length] != labels[length:]).nonzero().flatten()
        edges = torch.cat((differs.new_tensor([-1]), differs, differs.new_tensor([len(labels) - length])))
        equal, where = (edges.diff() - 1).max(0)
        times = int(equal) // length + 1
        if times >= LEAST_TIMES and (times - 1) * length > saved:
            saved = (times - 1) * length
            best = int(edges[where]) + 1, length, int(equal) + length
    return best


def _at_ends(start: int, length: int, total: int, last_uses: list[int], first: int) -> tuple[int, int, int]:
    """Return start, length and number of repetitions. Cut where the fewest tensors are passed on."""

    def handed(offset: int) -> int:
        end = first + start + offset + length
        return sum(last_uses[place] >= end for place in range(first + start, end))

    offsets = [offset for offset in range(length) if (total - offset) // length >= LEAST_TIMES]
    offset = min(offsets, key=lambda offset: (handed(offset), -((total - offset) // length), offset))
    return start + offset, length, (total - offset) // length


def _last_uses(steps: CallSequence) -> list[int]:
    """Return the position at which each tensor is last read.

    Numbers get -1, because passing numbers between parts is almost free.
    """
    places = {node: place for place, node in enumerate(steps)}
    tensors = (isinstance(node.meta.get("val"), torch.Tensor) for node in steps)
    return [
        max((places.get(user, len(steps)) for user in node.users), default=-1) if tensor else -1
        for node, tensor in zip(steps, tensors, strict=True)
    ]


def _label(node: fx.Node) -> Hashable:
    """Return the key of a call without its tensor inputs.

    The key leaves out the result's storage offset, because torch may report different offsets for equal calls: the fake
    tensor cache may return another offset than the first trace.
    """
    given = tuple(
        each(value, lambda v: None if isinstance(v, fx.Node) else constant_of(v)) for value in (node.args, node.kwargs)
    )
    return node.target, given, known_of(node.meta.get("val"), begins=False)
