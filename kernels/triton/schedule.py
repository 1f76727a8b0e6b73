"""Work for a ragged batch: equal runs of blocks over (request, block), computed on the device once per decode step.

A grid of (splits, requests) gives every request the same number of splits, so one long request among short ones is
walked by few SMs while the others have finished. Here the blocks of all requests stand in one line, each request with
``OVERHEAD`` extra ones for its start and its end, and the line is cut into equal pieces, the *partitions*, one for each
SM (per block of query rows). The rule (the idea of FlashMLA's and FlashInfer's planners, without their code), for
request b of ``n_b = ceil(len_b / 64)`` blocks:

    start_b    = sum over i < b of (n_i + OVERHEAD)            pay = ceil(total / partitions), at least 1
    items[p]   = the first (request, block) at or after position p * pay        half-open ranges items[p] .. items[p+1]
    first_b    = start_b // pay       last_b = (start_b + max(n_b, 1) - 1) // pay       count_b = last_b - first_b + 1

A request with ``count_b`` = 1 lies in one partition, which writes its result. The others leave ``count_b`` partial
results in scratch slots that follow each other; there are at most ``slots(...)``. An empty request is an item of no
blocks. Nothing is read back by the host, so a schedule can be captured in a CUDA graph; it has to be made again
whenever the lengths change, and may be shared by all layers of a step.

A request's cuts depend on the whole batch, so there is no schedule with ``deterministic=True``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_compile.errors import InputError

BLOCK = 64  # cache rows per block of the Gluon kernel
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
        """Partial results at most: p partitions make p - 1 cuts, and each request that is cut has one piece more."""
        cuts = self.partitions - 1
        return cuts + min(cuts, self.count.shape[0])


def partitions(sms: int, rows: int) -> int:
    """Partitions for ``rows`` = S*H query rows: the blocks of 64 rows of one partition run at the same time."""
    return max(1, sms // -(-rows // 64))


def suits(B: int) -> bool:
    """Whether a batch can be scheduled: one request has nothing to share."""
    return 1 < B <= MAX_REQUESTS


def reference(lengths: list[int], T: int, count: int) -> Schedule:
    """The rule, position by position, in Python: what the kernel has to give for ``count`` partitions."""
    line: list[tuple[int, int] | None] = []  # what stands at each position; None: overhead
    starts, blocks = [], [-(-min(max(n, 0), T) // BLOCK) for n in lengths]
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


def schedule(seq_lens: Tensor, T: int, count: int) -> Schedule:
    """The schedule of requests of ``seq_lens`` int32 [B] rows, each cut to T, over ``count`` partitions.

    On a GPU one small kernel on the current stream; on the CPU the reference. Raises :class:`InputError`.
    """
    B = seq_lens.shape[0] if seq_lens.dim() == 1 else 0
    if seq_lens.dtype != torch.int32 or not 1 <= B <= MAX_REQUESTS:
        got = f"{seq_lens.dtype} {list(seq_lens.shape)}"
        raise InputError(f"schedule: seq_lens is {got}, expected int32 [B] with B from 1 to {MAX_REQUESTS}")
    if count < 1 or T < 0:
        raise InputError(f"schedule: {count} partitions of {T} rows, expected at least 1 and at least 0")
    if seq_lens.device.type == "cpu":
        return reference(seq_lens.tolist(), T, count)
    from mla_compile.kernels.triton import schedule_triton

    items = seq_lens.new_empty(count + 1, 2)
    shift, first, pieces = seq_lens.new_empty(3, B).unbind()
    schedule_triton.launch(seq_lens.contiguous(), T, count, items, shift, first, pieces)
    return Schedule(count, T, items, shift, first, pieces)
