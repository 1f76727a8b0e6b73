"""Room behind the rows of a cache that grows, so that a call writes its new rows in place of copying the old ones.

A program that appends (:mod:`mla_compile.passes.cache.append`) is given ``T + S`` rows, of which it writes the last
``S``. They are the memory of the ``T`` rows that the caller holds where that memory is ours, has room, and nobody has
appended to those rows before; else new memory for twice as many, into which the old rows are copied once. What the
caller gets back is a tensor of ``T + S`` rows like the one that ``cat`` would have made, except that

* in a batch its rows lie token by token, so it is not contiguous;
* it shares memory with the tensors it grew from: who *writes* into an older one changes it too.

The length of what is handed out is marked as one that changes: without that, Dynamo would compile the first step for
this length alone, and the second step anew for any length.

Appending twice to the same rows (two continuations of one prompt) gives each its own memory, and rows that are sliced,
reordered or copied on the way are rows like any others: they are copied once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from mla_compile.passes.cache.append import token_major


@dataclass
class _Memory:
    """Memory for rows along one axis, ``used`` of which are somebody's."""

    rows: torch.Tensor
    used: int


_held: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Tensors that were handed out -> the memory that they show."""
_lock = threading.Lock()


def length_marker() -> Callable[[torch.Tensor, int], None]:
    """What tells Dynamo that a tensor's size along an axis will change; nothing where it compiles each size by itself.

    To be asked for while Dynamo compiles: it is a setting of the compilation (``dynamic=False``).
    """
    if not torch._dynamo.config.automatic_dynamic_shapes:
        return lambda tensor, axis: None
    mark: Callable[[torch.Tensor, int], None] = torch._dynamo.maybe_mark_dynamic
    return mark


def room_for(rows: torch.Tensor, axis: int, count: int) -> torch.Tensor:
    """``rows`` and behind them ``count`` rows of any content along ``axis``: the same memory if there is room."""
    T = rows.shape[axis]
    with _lock:
        memory = _held.get(rows)
        if memory is None or not _continues(rows, memory, axis) or T + count > memory.rows.shape[axis]:
            memory = _Memory(larger(rows, axis, T + count), T)
        memory.used = T + count
        shown = first_rows(memory.rows, axis, T + count)
        _held[shown] = memory
    return shown


def _continues(rows: torch.Tensor, memory: _Memory, axis: int) -> bool:
    """Whether ``rows`` are all the rows of their memory; a tensor can be given other memory behind our back."""
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
    """New memory for more than ``least`` rows, with ``rows`` at its beginning."""
    # Powers of two: twice the room whenever it is full, and at most twice what is needed.
    try:
        made = _memory(rows, axis, 1 << least.bit_length())
    except torch.OutOfMemoryError:  # what a copy would take may still fit
        made = _memory(rows, axis, least)
    with torch.no_grad():
        made.narrow(axis, 0, rows.shape[axis]).copy_(rows)
    return made


def _memory(like: torch.Tensor, axis: int, count: int) -> torch.Tensor:
    shape = (*like.shape[:axis], count, *like.shape[axis + 1 :])
    # Not of inference mode, in which the cache may have been made and out of which it may be taken.
    with torch.inference_mode(mode=False):
        return torch.empty_strided(shape, token_major(shape, axis), dtype=like.dtype, device=like.device)


def first_rows(memory: torch.Tensor, axis: int, count: int) -> torch.Tensor:
    """The first ``count`` rows of what :func:`larger` returned."""
    shape = (*memory.shape[:axis], count, *memory.shape[axis + 1 :])
    # No view in autograd's sense: a compiler would ask for the whole memory behind it, and guard its size.
    with torch.inference_mode(mode=False):
        empty = torch.empty(0, dtype=memory.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), 0, shape, token_major(shape, axis))
