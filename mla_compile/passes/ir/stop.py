"""The record of why a walk ends at a node, which can be ranked, reported and tested."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Stop:
    """Why the walk ended at ``node``: a code of :mod:`mla_compile.codes` and the detail in words.

    ``fix``: what the user could change, if the code's general advice does not fit.
    """

    node: fx.Node
    code: str
    detail: str
    fix: str | None = None
