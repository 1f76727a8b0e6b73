"""Legal attentions for mutations to start from: captured graphs that are absorbed as they are."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile.capture import capture
from mla_compile.core.guards import guards_of
from mla_compile.core.program import Program
from mla_compile.errors import MlaCompileWarning
from mla_compile.passes.ir.walk import ancestors
from mla_compile.passes.sources.records import AbsorbPlan, Verdict
from mla_compile.pipeline.manager import Analyses
from tests.support.generated_module import GeneratedMLA
from tests.support.generator import Case, drawn
from tests.support.programs import LEGAL, canonical


@dataclass(frozen=True)
class Base:
    """A captured call of a legal case, and what is known of it because it is legal.

    ``past``: tokens before this call. ``symbolic``: sizes of the inputs are symbols, so that the graph takes others.
    """

    case: Case
    program: Program
    plan: AbsorbPlan
    past: int
    symbolic: bool
    traced: fx.GraphModule

    def inputs(self, draw: int, past: int | None = None) -> list[Any]:
        """Random inputs of the graph, after ``past`` tokens."""
        return _flat(self._module, self.case, self.past if past is None else past, draw)

    @functools.cached_property
    def _module(self) -> GeneratedMLA:
        return GeneratedMLA(self.case)

    def takes(self, values: list[Any]) -> bool:
        """Whether the graph was traced for inputs of these shapes too."""
        if not self.symbolic:
            return False
        fakes = [n.meta["val"] for n in self.traced.graph.find_nodes(op="placeholder")]
        return guards_of(self.traced.shape_env, fakes, ignore_static=False)(values)  # type: ignore[arg-type]  # make_fx sets it


def bases(count: int, start: int) -> Iterator[Base]:
    """``count`` bases; every second one has equal sizes, so that no axis can be told from another by its size."""
    found = 0
    rng = random.Random(start)
    while found < count:
        for case in drawn(4 * count, start):
            case = _plain(case, rng)
            if found % 2:
                case = _equal(case, rng.choice((2, 2, 3, 4)))
            made = _base(case, past=rng.choice((0, case.T, case.T)), symbolic=rng.random() < 0.4)
            if made is not None:
                found += 1
                yield made
            if found == count:
                return
        start += 1


def _plain(case: Case, rng: random.Random) -> Case:
    """float64, more than one token and head, and a latent that is narrower than what it is expanded to."""
    return replace(
        case,
        T=max(case.T, 2),
        H=max(case.H, 2),
        L=min(case.L, 6),
        N=max(case.N, 2),
        V=max(case.V, 2),
        # Rows that are multiplied by a factor each are no node of the graph, to which the oracle could give numbers.
        beside="none" if case.beside == "gated" else case.beside,
        dtype="float64",
        door="trace",
        steps=1,
        pad_values=False,
        tied=False,
        cut=False,
        latents=1,
        reads=False,
        library="",  # a mutant is judged by what is in the graph, and a stand-in is not yet
        forms="absorbed",
        fold=rng.choice(("never", "always")),
    )


def _equal(case: Case, n: int) -> Case:
    """Batch, heads, queries, keys and all widths are ``n``."""
    rotated = case.rope if n % 2 == 0 and case.R else "none"
    return replace(
        case, B=n, T=n, D=n, H=n, L=n, N=n, V=n, Q=n if case.Q else 0, R=n if case.R else 0, groups=1, chunk=n,
        rope=rotated,
    )  # fmt: skip


def _base(case: Case, past: int, symbolic: bool) -> Base | None:
    module = GeneratedMLA(case)
    flat = _flat(module, case, past, 0)

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        x, positions, *rest = values
        keep = None if case.mask in ("none", "is_causal") else rest.pop(0)
        return module(x, positions, keep, tuple(rest))

    module.start = past
    mode = "symbolic" if symbolic else "fake"
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaCompileWarning)
        traced = make_fx(call, tracing_mode=mode, pre_dispatch=True, _allow_non_fake_inputs=True)(*flat)
        program = capture.from_graph_module(traced)
    canonical(program)
    program.gm.recompile()
    (verdict,) = verdicts(program)
    if not verdict.absorb or verdict.plan is None:
        return None
    return Base(case, program, verdict.plan, past, symbolic, traced)


def verdicts(program: Program) -> list[Verdict]:
    """What the passes make of a canonical program."""
    return Analyses(program).get(LEGAL)


def _flat(module: GeneratedMLA, case: Case, past: int, draw: int) -> list[Any]:
    generator = torch.Generator().manual_seed(draw)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * (1.0, 3.0)[draw % 2]

    count = case.chunk if past else case.T
    values: list[Any] = [normal(case.B, count, case.D), torch.arange(past, past + count)]
    if case.mask not in ("none", "is_causal"):
        length = case.capacity if case.cache in ("index_copy", "slice") else past + count
        keep = (torch.arange(length) <= values[1][:, None]).expand(case.B, -1, -1)
        first = torch.arange(case.B) % 3 if case.padded else torch.zeros(case.B, dtype=torch.long)
        values.append(keep & (torch.arange(length) >= first[:, None, None]))
    for empty in module.empty_state():
        at = empty.shape.index(0) if 0 in empty.shape else -1
        axis = {3: 1, 4: 2}[empty.dim()]
        assert at >= 0
        values.append(normal(*[past if k == axis else s for k, s in enumerate(empty.shape)]))
    return values


def behind(node: fx.Node) -> set[fx.Node]:
    """``node`` and everything it is computed from."""
    return {node, *ancestors(node)}
