"""Jumps through a table in PTX as comparisons, where a cluster's kernel is compiled.

Triton tells waiting warps by a number which partition of ``warp_specialize`` is theirs. Beside two barriers between the
CTAs of a cluster these are five numbers, from which LLVM makes a table of jumps. ptxas takes such a jump for one from
anywhere: consumer 1's sums might then be what a product in flight writes, so it waits for the scores of a block before
the product with the other consumer's P (its note C7517). With the same jumps as comparisons it does not.
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
    """PTX in which every jump through a table goes by comparisons with its places; other text stays."""
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
    """Within it Triton compiles with :func:`compared`, unless somebody looks at its stages already."""
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


def _hook(backend: Any = None, stages: dict[str, Callable[..., Any]] | None = None, *_: Any) -> tuple[str, str] | None:
    """Without arguments what the key of Triton's cache has to tell; else puts :func:`compared` behind the PTX."""
    if stages is None:
        return _KEY, _KEY
    written = stages["ptx"]
    stages["ptx"] = lambda source, metadata: compared(written(source, metadata))
    return None
