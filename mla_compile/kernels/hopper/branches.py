"""Replaces indirect jumps in PTX by comparisons, for the kernel of a cluster.

Triton sends waiting warps a number, which tells them which partition of ``warp_specialize`` to run. In a cluster, two
barriers between the CTAs bring this to five numbers, and LLVM makes a jump table of them. ptxas assumes that a jump
through the table may happen at any time, even while a product writes consumer 1's sums. So ptxas makes consumer 1 wait
for the scores of a block before the product with the other consumer's P (ptxas note C7517). Comparisons avoid this
wait.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_TABLE = re.compile(r"^(\w+):\s*\.branchtargets\s+([^;]+);\s*$", re.MULTILINE)
_JUMP = r"^(\s*brx\.idx(?:\.uni)?\s+(%\w+), {};)"
_KEY = "mla_compile: jumps through a table as comparisons"


def compared(ptx: str) -> str:
    """Return the PTX with every indirect jump and its table replaced by comparisons."""
    for table in _TABLE.finditer(ptx):
        *targets, last = re.findall(r"[^\s,]+", table[2])
        tests = [f"\tsetp.eq.b32 \t%is, {{0}}, {i};\n\t@%is bra \t{target};" for i, target in enumerate(targets)]
        chain = "\n".join(("\t{{", "\t.reg .pred \t%is;", *tests, f"\tbra.uni \t{last};", "\t}}"))
        for jump in re.findall(_JUMP.format(table[1]), ptx, re.MULTILINE):
            ptx = ptx.replace(jump[0], chain.format(jump[1]))
        ptx = ptx.replace(table[0], "")
    return ptx


@contextmanager
def comparisons() -> Iterator[None]:
    """Make Triton compile with :func:`compared` in this context, unless an inspection hook is set already."""
    from triton import knobs

    before = getattr(knobs.runtime, "add_stages_inspection_hook", None)
    if before is not None:
        yield
        return
    knobs.runtime.add_stages_inspection_hook = _hook
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = before


def _hook(
    backend: object = None, stages: dict[str, Callable[..., Any]] | None = None, *_: Any
) -> tuple[str, str] | None:
    """Apply :func:`compared` after the PTX stage. If ``stages`` is None, return an addition to Triton's cache key."""
    if stages is None:
        return _KEY, _KEY
    written = stages["ptx"]
    stages["ptx"] = lambda source, metadata: compared(written(source, metadata))
    return None
