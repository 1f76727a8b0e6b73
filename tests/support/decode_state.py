"""Decode steps of models whose state changes in every step, and Dynamo's settings around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mla_compile.dynamo.recompiles import SYMBOLIC
from tests.support.unsettled import (
    steps,
)

OPTIONS: dict[str, Any] = {"codegen": "eager", "lowering": "op", "forms": "absorbed"}


LIMITS = ("recompile_limit", "accumulated_recompile_limit")


def absorbed_runs(fast: Callable[..., Any], model: nn.Module, runs: list[int], count: int = 24) -> list[int]:
    """How many rewritten graphs ran in each step; the results are those of ``model``, which is a copy."""
    ran = []
    with torch.no_grad():
        for x in steps(count):
            before = len(runs)
            got, want = fast(x), model(x)
            assert (got - want).abs().max() <= 1e-12 * want.abs().max()
            ran.append(len(runs) - before)
    return ran


def seen_settings() -> dict[str, Any]:
    return {name: getattr(torch._dynamo.config, name) for name in (*SYMBOLIC, *LIMITS)}
