"""Compare a server's graphs with the model before any request is served.

The rewritten attentions have already been compared in float64. This check covers the rest: pages, different lengths of
requests, prompts read in pieces, and loops over experts, which tracing unrolls for all experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla_compile.batching.graphs import Decode, StepGraphs
from mla_compile.capture.causal_lm import CausalLM, evaluating
from mla_compile.errors import CaptureError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutputWithPast

_PAGE, _PIECES, _STEPS = 8, ((5, 6), (2,), (9, 3, 2)), 3
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_PACKED = 0.5
"""Float8 rounding has a relative error of about 1/40, which the model may amplify. Wrong rows cause an error of 1."""


def check(lm: CausalLM, graphs: StepGraphs, decode: Decode) -> None:
    """Read three prompts in pieces, decode them together, and compare the logits of each new token with the model's.

    ``decode`` needs pools of :func:`pages_needed` pages with 8 tokens each. Raises :class:`CaptureError` if the
    relative error is larger than rounding explains.
    """
    model: PreTrainedModel = lm.model
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    vocabulary = min(model.get_input_embeddings().weight.shape[0], 1 << 15)
    lengths = [sum(pieces) for pieces in _PIECES]
    ids = [torch.randint(vocabulary, (n + _STEPS,), generator=generator).to(device) for n in lengths]
    got: list[list[torch.Tensor]] = []
    tables = torch.arange(pages_needed(), device=device).reshape(len(ids), -1)
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
    """Return the number of pages for all requests of the check. Each request gets an equal share."""
    longest = max(sum(pieces) for pieces in _PIECES) + _STEPS
    return len(_PIECES) * -(-longest // _PAGE)


def page_size() -> int:
    """Return the number of tokens per page in the check."""
    return _PAGE


def _error(lm: CausalLM, ids: torch.Tensor, length: int, got: list[torch.Tensor]) -> float:
    with torch.no_grad(), evaluating(lm.model):
        out: CausalLMOutputWithPast = lm.model(input_ids=ids[None], use_cache=False)
    want = out.logits[0, length - 1 : length + _STEPS].double()
    return float((torch.stack(got).double() - want).norm() / want.norm())
