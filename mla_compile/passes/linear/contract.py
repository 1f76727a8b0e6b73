"""Transfer rules for operators that combine a linear map with a weight: products, sums, contractions.

Every operator is read as an einsum. Labels of the weight that are not in the result are summed over. A weight may have
labels of the map's features and of the last axis of the source's rows. A weight with the label of a token ends the
walk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from mla_compile.passes.ir.axes import Atom, Axis, flatten, fresh_axis
from mla_compile.passes.ir.expr import Expr, Factor
from mla_compile.passes.ir.factors import product, scaled, total
from mla_compile.passes.ir.graph import args_of, argument, axis, bytes_hint, packet, shape, val
from mla_compile.passes.ir.labels import matmul_labels, parse_einsum
from mla_compile.passes.ir.sizes import same
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.linear.join import joint_of, one_map
from mla_compile.passes.linear.records import LinearMap, Maps, Piece, RowsJoined, Segment
from mla_compile.passes.linear.stops import computed_projection, unexplained

aten = torch.ops.aten


def _usable(expr: Expr, node: fx.Node) -> Stop | None:
    """Refuse a weight that is not an ordinary floating-point tensor, because expressions compute with its values."""
    if expr.value.layout != torch.strided:
        return Stop(node, "unsupported_weight", f"a weight of layout {expr.value.layout}")
    # 8-bit and integer weights need their scales. A product that is computed ahead would lose the scales.
    if not expr.value.dtype.is_floating_point or expr.value.dtype.itemsize < 2:
        return Stop(node, "unsupported_weight", f"a weight of dtype {expr.value.dtype} without dequantization")
    if any(not isinstance(d, int) for d in expr.value.shape):
        return Stop(node, "unsupported_weight", "a weight whose size is only known when it is computed")
    return None


def _bind(
    piece: Piece, node: fx.Node, labels: str, weight: Expr, weight_labels: str
) -> tuple[Factor, dict[str, Axis]] | Stop:
    """Return the weight with its dimensions written in the map's atoms, and the axis of every label."""
    axis_of = dict(zip(labels, piece.axes, strict=True))
    # An axis of size 1 has no atom: it broadcasts.
    sizes = [(lab, s) for lab, s in zip(weight_labels, weight.shape, strict=True) if s != 1]
    atoms: list[Atom] = []
    for label, size in sizes:
        if not axis_of.get(label, ()):
            axis_of[label] = fresh_axis(size)
        own = axis_of[label]
        # Weights have fixed sizes. A tensor that lies along a symbolic axis has a value per token, like a table of
        # positions.
        if not all(isinstance(a.size, int) for a in own):
            return Stop(node, "position_dependent", "a weight that differs from token to token")
        atoms += own
    for label in weight_labels:
        axis_of.setdefault(label, ())
    expr = weight.view([a.size for a in atoms])
    return Factor(expr, tuple(atoms)), axis_of


def _apply(
    piece: Piece, node: fx.Node, labels: str, weight: Expr, weight_labels: str, out: str, *, per_row: bool
) -> Piece | Stop:
    bound = _bind(piece, node, labels, weight, weight_labels)
    if isinstance(bound, Stop):
        return bound
    factor, axis_of = bound
    tokens = piece.source_atoms
    known = set(piece.weight.atoms if piece.weight else ()) | set(piece.bias.atoms if piece.bias else ())
    summed: list[Atom] = []
    for label in labels:
        own = axis_of[label]
        if label in out:
            # A weight may only differ along the last axis of the rows. Along another axis, it would be a different
            # weight for each token or head. Queries could then not be multiplied by one weight for all rows.
            blind = tokens - _grouped(piece)
            if not per_row and label != labels[-1] and any(a in blind and a in factor.atoms for a in own):
                contracts = any(c not in out for c in labels)
                code = "head_dependent_latent" if contracts else "position_dependent"
                return Stop(node, code, "a weight that differs along an axis of the rows")
        elif not own:
            continue
        # The weight takes no part in this sum, so tokens or heads are added up.
        elif label not in weight_labels or not all(a in factor.atoms for a in own):
            return Stop(node, "token_mixing", "a sum over an axis")
        # A sum over a broadcast axis may be legal, but no model needs it.
        elif piece.source is not None and not all(a in tokens or a in known for a in own):
            return Stop(node, "unsupported_op", "a sum over a broadcast axis")
        else:
            summed += own
    for label, size in zip(weight_labels, weight.shape, strict=True):
        if label not in labels and label not in out and size != 1:
            # This would be legal, but no model needs it.
            return Stop(node, "unsupported_op", "an axis that only the weight has is summed")
    axes = tuple(axis_of[label] for label in out)
    bias = None if piece.bias is None else product(piece.bias, factor, summed)
    # A constant has no weight, only a bias, which was multiplied above.
    if piece.source is None:
        return replace(piece, axes=axes, bias=bias, dtype=val(node).dtype)
    weights = product(piece.weight, factor, [a for a in summed if a not in tokens])
    result = replace(piece, axes=axes, weight=weights, bias=bias, dtype=val(node).dtype)
    projected = any(label not in out for label in labels)  # also for rows of width 1, which have no atom
    return result.visited(node, contractions=int(projected), scalings=int(not projected))


def _grouped(piece: Piece) -> frozenset[Atom]:
    """Return the atoms of the rows along which the piece's weight already differs, such as groups of heads."""
    kept = set(flatten(piece.axes))
    return frozenset(a for a in (piece.weight.atoms if piece.weight else ()) if a in piece.source_atoms and a in kept)


def contract(
    maps: Maps, node: fx.Node, x: fx.Node, labels: str, weight: Expr, weight_labels: str, out: str
) -> LinearMap | Stop:
    """Apply ``einsum(labels,weight_labels->out)`` to a linear map and a weight."""
    problem = _usable(weight, node)
    if problem is not None:
        return problem
    source = maps.map(x)
    # One weight cannot sum columns from different sources, so segments of one source are merged first.
    if source.axis is not None and labels[source.axis] not in out:
        source = one_map(source, node) or source
    label = None if source.axis is None else labels[source.axis]

    def apply(s: Segment) -> Piece | Stop:
        own = _columns(weight, weight_labels, label, s)
        return _apply(
            s.piece, node, labels, own, weight_labels, out, per_row=maps.per_row or node in maps.virtual.grouped
        )

    if label is None:
        return source.each_segment(apply)
    joint = joint_of(source)
    raw = not any(p.projected for p in source.pieces)
    if label not in out:
        # The joined tensor becomes the source if no segment is projected, or if the joined tensor is narrower than the
        # result, like a latent. Otherwise, the joined tensor is a wide result of projections.
        if joint is not None and (raw or bytes_hint(joint) < bytes_hint(node)):
            raise RowsJoined(joint)  # one latent, joined from parts
        return Stop(node, "unsupported_op", "a projection of columns that come from different sources")
    # The weight sums over an axis other than the joined axis. The joined parts are therefore rows that this operator
    # projects.
    if joint is not None and raw and label not in weight_labels and any(c not in out for c in labels):
        raise RowsJoined(joint)
    return source.each_segment(apply, out.index(label))


def _columns(weight: Expr, labels: str, label: str | None, segment: Segment) -> Expr:
    """Return the slice of a weight for the columns of ``segment`` along ``label`` (None: the whole weight)."""
    at = -1 if label is None else labels.find(label)
    return weight if at < 0 or weight.shape[at] == 1 else weight.slice(at, segment.start, segment.stop)


_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def _aligned_labels(rank: int, weight_rank: int) -> tuple[str, str, str]:
    """Return labels of two operands that broadcast against each other from the right, and of the result."""
    wide = max(rank, weight_rank)
    names = _ALPHABET[:wide]
    return names[wide - rank :], names[wide - weight_rank :], names


def multiply_weight(maps: Maps, node: fx.Node, x: fx.Node, weight: fx.Node, *, reciprocal: bool) -> LinearMap | Stop:
    expr = maps.leaf(weight)
    # The reciprocal of the divisor is computed once, in the divisor's dtype.
    if reciprocal:
        expr = expr.call(aten.reciprocal.default)
    labels, weight_labels, out = _aligned_labels(len(shape(x)), len(expr.value.shape))
    if len(labels) < len(out):
        return unexplained(maps, node)
    return contract(maps, node, x, labels, expr, weight_labels, out)


def add_weight(maps: Maps, node: fx.Node, x: fx.Node, bias: fx.Node, factor: float) -> LinearMap | Stop:
    expr = maps.leaf(bias)
    problem = _usable(expr, node)
    labels, bias_labels, out = _aligned_labels(len(shape(x)), len(expr.value.shape))
    if problem is not None or len(labels) < len(out):
        return problem or unexplained(maps, node)
    source = maps.map(x)
    at = None if source.axis is None else labels[source.axis]

    def add(s: Segment) -> Piece | Stop:
        bound = _bind(s.piece, node, labels, _columns(expr, bias_labels, at, s), bias_labels)
        if isinstance(bound, Stop):
            return bound
        own, axis_of = bound
        # A bias along the last axis of the rows is the same for all tokens. A bias along another axis is a table of
        # positions.
        rows = s.piece.source_atoms - _grouped(s.piece)
        outside = [a for lab in labels[:-1] for a in axis_of[lab] if a in rows and a in own.atoms]
        if outside and not maps.per_row:
            return Stop(node, "position_dependent", "a bias that differs from token to token")
        axes = tuple(axis_of[lab] for lab in labels)
        piece = replace(s.piece, axes=axes, bias=total(s.piece.bias, scaled(own, factor)), dtype=val(node).dtype)
        return piece.visited(node, scalings=1)

    return source.each_segment(add)


def linear(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    x, weight, bias = args_of(node)[0], args_of(node)[1], argument(node, 2, "bias")
    if not maps.is_weight(weight) and not maps.is_weight(x):
        return computed_projection(node)
    # If the bias is computed from the inputs, the result is not a fixed map of `x`.
    if maps.is_weight(x) or (bias is not None and not maps.is_weight(bias)):
        return unexplained(maps, node)
    labels = _ALPHABET[: len(shape(x))]
    expr = maps.leaf(weight)
    if len(expr.value.shape) != 2:
        return unexplained(maps, node)
    result = contract(maps, node, x, labels, expr, "z" + labels[-1], labels[:-1] + "z")
    return result if bias is None or isinstance(result, Stop) else _with_bias(result, maps.leaf(bias), node)


def _with_bias(source: LinearMap, bias: Expr, node: fx.Node, dim: int = -1) -> LinearMap | Stop:
    """Return ``source + bias``. The bias lies along axis ``dim``, which must not be segmented."""

    def add(piece: Piece) -> Piece | Stop:
        labels = _ALPHABET[: len(piece.axes)]
        bound = _bind(piece, node, labels, bias, labels[dim])
        if isinstance(bound, Stop):
            return bound
        return replace(piece, bias=total(piece.bias, bound[0]))

    return source.each(add)


def matmul(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    """Return the map of matmul, mm, bmm, addmm or baddbmm with a weight on either side."""
    offset = 1 if packet(node) in (aten.addmm, aten.baddbmm) else 0
    a, b = args_of(node)[offset], args_of(node)[offset + 1]
    ra, rb = len(shape(a)), len(shape(b))
    # A product of two weights is a weight and has no rule. A product of two activations belongs to an attention.
    # Keywords (`beta` and `alpha` of addmm) are not supported.
    if ra < 2 or rb < 2 or maps.is_weight(a) == maps.is_weight(b) or node.kwargs:
        return unexplained(maps, node)
    left, right, out = matmul_labels(ra, rb)
    x, weight, labels, weight_labels = (a, b, left, right) if maps.is_weight(b) else (b, a, right, left)
    if len(labels) < len(out):
        return unexplained(maps, node)
    result = contract(maps, node, x, labels, maps.leaf(weight), weight_labels, out)
    if offset == 0 or isinstance(result, Stop):
        return result
    bias = args_of(node)[0]
    # A bias with more than one axis may differ from token to token. If the map is segmented, the bias would have to be
    # cut too.
    if not maps.is_weight(bias) or len(shape(bias)) != 1 or result.axis is not None:
        return unexplained(maps, node)
    return _with_bias(result, maps.leaf(bias), node)


def convolution(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    """Return the map of a convolution of kernel size 1 over [B,C,...].

    Such a convolution is a product with a matrix [out,C]. Larger kernels mix tokens.
    """
    x, weight, bias = args_of(node)[0], args_of(node)[1], argument(node, 2, "bias")
    rank = len(shape(x))
    if maps.is_weight(x) or not maps.is_weight(weight) or (bias is not None and not maps.is_weight(bias)):
        return unexplained(maps, node)
    expr = maps.leaf(weight)
    pointwise = len(expr.value.shape) == rank and rank > 2 and all(same(s, 1) for s in shape(weight)[2:])
    whole = all(same(a, b) for a, b in zip(shape(x)[2:], shape(node)[2:], strict=True))  # no stride and no padding
    if not pointwise or not whole or not same(shape(weight)[1], shape(x)[1]) or _padded(node):
        return unexplained(maps, node)
    labels = _ALPHABET[:rank]
    out = labels[0] + "z" + labels[2:]
    result = contract(maps, node, x, labels, expr.view(expr.shape[:2]), "z" + labels[1], out)
    return result if bias is None or isinstance(result, Stop) else _with_bias(result, maps.leaf(bias), node, 1)


def _padded(node: fx.Node) -> bool:
    padding = argument(node, 4, "padding", 0)
    return padding not in (0, [0], [0, 0], [0, 0, 0], (0,), (0, 0), (0, 0, 0), "valid", "same")


def einsum(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    parsed = parse_einsum(node)
    if parsed is None:
        return unexplained(maps, node)
    operands = args_of(node)[1]
    inputs, out = parsed
    weights = [maps.is_weight(o) for o in operands]
    # Only one operand may be an activation, because products of two activations belong to attentions.
    if sum(weights) != len(weights) - 1 or len(operands) > 2:
        return unexplained(maps, node)
    at = weights.index(False)
    if len(operands) == 1:
        # With one operand, only a permutation is allowed, because a dropped label is a sum.
        if sorted(inputs[0]) != sorted(out):
            return unexplained(maps, node)
        source = maps.map(operands[0])
        order = [inputs[0].index(c) for c in out]
        where = None if source.axis is None else order.index(source.axis)
        return source.each(lambda p: replace(p, axes=tuple(p.axes[d] for d in order)).visited(node), where)
    return contract(maps, node, operands[at], inputs[at], maps.leaf(operands[1 - at]), inputs[1 - at], out)


def tensordot(maps: Maps, node: fx.Node) -> LinearMap | Stop:
    """Return the map of tensordot.

    The result has the remaining axes of the first operand, followed by the remaining axes of the second.
    """
    a, b, dims_a, dims_b = args_of(node)[:4]
    if maps.is_weight(a) == maps.is_weight(b):
        return unexplained(maps, node)
    ra, rb = len(shape(a)), len(shape(b))
    left, right = list(_ALPHABET[:ra]), list(_ALPHABET[ra : ra + rb])
    for i, j in zip(dims_a, dims_b, strict=True):
        right[axis(j, rb)] = left[axis(i, ra)]
    out = "".join([*(c for c in left if c not in right), *(c for c in right if c not in left)])
    x, weight, labels, weight_labels = (a, b, left, right) if maps.is_weight(b) else (b, a, right, left)
    return contract(maps, node, x, "".join(labels), maps.leaf(weight), "".join(weight_labels), out)


def batch_norm(maps: Maps, node: fx.Node, norm: fx.Node) -> LinearMap | Stop:
    """Return the map of the batch norm ``norm``, which normalizes axis 1 with stored statistics.

    ``node`` is the first or only result, ``(x - mean) / sqrt(var + eps) * weight + bias``.
    """
    x, weight, bias, mean, var = args_of(norm)[:5]
    whole = packet(norm) is aten.batch_norm
    if whole and args_of(norm)[5]:  # statistics are computed from this call's input
        return unexplained(maps, norm)
    if maps.is_weight(x) or not all(maps.is_weight(n) for n in (weight, bias, mean, var) if n is not None):
        return unexplained(maps, norm)
    factor = maps.leaf(var).call(aten.add.Scalar, args_of(norm)[7 if whole else 6]).call(aten.rsqrt.default)
    if weight is not None:
        factor = factor.call(aten.mul.Tensor, maps.leaf(weight))
    shift = maps.leaf(mean).call(aten.mul.Tensor, factor).call(aten.neg.default)
    if bias is not None:
        shift = shift.call(aten.add.Tensor, maps.leaf(bias))
    labels = _ALPHABET[: len(shape(x))]
    scaled_map = contract(maps, node, x, labels, factor, labels[1], labels)
    if isinstance(scaled_map, Stop):
        return scaled_map
    # If the channels are segmented, the shift would have to be cut too.
    return unexplained(maps, norm) if scaled_map.axis == 1 else _with_bias(scaled_map, shift, node, 1)


CONTRACTION_RULES: dict[object, Callable[[Maps, fx.Node], LinearMap | Stop]] = {
    **dict.fromkeys((aten.linear, aten.inner), linear),
    **dict.fromkeys((aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm), matmul),
    aten.einsum: einsum,
    aten.tensordot: tensordot,
    aten.batch_norm: lambda maps, node: batch_norm(maps, node, node),
    **dict.fromkeys((aten.conv1d, aten.conv2d), convolution),
}
