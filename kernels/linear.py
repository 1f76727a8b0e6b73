"""Products of a few rows with a weight: ``y[...,o] = sum_k x[...,k] weight[o,k] + bias[o]``, as torch's own ``linear``.

A decode step multiplies one row per request by weights that have to come from memory, and torch's bfloat16 products
then take two to three times as long as reading the weights. On a CPU the native kernel takes up to :data:`MOST` rows.
More rows, other devices and other dtypes are left to torch.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.core.measuring import timed
from mla_compile.errors import InputError
from mla_compile.kernels.cpu import native

ROWS = "mla_compile::few_rows_linear"
MOST = native.MAX_FEW
LEAST_BYTES = 1 << 18
"""A smaller weight stays in a cache, and the fixed costs of a call dominate."""
_DTYPES = (torch.float32, torch.bfloat16)
_GAIN = 1.1  # the kernel is used if it is faster than torch by this factor
_SIDE, _WEIGHTS, _ROUNDS = 2048, 4, 7  # the measurement: the side and number of square weights, and the rounds


def run(x: Tensor, weight: Tensor, bias: Tensor | None = None, most: int = MOST) -> Tensor:
    """[...,O] from ``x`` [...,K], ``weight`` [O,K] and ``bias`` [O], all of one dtype.

    ``most``: the number of rows up to which the kernel is used, at most :data:`MOST`. Raises :class:`InputError` if the
    arguments do not fit together.
    """
    check(x, weight, bias)
    rows = x.numel() // weight.shape[1] if weight.shape[1] else 0
    if rows <= most and takes(x.device, x.dtype, rows) and weight.numel():
        library = native.load()
        if library is not None:
            out = native.few_rows_linear(library, x.reshape(rows, -1), weight, bias)
            return out.view(*x.shape[:-1], weight.shape[0])
    with torch.autocast(x.device.type, enabled=False):  # the result has the dtype of x
        return F.linear(x, weight, bias)


def fake(x: Tensor, weight: Tensor, bias: Tensor | None = None, most: int = MOST) -> Tensor:
    """An empty tensor like the result."""
    check(x, weight, bias)
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise :class:`InputError` if the arguments do not fit together."""
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise InputError(
            f"{ROWS}: x is {list(x.shape)} and weight {list(weight.shape)}, expected [...,K] and [O,K]; transpose one"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise InputError(f"{ROWS}: bias is {list(bias.shape)}, expected [O] = [{weight.shape[0]}]")
    given = [x, weight] if bias is None else [x, weight, bias]
    if len({(t.dtype, t.device) for t in given}) > 1:
        said = ", ".join(f"{t.dtype} on {t.device}" for t in given)
        raise InputError(f"{ROWS}: got {said}; expected one dtype and one device, cast or move them")


def takes(device: torch.device, dtype: torch.dtype, rows: int) -> bool:
    """Whether the native kernel supports such a product."""
    return device.type == "cpu" and dtype in _DTYPES and 1 <= rows <= MOST


def pays(device: torch.device, dtype: torch.dtype, rows: int) -> bool:
    """Whether the native kernel was measured to be faster than torch here, with torch's current number of threads."""
    return takes(device, dtype, rows) and _measured(dtype, rows, torch.get_num_threads()) >= _GAIN


@functools.cache
def _measured(dtype: torch.dtype, rows: int, threads: int) -> float:
    """The speed of the kernel relative to torch on weights that come from memory; 0 if there is no kernel.

    Compares the best rounds of both, which takes a tenth of a second.
    """
    library = native.load()
    if library is None:
        return 0.0
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        weights = [torch.ones(_SIDE, _SIDE, dtype=dtype) for _ in range(_WEIGHTS)]
        x = torch.ones(rows, _SIDE, dtype=dtype)
        best = {"torch": float("inf"), "native": float("inf")}
        for _ in range(_ROUNDS):
            best["torch"] = min(best["torch"], timed(lambda: [F.linear(x, w) for w in weights]))
            best["native"] = min(
                best["native"], timed(lambda: [native.few_rows_linear(library, x, w, None) for w in weights])
            )
    return best["torch"] / best["native"]
