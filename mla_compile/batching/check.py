"""The two graphs of a server against the model itself, before anybody is served.

Rewritten attentions were compared in float64 already. What is new here is everything around them: pages, lengths of
one's own, a prompt in pieces, loops over experts that were traced as loops over all.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_compile.batching.graphs import Decode, StepGraphs
from mla_compile.capture.causal_lm import CausalLM, evaluating
from mla_compile.errors import CaptureError

_PAGE, _PIECES, _STEPS = 8, ((5, 6), (2,), (9, 3, 2)), 3
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_PACKED = 0.5
"""Rows in float8 are off by a fortieth, and what a model makes of that is its own; wrong rows are off by 1."""


def check(lm: CausalLM, graphs: StepGraphs, decode: Decode) -> None:
    """Reads three prompts in pieces, decodes them together, and compares all logits with the model's.

    ``decode``: over pools of :func:`pages_needed` pages of 8 tokens. Raises :class:`CaptureError` where the relative
    error is beyond what rounding explains.
    """
    model: Any = lm.model
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    vocabulary = min(model.get_input_embeddings().weight.shape[0], 1 << 15)
    lengths = [sum(pieces) for pieces in _PIECES]
    ids = [torch.randint(vocabulary, (n + _STEPS,), generator=generator).to(device) for n in lengths]
    got: list[list[torch.Tensor]] = []
    tables: Any = torch.arange(pages_needed(), device=device).reshape(len(ids), -1)
    for row, pieces, table in zip(ids, _PIECES, tables, strict=True):
        start = 0
        logits: list[torch.Tensor] = []
        for count in pieces:
            logits = [graphs.read(row[start : start + count], start, table, decode.pools)]
            start += count
        got.append(logits)
    for step in range(_STEPS):
        held = torch.tensor(lengths, device=device) + step
        next_ids = torch.stack([row[n] for row, n in zip(ids, held.tolist(), strict=True)])
        rows = decode.call(next_ids[:, None], held[:, None], tables.int(), held.int() + 1, decode.pools)
        for logits, own in zip(got, rows, strict=True):
            logits.append(own[-1])
    error = max(_error(lm, row, n, own) for row, n, own in zip(ids, lengths, got, strict=True))
    most = _PACKED if graphs.packed else _TOLERANCE[lm.dtype]
    if not error < most:
        raise CaptureError(
            f"{type(lm.model).__name__} over pages differs from the model by {error:.1e} (relative), expected less "
            f"than {most:.0e}; it was not used"
        )


def pages_needed() -> int:
    """Pages of all requests of the check, each with as many."""
    longest = max(sum(pieces) for pieces in _PIECES) + _STEPS
    return len(_PIECES) * -(-longest // _PAGE)


def page_size() -> int:
    """Tokens of a page of the check."""
    return _PAGE


def _error(lm: CausalLM, ids: torch.Tensor, length: int, got: list[torch.Tensor]) -> float:
    with torch.no_grad(), evaluating(lm.model):
        out: Any = lm.model(input_ids=ids[None], use_cache=False)
    want = out.logits[0, length - 1 : length + _STEPS].double()
    return float((torch.stack(got).double() - want).norm() / want.norm())
