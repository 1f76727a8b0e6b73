"""What the passes know about the machine that will run a program. No other module of the passes queries the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mla_compile.kernels import launch, linear
from mla_compile.kernels.cpu import native
from mla_compile.passes.rewrite.linear_operator import LinearOperator


@dataclass(frozen=True)
class Target:
    """A machine. Facts that take long to find (the C kernel is built on first use) are found when a pass needs them.

    Attributes:
        runs: whether a kernel runs the operator over given rows. The operator's reference implementation is not such a
            kernel: it is no faster than the model's own code.
        reads_float8: whether a kernel on a given device reads rows in float8.
        linear: when the operator for products with a weight is faster than compiled code.
        reads_heads: whether a kernel for products of a few rows with a weight for each head supports a device, a dtype
            of the rows and a dtype of the weights.
        most_of_heads: the most rows for the kernel of ``reads_heads``.
        ranks: the number of processes that run the model.
    """

    runs: Callable[[torch.Tensor], bool]
    reads_float8: Callable[[torch.device], bool]
    linear: LinearOperator
    reads_heads: Callable[[torch.device, torch.dtype, torch.dtype], bool]
    most_of_heads: int
    ranks: int


def this_machine() -> Target:
    """Return the machine of this process."""
    return Target(
        _runs,
        _reads_float8,
        LinearOperator(linear.pays, linear.MOST, linear.many_rows, linear.MANY, linear.LEAST_BYTES, linear.packs),
        linear.reads_heads,
        linear.MOST_OF_HEADS,
        _ranks(),
    )


def _runs(rows: torch.Tensor) -> bool:
    if rows.device.type == "cuda":  # a traced tensor may be on "cuda" where there is no GPU
        return torch.cuda.is_available() and launch.reads(rows)
    return rows.device.type == "cpu" and native.load() is not None


def _reads_float8(device: torch.device) -> bool:
    return device.type == "cuda" or (device.type == "cpu" and native.load() is not None)


def _ranks() -> int:
    group = torch.distributed
    return group.get_world_size() if group.is_available() and group.is_initialized() else 1
