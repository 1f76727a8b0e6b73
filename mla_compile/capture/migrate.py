"""Converts an existing cache of K and V to the latent rows that a program now takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from mla_compile.capture.cache_change import CacheChange, CachedTensor
from mla_compile.errors import InputError
from mla_compile.passes.cache.expansion import evaluate, expand
from mla_compile.passes.cache.packed import at_once, pack
from mla_compile.passes.cache.recipe import ColumnBlock, Recipe


class Migrated(NamedTuple):
    """A converted cache: a tuple of row tensors for each cache input, in order, and the error of the conversion."""

    inputs: tuple[tuple[torch.Tensor, ...], ...]
    error: float


def migrate(change: CacheChange, cached: Sequence[torch.Tensor], tolerance: float | None = None) -> Migrated:
    """Recover the latent rows of an existing cache from K, V, and the weights that expand rows to K and V.

    The rows are the least-squares solution in float64 over all tensors that are computed from the same rows. The error
    is the largest relative difference (2-norm) between a given tensor and the tensor recomputed from rows.

    Raises :class:`InputError` if other weights made a tensor. This is assumed if the tensor's error, without float8
    rounding, exceeds ``tolerance``. The default tolerance is 64 times the rounding error of the dtype.
    """
    if len(cached) != len(change.inputs):
        names = ", ".join(t.name for t in change.inputs)
        raise InputError(f"got {len(cached)} tensors, expected one for each cache input: {names}")
    for tensor, given in zip(change.inputs, cached, strict=True):
        _check_shape(tensor, given)
    solved = _solve([e for t, given in zip(change.inputs, cached, strict=True) for e in _equations(t, given)])
    rows: dict[int, torch.Tensor] = {}
    error = 0.0
    for tensor, given in zip(change.inputs, cached, strict=True):
        recipe = tensor.recipe
        plain = [_in_precision(solved[r], change.dtypes[r], recipe.dtype) for r in tensor.rows]
        # This check uses the unpacked rows, because float8 would add an error.
        again = expand(replace(recipe, packed=()), plain, tensor.leaves, at_once)
        one = _relative(again.double() - given.double(), given.double())
        allowed = tolerance if tolerance is not None else 64 * torch.finfo(given.dtype).eps
        if not one <= allowed:
            raise InputError(
                f"the cache {tensor.name} was not made by the weights of this program: the best rows miss it by "
                f"{one:.1e}, allowed {allowed:.1e}; fill the cache with this program, or give a larger tolerance"
            )
        held = [pack(x, recipe.widths[k], at_once) if recipe.is_packed(k) else x for k, x in enumerate(plain)]
        rows.update(zip(tensor.rows, held, strict=True))
        again = expand(recipe, held, tensor.leaves, at_once)
        error = max(error, _relative(again.double() - given.double(), given.double()))
    return Migrated(tuple(tuple(rows[t.rows[i]] for i in t.holds) for t in change.inputs), error)


def _in_precision(rows: torch.Tensor, held: torch.dtype, computed: torch.dtype) -> torch.Tensor:
    """Return rows in the dtype ``held``, or in the dtype ``computed`` of K and V if ``held`` is packed bytes."""
    return rows.to(held if held.is_floating_point else computed)


def _check_shape(tensor: CachedTensor, given: torch.Tensor) -> None:
    kinds = tensor.recipe.kinds
    if given.dim() != len(kinds) or any(
        kind not in ("row", size) for kind, size in zip(kinds, given.shape, strict=True)
    ):
        expected = ", ".join("*" if kind == "row" else str(kind) for kind in kinds)
        raise InputError(f"the cache {tensor.name} has shape {list(given.shape)}, expected [{expected}]")


class _Equation(NamedTuple):
    """``sum(A rows) = b``, with ``A`` [values of one token, width] for each row tensor, and ``b`` [..., values]."""

    matrices: dict[int, torch.Tensor]
    target: torch.Tensor


def _equations(tensor: CachedTensor, given: torch.Tensor) -> list[_Equation]:
    """Return the linear equations that one K or V imposes on rows, one equation for each range of columns."""
    recipe, stacked = tensor.recipe, [given]
    for gone, axis in enumerate(recipe.stacked):
        stacked = [x for one in stacked for x in one.unbind(axis - sum(k < axis for k in recipe.stacked[:gone]))]
    return [
        e for one, x in zip(recipe.each(recipe.stacked), stacked, strict=True) for e in _equations_of(one, tensor, x)
    ]


def _equations_of(recipe: Recipe, tensor: CachedTensor, given: torch.Tensor) -> list[_Equation]:
    """Return the equations of a tensor, or of one tensor in a stack."""
    heads, outer = recipe.heads, recipe.outer
    found: list[_Equation] = []
    start = stop = 0
    for part in recipe.parts:
        matrix = _matrix(recipe, part, tensor.leaves) * part.scale
        start, stop = (start, stop) if part.added else (stop, stop + matrix.shape[-2])
        b = given.double().narrow(recipe.columns, start, stop - start)
        if part.bias is not None:  # only the first part of a sum has a bias
            bias = evaluate(part.bias, tensor.leaves, at_once, {}).double()
            bias = bias.expand([bias.shape[k] if k != recipe.columns else stop - start for k in range(bias.dim())])
        else:
            bias = b.new_zeros([1] * b.dim())
        if recipe.is_marked(part.rows):  # each written row ends with a 1, whose weight is the bias
            column = bias.permute(*outer, *heads, recipe.columns)[(0,) * len(outer)]
            matrix = torch.cat([matrix, column.expand(matrix.shape[:-1]).unsqueeze(-1)], -1)
        else:
            b = b - bias
        rows, flat = tensor.rows[part.rows], matrix.reshape(-1, matrix.shape[-1])
        if part.added:
            known = found[-1].matrices
            known[rows] = known[rows] + flat if rows in known else flat
        else:
            found.append(_Equation({rows: flat}, b.permute(*outer, *heads, recipe.columns).flatten(len(outer))))
    return found


def _matrix(recipe: Recipe, part: ColumnBlock, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the weight of a block of columns for every head, [heads..., columns, width]."""
    sizes = [int(recipe.kinds[k]) for k in recipe.heads]
    matrix: torch.Tensor
    if part.weight is None:
        matrix = torch.eye(part.width, dtype=torch.float64, device=leaves[0].device if leaves else None)
        if part.factor is not None:  # the size of the factor is 1 along the axes of the rows
            factor = evaluate(part.factor, leaves, at_once, {}).double()
            factor = factor.permute(*recipe.outer, *recipe.heads, recipe.columns)
            matrix = matrix * factor[(0,) * len(recipe.outer)].unsqueeze(-1)
        return matrix.expand(*sizes, part.width, part.width)
    matrix = evaluate(part.weight, leaves, at_once, {}).double()
    for k, there in enumerate(part.heads):
        if not there:
            matrix = matrix.unsqueeze(k)
    return matrix.expand(*sizes, *matrix.shape[-2:])


def _solve(equations: Sequence[_Equation]) -> dict[int, torch.Tensor]:
    """Solve the ``equations``. Groups of equations that share no unknown are solved separately."""
    solved: dict[int, torch.Tensor] = {}
    left = list(equations)
    while left:
        tied = [left.pop(0)]
        numbers = {*tied[0].matrices}
        while meeting := [e for e in left if e.matrices.keys() & numbers]:
            tied += meeting
            numbers = numbers.union(*(e.matrices for e in meeting))
            left = [e for e in left if not e.matrices.keys() & numbers]
        widths = {n: e.matrices[n].shape[1] for e in tied for n in sorted(e.matrices)}
        blocks = [
            torch.cat([e.matrices.get(n, e.target.new_zeros(e.target.shape[-1], w)) for n, w in widths.items()], 1)
            for e in tied
        ]
        inverse: torch.Tensor = torch.linalg.pinv(torch.cat(blocks)).mT
        rows = torch.cat([e.target for e in tied], -1) @ inverse
        solved |= zip(widths, rows.split([*widths.values()], -1), strict=True)
    return solved


def _relative(difference: torch.Tensor, of: torch.Tensor) -> float:
    return float(difference.norm() / of.norm().clamp_min(torch.finfo(torch.float64).tiny))
