"""The record of why a walk ended at a node. It can be ranked, reported and tested."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Stop:
    """Why a walk ended at ``node``: a code from :mod:`mla_compile.codes`, and the detail in words.

    ``fix``: what the user could change, if the general advice for the code does not fit.
    """

    node: fx.Node
    code: str
    detail: str
    fix: str | None = None
