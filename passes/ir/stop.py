"""Why something ends at a node: a value, so that a near miss can be ranked, reported and tested."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Stop:
    """Why the walk ended at ``node``: a code of :mod:`mla_compile.codes` and the detail in words.

    ``fix``: what the user could change, where the code's own advice is not it.
    """

    node: fx.Node
    code: str
    detail: str
    fix: str | None = None
