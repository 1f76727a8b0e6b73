"""Work for a ragged batch: equal runs of blocks over (request, block), cut on the device at the start of a call.

A grid of (splits, requests) gives every request the same number of splits, so one long request among short ones is
walked by few SMs while the others have finished. Here the blocks of all requests stand in one line, each request with
``OVERHEAD`` extra ones for its start and its end, and the line is cut into equal pieces, the *partitions*, one for each
SM (per block of query rows). The rule (the idea of FlashMLA's and FlashInfer's planners, without their code), for
request b of ``n_b = ceil(len_b / 64)`` blocks, with a window without those before it:

    start_b    = sum over i < b of (n_i + OVERHEAD)            pay = ceil(total / partitions), at least 1
    items[p]   = the first (request, block) at or after position p * pay        half-open ranges items[p] .. items[p+1]
    first_b    = start_b // pay       last_b = (start_b + max(n_b, 1) - 1) // pay       count_b = last_b - first_b + 1

A request with ``count_b`` = 1 lies in one partition, which writes its result. The others leave ``count_b`` partial
results in scratch slots that follow each other; there are at most :func:`slots` of them. An empty request is an item of
no blocks. The host reads nothing back, so a call that cuts its batch can be captured in a CUDA graph.

This file has the rule in Python; kernels/triton/schedule_triton.py follows it on the device. A request's cuts depend on
the whole batch, so there is no schedule with ``deterministic=True``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_compile.kernels.plan import HOPPER_BLOCK
from mla_compile.kernels.shared import MAX_SMS

BLOCK = HOPPER_BLOCK
OVERHEAD = 5  # blocks' time for reading the query, filling the pipeline and writing the result (FlashMLA's figure)
MAX_REQUESTS = 4096  # the kernel holds all lengths at once


@dataclass(frozen=True)
class Schedule:
    """int32 tensors on one device. ``items`` [partitions+1,2]; the rest [B].

    ``shift`` is a request's first scratch slot minus its first partition, ``first`` that slot, ``count`` its pieces.
    """

    partitions: int
    capacity: int  # rows T that the lengths were cut to
    items: Tensor
    shift: Tensor
    first: Tensor
    count: Tensor

    @property
    def slots(self) -> int:
        """Partial results at most."""
        return slots(self.partitions, self.count.shape[0])


def partitions(sms: int, rows: int) -> int:
    """Partitions for ``rows`` = S*H query rows: the row blocks of one partition run at the same time."""
    return max(1, min(sms, MAX_SMS) // -(-rows // BLOCK))


def slots(partitions: int, B: int) -> int:
    """Partial results at most: p partitions make p - 1 cuts, and each request that is cut has one piece more."""
    return partitions - 1 + min(partitions - 1, B)


def suits(B: int) -> bool:
    """Whether a batch can be scheduled: one request has nothing to share."""
    return 1 < B <= MAX_REQUESTS


def reference(lengths: list[int], T: int, count: int, reach: int | None = None) -> Schedule:
    """The rule, position by position, in Python: what the kernel has to give for ``count`` partitions.

    ``reach`` is how many rows the query tokens of a request see between them, with a window.
    """
    line: list[tuple[int, int] | None] = []  # what stands at each position; None: overhead
    starts, rows = [], [min(max(n, 0), T) for n in lengths]
    blocks = [-(-n // BLOCK) - (0 if reach is None else max(n - reach, 0) // BLOCK) for n in rows]
    for b, n in enumerate(blocks):
        starts.append(len(line))
        line += [(b, j) for j in range(max(n, 1))]
        line += [None] * (n + OVERHEAD - max(n, 1))
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
