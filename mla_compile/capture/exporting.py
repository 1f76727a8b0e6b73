"""``torch.export``, as this library calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def traced_program(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    deferred: bool = False,
) -> torch.export.ExportedProgram:
    """``torch.export.export`` in its mode for any Python; ``deferred``: what sizes have to be is asserted in the graph.

    Fake tensors remember the results of operators by the shapes of their inputs. Sizes that are left open make such
    a memory cost more than it saves, and the program keeps the tensors that it was traced with: with it, tracing
    and decomposing the steps of a model takes a quarter longer.
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
