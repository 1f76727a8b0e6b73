"""What the tensors of one K share: the rows that it is computed from, or K itself once somebody has written to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from mla_compile.errors import StaleWeightError, WeightError
from mla_compile.passes.cache.recipe import Recipe, at_once, expand
from mla_compile.runtime.folds import parts_of, version, versions


class Cell:
    """What one K is computed from; shared by all tensors that are, or show a part of, the same memory.

    ``full`` is K itself, once somebody has written to it or holds a view of it. From then on it is what counts.
    ``own``: it is a buffer of a module, into whose rows compiled graphs write.
    """

    def __init__(
        self,
        recipe: Recipe | None,
        rows: Sequence[torch.Tensor] = (),
        leaves: Sequence[torch.Tensor] = (),
        full: torch.Tensor | None = None,
        *,
        own: bool = False,
    ) -> None:
        self.recipe = recipe
        self.rows = tuple(rows)
        self.leaves = tuple(leaves)
        self.full = full
        self.own = own
        self.versions = [versions(leaf) for leaf in leaves]
        self._share()

    def _share(self) -> None:
        for row in self.rows if self.own else ():
            _sharing.setdefault(row, weakref.WeakSet()).add(self)

    def sharers(self) -> set[Cell]:
        """All buffers that are made of one of the same rows: who writes to these writes to all of them."""
        found = (_sharing.get(row, ()) for row in self.rows)
        return {cell for cells in found for cell in cells if any(a is b for a in cell.rows for b in self.rows)}

    def expand(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """K of the rows given, which may be some of the cell's."""
        self.check()
        assert self.recipe is not None
        # The recipe has the casts of the graph that made the rows, whatever is active where K is read.
        with torch.no_grad(), torch._C._DisableAutocast():
            made: torch.Tensor = expand(self.recipe, rows, self.leaves, at_once)
        return made.contiguous()

    def settle(self) -> torch.Tensor:
        """K itself, which replaces the rows from now on."""
        if self.full is None:
            with torch.inference_mode(mode=False):  # it may be written to outside, as the buffer that it stands for
                full = self.expand(self.rows)
            self.replace(full)
            return full
        return self.full

    def replace(self, full: torch.Tensor) -> None:
        """Other values, whatever the rows were."""
        self.full = full
        if not isinstance(full, FakeTensor):  # the guards of a trace are about what came in
            self.rows = self.leaves = ()

    def clear(self) -> None:
        """All zeros, which are those of any weights. Whoever shares the rows keeps them, until it is cleared too."""
        self.rows = tuple(once((row,), zeros) for row in self.rows)
        if any(version(row) for row in self.rows):  # those that another was cleared to, and has written to since
            self.rows = tuple(map(zeros, self.rows))
        self.versions = [versions(leaf) for leaf in self.leaves]
        self._share()

    def check(self) -> None:
        """Raises :class:`StaleWeightError` if a weight has changed since the rows were made, or is not there."""
        if any(versions(leaf) != was for leaf, was in zip(self.leaves, self.versions, strict=False)):
            empty = "empty it with zero_()" if self.own else "start with an empty cache"
            raise StaleWeightError(
                "a weight was changed after this cache was filled: its rows were made for the old weights; "
                f'{empty}, or compile with the option cache="expanded"'
            )
        if any(part.numel() and not part.untyped_storage().nbytes() for leaf in self.leaves for part in parts_of(leaf)):
            raise WeightError(
                "a weight that this cache is expanded with has no memory now (FSDP frees weights outside of the layer "
                'that they belong to): read the cache while they are there, or compile with cache="expanded"'
            )


_sharing: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Rows that are written to -> the cells of the buffers that are made of them."""


_made: dict[tuple[Any, ...], tuple[weakref.ref[torch.Tensor], tuple[weakref.ref[torch.Tensor], ...]]] = {}


def once(sources: tuple[torch.Tensor, ...], make: Callable[..., torch.Tensor], *how: int) -> torch.Tensor:
    """``make(*sources, *how)``, or its earlier result for the same tensors, so that what K and V share stays shared."""
    key = (make, *map(id, sources), *(version(source) for source in sources), *how)
    known = _made.get(key)
    if known is not None and all(ref() is source for ref, source in zip(known[1], sources, strict=True)):
        before = known[0]()
        if before is not None:
            return before
    if len(_made) > 256:
        for old in [k for k, (result, _) in list(_made.items()) if result() is None]:
            _made.pop(old, None)
    made = make(*sources, *how)
    _made[key] = weakref.ref(made), tuple(map(weakref.ref, sources))
    return made


def zeros(rows: torch.Tensor) -> torch.Tensor:
    """New rows of zeros."""
    with torch.inference_mode(mode=False):  # where writes are counted, and from which it may be taken
        return torch.zeros_like(rows)
