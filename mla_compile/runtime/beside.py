"""Rows that are kept in addition to unchanged buffers of K and V, for code that ``torch.compile`` compiled.

The backend of ``torch.compile`` owns no module, so it cannot replace a buffer by rows. Instead, it keeps rows in
addition to the buffer. A compiled call writes K to the buffer, like the model, and writes the rows of K to a tensor
that this module keeps. The next call attends to these rows.

The rows are valid only if nothing but compiled calls has written to the buffer since the buffer was empty. Other writes
change the buffer's version counter. Writes through ``.data``, NumPy or a user's kernel do not change the counter.
Comparing a random sample of the buffer's values detects such writes.
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
from mla_compile.runtime.folds import same_bits, version, weight_reader
from mla_compile.runtime.latent import LatentTensor
from mla_compile.runtime.own_buffers import is_empty, may_be_cache

_OTHERS_WROTE = (
    "the original graph runs in this call, because something besides compiled calls wrote to buffers of K and V, or "
    "weights have changed since; empty the buffers with zero_(), or use mla_compile.optimize(model), which keeps rows "
    "in their place"
)


@dataclass(frozen=True)
class _Beside:
    """The rows of a buffer, and the state of the buffer after the last call that wrote these rows."""

    rows: LatentTensor
    version: int
    memory: tuple[object, ...]
    places: torch.Tensor
    sample: torch.Tensor

    @classmethod
    def of(cls, rows: LatentTensor, buffer: torch.Tensor, before: _Beside | None) -> _Beside:
        """Record the present state of ``buffer``; ``before`` is the state before this call, or None if unknown."""
        same = before is not None and before.memory == _memory_of(buffer)
        places = before.places if before is not None and same else _places(buffer)
        return cls(rows, version(buffer), _memory_of(buffer), places, _sample(buffer, places))

    def describes(self, buffer: torch.Tensor) -> bool:
        """Whether ``buffer`` is unchanged since the call that wrote the rows."""
        counted = (self.version, self.memory) == (version(buffer), _memory_of(buffer))
        return counted and same_bits(_sample(buffer, self.places), self.sample)


def _memory_of(buffer: torch.Tensor) -> tuple[object, ...]:
    """Return a buffer's address, device, shape and strides."""
    return buffer.data_ptr(), buffer.device, buffer.shape, buffer.stride()


_SAMPLES = 1024
"""The approximate number of buffer values compared in each call.

A smaller buffer is compared completely. For a large batch, ``_SAMPLES_OF_ONE`` raises the number.
"""

_SAMPLES_OF_ONE = 64
"""The minimum number of compared values per batch entry (index on the first axis)."""


def _places(buffer: torch.Tensor) -> torch.Tensor:
    """Draw a random sample of a buffer's values, spread evenly over every axis, and return their offsets in memory.

    Source: Latin hypercube sampling (McKay, Beckman and Conover 1979), done separately for each batch entry.
    """
    if buffer.numel() <= _SAMPLES:
        points = torch.cartesian_prod(*map(torch.arange, buffer.shape)).unbind(1)
    else:
        first, *others = buffer.shape
        count = max(_SAMPLES // first, _SAMPLES_OF_ONE)
        chance = torch.Generator()
        chance.seed()  # does not advance the user's generator
        drawn = torch.rand(first, len(others), count, generator=chance, dtype=torch.float64)
        strata = torch.rand(drawn.shape, generator=chance).argsort(-1)
        inner = ((strata + drawn) / count * torch.tensor(others).unsqueeze(-1)).long()
        points = (torch.arange(first).unsqueeze(-1), *inner.unbind(1))
    places = torch.zeros((), dtype=torch.long)
    for point, stride in zip(points, buffer.stride(), strict=True):
        places = places + point * stride
    return places.flatten().to(buffer.device)


def _sample(buffer: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    span = 1 + sum((size - 1) * stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
    return buffer.detach().as_strided((span,), (1,)).index_select(0, places)


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Maps each buffer of K or V to its rows."""


def rows_beside(buffer: torch.Tensor) -> LatentTensor | None:
    """Return the rows from which the present values of ``buffer`` are made; None if they are unknown."""
    known = _known.get(buffer)
    if known is None or not known.describes(buffer):
        return None
    try:
        known.rows.rows()
    except (StaleWeightError, WeightError):
        return None
    found: LatentTensor = known.rows
    return found


def may_have_rows(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the buffers whose rows are known or whose values are all zero.

    Buffers that share memory or have no version counter are left out.
    """
    owners = [_owner(b) for b in buffers.values()]
    return {name: b for name, b in buffers.items() if owners.count(_owner(b)) == 1 and _may_have_rows(b)}


def _may_have_rows(buffer: torch.Tensor) -> bool:
    if not may_be_cache(buffer) or type(buffer) is not torch.Tensor or buffer.is_inference():
        return False
    return rows_beside(buffer) is not None or is_empty(buffer)


def _owner(tensor: torch.Tensor) -> object:
    """Return a key of a tensor's memory. A subclass need not show its memory, so its key is the tensor's identity."""
    return tensor.untyped_storage()._cdata if type(tensor) is torch.Tensor else id(tensor)


@dataclass(frozen=True)
class _Twin:
    """An input that takes rows: its recipe, readers of its weights, the names of its rows, and its buffer's index."""

    recipe: Recipe
    leaves: tuple[Callable[[Inputs], torch.Tensor], ...]
    rows: tuple[str, ...]
    buffer: int

    def reads(self, known: LatentTensor, inputs: Inputs) -> bool:
        """Whether ``known`` has this input's recipe and was made with this call's weights."""
        return known.recipe == self.recipe and all(
            leaf is read(inputs) for leaf, read in zip(known.leaves, self.leaves, strict=True)
        )


class RowsBeside:
    """A callable that takes a graph's inputs and keeps rows for some of these inputs, which are buffers.

    Args:
        call: takes the graph's inputs, followed by the rows of ``twins``.
        otherwise: the original graph. It runs, after a warning, if the rows of a buffer are unknown.
        program: the program of ``call``, whose cache holds rows.
        names: the names of the inputs that ``call`` takes.
        twins: maps the name of each input that takes rows to the name of the rows' buffer.
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

    def __call__(self, *inputs: Any) -> object:
        """Run the graph."""
        rows = self._rows(inputs)
        if rows is None:
            warn(_OTHERS_WROTE)
            return self._otherwise(*inputs)
        # During the call, the rows are removed from ``_known``. If the call fails midway, no later call uses them.
        states = [_known.pop(inputs[twin.buffer], None) for twin in self._twins]
        before = [_versions(own) for own in rows]
        done = self._call(*inputs, *rows)
        for twin, own, was, state in zip(self._twins, rows, before, states, strict=True):
            if all(now > old for now, old in zip(_versions(own), was, strict=True)):  # if not, the original graph ran
                buffer = inputs[twin.buffer]
                _known[buffer] = _Beside.of(own, buffer, state)
        return done

    def _rows(self, inputs: Inputs) -> list[LatentTensor] | None:
        """Return the rows of all buffers. A buffer of zeros gets rows of zeros.

        Return None if the graph writes to one memory through two inputs. Also return None if the rows of a nonzero
        buffer are unknown, or do not fit this call's recipe and weights.
        """
        owners = [_owner(inputs[index]) for index in self._written]
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
        """Return rows of zeros for a buffer.

        ``fresh`` maps names to the zero rows that this call has already made. New rows are added to ``fresh``.
        """
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
