"""Report attentions over a latent that are not absorbed, because no softmax weighs their values.

Two products with an elementwise function between them (a sigmoid, a squared ReLU) are not always an attention. Graph
networks, layers with a running state, and networks whose weights are computed from inputs contain this pattern, too.
So the pattern is reported only if it would be absorbed with a softmax in place of the function. It must have several
heads, and a weight must make keys or values from one narrower row per token, unless such keys are cached.
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
    """Return the value product of each attention to a latent, with a reason that names the function of the scores.

    ``verdicts`` would hold if each of ``functions`` were a softmax.
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
