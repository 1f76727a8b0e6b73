"""Finds on which positions of the operands each position along an axis of the result depends.

Along the head axis of ``softmax(q k^T) v``, position h of the result needs only position h of q, k and v. Parts of the
operands therefore give a part of the result. This dependence is called a *step*. An operator has no step along an axis
that it mixes. Examples are an axis that a product sums over, and an axis along which a softmax or norm works. Operators
without a rule have no step either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from mla_compile.passes.ir import moves
from mla_compile.passes.ir.axes import axis_size
from mla_compile.passes.ir.graph import args_of, argument, axis, is_tensor, packet, shape, val
from mla_compile.passes.ir.labels import product_labels
from mla_compile.passes.ir.operators import decode, rule_for
from mla_compile.passes.ir.sizes import same, same_sizes

aten = torch.ops.aten
_ALONG_ONE = {
    "cumsum": (1, "dim"), "cumprod": (1, "dim"), "flip": (1, "dims"), "roll": (2, "dims"), "index_select": (1, "dim"),
    "gather": (1, "dim"), "scatter": (1, "dim"), "index_copy": (1, "dim"), "index_add": (1, "dim"),
}  # fmt: skip
"""Operators that keep the axes of their first operand, each with the position and name of its axis argument."""

Instead: TypeAlias = "tuple[Callable[..., object], tuple[fx.node.Argument, ...]]"


@dataclass(frozen=True)
class OperandAxis:
    """Axis ``dim`` of an operand. Each unit of the result (see :class:`Blind`) reads ``inner`` positions."""

    dim: int
    inner: int = 1


@dataclass(frozen=True)
class Blind:
    """A step in which each unit of the result depends on the same unit of each operand in ``reads``.

    Operands that are not in ``reads`` are read whole. ``unit``: the number of positions in a unit. ``reshaped``:
    whether the operator's arguments give the shape of its result. ``instead``: the operator that computes a part of the
    result in place of the original, and its arguments after the operand. ``own_rows``: whether the operator is a
    product and both of its operands have the axis.
    """

    reads: Mapping[fx.Node, OperandAxis]
    unit: int = 1
    reshaped: bool = False
    instead: Instead | None = None
    own_rows: bool = False


@dataclass(frozen=True)
class Joined:
    """The step of an operator that joins the axis of its result from parts."""

    parts: tuple[moves.AxisPart, ...]


BackwardStep = Blind | Joined


def step(node: fx.Node, dim: int) -> BackwardStep | None:
    """Return the step along axis ``dim`` of ``node``; None if there is no step."""
    length = shape(node)[dim] if is_tensor(node) else 1
    # If the length is not known, there are no positions to name. An axis of size 1 has no parts.
    if not isinstance(length, int) or length == 1 or node.op != "call_function":
        return None
    return _step(node, dim, length)


def per_position(node: fx.Node, dim: int) -> Blind | None:
    """Return the step along axis ``dim`` if each position needs one position of each operand in ``reads``.

    Unlike in :func:`step`, the length may be symbolic. Return None if there is no such step, or if the axis has size 1.
    """
    if node.op != "call_function" or not is_tensor(node) or same(shape(node)[dim], 1):
        return None
    found = _step(node, dim, shape(node)[dim])  # the symbolic length is only compared
    if not isinstance(found, Blind) or found.unit != 1 or any(p.inner != 1 for p in found.reads.values()):
        return None
    return found


def along(node: fx.Node, dim: int) -> dict[fx.Node, int]:
    """Return the operands that have axis ``dim`` of ``node``, each with the index of this axis in the operand.

    ``node`` may mix positions along the axis. Unlike in :func:`step`, lengths may be symbolic. Operands that broadcast
    along the axis are left out.
    """
    if node.op != "call_function" or not is_tensor(node) or same(shape(node)[dim], 1):
        return {}
    how, rank = decode(node), len(shape(node))
    if isinstance(how, moves.Repeat) and how.map is not None:
        return {how.x: dims[0]} if (dims := how.map.read_along(dim)) else {}
    if isinstance(how, moves.Along):
        return dict.fromkeys(how.operands, dim)
    if isinstance(how, moves.WriteRows):
        return {how.base: dim, how.x: dim}
    if isinstance(how, moves.WriteOne) and how.dim != dim:
        return {how.base: dim, how.x: dim - (dim > how.dim)}
    name = getattr(packet(node), "__name__", "")
    if name in ("sum", "mean", "amax", "amin", "logsumexp"):
        gone = () if argument(node, 2, "keepdim", False) else reduced(node)
        kept = [d for d in range(len(shape(args_of(node)[0]))) if d not in gone]
        return {args_of(node)[0]: kept[dim]}
    if name in _ALONG_ONE or (name in ("conv1d", "conv2d", "convolution") and dim != 1):
        return {args_of(node)[0]: dim}
    if name in ("view_as_real", "view_as_complex") and dim < min(rank, len(shape(args_of(node)[0]))):
        return {args_of(node)[0]: dim}
    if name == "getitem" and isinstance(args_of(node)[0], fx.Node) and how is None:
        whole = args_of(node)[0]
        return {whole.args[0]: dim} if is_tensor(whole.args[0]) and len(shape(whole.args[0])) == rank else {}
    found = _step(node, dim, shape(node)[dim])  # the symbolic length is only compared
    if isinstance(found, Blind):
        return {n: place.dim for n, place in found.reads.items()}
    return {} if found is None else {p.node: p.dim for p in found.parts}


def reduced(node: fx.Node) -> tuple[int, ...]:
    """Return the axes of the first operand over which ``node``, a reduction, runs."""
    rank, dims = len(shape(args_of(node)[0])), argument(node, 1, "dim")
    dims = range(rank) if dims is None else [dims] if isinstance(dims, int) else dims
    return tuple(axis(d, rank) for d in dims)


def worked_along(node: fx.Node) -> tuple[int, ...]:
    """Return the axes along which a result position of ``node`` depends on other positions.

    ``node`` must have the axes of its first operand.
    """
    name, rank = getattr(packet(node), "__name__", ""), len(shape(node))
    if name == "index":
        return tuple(d for d, given in enumerate(args_of(node)[1]) if given is not None)
    if name in ("conv1d", "conv2d", "convolution"):
        return tuple(range(2, rank))
    if name not in _ALONG_ONE:
        return ()
    dims = argument(node, *_ALONG_ONE[name])
    dims = [dims] if isinstance(dims, int) else dims
    return tuple(axis(d, rank) for d in dims) if dims else tuple(range(rank))  # `roll` without axes rolls all of them


def _step(node: fx.Node, dim: int, length: int) -> BackwardStep | None:
    how = decode(node)
    move = rule_for(_MOVES, how)
    if move is not None:
        return move(node, how, dim, length)
    rule = _RULES.get(packet(node))
    if rule is not None:
        return rule(node, dim, length)
    tags = getattr(node.target, "tags", ())
    # A random operator is refused, because it would draw other numbers for a part.
    pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return _pointwise(node, dim, length) if pointwise else None


def _reads(
    pairs: Sequence[tuple[fx.Node, int]], length: int, instead: Instead | None = None, *, own_rows: bool = False
) -> Blind | None:
    """Return the step that reads each operand in ``pairs`` along its axis.

    A negative axis means that the operand broadcasts. Return None if all operands broadcast, if an operand would be
    read along two axes, or if lengths differ.
    """
    reads: dict[fx.Node, OperandAxis | None] = {}
    for node, dim in pairs:
        broadcast = dim < 0 or same(shape(node)[dim], 1)
        if not broadcast and not same(shape(node)[dim], length):
            return None
        place = None if broadcast else OperandAxis(dim)
        # In `x @ x`, row h of the result needs row h of the first x, but the whole second x. A part of x is not enough.
        if reads.setdefault(node, place) != place:
            return None
    # Operands that broadcast along the axis are read whole by each part.
    found = {n: p for n, p in reads.items() if p is not None}
    return Blind(found, instead=instead, own_rows=own_rows) if found else None


def _pointwise(node: fx.Node, dim: int, length: int) -> BackwardStep | None:
    rank = len(shape(node))
    return _reads([(n, dim - rank + len(shape(n))) for n in node.all_input_nodes if is_tensor(n)], length)


def _first(node: fx.Node, dim: int, length: int) -> BackwardStep | None:
    """Handle operators that keep every axis of their first operand."""
    return _reads([(args_of(node)[0], dim)], length)


def _copied(node: fx.Node, how: moves.Copy, dim: int, length: int) -> BackwardStep | None:
    return _reads([(how.x, dim)], length)


def _assigned(node: fx.Node, how: moves.Assign, dim: int, length: int) -> BackwardStep | None:
    """Handle a copy into a target whose values are not read."""
    x = how.x
    if val(x).dtype == val(node).dtype and same_sizes(shape(x), shape(node)):
        return Joined((moves.AxisPart(0, length, x, dim),))
    return _reads([(how.target, dim), (x, dim - len(shape(node)) + len(shape(x)))], length)


def _normalized(node: fx.Node, dim: int, length: int) -> BackwardStep | None:
    """Handle a softmax or a norm that works along other axes."""
    rank, over = len(shape(node)), argument(node, 1, "dim")
    if over is None:
        return None
    # A softmax takes an axis. layer_norm and rms_norm take the sizes of the last axes, so the number of sizes is used.
    along = [axis(over, rank)] if isinstance(over, int) else list(range(rank - len(over), rank))
    return None if dim in along else _first(node, dim, length)


def _rearranged(node: fx.Node, how: moves.Rearrange, dim: int, length: int) -> BackwardStep | None:
    """Handle an axis whose outermost factor is also the outermost factor of an axis of the operand."""
    if how.map is None:
        return None
    outer, *rest = how.map.after[dim]
    for k, own in enumerate(how.map.before):
        # Only an outermost factor gives neighbouring positions. The positions of an inner factor are scattered.
        if own and own[0] is outer:
            unit, inner = axis_size(rest), axis_size(own[1:])
            if not isinstance(unit, int) or not isinstance(inner, int):
                return None
            return Blind({how.x: OperandAxis(k, inner)}, unit, reshaped=how.told is not None)
    # The operand does not have this axis, so all positions of the axis are equal. Only an expansion accepts another
    # size.
    expands = isinstance(how, moves.Expand) and not how.map.read_along(dim)
    return Blind({}, reshaped=True) if expands else None


def _along(node: fx.Node, how: moves.Along, dim: int, length: int) -> BackwardStep | None:
    if how.dim == dim:
        return None if how.axis_parts is None else Joined(how.axis_parts)
    if not isinstance(how, moves.Slice):
        return _reads([(x, dim) for x in how.operands], length)
    # A part of a split's result is built as a slice, because the split itself cuts the whole tensor.
    instead = None if how.bounds is None else (aten.slice.Tensor, (how.dim, *how.bounds))
    return None if instead is None else _reads([(how.x, dim)], length, instead)


def _selected(node: fx.Node, how: moves.Select, dim: int, length: int) -> BackwardStep | None:
    return _reads([(how.x, dim + (dim >= how.dim))], length)


def _stacked(node: fx.Node, how: moves.Stack, dim: int, length: int) -> BackwardStep | None:
    # No operand has the new axis. `AxisParts.stacked` tells its positions apart.
    return None if how.dim == dim else _reads([(x, dim - (dim > how.dim)) for x in how.parts], length)


def _product(node: fx.Node, dim: int, length: int) -> BackwardStep | None:
    labelled = product_labels(node)
    # A sum over a written-out product reads the product node, not the two operands.
    if labelled is None or packet(node) is aten.sum:
        return None
    left, right, out = labelled
    label = out[dim]
    places = [(n, labels.find(label)) for n, labels in (left, right)]
    # If both operands have the axis, each position (a head) has its own product. Otherwise, rows share a weight.
    both = all(k >= 0 and same(shape(n)[k], length) for n, k in places)
    return _reads(places, length, own_rows=both)


def _linear(node: fx.Node, dim: int, length: int) -> BackwardStep | None:
    """Handle ``linear``. The last axis of the result comes from the weight and bias. All other axes come from ``x``."""
    x, weight, bias = args_of(node)[0], args_of(node)[1], argument(node, 2, "bias")
    beside = [] if bias is None else [bias]
    if dim < len(shape(node)) - 1:
        return _reads([(x, dim), *((n, -1) for n in (weight, *beside))], length)
    return _reads([(x, -1), *((n, 0) for n in (weight, *beside))], length)


def _fused(node: fx.Node, dim: int, length: int) -> BackwardStep | None:
    """Handle PyTorch's attention. All axes except the last two are independent. K and V may have fewer heads."""
    rank = len(shape(node))
    # The last two axes have no steps: `is_causal` would mask any part of the queries like the first queries. Dropout
    # would draw other numbers for a part.
    if dim >= rank - 2 or argument(node, 4, "dropout_p", 0.0) != 0.0:
        return None
    q, k, v = (argument(node, i, n) for i, n in enumerate(("query", "key", "value")))
    mask = argument(node, 3, "attn_mask")
    pairs = [(q, dim)]
    if mask is not None:
        pairs.append((mask, dim - rank + len(shape(mask))))
    heads = shape(k)[dim]
    grouped = bool(argument(node, 7, "enable_gqa", False)) and dim == rank - 3 and not same(heads, length)
    if not grouped or same(heads, 1):
        return _reads([*pairs, (k, dim), (v, dim)], length)
    # If heads are grouped, q and k have different lengths along the axis. A tensor that is both q and k would then need
    # two places.
    found = _reads(pairs, length)
    if found is None or not isinstance(heads, int) or not same(shape(v)[dim], heads) or {k, v} & {n for n, _ in pairs}:
        return None
    times = length // heads
    reads = {n: OperandAxis(p.dim, times) for n, p in found.reads.items()}
    return Blind({**reads, k: OperandAxis(dim), v: OperandAxis(dim)}, times)


_MOVES: dict[type, Callable[[fx.Node, Any, int, int], BackwardStep | None]] = {
    moves.Copy: _copied,
    moves.Assign: _assigned,
    moves.Rearrange: _rearranged,
    moves.Along: _along,
    moves.Select: _selected,
    moves.Stack: _stacked,
}
_RULES: dict[object, Callable[[fx.Node, int, int], BackwardStep | None]] = {
    aten.masked_fill: _pointwise,
    **dict.fromkeys((aten.softmax, aten._softmax, aten._safe_softmax, aten.layer_norm, aten.rms_norm), _normalized),
    **dict.fromkeys((aten.matmul, aten.bmm, aten.mm, aten.einsum), _product),
    aten.linear: _linear,
    aten.scaled_dot_product_attention: _fused,
}
