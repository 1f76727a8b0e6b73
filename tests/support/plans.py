"""Plans for DeepSeek-V3's sizes."""

from __future__ import annotations

from typing import Any

import torch

from mla_compile.kernels.devices import PRESETS
from mla_compile.kernels.plan import Plan, plan

KB = 1024
HALF, FLOAT, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
H200 = PRESETS["sm_90"]


def make(**changes: Any) -> Plan:
    """A plan for DeepSeek-V3's sizes on an H200, but for ``changes``."""
    sizes: dict[str, Any] = {"B": 1, "S": 1, "H": 128, "L": 512, "R": 64, "T": 4096}
    return plan(**{**sizes, "query_dtype": HALF, "cache_dtype": HALF, "device": H200, "gluon": False, **changes})
