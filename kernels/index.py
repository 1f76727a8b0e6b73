"""Scores of keys by the indexer of a sparse attention: one call on the kernel of its device.

The equation and the arguments are those of :class:`mla_compile.kernels.call.IndexCall`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_compile.kernels import checks, reference
from mla_compile.kernels.call import IndexCall
from mla_compile.kernels.cpu import index as cpu


def run(call: IndexCall) -> Tensor:
    """[B,S,T] float32 (float64 for float64 keys). Raises :class:`InputError` where the arguments do not fit together."""
    checks.check_index(call)
    if call.query.is_cpu:
        return cpu.index_scores(call)
    with torch.autocast(call.query.device.type, enabled=False):  # the reference chooses its own precision
        return reference.index_scores(call)
