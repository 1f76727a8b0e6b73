"""Products of a few rows with a weight, as in torch's ``linear``: ``y[...,o] = sum_k x[...,k] weight[o,k] + bias[o]``.

A decode step multiplies one row per request by weights that must be read from memory. Torch's bfloat16 products then
take two to three times as long as the reading. On a CPU, the native kernel multiplies up to :data:`MOST` rows by one
weight, or up to :data:`MOST_OF_HEADS` rows if every head has its own small weight. A weight may be stored in fewer bits
than the rows. Torch computes products with more rows, on other devices, or in other dtypes.

An int8 weight [O,K] may have a scale and a zero point for each group of g columns. The codes ``weight[o,k]`` then mean
``(weight[o,k] - zeros[o,k//g]) * scales[o,k//g]``.
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
HEADS = "mla_compile::few_rows_of_heads"
MOST = 4
MOST_OF_HEADS = 16
LEAST_BYTES = 1 << 18
"""Graphs use the kernel from this weight size on. Smaller weights stay in a cache, and fixed call costs dominate."""
COLUMNS = native.COLUMNS
_STORED = {
    torch.float32: (torch.float32, torch.bfloat16, torch.int8),
    torch.bfloat16: (torch.bfloat16, torch.int8),
}  # dtype of the rows -> dtypes of weights that the native kernel reads
_GAIN = 1.1  # graphs use the kernel if it is faster than torch by this factor
_SIDE, _BYTES, _ROUNDS = 2048, 1 << 26, 7  # of the measurement: side of a square weight, bytes of all weights, rounds


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    most: int = MOST,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
) -> Tensor:
    """Return ``x`` [...,K] times ``weight`` [O,K] plus ``bias`` [O], as [...,O] in the dtype of ``x``.

    The bias has the dtype of ``x``; the weight has it, too, or is stored in fewer bits. The kernel is used for up to
    ``most`` rows, where ``most`` is at most :data:`MOST`.

    An int8 weight may have ``scales`` [O,K/g] in float32 or the dtype of ``x``, and ``zeros`` [O,K/g] in int8. The
    kernel is used if g is a multiple of :data:`COLUMNS`. It does not round the scaled weight to the dtype of ``x``.

    Raises :class:`InputError` if the arguments do not fit together.
    """
    check(x, weight, bias, scales, zeros)
    rows = x.numel() // weight.shape[1] if weight.shape[1] else 0
    few = rows <= most and takes(x.device, x.dtype, weight.dtype, rows) and weight.numel() > 0
    if few and (scales is None or weight.shape[1] // scales.shape[1] % COLUMNS == 0):
        library = native.load()
        if library is not None:
            out = native.few_rows_product(library, x.reshape(1, rows, -1), weight[None], bias, scales, zeros)
            return out.view(*x.shape[:-1], weight.shape[0])
    with torch.autocast(x.device.type, enabled=False):  # the result has the dtype of x
        return F.linear(x, _dequantized(weight.to(x.dtype), scales, zeros), bias)


def _dequantized(weight: Tensor, scales: Tensor | None, zeros: Tensor | None) -> Tensor:
    """Return the weight [O,K] for codes that have been converted to its dtype."""
    if scales is None or not weight.numel():
        return weight
    codes = weight.reshape(*scales.shape, -1)
    scaled = (codes if zeros is None else codes - zeros[..., None]) * scales[..., None]
    return scaled.reshape(weight.shape).to(weight.dtype)


def run_of_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x`` [G,...,K] times ``weight`` [G,O,K], as [G,...,O]; the weight may be stored in fewer bits.

    Raises :class:`InputError` if the arguments do not fit together.
    """
    check_of_heads(x, weight)
    G, O, K = weight.shape  # noqa: E741  the letter of the output's columns
    rows = x.reshape(G, -1, K) if K else x.new_empty(G, 0, 0)
    if reads(x.device, x.dtype, weight.dtype) and 1 <= rows.shape[1] <= MOST_OF_HEADS and weight.numel():
        library = native.load()
        if library is not None:
            return native.few_rows_product(library, rows, weight).view(*x.shape[:-1], O)
    with torch.autocast(x.device.type, enabled=False):
        return torch.einsum("g...k,gok->g...o", x, weight.to(x.dtype))


def fake_of_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Return an empty tensor like the result."""
    check_of_heads(x, weight)
    return x.new_empty(*x.shape[:-1], weight.shape[1])


def fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    most: int = MOST,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
) -> Tensor:
    """Return an empty tensor like the result."""
    check(x, weight, bias, scales, zeros)
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def check(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None, zeros: Tensor | None) -> None:
    """Raise :class:`InputError` if the arguments do not fit together."""
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise InputError(
            f"{ROWS}: x is {list(x.shape)} and weight {list(weight.shape)}, expected [...,K] and [O,K]; transpose one"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise InputError(f"{ROWS}: bias is {list(bias.shape)}, expected [O] = [{weight.shape[0]}]")
    _check_groups(x, weight, scales, zeros)
    _check_stored(ROWS, x, weight, *(() if bias is None else (bias,)))


def _check_groups(x: Tensor, weight: Tensor, scales: Tensor | None, zeros: Tensor | None) -> None:
    O, K = weight.shape  # noqa: E741  the letter of the output's columns
    given = [t for t in (scales, zeros) if t is not None]
    rows, groups = scales.shape if scales is not None and scales.dim() == 2 else (None, 0)
    if given and not (rows == O and groups and K % groups == 0 and all(t.shape == given[0].shape for t in given)):
        said = ", ".join("none" if t is None else str(list(t.shape)) for t in (scales, zeros))
        raise InputError(f"{ROWS}: scales and zeros are {said}; expected [O,K/g] of a weight [O,K] = [{O}, {K}]")
    if scales is None:
        return
    codes = [weight] if zeros is None else [weight, zeros]
    fits = all(t.dtype == torch.int8 for t in codes) and scales.dtype in (torch.float32, x.dtype)
    if not fits or any(t.device != x.device for t in given):
        said = ", ".join(f"{t.dtype} on {t.device}" for t in (*codes, scales))
        raise InputError(f"{ROWS}: codes and scales are {said}; expected torch.int8, and {x.dtype} or torch.float32")


def check_of_heads(x: Tensor, weight: Tensor) -> None:
    """Raise :class:`InputError` if the arguments do not fit together."""
    fits = x.dim() >= 2 and weight.dim() == 3 and x.shape[0] == weight.shape[0] and x.shape[-1] == weight.shape[2]
    if not fits:
        raise InputError(
            f"{HEADS}: x is {list(x.shape)} and weight {list(weight.shape)}, expected [G,...,K] and [G,O,K]"
        )
    _check_stored(HEADS, x, weight)


def _check_stored(name: str, x: Tensor, weight: Tensor, *others: Tensor) -> None:
    given = [x, weight, *others]
    stored = weight.dtype == x.dtype or weight.dtype in _STORED.get(x.dtype, ())
    if not stored or any(t.dtype != x.dtype for t in others) or len({t.device for t in given}) > 1:
        said = ", ".join(f"{t.dtype} on {t.device}" for t in given)
        raise InputError(f"{name}: got {said}; expected one dtype and one device, cast or move them")


def reads(device: torch.device, dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Whether the native kernel can multiply rows of ``dtype`` by a weight of dtype ``stored``."""
    return device.type == "cpu" and stored in _STORED.get(dtype, ())


def takes(device: torch.device, dtype: torch.dtype, stored: torch.dtype, rows: int) -> bool:
    """Whether the native kernel can replace torch's product of ``rows`` rows with one weight."""
    return reads(device, dtype, stored) and stored in (dtype, torch.int8) and 1 <= rows <= MOST


def reads_heads(device: torch.device, dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Whether the native kernel multiplies each head's rows (up to :data:`MOST_OF_HEADS`) by the head's own weight.

    The kernel was faster than torch in every measurement of such a product (``benchmarks/few_rows.py``).
    """
    return reads(device, dtype, stored) and native.load() is not None


def pays(device: torch.device, dtype: torch.dtype, stored: torch.dtype, rows: int, width: int = 0) -> bool:
    """Whether the native kernel is faster than torch, measured on this machine with torch's current thread count.

    ``width`` is the number of columns that share a scale, or 0 for a weight without scales. A weight with scales needs
    no measurement: torch dequantizes it in every call, which takes many times as long (``benchmarks/peers_cpu``).
    """
    if not takes(device, dtype, stored, rows):
        return False
    if width:
        return width % COLUMNS == 0 and native.load() is not None
    return _measured(dtype, stored, rows, torch.get_num_threads()) >= _GAIN


@functools.cache
def _measured(dtype: torch.dtype, stored: torch.dtype, rows: int, threads: int) -> float:
    """Return how many times as fast as torch the kernel is on weights read from memory; 0 if there is no kernel.

    The best rounds of both are compared. The measurement takes a tenth of a second.
    """
    library = native.load()
    if library is None:
        return 0.0
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        weights = [torch.ones(_SIDE, _SIDE, dtype=stored) for _ in range(_BYTES // _SIDE**2 // stored.itemsize)]
        x, scales = torch.ones(rows, _SIDE, dtype=dtype), torch.ones(_SIDE, dtype=dtype)
        best = {"torch": float("inf"), "native": float("inf")}
        for _ in range(_ROUNDS):
            best["torch"] = min(best["torch"], timed(lambda: [_by_torch(x, w, scales) for w in weights]))
            best["native"] = min(
                best["native"], timed(lambda: [native.few_rows_product(library, x[None], w[None]) for w in weights])
            )
    return best["torch"] / best["native"]


def _by_torch(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Compute the product with torch's fastest operator, which for int8 is the one that Inductor uses."""
    return F.linear(x, weight) if weight.dtype == x.dtype else torch._weight_int8pack_mm(x, weight, scales)
