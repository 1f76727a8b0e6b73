"""Report attentions over a latent that are not absorbed, because no softmax weighs their values.

A product, an elementwise function of the scores (a sigmoid, a squared ReLU) and a second product also occur where there
is no attention: in networks whose weights are computed from inputs, between the nodes of a graph network, and in layers
with a running state. So an attention is reported only if it would be absorbed with a softmax in place of the function:
it has several heads, and a weight makes keys or values from one narrower row per token, or such keys are cached.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from mla_compile.codes import Code
from mla_compile.passes.ir.axes import axis_size
from mla_compile.passes.ir.graph import packet
from mla_compile.passes.ir.sizes import same
from mla_compile.passes.ir.stop import Stop
from mla_compile.passes.sources.records import Verdict

_LEGAL = (Code.ABSORBED, Code.KEYS_USED_ELSEWHERE, Code.VALUES_USED_ELSEWHERE)


def not_softmax(verdicts: Sequence[Verdict], functions: Sequence[fx.Node]) -> list[tuple[fx.Node, Stop]]:
    """Return the value product of each attention to a latent, with a reason that names the function of its scores.

    ``verdicts`` are the verdicts that would hold if each of ``functions`` were a softmax.
    """
    why = "keys are weighed by {} of their scores, and no softmax follows"
    return [
        (verdict.site.node, Stop(function, Code.NOT_SOFTMAX, why.format(packet(function).__name__)))
        for verdict, function in zip(verdicts, functions, strict=True)
        if _of_a_latent(verdict)
    ]


def _of_a_latent(verdict: Verdict) -> bool:
    if verdict.code is Code.EXPANDED_CACHE:
        return bool(verdict.site.lead)
    return verdict.code in _LEGAL and verdict.plan is not None and not same(axis_size(verdict.plan.heads), 1)
