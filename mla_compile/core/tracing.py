"""A lock by which one thread traces at a time.

Tracing changes torch for the whole process, such as the call of a module and the fake tensors of a weight. Dynamo
compiles under a lock for that reason, and so does our backend. All other code here that traces or compiles takes the
same lock, so that threads wait for each other whichever entry point they use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._guards import TracingContext


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold the lock while the block runs; it is reentrant.

    The caller must not hold another lock that a thread could acquire while it traces.
    """
    from torch._dynamo.convert_frame import compile_lock  # imported on use: loads all of Dynamo

    with compile_lock:
        yield


def is_traced() -> bool:
    """Whether another compiler is tracing in this thread; ``is_compiling`` alone is a flag of the whole process."""
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        return True
    return torch.compiler.is_compiling() and TracingContext.try_get() is not None
