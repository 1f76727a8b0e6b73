"""Partitions the blocks of a ragged batch into runs with equal work, on the device, before attention.

A grid of (splits, requests) gives every request the same number of splits. If one request is long and the others are
short, a few SMs still walk the long request after all others have finished. Here the blocks of all requests form one
line, in which each request has ``OVERHEAD`` extra blocks for its start and its end. The line is cut into equal pieces,
the *partitions*. There is one partition per SM, or fewer if a request has several blocks of query rows. The idea is
from the planners of FlashMLA and FlashInfer, but the code is new. Request b has ``n_b = ceil(len_b / 64)`` blocks, or
fewer with a window. The rule is:

    start_b    = sum over i < b of (n_i + OVERHEAD)            pay = ceil(total / partitions), at least 1
    items[p]   = the first (request, block) at or after position p * pay        half-open ranges items[p] .. items[p+1]
    first_b    = start_b // pay       last_b = (start_b + max(n_b, 1) - 1) // pay       count_b = last_b - first_b + 1

A request with ``count_b`` = 1 lies in one partition, which writes the request's result. Each other request leaves
``count_b`` partial results in consecutive scratch slots. There are at most :func:`slots` partial results in total. An
empty request is an item without blocks. The host reads nothing back, so such a call can be captured in a CUDA graph.

kernels/triton/schedule_triton.py implements the rule on the device. The cuts of a request depend on the whole batch, so
``deterministic=True`` uses no schedule.
"""

from __future__ import annotations

from mla_compile.kernels.plan import HOPPER_BLOCK
from mla_compile.kernels.shared import MAX_SMS

BLOCK = HOPPER_BLOCK
OVERHEAD = 5  # time to read the query, fill the pipeline and write the result, in blocks (FlashMLA's figure)
MAX_REQUESTS = 4096  # the kernel holds all lengths at once


def partitions(sms: int, rows: int) -> int:
    """Return how many partitions run at a time if each has a CTA for every block of the ``rows`` = S*H query rows."""
    return max(1, min(sms, MAX_SMS) // -(-rows // BLOCK))


def slots(partitions: int, B: int) -> int:
    """Return the maximum number of partial results. A request that is cut n times leaves n + 1 partial results."""
    return partitions - 1 + min(partitions - 1, B)


def suits(B: int) -> bool:
    """Whether a batch of B requests can be scheduled. A single request has nothing to balance."""
    return 1 < B <= MAX_REQUESTS
