"""The change of a program's cache: the inputs and outputs that were K and V and are now latent rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mla_compile.core.program import Program
from mla_compile.errors import InputError
from mla_compile.passes.cache.recipe import Recipe


@dataclass(frozen=True)
class CachedTensor:
    """One K or V of the old signature.

    Attributes:
        name: the name of the input, or of the input that an output extends; ``output N`` for other outputs.
        recipe: how this K or V is computed from its rows.
        leaves: the weights that the recipe uses.
        rows: the indices of the program's row tensors from which this K or V is computed. K and V of one attention
            share some row tensors.
        holds: positions in ``rows`` of the tensors that replace this K or V in the new signature. The other tensors
            replace another K or V.
    """

    name: str
    recipe: Recipe
    leaves: tuple[torch.Tensor, ...]
    rows: tuple[int, ...]
    holds: tuple[int, ...]

    @property
    def values(self) -> int:
        """Values per token in the old cache."""
        return self.recipe.values

    @property
    def kept(self) -> int:
        """Values per token in the new cache, not counting rows that another K or V holds."""
        return sum(self.recipe.row_values(i) for i in self.holds)


@dataclass(frozen=True)
class CacheChange:
    """The inputs and outputs that became rows: each is now a tuple of tensors ``[batch..., tokens, width]``.

    ``dtypes`` has one dtype for each row tensor. ``written`` names the inputs that the program writes to. These inputs
    are buffers of full length, in which unwritten rows are zero.
    """

    inputs: tuple[CachedTensor, ...]
    outputs: tuple[CachedTensor, ...]
    dtypes: tuple[torch.dtype, ...]
    written: tuple[str, ...] = ()

    @property
    def results(self) -> tuple[CachedTensor, ...]:
        """The tensors that the next program reads: outputs of this program, and buffers that this program writes."""
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
        """Raise :class:`InputError` unless these inputs fit the caches that ``other`` (a prefill) returns or writes."""
        if len(self.inputs) != len(other.results):
            raise InputError(f"{len(self.inputs)} inputs hold a cache, the other program returns {len(other.results)}")
        for mine, theirs in zip(self.inputs, other.results, strict=True):
            same = len(mine.leaves) == len(theirs.leaves) and all(map(torch.equal, mine.leaves, theirs.leaves))
            if mine.recipe != theirs.recipe or mine.holds != theirs.holds or not same:
                raise InputError(
                    f"the cache input {mine.name} is expanded in another way, or with other weights, than "
                    f"{theirs.name} of the other program: give both programs the same weights and the same code"
                )


def of_program(program: Program, values: Mapping[str, torch.Tensor | None]) -> CacheChange:
    """Return the change that ``program.cache`` describes. ``values`` has the program's weights by name."""
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
