"""Where a graph repeats itself: stretches of calls that are equal but for the tensors they are given."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from mla_compile.core.alike import constant_of, each, known_of

Steps = Sequence[fx.Node]
"""Calls in the order of the graph."""

LEAST_TIMES = 3
"""Fewer repetitions do not pay: each call of a compiled part costs some microseconds in every step."""
LEAST_LENGTH = 64
"""Shorter ones are experts or heads and no layers, which have a hundred calls and more."""


def cut(steps: Steps) -> list[list[Steps]]:
    """``steps`` cut into stretches, in order: one that repeats itself into its repetitions, else the whole of it.

    Repetitions look alike call by call. What they are given may differ: see :func:`form`.
    """
    known: dict[Hashable, int] = {}
    labels = torch.tensor([known.setdefault(_label(node), len(known)) for node in steps])
    return _cut(steps, labels, _last_uses(steps), 0)


def form(steps: Steps) -> tuple[Hashable, list[fx.Node]]:
    """What a stretch computes of its inputs, equal for equal computations; and these inputs, as they are first read."""
    places = {node: place for place, node in enumerate(steps)}
    inputs: dict[fx.Node, int] = {}

    def read(value: Any) -> Hashable:
        if not isinstance(value, fx.Node):
            return constant_of(value)
        return places[value] if value in places else ("input", inputs.setdefault(value, len(inputs)))

    calls = tuple((_label(node), each(node.args, read), each(node.kwargs, read)) for node in steps)
    return (calls, tuple(known_of(node.meta.get("val")) for node in inputs)), list(inputs)


def _cut(steps: Steps, labels: torch.Tensor, last_uses: list[int], first: int) -> list[list[Steps]]:
    """Of a part of all steps, ``first`` its place among them: what repeats most, and what is before and behind it."""
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
    """Start, length of one repetition and length of all of the stretch whose repetitions save most."""
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
    """Start, length and number of the repetitions, begun where the fewest tensors are handed to the next."""

    def handed(offset: int) -> int:
        end = first + start + offset + length
        return sum(last_uses[place] >= end for place in range(first + start, end))

    offsets = [offset for offset in range(length) if (total - offset) // length >= LEAST_TIMES]
    offset = min(offsets, key=lambda offset: (handed(offset), -((total - offset) // length), offset))
    return start + offset, length, (total - offset) // length


def _last_uses(steps: Steps) -> list[int]:
    """Where each tensor is last read; numbers are as good as free to hand on."""
    places = {node: place for place, node in enumerate(steps)}
    tensors = (isinstance(node.meta.get("val"), torch.Tensor) for node in steps)
    return [
        max((places.get(user, len(steps)) for user in node.users), default=-1) if tensor else -1
        for node, tensor in zip(steps, tensors, strict=True)
    ]


def _label(node: fx.Node) -> Hashable:
    """A call without the tensors that it is given.

    Where its result begins in memory follows from those, and torch tells it otherwise the first time that it traces a
    call: of a copy, fake tensors of the cache begin elsewhere.
    """
    given = tuple(
        each(value, lambda v: None if isinstance(v, fx.Node) else constant_of(v)) for value in (node.args, node.kwargs)
    )
    return node.target, given, known_of(node.meta.get("val"), begins=False)
