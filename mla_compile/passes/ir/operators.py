"""The only decoder of operators that move values without computing any. Its records say what a node does.

:func:`decode` knows the positions and defaults of each operator's arguments, and the meaning of negative positions. All
other code reads the records. :func:`decode` expects the canonical spellings of
:mod:`mla_compile.passes.canonical.views`. Operators without a canonical spelling, such as splits at run-time sizes, are
read as far as their arguments are known.

Operators that compute (products, sums, softmaxes) are not decoded here. Each of these operators has one reader in
another module.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import fx

from mla_compile.passes.ir.axes import expanded, permuted, repeated, reshaped
from mla_compile.passes.ir.graph import args_of, argument, axis, is_tensor, packet, shape, val
from mla_compile.passes.ir.moves import (
    Assign,
    Copy,
    Dropout,
    Expand,
    Fill,
    Join,
    OfOne,
    Permute,
    Reading,
    Rearrange,
    Regroup,
    Reorder,
    Repeat,
    Select,
    Slice,
    Stack,
    Told,
    Write,
    WriteOne,
    WriteRows,
)
from mla_compile.passes.ir.sizes import same, same_sizes
from mla_compile.passes.ir.stand_in import stand_in

aten = torch.ops.aten

PRODUCTS = {aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.einsum}
"""Operators that compute matrix products."""

CONTRACTIONS = {*PRODUCTS, aten.inner, aten.tensordot, aten.batch_norm, aten.conv1d, aten.conv2d}
"""Operators that may apply a weight to the features of a row."""


def is_contraction(node: fx.Node) -> bool:
    return packet(node) in CONTRACTIONS


SPLITS = {
    aten.split_with_sizes, aten.split, aten.chunk, aten.tensor_split, aten.unsafe_split, aten.unsafe_chunk,
    aten.unsafe_split_with_sizes,
}  # fmt: skip
"""Operators that cut a tensor into slices along one axis. The axis is their third argument."""

Found = TypeVar("Found")


def decode(node: object) -> Reading | None:
    """Return a record of how ``node`` moves values; None if ``node`` computes values or has unknown arguments."""
    rule = _DECODERS.get(packet(node))
    return None if rule is None or not isinstance(node, fx.Node) else rule(node)


def behind(node: fx.Node, kinds: type[OfOne] | tuple[type[OfOne], ...]) -> list[fx.Node]:
    """Return ``node`` and the tensors upstream of it, nearest first.

    The walk passes only operators of ``kinds``. Each has one operand.
    """
    found = [node]
    while isinstance(how := decode(found[-1]), kinds):
        found.append(how.x)
    return found


def whole_scatter(node: fx.Node) -> tuple[fx.Node, int, fx.Node, fx.Node] | None:
    """Return tensor, axis, positions and source of a scatter that writes its whole source; None for other nodes."""
    if node.target is not torch.ops.aten.scatter.src:  # other overloads add to the tensor, or write one number
        return None
    base, dim, index, x = args_of(node)
    dim = axis(dim, len(shape(node)))
    sizes = [*shape(base)[:dim], shape(x)[dim], *shape(base)[dim + 1 :]]
    return (base, dim, index, x) if same_sizes(sizes, shape(x)) and same_sizes(shape(index), shape(x)) else None


VARYING = 16
"""How many operators upstream :func:`varying` looks for a broadcast."""


def varying(node: fx.Node, depth: int = VARYING) -> frozenset[int]:
    """Return the axes of ``node`` along which its values may differ."""
    own = shape(node)
    wide = (k for k, n in enumerate(own) if not same(n, 1))
    how, tags = decode(node), getattr(node.target, "tags", ())
    if isinstance(how, Fill):
        return frozenset()
    if not depth:
        return frozenset(wide)
    if isinstance(how, Copy):
        return varying(how.x, depth - 1)
    if isinstance(how, Rearrange) and how.map is not None:
        inner, read = varying(how.x, depth - 1), how.map.read_along
        return frozenset(k for k in wide if not inner.isdisjoint(read(k)))
    if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags:
        read_from = [n for n in node.all_input_nodes if is_tensor(n)]
        return frozenset(k + len(own) - len(shape(n)) for n in read_from for k in varying(n, depth - 1))
    return frozenset(wide)


def rule_for(rules: Mapping[type, Found], how: object) -> Found | None:
    """Return the rule for the class of the record ``how`` or for its nearest base class; None if there is no rule."""
    return next((rules[kind] for kind in type(how).__mro__ if kind in rules), None)


def _copy(node: fx.Node) -> Copy | None:
    x = argument(node, 0, "self")
    return Copy(x) if isinstance(x, fx.Node) else None  # in a traced function, the argument may be a number


def _dropout(node: fx.Node) -> Dropout:
    train = argument(node, 2, "train", True)
    # In `native_dropout`, `train` may be None, which means that dropout is on.
    return Dropout(args_of(node)[0], active=train is not False and argument(node, 1, "p", 0.5) != 0)


def _regroup(node: fx.Node) -> Regroup | None:
    x = argument(node, 0, "self")
    # `view.dtype`, which reinterprets bytes, has the same packet as `view`.
    if val(x).dtype != val(node).dtype:
        return None
    told = argument(node, 1, "size") if packet(node) in (aten.view, aten.reshape) else None
    told = told if isinstance(told, (list, tuple)) else None
    return Regroup(x, lambda: reshaped(shape(x), shape(node)), told)


def _permute(node: fx.Node) -> Permute:
    x, rank = argument(node, 0, "self"), len(shape(node))
    order = tuple(axis(d, rank) for d in argument(node, 1, "dims"))
    return Permute(x, lambda: permuted(shape(x), order))


def _unfold(node: fx.Node) -> Reorder | None:
    """Read an unfold into adjacent blocks. Blocks that overlap or that leave out values are not decoded."""
    x, rank = argument(node, 0, "self"), len(shape(node)) - 1
    dim, size = axis(argument(node, 1, "dimension"), rank), argument(node, 2, "size")
    whole, blocks = shape(x)[dim], shape(node)[dim]
    if argument(node, 3, "step") != size or not same(blocks * size, whole):
        return None
    # The axis is split into blocks and positions, and the positions become the last axis.
    split = (*shape(x)[:dim], blocks, size, *shape(x)[dim + 1 :])
    order = (*(k for k in range(rank + 1) if k != dim + 1), dim + 1)
    return Reorder(x, lambda: (cut := reshaped(shape(x), split)) and cut.then(permuted(split, order)))


def _expand(node: fx.Node) -> Expand:
    x = argument(node, 0, "self")
    return Expand(x, lambda: expanded(shape(x), shape(node)), argument(node, 1, "size"))


def _repeat(node: fx.Node) -> Repeat | None:
    return _repeated(node, argument(node, 1, "repeats"), interleaved=False)


def _repeat_interleave(node: fx.Node) -> Repeat | None:
    times, dim = argument(node, 1, "repeats"), argument(node, 2, "dim")
    if not isinstance(dim, int):  # without an axis, the tensor is flattened first
        return None
    counts = [1] * len(shape(node))
    counts[axis(dim, len(counts))] = times
    return _repeated(node, counts, interleaved=True)


def _repeated(node: fx.Node, counts: Sequence[object], *, interleaved: bool) -> Repeat | None:
    x = argument(node, 0, "self")
    known = all(isinstance(c, int) for c in counts)
    return Repeat(x, lambda: repeated(shape(x), tuple(counts), interleaved=interleaved)) if known else None


def _slice(node: fx.Node) -> Slice:
    x, dim = argument(node, 0, "self"), axis(argument(node, 1, "dim", 0), len(shape(node)))
    bounds = _bounds(node, 2)
    return Slice(x, dim, bounds, _taken(bounds, shape(x)[dim]))


def _narrow(node: fx.Node) -> Slice:
    """Read a narrow that has no canonical spelling because its start or length is only known at run time."""
    return Slice(argument(node, 0, "self"), axis(argument(node, 1, "dim"), len(shape(node))), None, None)


def _member(node: fx.Node) -> Slice | Dropout | None:
    """Read one result of an operator that has several results."""
    # Each result of a split is decoded. The split itself is a tuple and is not decoded.
    whole, at = args_of(node)
    if packet(whole) is aten.native_dropout:
        return _dropout(whole) if at == 0 else None
    if packet(whole) not in SPLITS:
        return None
    x = argument(whole, 0, "self")
    dim = axis(argument(whole, 2, "dim", 0), len(shape(x)))
    sizes = [part.shape[dim] for part in whole.meta["val"][: at + 1]]
    # A result of symbolic size is still a slice along a known axis. Later code needs the axis to give the right reason.
    if not isinstance(shape(x)[dim], int) or not all(isinstance(s, int) for s in sizes):
        return Slice(x, dim, None, None)
    start, stop = sum(sizes[:-1]), sum(sizes)
    return Slice(x, dim, (start, stop, 1), range(start, stop))


def _bounds(node: fx.Node, position: int) -> tuple[Told, Told, Told]:
    start, stop = argument(node, position, "start"), argument(node, position + 1, "end")
    return start, stop, argument(node, position + 2, "step", 1)


def _taken(bounds: tuple[Told, Told, Told], length: object) -> range | None:
    if not isinstance(length, int) or any(isinstance(b, fx.Node) for b in bounds):
        return None
    # `slice.indices` clamps bounds like torch. Exported graphs write "to the end" as 2**63 - 1.
    return range(*slice(*bounds).indices(length))


def _select(node: fx.Node) -> Select:
    x = argument(node, 0, "self")
    dim = axis(argument(node, 1, "dim"), len(shape(x)))
    return Select(x, dim, _index(argument(node, 2, "index"), shape(x)[dim]))


def _index(told: object, length: object) -> int | None:
    return axis(told, length) if isinstance(told, int) and isinstance(length, int) else None


def _cat(node: fx.Node) -> Join:
    rank = len(shape(node))
    parts = (x for x in argument(node, 0, "tensors") if len(shape(x)) == rank)  # torch skips empty 1-D tensors
    return Join(tuple(parts), axis(argument(node, 1, "dim", 0), rank))


def _stack(node: fx.Node) -> Stack:
    return Stack(tuple(argument(node, 0, "tensors")), axis(argument(node, 1, "dim", 0), len(shape(node))))


def _assign(node: fx.Node) -> Assign | None:
    x = argument(node, 1, "src")
    return Assign(argument(node, 0, "self"), x) if is_tensor(x) else None


def _slice_scatter(node: fx.Node) -> Write:
    dim, bounds = axis(argument(node, 2, "dim", 0), len(shape(node))), _bounds(node, 3)
    return Write(argument(node, 0, "self"), argument(node, 1, "src"), dim, bounds, _taken(bounds, shape(node)[dim]))


def _select_scatter(node: fx.Node) -> WriteOne:
    dim = axis(argument(node, 2, "dim"), len(shape(node)))
    index = _index(argument(node, 3, "index"), shape(node)[dim])
    return WriteOne(argument(node, 0, "self"), argument(node, 1, "src"), dim, index)


def _index_copy(node: fx.Node) -> WriteRows:
    base, dim, index, x = (argument(node, k, name) for k, name in enumerate(("self", "dim", "index", "source")))
    return WriteRows(base, x, axis(dim, len(shape(node))), index)


def _index_put(node: fx.Node) -> WriteRows | None:
    """Read an index_put at positions along one axis. Masks, and positions along several axes, are not decoded."""
    base, indices, x = (argument(node, k, name) for k, name in enumerate(("self", "indices", "values")))
    given = [k for k, index in enumerate(indices) if index is not None]
    # With `accumulate`, the result also depends on the base at the written positions.
    if len(given) != 1 or argument(node, 3, "accumulate", False):
        return None
    index = indices[given[0]]
    # A boolean index is a mask: the number of rows that it writes depends on the data.
    if len(shape(index)) != 1 or val(index).dtype not in (torch.int64, torch.int32):
        return None
    return WriteRows(base, x, given[0], index)


def _fill_at(position: int, name: str) -> Callable[[fx.Node], Fill]:
    return lambda node: Fill(argument(node, position, name))


_DECODERS: dict[object, Callable[[fx.Node], Reading | None]] = {
    **dict.fromkeys(
        (
            aten.clone, aten.contiguous, aten.alias, aten.detach, aten.lift_fresh, aten.lift_fresh_copy,
            aten._to_copy, aten.to, aten.type_as,
        ),
        _copy,
    ),
    stand_in: _copy,
    aten.dropout: _dropout,
    **dict.fromkeys((aten.view, aten.reshape, aten.unsqueeze, aten.squeeze), _regroup),
    aten.permute: _permute,
    aten.unfold: _unfold,
    aten.expand: _expand,
    aten.repeat: _repeat,
    aten.repeat_interleave: _repeat_interleave,
    aten.slice: _slice,
    aten.narrow: _narrow,
    operator.getitem: _member,
    aten.select: _select,
    aten.cat: _cat,
    aten.stack: _stack,
    aten.copy: _assign,
    aten.slice_scatter: _slice_scatter,
    aten.select_scatter: _select_scatter,
    aten.index_copy: _index_copy,
    aten.index_put: _index_put,
    **dict.fromkeys(
        (aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided), lambda _: Fill(None)
    ),
    **dict.fromkeys((aten.zeros, aten.zeros_like, aten.new_zeros), lambda _: Fill(0)),
    **dict.fromkeys((aten.full, aten.full_like), _fill_at(1, "fill_value")),
    aten.new_full: _fill_at(2, "fill_value"),
    aten.scalar_tensor: _fill_at(0, "s"),
}  # fmt: skip
