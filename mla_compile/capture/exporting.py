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
    """``torch.export.export`` in non-strict mode; ``deferred``: conditions on sizes become asserts in the graph.

    The cache of fake tensors is disabled: with dynamic sizes it costs more than it saves, and the program would keep
    the cached tensors alive. With the cache, tracing and decomposing the steps of a model takes a quarter longer.
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
