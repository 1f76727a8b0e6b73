"""The indexer's scores on CPU: the native kernel (native.py), or torch's operators if the kernel cannot run.

Torch's operators process the keys in blocks, so that the products of all heads stay in the processor's cache.
The products are in float32 (float64 for float64), because bfloat16 would round the scores that select the best keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_compile.kernels.call import IndexCall
from mla_compile.kernels.cpu import native
from mla_compile.kernels.reference import compute_dtype

BLOCK = 2048  # keys in one block: 0.5 MiB of float32 products at J = 64


def index_scores(call: IndexCall) -> Tensor:
    """Compute :func:`mla_compile.kernels.reference.index_scores` for a call whose tensors are on a CPU."""
    query, keys = call.query, call.keys
    dtype = compute_dtype(keys)
    if 0 in query.shape or keys.shape[1] == 0:  # nothing to sum, or an empty result
        return query.new_zeros(*query.shape[:2], keys.shape[1], dtype=dtype)
    library = None if dtype == torch.float64 else native.load()
    if library is not None and native.takes(library, query, keys):
        return native.index_scores(library, call)
    with torch.autocast("cpu", enabled=False):  # autocast would turn the float32 products below into bfloat16 ones
        return _in_blocks(call, dtype)


def _in_blocks(call: IndexCall, dtype: torch.dtype) -> Tensor:
    (B, S, J, D), T = call.query.shape, call.keys.shape[1]
    weights = call.weights.to(dtype)[:, :, None, :]
    out = call.query.new_empty(B, S, T, dtype=dtype)
    rows = max(1, BLOCK // S)  # keys in a block; S queries are multiplied together
    query = call.query.to(dtype).reshape(B, S * J, D)
    for start in range(0, T, rows):
        block = call.keys[:, start : start + rows].to(dtype)
        products = (query @ block.transpose(1, 2)).mul_(call.scale).relu_().view(B, S, J, -1)
        out[:, :, start : start + rows] = (weights @ products).squeeze(2)
    return out
