"""The cell that the tensors of one K share.

It holds the rows from which K is computed, or K itself after K was written.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from mla_compile.errors import StaleWeightError, WeightError
from mla_compile.passes.cache.expansion import expand
from mla_compile.passes.cache.packed import at_once
from mla_compile.passes.cache.recipe import Recipe
from mla_compile.runtime.folds import parts_of, version, versions


class Cell:
    """The contents of one K, shared by all tensors that show K or a slice of it.

    ``full`` is K itself. K replaces the rows once a caller writes to K or holds a view of K. ``own`` means that the
    cell belongs to a module's buffer, and that compiled graphs write to the rows.
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
        """Return all cells of buffers that share rows with this cell. A write to the rows changes all these cells."""
        found = (_sharing.get(row, ()) for row in self.rows)
        return {cell for cells in found for cell in cells if any(a is b for a in cell.rows for b in self.rows)}

    def expand(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute K from ``rows``, which are all rows of the cell or a range."""
        self.check()
        assert self.recipe is not None
        # The recipe contains the casts of the graph that made the rows. The autocast mode of the reading code must not
        # apply.
        with torch.no_grad(), torch._C._DisableAutocast():
            made: torch.Tensor = expand(self.recipe, rows, self.leaves, at_once)
        return made.contiguous()

    def settle(self) -> torch.Tensor:
        """Replace the rows by K, and return K."""
        if self.full is None:
            with torch.inference_mode(mode=False):  # the caller may write to K outside of inference mode
                full = self.expand(self.rows)
            self.replace(full)
            return full
        return self.full

    def replace(self, full: torch.Tensor) -> None:
        """Replace the contents with a dense tensor and drop the rows."""
        self.full = full
        if not isinstance(full, FakeTensor):  # a trace keeps the rows: its guards refer to inputs
            self.rows = self.leaves = ()

    def clear(self) -> None:
        """Set the contents to zeros, which are valid for any weights.

        Other cells that share the rows keep the old rows until these cells are cleared, too.
        """
        self.rows = tuple(once((row,), zeros) for row in self.rows)
        if any(version(row) for row in self.rows):  # another cell shares these zeros and has written to them
            self.rows = tuple(map(zeros, self.rows))
        self.versions = [versions(leaf) for leaf in self.leaves]
        self._share()

    def check(self) -> None:
        """Check that the weights have memory, and are unchanged since the rows were made.

        Raises :class:`StaleWeightError` if a weight has changed, and :class:`WeightError` if a weight has no memory.
        """
        if any(versions(leaf) != was for leaf, was in zip(self.leaves, self.versions, strict=False)):
            empty = "empty it with zero_()" if self.own else "start with an empty cache"
            raise StaleWeightError(
                "a weight was changed after this cache was filled: its rows were made for the old weights; "
                f'{empty}, or compile with the option cache="expanded"'
            )
        if any(part.numel() and not part.untyped_storage().nbytes() for leaf in self.leaves for part in parts_of(leaf)):
            raise WeightError(
                "a weight that this cache is expanded with has no memory now (FSDP frees weights outside of the layer "
                'that they belong to): read the cache while the weight is there, or compile with cache="expanded"'
            )


_sharing: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Maps rows of buffers to the cells of the buffers that use them."""


_made: dict[tuple[object, ...], tuple[weakref.ref[torch.Tensor], tuple[weakref.ref[torch.Tensor], ...]]] = {}


def once(sources: tuple[torch.Tensor, ...], make: Callable[..., torch.Tensor], *how: int) -> torch.Tensor:
    """Return ``make(*sources, *how)``. Equal calls return the same tensor, so that K and V still share rows."""
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
    """Return new rows of zeros."""
    with torch.inference_mode(mode=False):  # inference tensors have no version counter
        return torch.zeros_like(rows)
