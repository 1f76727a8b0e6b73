"""Steps recorded once for their sizes and replayed from then on: CUDA graphs, and XPU's.

A decode step of a few users is hundreds of short launches, which the host takes longer to issue than the device to run.
A recording holds addresses. What comes anew with each step is copied to where it was recorded from; weights, folds and
pools are read where they lie, and a step is recorded anew when one of them has moved.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.continuous_batching.utils import (
    accelerator_graph_capture_context,
    create_accelerator_graph,
    get_accelerator_graph_name,
    get_memory_pools,
)

from mla_compile.core.program import Call
from mla_compile.runtime.folds import addresses

logger = logging.getLogger("mla_compile")
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class _Recording:
    graph: Any
    given: tuple[torch.Tensor, ...]
    results: tuple[torch.Tensor, ...]
    stays: tuple[tuple[int, ...], ...]  # addresses


def can_record(device: torch.device) -> bool:
    """Whether launches on ``device`` can be recorded with the torch that is installed."""
    found = torch.accelerator.current_accelerator() if get_accelerator_graph_name() is not None else None
    return found is not None and found.type == device.type


class Replayed:
    """A callable of flat inputs with tensors as results, recorded when it is first called with inputs of a size.

    ``changing``: the places of the inputs that are others in each call. One whose recording fails, because something in
    it waits for the device, runs as it is from then on, with a warning.
    """

    def __init__(self, call: Call, changing: Sequence[int]) -> None:
        self._call, self._changing = call, tuple(changing)
        self._known: dict[Sizes, _Recording | None] = {}
        # One pool for all sizes, as they run one after the other; so results are copied before the next one runs.
        self._pool = get_memory_pools()

    @property
    def count(self) -> int:
        """How many sizes are recorded."""
        return sum(recording is not None for recording in self._known.values())

    def __call__(self, *inputs: Any) -> list[torch.Tensor]:
        """The results, which nobody else writes to."""
        given = [inputs[at] for at in self._changing]
        sizes = tuple(n for tensor in given for n in tensor.shape)
        stays = tuple(addresses(value) for at, value in enumerate(inputs) if at not in self._changing)
        if sizes not in self._known:
            return self._record(sizes, inputs, stays)
        recording = self._known[sizes]
        if recording is None:
            return list(self._call(*inputs))
        if recording.stays != stays:
            return self._record(sizes, inputs, stays)
        for place, value in zip(recording.given, given, strict=True):
            place.copy_(value, non_blocking=True)
        recording.graph.replay()
        return [result.clone() for result in recording.results]

    def _record(self, sizes: Sizes, inputs: Sequence[Any], stays: tuple[tuple[int, ...], ...]) -> list[torch.Tensor]:
        """Runs a step and records it: what is compiled or tuned when it first runs cannot be recorded."""
        self._known.pop(sizes, None)
        values = list(inputs)
        for at in self._changing:
            values[at] = inputs[at].clone()
        answer = list(self._call(*values))
        graph = create_accelerator_graph()
        try:
            with accelerator_graph_capture_context(graph, stream=None, pool=self._pool[1]):
                results = tuple(self._call(*values))
        except RuntimeError as error:  # of the driver, or of what was about to wait
            logger.warning("decode steps of sizes %s cannot be recorded: %s", sizes, error)
            self._known[sizes] = None
            return answer
        given = tuple(values[at] for at in self._changing)
        self._known[sizes] = _Recording(graph, given, results, stays)
        return answer
