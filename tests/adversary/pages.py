"""One tampered decode step over pages: each request, whatever its length, has the numbers that it has alone.

The oracle is the model, given each request alone: it reads the prompt, and decodes token by token with the cache that
it returned itself. The same rows lie in pages of one pool, and the step over pages decodes all requests together.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mla_compile import pipeline
from mla_compile.batching.check import check, page_size, pages_needed
from mla_compile.batching.graphs import StepGraphs
from mla_compile.batching.table import POSITIONS, TOKENS
from mla_compile.batching.traced import NotMlaError
from mla_compile.capture import capture
from mla_compile.capture.causal_lm import CausalLM, wire
from mla_compile.core.program import Program
from mla_compile.errors import CaptureError, ExportError
from mla_compile.options import Options
from mla_compile.passes.cache.page_rows import rows_of_pages, write_to_pages
from mla_compile.passes.cache.pages import (
    Unpaged,
    find_pages,
    pool_rows,
    read_batch_from,
    step_over_pages,
)
from tests.adversary.check import EXACT, THROUGH_FLOAT32, same_numbers
from tests.adversary.places import Refused
from tests.adversary.steps_of_many import TAMPERINGS, VOCAB, Mutant, Tiny

LENGTHS, STEPS, PAGE, ROOM = (2, 9, 4), 3, 4, 3


@torch.no_grad()
def check_pages(mutant: Mutant) -> str:
    """``over pages``, ``refused``, or ``noticed`` by the comparison with the model where sequences are mixed.

    Raises AssertionError for a wrong number, and for a legal mutant that is refused; :class:`Refused` where the mutant
    does not run.
    """
    model, tampering = Tiny(mutant), TAMPERINGS[mutant.tampering]
    generator = torch.Generator().manual_seed(mutant.seed)
    ids = [torch.randint(VOCAB, (1, n + STEPS), generator=generator) for n in LENGTHS]
    try:
        alone = [_alone(model, own, n) for own, n in zip(ids, LENGTHS, strict=True)]
        if tampering.mixes:
            return _noticed(wire(model))
        program, caches = _traced(model)
    except (RuntimeError, IndexError, ExportError) as error:
        raise Refused(f"it does not run: {error}") from error
    outcome = pipeline.run(program, Options(forms="absorbed", fold="never", codegen="eager"))
    said = [f"{site.verdict} ({site.code}): {site.reason}" for site in outcome.report.sites]
    step = outcome.program
    found: Any = Unpaged("; ".join(said))
    if outcome.absorbed:
        read_batch_from(step, TOKENS)
        found = find_pages(step, caches)
    if isinstance(found, Unpaged):
        assert not tampering.legal, f"a legal mutant is refused: {found.reason}"
        return "refused"
    kinds = [pool_rows(rows, packed=False) for rows in found]
    pools = [torch.full((len(LENGTHS) * ROOM, PAGE, width), torch.nan, dtype=dtype) for width, dtype in kinds]
    table = torch.randperm(len(LENGTHS) * ROOM, generator=generator).reshape(len(LENGTHS), ROOM).int()
    for own, (_, caches_of) in zip(table, alone, strict=True):
        for rows, pool, past in zip(found, pools, caches_of[0], strict=True):
            write_to_pages(pool, own, 0, past, rows)
    names = step_over_pages(step, found, pools, TOKENS, packed=False)
    allowed = THROUGH_FLOAT32 if mutant.tampering.endswith("float32") else EXACT
    for number in range(STEPS):
        at = torch.tensor(LENGTHS) + number
        given = dict(zip(names, (table, at.int() + 1, *pools), strict=True))
        given[TOKENS] = torch.cat([own[:, n : n + 1] for own, n in zip(ids, at.tolist(), strict=True)])
        given[POSITIONS] = at[:, None]
        logits = step.gm(*[given[n.name] if n.name in given else step.weights[n.name] for n in step.placeholders])[0]
        for request, (wanted, caches_of) in enumerate(alone):
            told = f"of request {request} in step {number}"
            same_numbers(logits[request], wanted[number], allowed, f"logits {told}")
            for k, (rows, pool, own) in enumerate(zip(found, pools, caches_of[number + 1], strict=True)):
                same_numbers(rows_of_pages(pool, table[request], len(own), rows), own, allowed, f"rows {k} {told}")
    return "over pages"


def _traced(model: Tiny) -> tuple[Program, list[str]]:
    """A step of one token of as many sequences, with as many cached tokens, as there may be; the caches' names."""
    sizes = model.mutant.sizes
    widths = [sizes.L, sizes.R] * sizes.layers
    B, P = 3, 7  # no other size of an input: torch takes equal ones for the same
    outer = (B, 1, P) if sizes.axis else (B, P)
    given = [torch.zeros(B, 1, dtype=torch.long), torch.full((B, 1), P)]
    given += [torch.zeros(*outer, width, dtype=torch.float64) for width in widths]

    def call(input_ids: Tensor, position_ids: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        layers = [SimpleNamespace(c=c, r=r) for c, r in zip(caches[::2], caches[1::2], strict=True)]
        out = model(input_ids, position_ids=position_ids, past_key_values=SimpleNamespace(layers=layers))
        return out.logits, *(rows for layer in out.past_key_values.layers for rows in (layer.c, layer.r))

    traced = make_fx(call, tracing_mode="symbolic", pre_dispatch=True, _allow_non_fake_inputs=True)(*given)
    names = [TOKENS, POSITIONS, *(f"caches_{k}" for k in range(len(widths)))]
    for node, name in zip(traced.graph.find_nodes(op="placeholder"), names, strict=True):
        node.name = node.target = name
    traced.recompile()
    return capture.from_graph_module(traced), names[2:]


def _alone(model: Tiny, ids: Tensor, length: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Logits [1,VOCAB] of each step after ``length`` tokens, and the rows [T,W] of each cache before and after it."""
    out: Any = model(ids[:, :length])
    logits, caches = [], [_rows(out.past_key_values)]
    for at in range(length, length + STEPS):
        out = model(ids[:, at : at + 1], position_ids=torch.tensor([[at]]), past_key_values=out.past_key_values)
        logits.append(out.logits[0])
        caches.append(_rows(out.past_key_values))
        if len(caches[-1][0]) != at + 1:
            raise Refused("a cache that does not hold a row for each token")
    return logits, caches


def _rows(cache: Any) -> list[Tensor]:
    return [rows.reshape(-1, rows.shape[-1]) for layer in cache.layers for rows in (layer.c, layer.r)]


def _noticed(lm: CausalLM) -> str:
    """What becomes of a model that mixes the sequences of a batch."""
    try:
        graphs = StepGraphs(lm, Options(codegen="eager"))
    except (CaptureError, NotMlaError):
        return "refused"
    try:
        check(lm, graphs, graphs.decode(graphs.make_pools(pages_needed(), page_size(), torch.device("cpu"))))
    except CaptureError:
        return "noticed"
    return "over pages"
