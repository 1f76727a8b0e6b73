"""Record a step once per set of sizes as a CUDA graph or XPU graph, and replay the recording later.

A decode step of a few users consists of hundreds of short launches. The host needs more time to issue launches than the
device needs to run them. A recording contains addresses. Inputs that change with each step are copied into the recorded
tensors. Weights, folds and pools are read in place. If their addresses change, the step is recorded again.
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

from mla_compile.batching.compiled import Sizes
from mla_compile.core.program import Call
from mla_compile.runtime.folds import addresses

logger = logging.getLogger("mla_compile")


@dataclass(frozen=True)
class _Recording:
    graph: Any
    given: tuple[torch.Tensor, ...]
    results: tuple[torch.Tensor, ...]
    stays: tuple[tuple[int, ...], ...]  # addresses of the inputs that stay in place


def can_record(device: torch.device) -> bool:
    """Whether the installed torch can record launches on ``device``."""
    found = torch.accelerator.current_accelerator() if get_accelerator_graph_name() is not None else None
    return found is not None and found.type == device.type


class Replayed:
    """A callable of flat inputs that is recorded on its first call with each set of sizes.

    ``changing``: the positions of the inputs that change from call to call. Recording fails, for example, if an
    operator waits for the device. Then a warning is logged, and calls with these sizes stay unrecorded.
    """

    def __init__(self, call: Call, changing: Sequence[int]) -> None:
        self._call, self._changing = call, tuple(changing)
        self._known: dict[Sizes, _Recording | None] = {}
        # All recordings share one memory pool, because they run one after the other. A run overwrites the results of
        # the run before, so results are copied.
        self._pool = get_memory_pools()

    @property
    def count(self) -> int:
        """The number of recordings, one per set of sizes."""
        return sum(recording is not None for recording in self._known.values())

    def __call__(self, *inputs: Any) -> list[torch.Tensor]:
        """Return the results as tensors that no later call overwrites."""
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
        """Run a step, then record it. Kernels are compiled and tuned in the run, because this cannot be recorded."""
        self._known.pop(sizes, None)
        values = list(inputs)
        for at in self._changing:
            values[at] = inputs[at].clone()
        answer = list(self._call(*values))
        graph = create_accelerator_graph()
        try:
            with accelerator_graph_capture_context(graph, stream=None, pool=self._pool[1]):
                results = tuple(self._call(*values))
        except RuntimeError as error:  # raised by the driver, or by an operator that waits for the device
            logger.warning("decode steps of sizes %s cannot be recorded: %s", sizes, error)
            self._known[sizes] = None
            return answer
        given = tuple(values[at] for at in self._changing)
        self._known[sizes] = _Recording(graph, given, results, stays)
        return answer
