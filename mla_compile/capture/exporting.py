"""``torch.export.export`` with the settings of this library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def traced_program(
    module: torch.nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None = None,
    *,
    dynamic_shapes: Any = None,
    deferred: bool = False,
) -> torch.export.ExportedProgram:
    """Run ``torch.export.export`` in non-strict mode. ``deferred``: conditions on sizes become asserts in the graph.

    The cache of fake tensors is disabled. With dynamic sizes, the cache would make tracing and decomposing a model's
    steps a quarter slower. The program would also keep the cached tensors alive.
    """
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        return torch.export.export(
            module,
            tuple(args),
            None if kwargs is None else dict(kwargs),
            dynamic_shapes=dynamic_shapes,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=deferred,
        )
