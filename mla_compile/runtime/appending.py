"""Spare capacity after the rows of a growing cache: a call can then write new rows without copying the old ones.

A program that appends (:mod:`mla_compile.passes.cache.append`) takes ``T + S`` rows and writes the last ``S``. The new
rows follow the caller's ``T`` rows in memory if three conditions hold: this module allocated that memory, the memory
has enough capacity, and nobody has appended to the ``T`` rows before. Otherwise the old rows are copied once into new
memory for up to twice as many rows. The returned tensor of ``T + S`` rows differs from the result of ``cat`` in two
ways:

* in a batch, rows are stored token by token, so the tensor is not contiguous;
* older tensors share the memory: *writing* into an older tensor changes the new tensor, too.

The length of the returned tensor is marked as dynamic. Otherwise Dynamo would compile the first step for one length,
and the second step again for any length.

If a caller appends twice to the same rows (two continuations of one prompt), each continuation gets its own memory.
If rows were sliced, reordered or copied between two calls, the next call copies the rows once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from mla_compile.passes.cache.append import token_major


@dataclass
class _RowMemory:
    """Memory for rows along one axis. The first ``used`` rows are in use."""

    rows: torch.Tensor
    used: int


_held: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Maps each tensor that a caller received to its memory."""
_lock = threading.Lock()


def length_marker() -> Callable[[torch.Tensor, int], None]:
    """Return a function that marks a size of a tensor as dynamic for Dynamo, or does nothing under ``dynamic=False``.

    Call ``length_marker`` while Dynamo compiles, because ``dynamic=False`` is a setting of the compilation.
    """
    if not torch._dynamo.config.automatic_dynamic_shapes:
        return lambda tensor, axis: None
    mark: Callable[[torch.Tensor, int], None] = torch._dynamo.maybe_mark_dynamic
    return mark


def room_for(rows: torch.Tensor, axis: int, count: int) -> torch.Tensor:
    """Return ``rows`` followed by ``count`` uninitialized rows along ``axis``. Old rows are copied only if needed."""
    T = rows.shape[axis]
    with _lock:
        memory = _held.get(rows)
        if memory is None or not _continues(rows, memory, axis) or T + count > memory.rows.shape[axis]:
            memory = _RowMemory(larger(rows, axis, T + count), T)
        memory.used = T + count
        shown = first_rows(memory.rows, axis, T + count)
        _held[shown] = memory
    return shown


def _continues(rows: torch.Tensor, memory: _RowMemory, axis: int) -> bool:
    """Whether ``rows`` still shows exactly the used rows of ``memory``.

    The caller may have given ``rows`` other memory.
    """
    return (
        memory.used == rows.shape[axis]
        and rows.data_ptr() == memory.rows.data_ptr()
        and rows.dtype == memory.rows.dtype
        and rows.stride() == token_major(rows.shape, axis)
        and _others(rows, axis) == _others(memory.rows, axis)
    )


def _others(rows: torch.Tensor, axis: int) -> tuple[int, ...]:
    return (*rows.shape[:axis], *rows.shape[axis + 1 :])


def larger(rows: torch.Tensor, axis: int, least: int) -> torch.Tensor:
    """Allocate memory for at least ``least`` rows, and copy ``rows`` to its beginning."""
    # The capacity is a power of two: at most twice ``least``, and at least twice the previous capacity.
    try:
        made = _memory(rows, axis, 1 << least.bit_length())
    except torch.OutOfMemoryError:  # exactly ``least`` rows may still fit
        made = _memory(rows, axis, least)
    with torch.no_grad():
        made.narrow(axis, 0, rows.shape[axis]).copy_(rows)
    return made


def _memory(like: torch.Tensor, axis: int, count: int) -> torch.Tensor:
    shape = (*like.shape[:axis], count, *like.shape[axis + 1 :])
    # Make a normal tensor, because a cache that was made in inference mode may be used outside of it.
    with torch.inference_mode(mode=False):
        return torch.empty_strided(shape, token_major(shape, axis), dtype=like.dtype, device=like.device)


def first_rows(memory: torch.Tensor, axis: int, count: int) -> torch.Tensor:
    """Return the first ``count`` rows of the memory that :func:`larger` returned."""
    shape = (*memory.shape[:axis], count, *memory.shape[axis + 1 :])
    # Autograd must not see a view: a compiler would take the whole memory as the view's base and guard on the base's
    # size.
    with torch.inference_mode(mode=False):
        empty = torch.empty(0, dtype=memory.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), 0, shape, token_major(shape, axis))
