"""What is said of attentions that are not absorbed, and whether the codes are true of what their K and V break."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters

from mla_compile.codes import Code
from mla_compile.core.program import Inputs, Program
from mla_compile.dynamo.compiler import Compiler
from mla_compile.options import Options
from mla_compile.passes.sources.records import Verdict
from mla_compile.pipeline.manager import Analyses
from tests.support.obligations import Obligations
from tests.support.programs import LEGAL, canonical

TRUE: dict[str, set[Code]] = {
    "random": {Code.DROPOUT},
    "nonlinear": {Code.NONLINEAR, Code.QUANTIZED_ROWS},
    "mixed": {Code.TOKEN_MIXING},
    "crossed": {Code.TOKEN_MIXING, Code.HEAD_DEPENDENT_LATENT, Code.PER_HEAD_ROPE},
    "position": {Code.POSITION_DEPENDENT, Code.PER_HEAD_ROPE},
    "heads": {Code.HEAD_DEPENDENT_LATENT, Code.PER_HEAD_ROPE},
    "several": {Code.TOO_MANY_SOURCES},
    "wide": {Code.COST_LATENT_WIDE, Code.NOT_MLA},
    "hidden": {Code.NOT_MLA},
    "unprojected": {Code.NOT_MLA},
    "given": {Code.EXPANDED_INPUTS, Code.EXPANDED_CACHE},
    "broken": {Code.GRAPH_BREAK},
    "weight": {Code.UNSUPPORTED_WEIGHT},
    "mask": {Code.MASK_DEPENDS_ON_KEYS},
    "keys read": {Code.KEYS_USED_ELSEWHERE, Code.EXPANDED_CACHE},
    "values read": {Code.VALUES_USED_ELSEWHERE, Code.EXPANDED_CACHE},
    "no softmax of keys": {Code.SOFTMAX_AXIS},
    "same rows": {Code.ALREADY_ABSORBED, Code.SHARED_ROWS},
}
"""The codes that are true where an obligation is broken.

``crossed``: rows of other sequences are read; a batch may stand where the heads were meant. ``wide``: the rows hold no
fewer values than K and V. ``hidden``: the queries are made of them, too. ``unprojected``: no
weight makes K or V of rows that hold fewer. ``given``: K or V hold an input as it is. ``weight``: something without
tokens is multiplied.
"""

ALWAYS = {Code.UNSUPPORTED_OP, Code.UNKNOWN_PRODUCT, Code.COLLECTIVE, Code.COST_PREFILL, Code.FORMS_EXPANDED}
"""Nothing is known of an operator; what costs less is another question."""


@dataclass(frozen=True)
class Told:
    """What was said of one part of an attention, and what is so."""

    part: str
    code: Code
    words: str
    broken: frozenset[str]

    @property
    def true(self) -> bool:
        return self.code in ALWAYS.union(*(TRUE[b] for b in self.broken))

    def __str__(self) -> str:
        return f"{self.code} ({self.words}) of {self.part}; broken is: {', '.join(sorted(self.broken)) or 'nothing'}"


class Recording(Compiler):
    """A backend that keeps each program with an attention, and the inputs of its first call."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.programs: list[tuple[Program, dict[str, Any]]] = []

    def _outcome(self, program: Program, *rest: Any) -> Any:
        outcome = super()._outcome(program, *rest)
        self.programs.append((outcome[0].base, dict.fromkeys(n.name for n in program.placeholders)))
        return outcome

    def __call__(self, gm: fx.GraphModule, example_inputs: Inputs) -> Callable[..., Any]:
        before = len(self.programs)
        call = super().__call__(gm, example_inputs)
        return self._noting(call, self.programs[-1][1]) if len(self.programs) > before else call

    def _noting(self, call: Callable[..., Any], given: dict[str, Any]) -> Callable[..., Any]:
        def noted(*inputs: Any) -> Any:
            if not any(v is not None for v in given.values()):
                given.update({k: v.clone() if isinstance(v, Tensor) else v for k, v in zip(given, inputs, strict=True)})
            return call(*inputs)

        return noted

    def said(self, batch: int) -> list[Told]:
        """All that is said of what is not absorbed; ``batch``: as for :func:`told`."""
        return [t for program, given in self.programs for t in told(program, given, batch)]


@contextlib.contextmanager
def recording(forms: str = "absorbed") -> Iterator[Recording]:
    """A backend for ``torch.compile(module, backend=..., dynamic=False)``, which sees each length as a graph."""
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield Recording(Options.parse({"forms": forms, "codegen": "eager", "verify": False}))


def told(program: Program, given: Mapping[str, Any], batch: int) -> list[Told]:
    """What is said of the attentions of a captured program, with what is so; ``given``: its inputs by name.

    ``batch``: how many sequences it is called for, which tells that axis from the heads.
    """
    program = program.copy()
    canonical(program)
    verdicts = Analyses(program).get(LEGAL)
    inputs = [_input(node, program, given) for node in program.placeholders]
    found = []
    for verdict in verdicts:
        said = _said(verdict)
        if any(code not in ALWAYS for _, code, _ in said):
            broken = Obligations(program, verdict.site, inputs, batch).broken()
            said = [(part, code, words, broken[part]) for part, code, words in said]
        else:
            said = [(*s, frozenset()) for s in said]
        found += [Told(*s) for s in said]
    return found


def _said(verdict: Verdict) -> list[tuple[str, Code, str]]:
    if not verdict.absorb:
        return [("both", verdict.code, f"{verdict.reason} at {verdict.blame}")]
    return [(kept.part, kept.code, f"{kept.reason} at {kept.blame}") for kept in verdict.kept]


def _input(node: fx.Node, program: Program, given: Mapping[str, Any]) -> Any:
    """The live weight, what the call was given, or random numbers where the passes changed what it takes."""
    value, meta = given.get(node.name), node.meta["val"]
    live = program.weights.get(node.name)
    if live is not None:
        return live
    if not isinstance(meta, Tensor):
        return meta if value is None else value
    if isinstance(value, Tensor) and value.shape == meta.shape and type(value) is Tensor:
        return value
    return torch.randn(tuple(meta.shape), dtype=torch.float64).to(meta.dtype)
