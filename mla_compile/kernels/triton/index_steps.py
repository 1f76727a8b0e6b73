"""The Triton launch of one indexer call, as data (:class:`mla_compile.kernels.triton.step.Step`).

With these block sizes, the kernel compiles without spills for all targets of benchmarks/gpu/offline.py. The sizes were
not tuned on a GPU.
"""

from __future__ import annotations

import torch

from mla_compile.kernels.call import IndexCall
from mla_compile.kernels.tiles import padded
from mla_compile.kernels.triton.step import Arguments, Step

HEADS, KEYS, FEATURES = 64, 64, 64  # sizes of a block in half precision
FLOAT32 = 32  # keys and features of a block in float32, for which tensor cores have no exact products
BUFFERS = ("query", "keys", "weights", "out")


def index_step(call: IndexCall, most: int = 0) -> Step:
    """Return the launch of a call, which writes ``out`` f32 [B,S,T], contiguous. Accepts meta tensors.

    If ``most`` is above T, the grid is for ``most`` keys. A launch may have fewer keys.
    """
    import mla_compile.kernels.triton.index_triton as kernels
    import triton.language as tl

    query, keys, weights, scale = call
    (B, S, J, D), T = query.shape, keys.shape[1]
    whole = query.dtype == torch.float32
    to = Arguments()
    for name, x in zip(BUFFERS, call[:3], strict=False):
        to.pointer(name, x)
    to.scratch("out", "out", "*fp32")
    to.strides({f"query_{axis}": query.stride(i) for i, axis in enumerate("bsjd")})
    to.strides({f"keys_{axis}": keys.stride(i) for i, axis in enumerate("btd")})
    to.strides({f"weights_{axis}": weights.stride(i) for i, axis in enumerate("bsj")})
    to.scalars |= {"scale": float(scale), "S": S, "T": T}
    block = FLOAT32 if whole else KEYS
    to.constants |= {
        "J": J,
        "D": D,
        "BLOCK_J": min(HEADS, padded(J)),
        "BLOCK_T": block,
        "BLOCK_D": min(FLOAT32 if whole else FEATURES, padded(D)),
        "DTYPE": {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}.get(query.dtype, tl.float32),
        "PRECISION": "ieee" if whole else "tf32",
    }
    # Queries are on the first axis of the grid, because only that axis may have more than 65535 blocks.
    grid = (B * S, -(-max(T, most) // block), 1)
    return to.step("index_scores", kernels.index_scores, grid, {"num_warps": 4, "num_stages": 3})
