"""Rows that are kept beside buffers of K and V which stay as they are, for calls that ``torch.compile`` compiled.

The backend of ``torch.compile`` owns no module, so it cannot put rows in the place of a buffer. It may keep them beside
it: a compiled call writes K to the buffer, as the model does, and the rows from which K was made to a tensor that
belongs to the buffer here. The next call attends to these rows. They are used only as long as they are certain to make
what the buffer holds: nothing but such calls has written to it since it was empty, which its version counter tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from mla_compile.core.program import Call, Inputs, Program
from mla_compile.errors import StaleWeightError, WeightError, warn
from mla_compile.passes.cache.recipe import Recipe
from mla_compile.runtime.folds import version, weight_reader
from mla_compile.runtime.latent import LatentTensor
from mla_compile.runtime.own_buffers import is_empty, may_be_cache

_OTHERS_WROTE = (
    "the original graph runs in this call, because something besides compiled calls wrote to buffers of K and V, or "
    "weights have changed since; empty the buffers with zero_(), or use mla_compile.optimize(model), which keeps rows "
    "in their place"
)


@dataclass(frozen=True)
class _Beside:
    """The rows beside a buffer, and the state in which their last call left the buffer."""

    rows: LatentTensor
    version: int
    address: int


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Buffer of K or V -> the rows beside it."""


def rows_beside(buffer: torch.Tensor) -> LatentTensor | None:
    """The rows that make what ``buffer`` holds now; None if there are none."""
    known = _known.get(buffer)
    if known is None or (known.version, known.address) != (version(buffer), buffer.data_ptr()):
        return None
    try:
        known.rows.rows()
    except (StaleWeightError, WeightError):
        return None
    found: LatentTensor = known.rows
    return found


def may_have_rows(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of the tensors that a graph writes to beside which rows can be kept: their rows are known, or all are zero.

    Tensors that share memory are left out, and those without a version counter.
    """
    owners = [_memory(b) for b in buffers.values()]
    return {name: b for name, b in buffers.items() if owners.count(_memory(b)) == 1 and _may_have_rows(b)}


def _may_have_rows(buffer: torch.Tensor) -> bool:
    if not may_be_cache(buffer) or type(buffer) is not torch.Tensor or buffer.is_inference():
        return False
    return rows_beside(buffer) is not None or is_empty(buffer)


def _memory(tensor: torch.Tensor) -> object:
    """What two tensors have in common that share memory; tensors of other classes show nothing of theirs."""
    return tensor.untyped_storage()._cdata if type(tensor) is torch.Tensor else id(tensor)


@dataclass(frozen=True)
class _Twin:
    """An input that is rows: how they expand, with which weights, their names, and the position of the buffer."""

    recipe: Recipe
    leaves: tuple[Callable[[Inputs], torch.Tensor], ...]
    rows: tuple[str, ...]
    buffer: int

    def reads(self, known: LatentTensor, inputs: Inputs) -> bool:
        """Whether these rows expand like this, with the weights of this call."""
        return known.recipe == self.recipe and all(
            leaf is read(inputs) for leaf, read in zip(known.leaves, self.leaves, strict=True)
        )


class RowsBeside:
    """A callable of a graph's inputs that keeps rows beside buffers among them.

    Args:
        call: takes the rows of ``twins`` behind the graph's inputs.
        otherwise: the original graph. It runs, after a warning, if rows do not make what a buffer holds.
        program: the program of ``call``, whose cache holds rows.
        names: the inputs that ``call`` takes.
        twins: the name of an input that is rows -> the buffer beside which they are kept.
    """

    def __init__(
        self, call: Call, otherwise: Call, program: Program, names: Sequence[str], twins: Mapping[str, str]
    ) -> None:
        self._call, self._otherwise = call, otherwise
        at = {name: index for index, name in enumerate(names)}
        cache = program.cache
        self._twins = [
            _Twin(cache.recipes[twin][0], tuple(weight_reader(program, at, leaf) for leaf in cache.recipes[twin][1]),
                  cache.inputs[twin], at[buffer])
            for twin, buffer in twins.items()
        ]  # fmt: skip
        self._dtypes = {row: program.node(row).meta["val"].dtype for row in cache.rows}
        self._written = [at[name] for name in program.mutations if name in at]

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph."""
        rows = self._rows(inputs)
        if rows is None:
            warn(_OTHERS_WROTE)
            return self._otherwise(*inputs)
        for twin in self._twins:  # a call that fails midway leaves nothing that could be taken for rows
            _known.pop(inputs[twin.buffer], None)
        before = [_versions(own) for own in rows]
        done = self._call(*inputs, *rows)
        for twin, own, was in zip(self._twins, rows, before, strict=True):
            if all(now > old for now, old in zip(_versions(own), was, strict=True)):  # else it ran the original graph
                buffer = inputs[twin.buffer]
                _known[buffer] = _Beside(own, version(buffer), buffer.data_ptr())
        return done

    def _rows(self, inputs: Inputs) -> list[LatentTensor] | None:
        """The rows of all buffers, zeros for those that hold zeros.

        None if a buffer holds anything else, or if the graph writes to its memory through another input, too.
        """
        owners = [_memory(inputs[index]) for index in self._written]
        if len(set(owners)) < len(owners):
            return None
        found: list[LatentTensor] = []
        fresh: dict[str, torch.Tensor] = {}
        for twin in self._twins:
            buffer = inputs[twin.buffer]
            known = rows_beside(buffer)
            if known is None or not twin.reads(known, inputs):
                if not _may_have_rows(buffer) or not is_empty(buffer):
                    return None
                known = self._empty(twin, inputs, fresh)
            found.append(known)
        return found

    def _empty(self, twin: _Twin, inputs: Inputs, fresh: dict[str, torch.Tensor]) -> LatentTensor:
        """Rows of zeros; ``fresh`` has those that other buffers of this call use already."""
        buffer = inputs[twin.buffer]
        with torch.inference_mode(mode=False), torch.no_grad():
            for index, name in enumerate(twin.rows):
                if name not in fresh:
                    shape = twin.recipe.row_shape(buffer.shape, twin.recipe.held_width(index))
                    fresh[name] = torch.zeros(shape, dtype=self._dtypes[name], device=buffer.device)
            leaves = [read(inputs) for read in twin.leaves]
            return LatentTensor.of(twin.recipe, [fresh[name] for name in twin.rows], leaves, own=True)


def _versions(rows: LatentTensor) -> list[int]:
    return [version(row) for row in rows.shown_rows()]
