"""Exports a causal language model as the two functions that a server calls.

One function computes one token for each of many requests. The other reads a piece of one prompt.
"""

from __future__ import annotations

import inspect

import torch
from torch.export import Dim, ExportedProgram

from mla_compile.capture.causal_lm import BATCH, PAST, QUERY, CausalLM, evaluating
from mla_compile.capture.exporting import traced_program
from mla_compile.capture.unroll import UnrolledExperts
from mla_compile.core.cache_argument import cache_argument, cache_of
from mla_compile.errors import CaptureError, brief

INPUTS = ("input_ids", "position_ids")
"""The inputs of a step other than caches."""


def export_step(lm: CausalLM, *, one_token: bool) -> ExportedProgram:
    """Export the model as a program that maps ``(input_ids, position_ids, *caches)`` to ``(logits, *caches)``.

    There is no mask, because no token is padding. With ``one_token``, the program takes one token for each of B
    sequences with equally many cached tokens, and B is dynamic. Otherwise, it takes two or more tokens of one sequence,
    and returns only the last token's logits if the model supports this. Raises :class:`CaptureError` if the model
    cannot be traced.
    """
    step, inputs, opened = step_to_trace(lm, one_token=one_token)
    names = {BATCH: Dim("batch"), QUERY: Dim("query"), PAST: Dim("past", min=0)}
    ids, positions, *rows = [{axis: names[size] for axis, size in axes.items()} for axes in opened]
    with torch.no_grad(), evaluating(lm.model), UnrolledExperts():
        shapes = (ids, positions, rows)
        try:
            try:
                return traced_program(step, inputs, dynamic_shapes=shapes)
            except torch._dynamo.exc.UserError:
                # torch cannot prove `min(k, past) <= past` here. An assert in the graph can be proved later.
                return traced_program(step, inputs, dynamic_shapes=shapes, deferred=True)
        except Exception as error:  # tracing runs the user's model, which may raise anything
            raise CaptureError(f"{type(lm.model).__name__} cannot be traced by torch.export: {brief(error)}") from error


def step_to_trace(
    lm: CausalLM, *, one_token: bool
) -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]], list[dict[int, int]]]:
    """Return the model as a module of ``(input_ids, position_ids, caches)``, example inputs, and dynamic axes.

    Each input has a dict of dynamic axes: axis -> size in the trace (``BATCH``, ``QUERY`` or ``PAST``).
    """
    device = next(lm.model.parameters()).device
    B, S = (BATCH, 1) if one_token else (1, QUERY)
    ids = torch.arange(3, 3 + B * S, device=device).reshape(B, S)
    positions = torch.arange(PAST, PAST + S, device=device).repeat(B, 1)
    step = _StepModule(
        lm, last_only=not one_token and "logits_to_keep" in inspect.signature(lm.model.forward).parameters
    )
    batch = {0: BATCH} if one_token else {}
    new = batch if one_token else {1: QUERY}
    rows = [batch | ({} if c.axis is None else {c.axis: PAST}) for c in lm.caches]
    return step, (ids, positions, lm.empty(B, PAST)), [new, new, *rows]


class _StepModule(torch.nn.Module):
    def __init__(self, lm: CausalLM, *, last_only: bool) -> None:
        super().__init__()
        self.model = lm.model
        self._lm = (lm,)  # in a tuple, so that it does not become a submodule
        self._cache = cache_argument(lm.model)
        self._extra = {"logits_to_keep": 1} if last_only else {}

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, caches: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        (lm,) = self._lm
        out = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=True,
            **{self._cache: lm.filled(caches)},
            **self._extra,
        )
        return out.logits, [entry.of(cache_of(out)) for entry in lm.caches]
