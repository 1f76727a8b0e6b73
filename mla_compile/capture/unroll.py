"""Traces a loop over the experts that have tokens as a loop over all experts.

A mixture-of-experts layer that is written as a loop computes which experts have tokens (``nonzero``), and which tokens
each expert has (``where``). Both depend on values, which an export does not have. An expert without tokens adds
nothing, so the loop may visit every expert. The products of such an expert have no rows, so a test that skips empty
experts may be traced as if there were rows. These assumptions cannot be proved from outside the model, so a program
that is exported in this mode is compared with the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class UnrolledExperts(TorchFunctionMode):
    """While this mode is active, ``nonzero`` of a vector of known length returns every index, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._every: torch.Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Replace ``nonzero`` and the iteration over its result, and assume that ``where`` finds at least one token."""
        given = dict(kwargs or {})
        if func in (torch.nonzero, torch.Tensor.nonzero) and not given.get("as_tuple") and _is_vector(args):
            self._every = torch.tensor([[index] for index in range(args[0].shape[0])])
            return self._every
        if func is torch.Tensor.unbind and args[0] is self._every and self._every is not None:
            # Constants created here keep their values in a trace. Slices of a traced tensor do not.
            return tuple(torch.tensor([index]) for index in range(self._every.shape[0]))
        result = func(*args, **given)
        if func is torch.where and len(args) == 1 and not given:
            rows = result[0].shape[0]
            if not isinstance(rows, int):
                torch._check(rows > 0)
        return result


def _is_vector(args: Sequence[Any]) -> bool:
    return bool(args) and args[0].dim() == 1 and isinstance(args[0].shape[0], int)
