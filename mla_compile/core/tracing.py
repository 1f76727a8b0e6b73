"""A lock that lets only one thread trace at a time.

Tracing changes state of the whole process, such as how modules are called and which fake tensors represent weights.
Dynamo therefore compiles under a lock, and so does mla_compile's backend. All other code of mla_compile that traces or
compiles takes the same lock, so threads wait for each other whichever entry point they use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._guards import TracingContext


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold the lock while the block runs. The lock is reentrant.

    To avoid a deadlock, the caller must not hold any other lock that a tracing thread may acquire.
    """
    from torch._dynamo.convert_frame import compile_lock  # imported on use: loads all of Dynamo

    with compile_lock:
        yield


def is_traced() -> bool:
    """Whether another compiler is tracing in this thread.

    ``is_compiling`` alone is not enough, because all threads share its flag.
    """
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        return True
    return torch.compiler.is_compiling() and TracingContext.try_get() is not None
