"""Spare capacity behind the rows of a growing cache, so that a call writes new rows instead of copying the old ones.

A program that appends (:mod:`mla_compile.passes.cache.append`) takes ``T + S`` rows, of which it writes the last ``S``.
All of these lie in the memory of the caller's ``T`` rows if that memory is ours, has room, and nobody has appended to
those rows before. Otherwise the old rows are copied once into new memory for up to twice as many. The caller gets back
a tensor of ``T + S`` rows like the one that ``cat`` would have made, with two exceptions:

* in a batch its rows are stored token by token, so it is not contiguous;
* it shares memory with the tensors it grew from: *writing* into an older one changes it, too.

The length of this tensor is marked as dynamic. Without that, Dynamo would compile the first step for this length only,
and the second step anew for any length.

Appending twice to the same rows (two continuations of one prompt) gives each continuation its own memory. Rows that are
sliced, reordered or copied between two calls are treated like any other rows: they are copied once.
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
    """Memory for rows along one axis, of which the first ``used`` are in use."""

    rows: torch.Tensor
    used: int


_held: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Tensor that was returned to a caller -> its memory."""
_lock = threading.Lock()


def length_marker() -> Callable[[torch.Tensor, int], None]:
    """A function that marks a size of a tensor as dynamic for Dynamo; under ``dynamic=False`` it does nothing.

    Call ``length_marker`` while Dynamo compiles, because ``dynamic=False`` is a setting of the compilation.
    """
    if not torch._dynamo.config.automatic_dynamic_shapes:
        return lambda tensor, axis: None
    mark: Callable[[torch.Tensor, int], None] = torch._dynamo.maybe_mark_dynamic
    return mark


def room_for(rows: torch.Tensor, axis: int, count: int) -> torch.Tensor:
    """``rows`` followed by ``count`` rows of undefined values along ``axis``, in the same memory if there is room."""
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
    """Whether ``rows`` are still all used rows of ``memory``: a caller may have given the tensor other memory since."""
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
    """New memory for at least ``least`` rows that begins with ``rows``."""
    # Powers of two: the capacity doubles whenever it is full, and is at most twice what is needed.
    try:
        made = _memory(rows, axis, 1 << least.bit_length())
    except torch.OutOfMemoryError:  # exactly ``least`` rows may still fit
        made = _memory(rows, axis, least)
    with torch.no_grad():
        made.narrow(axis, 0, rows.shape[axis]).copy_(rows)
    return made


def _memory(like: torch.Tensor, axis: int, count: int) -> torch.Tensor:
    shape = (*like.shape[:axis], count, *like.shape[axis + 1 :])
    # A normal tensor: the cache may be made in inference mode and used outside of it.
    with torch.inference_mode(mode=False):
        return torch.empty_strided(shape, token_major(shape, axis), dtype=like.dtype, device=like.device)


def first_rows(memory: torch.Tensor, axis: int, count: int) -> torch.Tensor:
    """The first ``count`` rows of the memory that :func:`larger` returned."""
    shape = (*memory.shape[:axis], count, *memory.shape[axis + 1 :])
    # Autograd must not see a view: a compiler would take the whole memory as the view's base and guard on its size.
    with torch.inference_mode(mode=False):
        empty = torch.empty(0, dtype=memory.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), 0, shape, token_major(shape, axis))
