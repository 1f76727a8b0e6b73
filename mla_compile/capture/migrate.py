"""An existing cache of K and V, converted to the latent rows that a program takes now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from mla_compile.capture.cache_change import CacheChange, CachedTensor
from mla_compile.errors import InputError
from mla_compile.passes.cache.packed import pack
from mla_compile.passes.cache.recipe import ColumnBlock, at_once, evaluate, expand


class Migrated(NamedTuple):
    """A converted cache: for each cache input, in order, the tuple of rows that now stands there; and its error."""

    inputs: tuple[tuple[torch.Tensor, ...], ...]
    error: float


def migrate(change: CacheChange, cached: Sequence[torch.Tensor], tolerance: float | None = None) -> Migrated:
    """The rows behind the K and V of an existing cache, recovered with the weights that expand them.

    Least squares in float64 over all tensors that are computed from the same rows. The error is the largest relative
    difference (2-norm) between a given tensor and the one recomputed from its rows. Raises :class:`InputError` where it
    exceeds ``tolerance`` (64 times the rounding error of the dtype by default): these weights did not make the tensor.
    """
    if len(cached) != len(change.inputs):
        names = ", ".join(t.name for t in change.inputs)
        raise InputError(f"got {len(cached)} tensors, expected one for each cache input: {names}")
    for tensor, given in zip(change.inputs, cached, strict=True):
        _check_shape(tensor, given)
    solved = [
        _solve([_equations(t, i, given) for t, given in zip(change.inputs, cached, strict=True)
                for i, row in enumerate(t.rows) if row == number])
        for number in range(len(change.dtypes))
    ]  # fmt: skip
    rows: dict[int, torch.Tensor] = {}
    error = 0.0
    for tensor, given in zip(change.inputs, cached, strict=True):
        recipe = tensor.recipe
        plain = [_in_precision(solved[r], change.dtypes[r], recipe.dtype) for r in tensor.rows]
        # Whether the weights made it is asked of the rows themselves, before float8 adds an error of its own.
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
    """Rows in the dtype that they are held in; those that are held as bytes, in that of K and V."""
    return rows.to(held if held.is_floating_point else computed)


def _check_shape(tensor: CachedTensor, given: torch.Tensor) -> None:
    kinds = tensor.recipe.kinds
    if given.dim() != len(kinds) or any(
        kind not in ("row", size) for kind, size in zip(kinds, given.shape, strict=True)
    ):
        expected = ", ".join("*" if kind == "row" else str(kind) for kind in kinds)
        raise InputError(f"the cache {tensor.name} has shape {list(given.shape)}, expected [{expected}]")


def _equations(tensor: CachedTensor, index: int, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``A`` [values of one token, width] and ``b`` [..., values] with ``A rows = b``, from the parts of one K or V."""
    recipe = tensor.recipe
    heads, outer = recipe.heads, recipe.outer
    sizes = [int(recipe.kinds[k]) for k in heads]
    matrices: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    start = 0
    for part in recipe.parts:
        matrix = _matrix(part, sizes, tensor.leaves)
        columns = matrix.shape[-2]
        if part.rows == index:
            b = given.double()
            if part.bias is not None:
                own = evaluate(part.bias, tensor.leaves, at_once, {}).double()
                whole = [own.shape[k] if k != recipe.columns else columns for k in range(own.dim())]
                b = b.narrow(recipe.columns, start, columns) - own.expand(whole)
            else:
                b = b.narrow(recipe.columns, start, columns)
            matrices.append(matrix.reshape(-1, part.width) * part.scale)
            targets.append(b.permute(*outer, *heads, recipe.columns).flatten(len(outer)))
        start += columns
    return torch.cat(matrices), torch.cat(targets, -1)


def _matrix(part: ColumnBlock, heads: Sequence[int], leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """The part's weight for every head, [heads..., columns, width]."""
    matrix: torch.Tensor
    if part.weight is None:
        matrix = torch.eye(part.width, dtype=torch.float64, device=leaves[0].device if leaves else None)
        return matrix.expand(*heads, part.width, part.width)
    matrix = evaluate(part.weight, leaves, at_once, {}).double()
    for k, there in enumerate(part.heads):
        if not there:
            matrix = matrix.unsqueeze(k)
    return matrix.expand(*heads, *matrix.shape[-2:])


def _solve(equations: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    matrix = torch.cat([a for a, _ in equations])
    inverse: torch.Tensor = torch.linalg.pinv(matrix).mT
    return torch.cat([b for _, b in equations], -1) @ inverse


def _relative(difference: torch.Tensor, of: torch.Tensor) -> float:
    return float(difference.norm() / of.norm().clamp_min(torch.finfo(torch.float64).tiny))
