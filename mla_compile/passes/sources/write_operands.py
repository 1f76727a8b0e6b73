"""Read the operands of arithmetic writes: factors shared by all heads and columns, and matrices that sum tokens."""

from __future__ import annotations

from string import ascii_letters

import torch
from torch import fx

from mla_compile.passes.ir import moves
from mla_compile.passes.ir.graph import args_of, is_tensor, shape
from mla_compile.passes.ir.operators import behind, varying
from mla_compile.passes.ir.sizes import same_sizes
from mla_compile.passes.sources.along_tokens import Shared

aten = torch.ops.aten


def shared(factor: fx.Node, node: fx.Node) -> Shared:
    """Return ``factor``, an operand of ``node``, with the axes of ``node`` along which the factor varies."""
    factor = behind(factor, moves.Expand)[-1]
    along, lead = varying(factor), len(shape(node)) - len(shape(factor))
    return Shared(factor, tuple(k + lead if k in along else None for k in range(len(shape(factor)))))


def is_spread(node: fx.Node) -> bool:
    """Whether ``node`` is a product of two broadcast tensors, such as ``k * one_hot``, perhaps times a number."""
    if (x := times_number(node)) is not None:
        return is_spread(x)
    return node.target in (aten.mul.Tensor, aten.div.Tensor) and not any(
        not is_tensor(n) or same_sizes(shape(n), shape(node)) for n in args_of(node)
    )


def times_number(node: fx.Node) -> fx.Node | None:
    """Return the tensor that ``node`` negates, or multiplies or divides by a number; None for other operators."""
    x, *number = args_of(node) or (None,)
    scaled = node.target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(number[0], (int, float))
    return x if scaled or node.target is aten.neg.default else None


def mix_of(node: fx.Node) -> tuple[fx.Node, Shared, int, int] | None:
    """If ``node`` multiplies a tensor by a matrix that sums its tokens, return the parts of ``node``; else None.

    The parts are the tensor, the matrix, the summed dimension of the matrix, and the summed axis of the tensor.
    """
    if node.target is aten.matmul.default:
        matrix, x = args_of(node)
        rank, own = len(shape(node)), len(shape(matrix))
        letters = ascii_letters[:rank]
        if len(shape(x)) != rank or not 1 < own <= rank:
            return None
        left, right, result = f"{letters[rank - own : -1]}Z", f"{letters[:-2]}Z{letters[-1]}", letters
    elif node.target is aten.einsum.default and len(args_of(node)[1]) == 2:
        inputs, _, result = str(args_of(node)[0]).replace(" ", "").partition("->")
        (left, right), (matrix, x) = inputs.split(","), args_of(node)[1]
        if len(right) < len(left):
            left, right, matrix, x = right, left, x, matrix
    else:
        return None
    gone = [k for k, (a, b) in enumerate(zip(right, result, strict=False)) if a != b]
    if len(right) != len(result) or len(gone) != 1 or len({*left}) < len(left) or not (left + right).isalpha():
        return None
    dim, summed = gone[0], left.find(right[gone[0]])
    if summed < 0 or result[dim] not in left or {*left} - {*result} != {right[dim]}:
        return None
    along = varying(matrix)
    axes = (result.index(a) if a in result and (k in along or a == result[dim]) else None for k, a in enumerate(left))
    return x, Shared(matrix, tuple(axes)), summed, dim
