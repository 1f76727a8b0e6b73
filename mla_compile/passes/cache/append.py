"""Rewrite caches that grow by ``cat``: each call writes new rows after the old rows, without copying the old rows.

Before: ``joined = cat([past, new], dim)``, which the caller keeps and passes as the ``past`` of the next call.
After: ``joined = slice_scatter(past, new, dim, T, T + S)``. Here, ``past`` has spare capacity for the new rows and is
written in place.

The caller of the program allocates the capacity (:mod:`mla_compile.runtime.appending`). Rows lie in memory token by
token, so no shape and no stride in the graph depends on the capacity.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_symbols

from mla_compile.core.program import Append, Program
from mla_compile.passes.cache.shown import seen_through_views
from mla_compile.passes.ir.graph import Builder, is_tensor, restride, shape, val
from mla_compile.passes.ir.moves import Join, WriteRows
from mla_compile.passes.ir.operators import decode
from mla_compile.passes.ir.sizes import Size, same_sizes
from mla_compile.passes.sources.writes import is_zeros, rows_written

aten = torch.ops.aten


def token_major(sizes: Sequence[Any], dim: int) -> tuple[Any, ...]:
    """Return strides for ``sizes`` with axis ``dim`` outermost, or dense strides if all earlier axes have length 1."""
    # The stride of an axis of length 1 has no effect, but guards compare it with the stride in `cat`'s result.
    ahead = [] if all(isinstance(n, int) and n == 1 for n in sizes[:dim]) else [dim]
    order = [*ahead, *(d for d in range(len(sizes)) if d not in ahead)]
    strides = {d: math.prod(sizes[later] for later in order[place + 1 :]) for place, d in enumerate(order)}
    return tuple(strides[d] for d in range(len(sizes)))


def append_in_place(program: Program, *, rewrite: bool = True, shared: Collection[fx.Node] = ()) -> int:
    """Add the caches of a program to ``program.appends``, and return how many entries ``program.appends`` has.

    A cache that grows by a fixed number of rows is written in place, unless ``rewrite`` is False or the cache is in
    ``shared``, that is, shared by ranks. All other caches are returned as before. The caller moves such a cache to
    memory with spare capacity at once, because changing the strides later would make a graph compile twice.
    """
    before, returned = len(program.mutations), program.outputs
    fit = _fitting(program)
    caches = {
        at: how
        for at, how in joined_rows(program, shared)
        if len(how.parts) == 1 or returned[before + at] in shared or _grows(how, fit)
    }
    written = {at: how for at, how in caches.items() if rewrite and _count(how) and returned[before + at] not in shared}
    settled = {at: how.dim for at, how in caches.items() if at not in written} | _first_rows(program)
    places = _places(program)
    program.appends += tuple(
        Append(None, places[at], dim, 0, shared=returned[before + at] in shared) for at, dim in settled.items()
    )
    program.appends += tuple(
        Append(None, places[at], how.dim, 0, shared=True, grows=False, total=_known(shape(how.base)[how.dim]))
        for at, how in begun_buffers(program)
        if returned[before + at] in shared
    )
    program.appends += tuple(Append(how.parts[0].name, places[at], how.dim, _count(how)) for at, how in written.items())
    for at, how in written.items():
        _rewrite(returned[before + at], how, program.fake_mode)
    if written:
        write_in_place(program, {at: (how.parts[0].name, returned[before + at]) for at, how in written.items()})
    return len(program.appends)


def write_in_place(program: Program, written: Mapping[int, tuple[str, fx.Node]]) -> None:
    """Write returned values into inputs in place.

    ``written``: place of a value among the returned values -> the name of the input, and the value.
    """
    before, returned = len(program.mutations), program.outputs
    kept = [at for at in range(len(returned) - before) if at not in written]
    new = [node for _, node in written.values()]
    program.gm.graph.output_node().args = ((*returned[:before], *new, *(returned[before + at] for at in kept)),)
    program.aliases = {kept.index(at): name for at, name in program.aliases.items()}
    program.mutations = (*program.mutations, *(name for name, _ in written.values()))


def _places(program: Program) -> list[int]:
    """Return the original place of each value that the program still returns instead of writing it in place."""
    gone = {one.output for one in program.appends if one.input is not None and one.output is not None}
    count = len(program.outputs) - len(program.mutations) + len(gone)
    return [at for at in range(count) if at not in gone]


def _count(how: Join) -> int:
    """Return the number of rows appended to old rows; 0 if the number is symbolic or there are no old rows."""
    return _known(shape(how.parts[-1])[how.dim]) if len(how.parts) == 2 else 0


def _known(size: Size) -> int:
    """Return a size; 0 if it is symbolic."""
    return size if isinstance(size, int) else 0


def _first_rows(program: Program) -> dict[int, int]:
    """Return the rows of K and V that begin without a past, as a map: place among the returned values -> token axis."""
    cache, before = program.cache, len(program.mutations)
    if cache is None:
        return {}
    return {
        at - before: cache.recipes[index][0].token_axis
        for index, rows in cache.outputs.items()
        for at in rows
        if index not in cache.grows and index not in cache.begun and program.outputs[at].op != "placeholder"
    }


def joined_rows(program: Program, known: Collection[fx.Node] = ()) -> Iterator[tuple[int, Join]]:
    """Yield pairs (place among the returned values, join) for rows that the caller keeps and the graph reads.

    A join is left out if one of its parts is returned too. ``known``: nodes that are rows even if the graph does not
    read them.
    """
    returned = program.outputs
    for at, joined in _kept(program):
        how = decode(joined)
        read = len(joined.users) > 1 or joined in known
        if isinstance(how, Join) and read and not {*how.parts}.intersection(returned):
            yield at, how


def begun_buffers(program: Program) -> Iterator[tuple[int, WriteRows]]:
    """Yield pairs (place among the returned values, write) for buffers of full length that begin in a program.

    A buffer is left out if a view of it is returned.
    """
    shown = seen_through_views(program.gm.graph)
    for at, buffer in _kept(program):
        how = rows_written(buffer)
        if how is not None and is_zeros(how.base) and buffer not in shown:
            yield at, how


def _kept(program: Program) -> Iterator[tuple[int, fx.Node]]:
    """Yield pairs (place, value) for computed values that are returned exactly once."""
    returned = program.outputs
    for at, node in enumerate(returned[len(program.mutations) :]):
        made = isinstance(node, fx.Node) and node.op == "call_function"
        if made and at not in program.aliases and returned.count(node) == 1:
            yield at, node


def _fitting(program: Program) -> set[fx.Node]:
    """Return the inputs that may be passed with spare capacity.

    Such an input has one reader and no other role, and other inputs hold all its symbolic sizes.
    """
    if any(isinstance(node.target, HigherOrderOperator) for node in program.gm.graph.nodes):
        return set()  # a higher-order operator keeps the strides with which it was traced
    inputs = program.placeholders
    # A symbolic size that no other input holds would be read from the rows, but rows with spare capacity are longer.
    numbers = {str(n.meta["val"]) for n in inputs if isinstance(n.meta["val"], torch.SymInt)}
    folded = {name for fold in program.folds for name in fold.weights}
    special = {
        *program.mutations,
        *program.aliases.values(),
        *program.capture.latents,
        *program.capture.parts,
        *program.capture.shared,
        *folded,
    }
    return {
        node
        for node in inputs
        if node.name not in special
        and len(node.users) == 1
        and is_tensor(node)
        and {str(symbol) for symbol in free_symbols(val(node).shape)} <= numbers
    }


def _grows(how: Join, fit: set[fx.Node]) -> bool:
    """Whether new rows are appended to an input that may be passed with spare capacity."""
    if len(how.parts) != 2:
        return False
    past, new = how.parts
    return past in fit and past is not new and _alike(val(past), val(new), how.dim)


def _alike(past: torch.Tensor, new: torch.Tensor, dim: int) -> bool:
    """Whether ``cat`` joins ``new`` to ``past`` along ``dim`` without converting or refusing it."""
    others = [[*x.shape[:dim], *x.shape[dim + 1 :]] for x in (past, new)]
    kinds = [(x.dtype, x.device, x.layout, type(x)) for x in (past, new)]
    return same_sizes(*others) and kinds[0] == kinds[1]


def _rewrite(joined: fx.Node, how: Join, fake_mode: FakeTensorMode | None) -> None:
    """Turn the ``cat`` node ``joined`` into a write. The node object is kept, so plans that refer to it stay valid."""
    (past, new), dim = how.parts, how.dim
    rows = val(joined).shape
    with fake_mode or contextlib.nullcontext():
        past.meta["val"] = val(past).new_empty_strided(rows, token_major(rows, dim))
    builder = Builder(joined, fake_mode)
    total, count = builder.size(past, dim), _count(how)
    start = total - count if isinstance(total, int) else builder.call(operator.sub, total, count)
    joined.target, joined.args, joined.kwargs = aten.slice_scatter.default, (past, new, dim, start, total), {}
    restride(joined, fake_mode)
