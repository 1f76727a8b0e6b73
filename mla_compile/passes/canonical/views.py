"""Rewrite views, permutations, slices and joins to the spellings that later passes read.

Before::

    k = flatten(swapaxes(x, 1, -1), 2); a, b = chunk(k, 2, -1); c = hstack([a, b])

After::

    k = reshape(permute(x, [0, 3, 2, 1]), [2, 8, 15]); a, b = split_with_sizes(k, [8, 7], -1); c = cat([a, b], 1)

An operator that already has its canonical spelling keeps its arguments. Its positions may count from the end, because
:func:`~mla_compile.passes.ir.operators.decode` resolves them. Values, strides and dtypes do not change, so the nodes
keep their names, metadata and users. Reports name the operator that the user called
(:data:`~mla_compile.passes.ir.graph.SPELLED`).

Later passes read these spellings, which ``decode`` turns into records:

=============================  ==========================  =========================================================
spelling                       record                      replaces
=============================  ==========================  =========================================================
permute(x, dims)               Permute                     transpose, t, T, mT, H, mH, adjoint, swapaxes, swapdims,
                                                           movedim, moveaxis
view(x, sizes)                 Regroup                     _unsafe_view, _reshape_alias, unflatten, view_as
reshape(x, sizes)              Regroup                     flatten, reshape_as: operators that may copy
unsqueeze, squeeze.dims        Regroup                     squeeze, squeeze.dim
expand(x, sizes)               Expand                      expand_as, broadcast_to
repeat(x, counts)              Repeat                      tile
repeat_interleave(x, n, dim)   Repeat                      the same with ``output_size``
unfold(x, dim, n, n)           Reorder
slice(x, dim, a, b, step)      Slice                       narrow
split_with_sizes, getitem      Slice                       split, chunk, tensor_split and their unsafe variants
select(x, dim, index)          Select                      unbind, getitem
cat(parts, dim)                Join                        concat, concatenate, hstack, vstack, row_stack, dstack,
                                                           column_stack
stack(parts, dim)              Stack
=============================  ==========================  =========================================================

Two operators stay unchanged: a split at sizes known only at run time, and a narrow by a number read from data.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from mla_compile.passes.ir.graph import SPELLED, args_of, argument, axis, evaluate_fake, packet, shape, val
from mla_compile.passes.ir.operators import SPLITS
from mla_compile.passes.ir.sizes import same, size

aten = torch.ops.aten
Dim: TypeAlias = "int | fx.Node"
Spelling: TypeAlias = "tuple[Callable[..., object], tuple[fx.node.Argument, ...]]"
"""An operator and its arguments."""


def canonicalize(graph: fx.Graph) -> int:
    """Rewrite every operator of the table above to its spelling; return how many nodes changed."""
    changed = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        rule = _RULES.get(packet(node))
        new = None if rule is None else rule(node)
        if new is not None and (node.target, node.args, node.kwargs) != (*new, {}):
            _respell(node, *new)
            changed += 1
        elif node.target is aten.unbind.int:
            changed += _unbind(node)
    return changed


def _respell(node: fx.Node, op: Callable[..., object], args: tuple[fx.node.Argument, ...], called: str = "") -> None:
    """Rewrite the node in place, so that references to it and to its name stay valid."""
    # `setdefault` keeps the operator that the user called, even if a node is rewritten twice.
    if op is not node.target:
        node.meta.setdefault(SPELLED, called or packet(node).__name__)
    node.target, node.args, node.kwargs = op, args, {}


def _unbind(node: fx.Node) -> int:
    """Turn the parts of an unbind into selections, because ONNX has no counterpart of a tuple of views."""
    x, dim, parts = argument(node, 0, "self"), argument(node, 1, "dim", 0), list(node.users)
    # If the tuple itself is returned or passed on, its parts cannot become selections.
    if any(part.target is not operator.getitem for part in parts):
        return 0
    for part in parts:
        index = args_of(part)[1]
        _respell(part, aten.select.int, (x, dim, index), f"unbind [{index}]")
    node.graph.erase_node(node)
    return 1


# Permutations


def _permuted(node: fx.Node, order: list[int]) -> Spelling:
    return aten.permute.default, (args_of(node)[0], order)


def _transpose(node: fx.Node) -> Spelling:
    """Rewrite transpose, swapaxes and swapdims, whose axis arguments are always traced by position."""
    order = list(range(len(shape(node))))
    if order:
        a, b = (axis(d, len(order)) for d in args_of(node)[1:3])
        order[a], order[b] = order[b], order[a]
    return _permuted(node, order)


def _reverse(node: fx.Node) -> Spelling:
    return _permuted(node, list(range(len(shape(node))))[::-1])


def _matrix_transpose(node: fx.Node) -> Spelling | None:
    """Rewrite mT, mH, H and adjoint; the conjugation in the last three does not change real numbers."""
    order = list(range(len(shape(node))))
    if val(node).dtype.is_complex and packet(node) is not aten.mT:
        return None
    return _permuted(node, [*order[:-2], *order[:-3:-1]])


def _movedim(node: fx.Node) -> Spelling:
    rank = len(shape(node))
    sources, targets = ([d] if isinstance(d, int) else d for d in args_of(node)[1:3])
    moved = {axis(b, rank): axis(a, rank) for a, b in zip(sources, targets, strict=True)}
    # The other axes keep their order in the remaining positions.
    left = iter(d for d in range(rank) if d not in moved.values())
    return _permuted(node, [moved[d] if d in moved else next(left) for d in range(rank)])


# Reshapes


def _of_size(op: Callable[..., object]) -> Callable[[fx.Node], Spelling]:
    """Return a rule for another name of ``op``."""
    return lambda node: (op, (argument(node, 0, "self"), argument(node, 1, "size")))


def _in_shape_of(node: fx.Node) -> Spelling:
    x, other = args_of(node)
    # `view_as` and `reshape_as` become different operators, because only `reshape` may copy.
    op = aten.view.default if packet(node) is aten.view_as else aten.reshape.default
    return op, (x, _sizes(node, [(other, k) for k in range(len(shape(other)))]))


def _unflatten(node: fx.Node) -> Spelling:
    x, dim, told = argument(node, 0, "self"), argument(node, 1, "dim"), argument(node, 2, "sizes")
    rank = len(shape(x))
    dim, own = axis(dim, rank), [(x, k) for k in range(rank)]
    before, after = _sizes(node, own[:dim]), _sizes(node, own[dim + 1 :], len(told) + dim)
    return aten.view.default, (x, [*before, *told, *after])


def _flatten(node: fx.Node) -> Spelling:
    x = argument(node, 0, "self")
    rank = len(shape(x))
    # A tensor without axes is flattened to one axis of size 1.
    first, last = (axis(argument(node, k, name, d), max(rank, 1)) for k, name, d in _FLATTENED)
    own = [(x, k) for k in range(rank)]
    before, after = _sizes(node, own[:first]), _sizes(node, own[last + 1 :], first + 1)
    # If the merged size is symbolic, torch computes it (-1). So no node has to multiply sizes.
    merged = shape(node)[first]
    return aten.reshape.default, (x, [*before, merged if isinstance(merged, int) else -1, *after])


_FLATTENED = ((1, "start_dim", 0), (2, "end_dim", -1))


def _sizes(node: fx.Node, axes: Iterable[tuple[fx.Node, int]], first: int = 0) -> list[Dim]:
    """Return the sizes of ``node`` from axis ``first`` on. Symbolic sizes are read from ``axes`` of other nodes."""
    known = shape(node)[first:]
    return [own if isinstance(own, int) else _size_of(x, k, node) for own, (x, k) in zip(known, axes, strict=False)]


def _size_of(x: fx.Node, dim: int, reader: fx.Node) -> fx.Node:
    """Return a node before ``reader`` that reads the size of an axis of ``x``."""
    # An existing `sym_size` is reused if it precedes the reader.
    for user in x.users:
        if user.target is aten.sym_size.int and user.args == (x, dim) and user < reader:
            return user
    return _number(reader, aten.sym_size.int, (x, dim), val(x).shape[dim])


def _number(reader: fx.Node, op: Callable[..., object], args: tuple[fx.node.Argument, ...], value: object) -> fx.Node:
    """Add a node before ``reader`` that computes a number for one of its arguments."""
    with reader.graph.inserting_before(reader):
        node = reader.graph.call_function(op, args)
    # The omitted keys describe the value of the reader itself and the operator that the user called.
    node.meta.update({k: v for k, v in reader.meta.items() if k not in ("val", "tensor_meta", SPELLED)})
    node.meta["val"] = value
    return node


def _squeeze(node: fx.Node) -> Spelling | None:
    x, told = argument(node, 0, "self"), argument(node, 1, "dim")
    rank = len(shape(x))
    dims = range(rank) if told is None else [told] if isinstance(told, int) else told
    # `squeeze(dim)` keeps an axis whose size is not 1. This is decided here, so that later passes need no sizes.
    gone = [axis(d, rank) for d in dims if same(shape(x)[d], 1)] if rank else []
    return (aten.squeeze.dims, (x, gone)) if gone else None


# Copies of axes


def _expand_as(node: fx.Node) -> Spelling:
    x, other = args_of(node)
    extra = len(shape(other)) - len(shape(x))
    sizes = _sizes(node, [(other, k) for k in range(len(shape(other)))])
    # -1 keeps a size, so a symbolic axis that is not expanded needs no `sym_size`.
    kept = (k >= extra and same(shape(x)[k - extra], shape(node)[k]) for k in range(len(sizes)))
    return aten.expand.default, (x, [-1 if own else wide for own, wide in zip(kept, sizes, strict=True)])


def _tile(node: fx.Node) -> Spelling:
    """Rewrite ``tile``, which may take fewer counts than there are axes."""
    x, counts = argument(node, 0, "self"), argument(node, 1, "dims")
    return aten.repeat.default, (x, [*[1] * (len(shape(node)) - len(counts)), *counts])


def _repeat_interleave(node: fx.Node) -> Spelling | None:
    """Drop ``output_size``, which follows from the count and would be wrong for a slice of ``x``."""
    x, count, dim = argument(node, 0, "self"), argument(node, 1, "repeats"), argument(node, 2, "dim")
    # Counts in a tensor differ from position to position. If `dim` is None, the tensor is flattened first.
    if node.target is not aten.repeat_interleave.self_int or not isinstance(count, int) or dim is None:
        return None
    return aten.repeat_interleave.self_int, (x, count, dim)


# Parts


def _narrow(node: fx.Node) -> Spelling | None:
    # `narrow.Tensor` reads its start from data.
    if node.target is not aten.narrow.default:
        return None
    x, dim, start, length = (argument(node, k, name) for k, name in enumerate(("self", "dim", "start", "length")))
    if free_unbacked_symbols([val(node), *(n.meta["val"] for n in (start, length) if isinstance(n, fx.Node))]):
        return None  # torch infers less about a slice with bounds that are read from data
    end: Dim | None
    if isinstance(start, int) and isinstance(length, int):
        end = start + length
        if start < 0 and end == 0:  # the slice reaches the end of the axis; 0 would mean the beginning
            end = None
    elif start == 0:
        end = length
    # A negative start counts from the end, but `start + length` would then count from the front.
    elif _counts_from_the_front(start):
        both = (start, length)
        end = _number(node, operator.add, both, evaluate_fake(None, operator.add, both, {}))
    else:
        return None
    return aten.slice.Tensor, (x, dim, start, end)


def _counts_from_the_front(start: Dim) -> bool:
    known = start if isinstance(start, int) else size(start.meta["val"])
    return known >= 0 if isinstance(known, int) else bool(known.is_nonnegative)


def _split(node: fx.Node) -> Spelling | None:
    x, dim = argument(node, 0, "self"), argument(node, 2, "dim", 0)
    parts = node.meta["val"]
    if not isinstance(parts, (tuple, list)) or not parts:
        return None
    sizes = [part.shape[dim] for part in parts]
    # If the sizes add up only for the traced lengths, they must not become constants of a dynamic graph.
    if not all(isinstance(s, int) for s in (*sizes, shape(x)[dim])) or sum(sizes) != shape(x)[dim]:
        return None
    return aten.split_with_sizes.default, (x, sizes, dim)


# Joins


def _cat(node: fx.Node) -> Spelling:
    return aten.cat.default, (argument(node, 0, "tensors"), argument(node, 1, "dim", 0))


_STACKS = {aten.hstack: 1, aten.column_stack: 1, aten.vstack: 0, aten.row_stack: 0, aten.dstack: 2}


def _stack_along(node: fx.Node) -> Spelling | None:
    """Rewrite hstack, vstack, dstack and column_stack unless they first have to add the joined axis to a tensor."""
    parts, dim = argument(node, 0, "tensors"), _STACKS[packet(node)]
    # hstack joins vectors along their only axis, and other tensors along the second axis.
    if packet(node) is aten.hstack and all(len(shape(x)) == 1 for x in parts):
        dim = 0
    elif any(len(shape(x)) < max(dim + 1, 2) for x in parts):
        return None
    return aten.cat.default, (parts, dim)


_RULES: dict[object, Callable[[fx.Node], Spelling | None]] = {
    **dict.fromkeys((aten.transpose, aten.swapaxes, aten.swapdims), _transpose),
    **dict.fromkeys((aten.t, aten.numpy_T), _reverse),
    **dict.fromkeys((aten.mT, aten.mH, aten.matrix_H, aten.adjoint), _matrix_transpose),
    **dict.fromkeys((aten.movedim, aten.moveaxis), _movedim),
    **dict.fromkeys((aten._unsafe_view, aten._reshape_alias), _of_size(aten.view.default)),
    **dict.fromkeys((aten.view_as, aten.reshape_as), _in_shape_of),
    aten.unflatten: _unflatten,
    aten.flatten: _flatten,
    aten.squeeze: _squeeze,
    aten.broadcast_to: _of_size(aten.expand.default),
    aten.expand_as: _expand_as,
    aten.tile: _tile,
    aten.repeat_interleave: _repeat_interleave,
    aten.narrow: _narrow,
    **dict.fromkeys(SPLITS - {aten.split_with_sizes}, _split),
    **dict.fromkeys((aten.concat, aten.concatenate), _cat),
    **dict.fromkeys(_STACKS, _stack_along),
}
"""Rules by operator; a rule returns None if the node stays as it is."""
