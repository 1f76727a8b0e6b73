"""Products of rows with a weight, as in torch's ``linear``: ``y[...,o] = sum_k x[...,k] weight[o,k] + bias[o]``.

A decode step multiplies one row per request by weights that must be read from memory. Torch's bfloat16 products then
take two to three times as long as the reading. On a CPU, the native kernel multiplies up to :data:`MOST` rows by one
weight, or up to :data:`MOST_OF_HEADS` rows if every head has its own small weight. A weight may be stored in fewer bits
than the rows. Torch computes products with more rows, on other devices, or in other dtypes.

On a CPU without instructions for bfloat16, torch's products of many rows in 16 bits take up to seven times as long as
in float32. There the operator can convert a piece of the weight at a time and multiply in float32.

An int8 weight [O,K] may have a scale and a zero point for each group of g columns. The codes ``weight[o,k]`` then mean
``(weight[o,k] - zeros[o,k//g]) * scales[o,k//g]``. If they have four bits, the kernel can read a packed copy instead
(:mod:`mla_compile.kernels.packed`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_compile.core.measuring import timed
from mla_compile.errors import InputError
from mla_compile.kernels import packed as four_bits
from mla_compile.kernels.cpu import native
from mla_compile.kernels.known import forms, remember

LINEAR = "mla_compile::linear"
HEADS = "mla_compile::few_rows_of_heads"
FEW, MOST = 4, 32
"""The numbers of rows up to which the native kernel is used: unless the caller names another, and at most."""
MOST_OF_HEADS = 16
LEAST_BYTES = 1 << 18
"""Graphs use the kernel from this weight size on. Smaller weights stay in a cache, and fixed call costs dominate."""
COLUMNS = native.COLUMNS
_STORED = {
    torch.float32: (torch.float32, torch.bfloat16, torch.int8),
    torch.bfloat16: (torch.bfloat16, torch.int8),
}  # dtype of the rows -> dtypes of weights that the native kernel reads
MANY = 16
"""From this number of rows on, float32 may be faster than 16 bits. Converting the weight dominates for fewer rows."""
_few: dict[object, bool] = {}  # kind of call -> whether the kernel computes it
_few_of_heads: dict[object, bool] = {}
_PIECE = 1 << 22  # numbers of a weight that are converted at a time
_GAIN = 1.1  # graphs use the operator if it is faster than torch by this factor
_SIDE, _BYTES, _ROUNDS = 2048, 1 << 26, 7  # of the measurement: side of a square weight, bytes of all weights, rounds
_MANY_ROWS, _MANY_SIDE, _MANY_ROUNDS = 128, 1024, 3  # the same for many rows and a single weight


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    most: int = FEW,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
    packed: Tensor | None = None,
    *,
    wide: bool = False,
) -> Tensor:
    """Return ``x`` [...,K] times ``weight`` [O,K] plus ``bias`` [O], as [...,O] in the dtype of ``x``.

    The bias has the dtype of ``x``; the weight has it, too, or is stored in fewer bits. The kernel is used for up to
    ``most`` rows, where ``most`` is at most :data:`MOST`. If ``wide``, products of more rows, from :data:`MANY` on, are
    computed in float32 and rounded once.

    An int8 weight may have ``scales`` [O,K/g] in float32 or the dtype of ``x``, and ``zeros`` [O,K/g] in int8. The
    kernel is used if g is a multiple of :data:`COLUMNS`. Neither the kernel nor ``wide`` rounds the scaled weight to
    the dtype of ``x``. If ``packed`` (:func:`mla_compile.kernels.packed.pack`) is given, the kernel reads it instead of
    all three. Rows must then be in bfloat16.

    Raises :class:`InputError` if the arguments do not fit together.
    """
    kind = (most, forms(x, weight, bias, scales, zeros, packed))
    few = _few.get(kind)
    if few is None:
        check(x, weight, bias, scales, zeros, packed)
        few = remember(_few, kind, _few_rows(x, weight, most, scales))
    rows = x.numel() // weight.shape[1] if weight.shape[1] else 0
    if few:
        library = native.load()
        if library is not None:
            given = x.reshape(1, rows, -1)
            if packed is not None and scales is not None:
                out = native.packed_product(library, given, packed, scales, bias)
            else:
                out = native.few_rows_product(library, given, weight[None], bias, scales, zeros)
            return out.view(*x.shape[:-1], weight.shape[0])
    with torch.autocast(x.device.type, enabled=False):  # the result has the dtype of x
        if wide and widens(x.dtype, rows):
            return in_float32(x, weight, bias, scales, zeros)
        return F.linear(x, _dequantized(weight.to(x.dtype), scales, zeros), bias)


def _few_rows(x: Tensor, weight: Tensor, most: int, scales: Tensor | None) -> bool:
    """Whether the kernel computes a product, if there is one."""
    rows = x.numel() // weight.shape[1] if weight.shape[1] else 0
    few = rows <= most and takes(x.device, x.dtype, weight.dtype, rows) and weight.numel() > 0
    return few and (scales is None or weight.shape[1] // scales.shape[1] % COLUMNS == 0)


def widens(dtype: torch.dtype, rows: int) -> bool:
    """Whether products of ``rows`` rows of ``dtype`` may be computed in float32."""
    return dtype in (torch.bfloat16, torch.float16) and rows >= MANY


def in_float32(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None, zeros: Tensor | None = None
) -> Tensor:
    """Compute the product of :func:`run`, with some rows of the weight at a time, so that its copy stays small."""
    O, K = weight.shape  # noqa: E741  the letter of the output's columns
    rows, own = x.reshape(-1, K).float(), None if bias is None else bias.float()
    out, step = x.new_empty(len(rows), O), max(1, _PIECE // K)
    for first in range(0, O, step):
        part, offset, scale, zero = (
            None if t is None else t[first : first + step] for t in (weight, own, scales, zeros)
        )
        assert part is not None
        out[:, first : first + step] = F.linear(rows, _dequantized(part.float(), scale, zero), offset)
    return out.view(*x.shape[:-1], O)


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
    kind = forms(x, weight)
    few = _few_of_heads.get(kind)
    if few is None:
        check_of_heads(x, weight)
        few = 1 <= math.prod(x.shape[1:-1]) <= MOST_OF_HEADS and weight.numel() > 0
        few = remember(_few_of_heads, kind, few and reads(x.device, x.dtype, weight.dtype))
    G, O, K = weight.shape  # noqa: E741  the letter of the output's columns
    if few:
        library = native.load()
        if library is not None:
            rows = x.reshape(G, -1, K)
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
    most: int = FEW,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
    packed: Tensor | None = None,
    *,
    wide: bool = False,
) -> Tensor:
    """Return an empty tensor like the result."""
    check(x, weight, bias, scales, zeros, packed)
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    zeros: Tensor | None,
    packed: Tensor | None = None,
) -> None:
    """Raise :class:`InputError` if the arguments do not fit together."""
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise InputError(
            f"{LINEAR}: x is {list(x.shape)} and weight {list(weight.shape)}, expected [...,K] and [O,K]; transpose one"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise InputError(f"{LINEAR}: bias is {list(bias.shape)}, expected [O] = [{weight.shape[0]}]")
    _check_groups(x, weight, scales, zeros)
    _check_stored(LINEAR, x, weight, *(() if bias is None else (bias,)))
    if packed is None:
        return
    shape = None if scales is None else four_bits.shape_of(weight, scales)
    if packed.shape != shape or packed.dtype != torch.int32 or x.dtype != torch.bfloat16 or packed.device != x.device:
        raise InputError(
            f"{LINEAR}: packed is {packed.dtype} {list(packed.shape)} on {packed.device} beside rows in {x.dtype}; "
            f"expected torch.int32 {shape and list(shape)} on {x.device} and rows in torch.bfloat16"
        )


def _check_groups(x: Tensor, weight: Tensor, scales: Tensor | None, zeros: Tensor | None) -> None:
    O, K = weight.shape  # noqa: E741  the letter of the output's columns
    given = [t for t in (scales, zeros) if t is not None]
    rows, groups = scales.shape if scales is not None and scales.dim() == 2 else (None, 0)
    if given and not (rows == O and groups and K % groups == 0 and all(t.shape == given[0].shape for t in given)):
        said = ", ".join("none" if t is None else str(list(t.shape)) for t in (scales, zeros))
        raise InputError(f"{LINEAR}: scales and zeros are {said}; expected [O,K/g] of a weight [O,K] = [{O}, {K}]")
    if scales is None:
        return
    codes = [weight] if zeros is None else [weight, zeros]
    fits = all(t.dtype == torch.int8 for t in codes) and scales.dtype in (torch.float32, x.dtype)
    if not fits or any(t.device != x.device for t in given):
        said = ", ".join(f"{t.dtype} on {t.device}" for t in (*codes, scales))
        raise InputError(f"{LINEAR}: codes and scales are {said}; expected torch.int8, and {x.dtype} or torch.float32")


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


def packs(device: torch.device, dtype: torch.dtype, scales: torch.dtype, width: int) -> bool:
    """Whether the kernel multiplies rows of ``dtype`` faster by packed codes than by codes in int8, as measured.

    ``width``: the number of columns that share a scale, whose dtype is ``scales``.
    """
    kinds = dtype == torch.bfloat16 and scales in (torch.float32, torch.bfloat16)
    if device.type != "cpu" or not kinds or width % COLUMNS or native.load() is None:
        return False
    return _measured_packed(scales, torch.get_num_threads()) >= _GAIN


def many_rows(device: torch.device, dtype: torch.dtype, stored: torch.dtype, width: int = 0) -> torch.dtype | None:
    """Return the dtype in which the operator multiplies many rows faster than compiled code of torch, as measured.

    None if torch is faster. Compiled code dequantizes a weight with scales (``width`` is not 0) before the product.
    """
    if device.type != "cpu" or not widens(dtype, MANY) or stored not in (dtype, *_STORED.get(dtype, ())):
        return None
    seconds = _measured_many(dtype, stored, torch.get_num_threads())
    best = min((dtype, torch.float32), key=lambda each: seconds[each])
    by_torch = seconds[dtype if width or stored == dtype else stored]
    return best if by_torch >= _GAIN * seconds[best] else None


@functools.cache
def _measured(dtype: torch.dtype, stored: torch.dtype, rows: int, threads: int) -> float:
    """Return how many times as fast as torch the kernel is on weights read from memory; 0 if there is no kernel.

    The best rounds of both are compared. The measurement takes a tenth of a second.
    """
    library = native.load()
    if library is None:
        return 0.0
    # For more than a few rows, it hardly matters where the weights are read from, and products take longer.
    few = rows <= FEW
    count, rounds = (_BYTES // _SIDE**2 // stored.itemsize, _ROUNDS) if few else (2, _MANY_ROUNDS)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        weights = [torch.ones(_SIDE, _SIDE, dtype=stored) for _ in range(count)]
        x = torch.ones(rows, _SIDE, dtype=dtype)
        by_torch, by_kernel = _best(
            rounds,
            lambda: [_by_torch(x, w) for w in weights],
            lambda: [native.few_rows_product(library, x[None], w[None]) for w in weights],
        )
    return by_torch / by_kernel


@functools.cache
def _measured_packed(scales: torch.dtype, threads: int) -> float:
    """Return how many times as fast the kernel is if codes with ``scales`` are packed."""
    library = native.load()
    assert library is not None
    of_groups, x = torch.ones(_SIDE, _SIDE // COLUMNS, dtype=scales), torch.ones(1, 1, _SIDE, dtype=torch.bfloat16)
    codes = [torch.ones(1, _SIDE, _SIDE, dtype=torch.int8) for _ in range(_BYTES // _SIDE**2)]
    words = [torch.zeros(four_bits.shape_of(each[0], of_groups), dtype=torch.int32) for each in codes]
    as_stored, packed = _best(
        _ROUNDS,
        lambda: [native.few_rows_product(library, x, each, None, of_groups) for each in codes],
        lambda: [native.packed_product(library, x, each, of_groups) for each in words],
    )
    return as_stored / packed


@functools.cache
def _measured_many(dtype: torch.dtype, stored: torch.dtype, threads: int) -> dict[torch.dtype, float]:
    """Return the seconds of a product of many rows in ``dtype``, in float32, and as compiled code reads ``stored``."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        weight, x = torch.ones(_MANY_SIDE, _MANY_SIDE, dtype=stored), torch.ones(_MANY_ROWS, _MANY_SIDE, dtype=dtype)
        ways = {dtype: lambda: run(x, weight, most=0), torch.float32: lambda: in_float32(x, weight)}
        if stored != dtype:
            ways[stored] = lambda: _by_torch(x, weight)
        return dict(zip(ways, _best(_MANY_ROUNDS, *ways.values()), strict=True))


def _best(rounds: int, *calls: Callable[[], object]) -> list[float]:
    """Return the seconds of each call in its best round. The calls take turns."""
    return [min(times) for times in zip(*([timed(call) for call in calls] for _ in range(rounds)), strict=True)]


def _by_torch(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the product with torch's fastest operator, which for int8 is the one that Inductor uses."""
    if weight.dtype == x.dtype:
        return F.linear(x, weight)
    return torch._weight_int8pack_mm(x, weight, torch.ones(len(weight), dtype=x.dtype))
