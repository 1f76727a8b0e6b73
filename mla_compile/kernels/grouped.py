"""Products of rows with one weight for each group of rows, as a mixture of experts computes them.

Rows are sorted by group: ``y[m,o] = sum_k x[m,k] weight[e,o,k]`` for ``ends[e-1] <= m < ends[e]``. Torch computes this
as ``torch._grouped_mm``. On a CPU, each group is multiplied as :mod:`mla_compile.kernels.linear` multiplies its rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.errors import InputError
from mla_compile.kernels import linear
from mla_compile.kernels.cpu import native

GROUPED = "mla_compile::grouped_linear"


def run(x: Tensor, weight: Tensor, ends: Tensor, most: int = linear.FEW, *, wide: bool = False) -> Tensor:
    """Return ``x`` [M,K] times the weight of each row's group, as [M,O] in the dtype of ``x``.

    ``weight`` [E,O,K] has the dtype of ``x``. ``ends`` [E] is int32 or int64, and rises: group e has the rows from
    ``ends[e-1]`` (or 0) to ``ends[e]``. Rows after the last group become 0. ``most`` and ``wide`` are those of
    :func:`mla_compile.kernels.linear.run`, for the rows of one group.

    Raises :class:`InputError` if the arguments do not fit together.
    """
    check(x, weight, ends)
    native_rows = min(most, linear.MOST) if linear.takes(x.device, x.dtype, weight.dtype, 1) else 0
    library = native.load() if native_rows else None
    out, first = x.new_zeros(len(x), weight.shape[1]), 0
    with torch.autocast(x.device.type, enabled=False):
        for e, last in enumerate(ends.tolist()):
            rows = x[first:last]
            if len(rows):
                own = weight[e]
                if library is not None and len(rows) <= native_rows:
                    out[first:last] = native.few_rows_product(library, rows[None], own[None])[0]
                elif wide and x.shape[1] and linear.widens(x.dtype, len(rows)):
                    out[first:last] = linear.in_float32(rows, own)
                else:
                    out[first:last] = F.linear(rows, own)
            first = max(first, last)
    return out


def fake(x: Tensor, weight: Tensor, ends: Tensor, most: int = linear.FEW, *, wide: bool = False) -> Tensor:
    """Return an empty tensor like the result."""
    check(x, weight, ends)
    return x.new_empty(x.shape[0], weight.shape[1])


def check(x: Tensor, weight: Tensor, ends: Tensor) -> None:
    """Raise :class:`InputError` if the arguments do not fit together."""
    shapes = x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[2] and ends.dim() == 1
    if not shapes or ends.shape[0] != weight.shape[0]:
        said = ", ".join(str(list(t.shape)) for t in (x, weight, ends))
        raise InputError(f"{GROUPED}: x, weight and ends are {said}; expected [M,K], [E,O,K] and [E]")
    kinds = x.dtype == weight.dtype and ends.dtype in (torch.int32, torch.int64)
    if not kinds or len({t.device for t in (x, weight, ends)}) > 1:
        said = ", ".join(f"{t.dtype} on {t.device}" for t in (x, weight, ends))
        raise InputError(f"{GROUPED}: got {said}; expected x and weight of one dtype, integers as ends, and one device")
