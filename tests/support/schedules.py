"""The rule of kernels/triton/schedule.py in Python, position by position: what the kernel on the device must return."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_compile.kernels.triton import schedule


@dataclass(frozen=True)
class Schedule:
    """int32 tensors on one device. ``items`` [partitions+1,2]; the rest [B].

    ``shift`` is a request's first scratch slot minus its first partition, ``first`` is that slot, ``count`` the number
    of its pieces.
    """

    partitions: int
    capacity: int  # rows T, to which lengths are clamped
    items: Tensor
    shift: Tensor
    first: Tensor
    count: Tensor

    @property
    def slots(self) -> int:
        """The largest number of partial results."""
        return schedule.slots(self.partitions, self.count.shape[0])


def reference(lengths: list[int], T: int, count: int, reach: int | None = None) -> Schedule:
    """The expected result of the kernel for ``count`` partitions.

    ``reach``: with a window, the number of rows that the query tokens of a request see in total.
    """
    line: list[tuple[int, int] | None] = []  # (request, block) at each position; None: overhead
    starts, rows = [], [min(max(n, 0), T) for n in lengths]
    blocks = [-(-n // schedule.BLOCK) - (0 if reach is None else max(n - reach, 0) // schedule.BLOCK) for n in rows]
    for b, n in enumerate(blocks):
        starts.append(len(line))
        line += [(b, j) for j in range(max(n, 1))]
        line += [None] * (n + schedule.OVERHEAD - max(n, 1))
    pay = max(1, -(-len(line) // count))
    items = [next((x for x in line[p * pay :] if x is not None), (len(lengths), 0)) for p in range(count + 1)]
    firsts = [start // pay for start in starts]
    pieces = [(s + max(n, 1) - 1) // pay - f + 1 for s, n, f in zip(starts, blocks, firsts, strict=True)]
    slot, slots = 0, []
    for n in pieces:
        slots.append(slot)
        slot += n if n > 1 else 0
    shift = [slot - first for slot, first in zip(slots, firsts, strict=True)]

    def tensor(x: list[int] | list[tuple[int, int]]) -> Tensor:
        return torch.tensor(x, dtype=torch.int32)

    return Schedule(count, T, tensor(items), tensor(shift), tensor(slots), tensor(pieces))
