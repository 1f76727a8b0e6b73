"""Attentions over a latent that are left because no softmax weighs their values: what is said of them.

A product, a function of each score by itself (a sigmoid, a squared ReLU), and a second product are found in many places
that are no attention: in networks whose weights are made of inputs, among the nodes of a graph, behind a running state.
Named is only what would be absorbed if its weights were a softmax: several heads, whose keys or values a weight makes
from one narrower row per token, or the cache of such keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from mla_compile.codes import Code
from mla_compile.passes.decide.records import Verdict
from mla_compile.passes.ir.axes import axis_size
from mla_compile.passes.ir.graph import packet
from mla_compile.passes.ir.sizes import same
from mla_compile.passes.ir.stop import Stop

_LEGAL = (Code.ABSORBED, Code.KEYS_USED_ELSEWHERE, Code.VALUES_USED_ELSEWHERE)


def not_softmax(verdicts: Sequence[Verdict], functions: Sequence[fx.Node]) -> list[tuple[fx.Node, Stop]]:
    """The value product of each attention to a latent, and the function in place of a softmax.

    ``verdicts`` are what would be said if each of ``functions`` were one.
    """
    return [
        (verdict.site.node, Stop(function, Code.NOT_SOFTMAX, _reason(function)))
        for verdict, function in zip(verdicts, functions, strict=True)
        if _of_a_latent(verdict)
    ]


def _of_a_latent(verdict: Verdict) -> bool:
    if verdict.code is Code.EXPANDED_CACHE:
        return bool(verdict.site.lead)
    return verdict.code in _LEGAL and verdict.plan is not None and not same(axis_size(verdict.plan.heads), 1)


def _reason(function: fx.Node) -> str:
    return f"keys are weighed by {packet(function).__name__} of their scores, and no softmax follows"
