"""One thread traces at a time.

Whoever traces changes torch for the whole process: what a call of a module does, which fake tensors are made of what.
Dynamo has a lock for that, under which it compiles, our backend included. Everything else here that traces, or makes
code of a graph, takes the same one, so that threads wait for each other, whichever door they came through.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Waits until no other thread traces, and has them wait meanwhile. A thread that has it may take it again.

    No other lock may be held that a thread could ask for while it traces.
    """
    from torch._dynamo.convert_frame import compile_lock  # on use: all of Dynamo

    with compile_lock:
        yield
