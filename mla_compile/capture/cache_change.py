"""A program whose cache inputs and outputs became latent rows: its new signature, and caches that exist already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mla_compile.core.program import Program
from mla_compile.errors import InputError
from mla_compile.passes.cache.recipe import ColumnBlock, Recipe, at_once, evaluate, expand

aten = torch.ops.aten


@dataclass(frozen=True)
class CachedTensor:
    """One K or V of the old signature.

    Attributes:
        name: of the input, or of the input that this output grows; ``output N`` where there is none.
        recipe: how it is made from its rows.
        leaves: the weights that takes.
        rows: numbers of the program's row tensors that make it; K and V of one attention share some.
        holds: positions in ``rows`` of those that stand at its place in the new signature; others stand elsewhere.
    """

    name: str
    recipe: Recipe
    leaves: tuple[torch.Tensor, ...]
    rows: tuple[int, ...]
    holds: tuple[int, ...]

    @property
    def values(self) -> int:
        """Values per token in the old cache."""
        total = 1
        for kind in self.recipe.kinds:
            total *= 1 if kind == "row" else kind
        return total

    @property
    def kept(self) -> int:
        """Values per token in the new cache, rows that stand elsewhere left out."""
        return sum(self.recipe.widths[i] for i in self.holds)


@dataclass(frozen=True)
class CacheChange:
    """The inputs and outputs that became rows: each is now a tuple of tensors ``[batch..., tokens, width]``.

    ``dtypes`` are those of the row tensors, by number; ``written`` the names of the inputs that the program writes to,
    buffers of full length. Rows of such a buffer are zeros where nothing was written yet.
    """

    inputs: tuple[CachedTensor, ...]
    outputs: tuple[CachedTensor, ...]
    dtypes: tuple[torch.dtype, ...]
    written: tuple[str, ...] = ()

    @property
    def results(self) -> tuple[CachedTensor, ...]:
        """What the program leaves for another one: its outputs, and the buffers that it writes to."""
        return (*self.outputs, *(t for t in self.inputs if t.name in self.written))

    def __str__(self) -> str:
        return "; ".join(
            f"{what} {t.name}: {t.values} values per token are now {t.kept} "
            f"({' + '.join(str(t.recipe.widths[i]) for i in t.holds) or 'its rows are in another one'})"
            + (", written in place" if t.name in self.written else "")
            for what, tensors in (("input", self.inputs), ("output", self.outputs))
            for t in tensors
        )

    def check_filled_by(self, other: CacheChange) -> None:
        """Raises :class:`InputError` unless what ``other`` (a prefill program) returns or writes fits these inputs."""
        if len(self.inputs) != len(other.results):
            raise InputError(f"{len(self.inputs)} inputs hold a cache, the other program returns {len(other.results)}")
        for mine, theirs in zip(self.inputs, other.results, strict=True):
            same = len(mine.leaves) == len(theirs.leaves) and all(map(torch.equal, mine.leaves, theirs.leaves))
            if mine.recipe != theirs.recipe or mine.holds != theirs.holds or not same:
                raise InputError(
                    f"the cache input {mine.name} is expanded in another way, or with other weights, than "
                    f"{theirs.name} of the other program: give both programs the same weights and the same code"
                )


class Migrated(NamedTuple):
    """A converted cache: for each cache input, in order, the tuple of rows that now stands there; and its error."""

    inputs: tuple[tuple[torch.Tensor, ...], ...]
    error: float


def of_program(program: Program, values: Mapping[str, torch.Tensor | None]) -> CacheChange:
    """The change that ``program.cache`` describes; ``values`` are its weights."""
    cache = program.cache
    assert cache is not None
    numbers = {name: index for index, name in enumerate(cache.rows)}
    inputs: dict[str, CachedTensor] = {}
    taken: set[int] = set()

    def tensor(key: str | int, name: str, rows: tuple[int, ...], holds: tuple[int, ...]) -> CachedTensor:
        recipe, leaves = cache.recipes[key]
        found = [values[leaf] for leaf in leaves]
        return CachedTensor(name, recipe, tuple(f for f in found if f is not None), rows, holds)

    for name, placeholders in cache.inputs.items():
        rows = tuple(numbers[r] for r in placeholders)
        holds = tuple(i for i, r in enumerate(rows) if r not in taken)
        taken.update(rows)
        inputs[name] = tensor(name, name, rows, holds)
    outputs: list[CachedTensor] = []
    given: set[int] = set()
    for index in sorted(cache.outputs):
        rows = cache.outputs[index]
        past = inputs.get(cache.grows.get(index, ""))
        holds = tuple(i for i, r in enumerate(rows) if r not in given) if past is None else past.holds
        given.update(rows)
        name = past.name if past is not None else f"output {index - len(program.mutations)}"
        outputs.append(tensor(index, name, rows, holds))
    dtypes = tuple(program.node(name).meta["val"].dtype for name in cache.rows)
    return CacheChange(tuple(inputs.values()), tuple(outputs), dtypes, tuple(cache.written))


def migrate(change: CacheChange, cached: Sequence[torch.Tensor], tolerance: float | None = None) -> Migrated:
    """The rows behind K and V that a cache holds already, recovered by the weights that expand them.

    Least squares in float64 over everything that is made from the same rows. The error is the largest relative
    difference (2-norm) between a given tensor and what its rows make again. Raises :class:`InputError` where it is
    above ``tolerance`` (64 roundings of the tensor's dtype by default): then these weights did not make the tensor.
    """
    if len(cached) != len(change.inputs):
        names = ", ".join(t.name for t in change.inputs)
        raise InputError(f"got {len(cached)} tensors, expected one for each cache input: {names}")
    for tensor, given in zip(change.inputs, cached, strict=True):
        _check_shape(tensor, given)
    rows = [
        _solve([_equations(t, i, given) for t, given in zip(change.inputs, cached, strict=True)
                for i, row in enumerate(t.rows) if row == number]).to(dtype)
        for number, dtype in enumerate(change.dtypes)
    ]  # fmt: skip
    error = 0.0
    for tensor, given in zip(change.inputs, cached, strict=True):
        again = expand(tensor.recipe, [rows[r] for r in tensor.rows], tensor.leaves, at_once)
        one = _relative(again.double() - given.double(), given.double())
        allowed = tolerance if tolerance is not None else 64 * torch.finfo(given.dtype).eps
        if not one <= allowed:
            raise InputError(
                f"the cache {tensor.name} is no image of rows by the weights of this program: its best rows miss it by "
                f"{one:.1e}, allowed {allowed:.1e}; fill the cache with this program, or give a larger tolerance"
            )
        error = max(error, one)
    return Migrated(tuple(tuple(rows[t.rows[i]] for i in t.holds) for t in change.inputs), error)


def _check_shape(tensor: CachedTensor, given: torch.Tensor) -> None:
    kinds = tensor.recipe.kinds
    if given.dim() != len(kinds) or any(
        kind not in ("row", size) for kind, size in zip(kinds, given.shape, strict=True)
    ):
        expected = ", ".join("*" if kind == "row" else str(kind) for kind in kinds)
        raise InputError(f"the cache {tensor.name} has shape {list(given.shape)}, expected [{expected}]")


def _equations(tensor: CachedTensor, index: int, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``A`` [unknowns of one token, width] and ``b`` [..., unknowns] with ``A rows = b``, from the parts of one K."""
    recipe = tensor.recipe
    heads = [k for k, kind in enumerate(recipe.kinds) if kind != "row" and k != recipe.columns]
    outer = [k for k, kind in enumerate(recipe.kinds) if kind == "row"]
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
