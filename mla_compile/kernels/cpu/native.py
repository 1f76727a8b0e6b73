"""The native CPU kernels for decode attention, the indexer, and products of a few rows: built from csrc/ on first use.

Inductor builds the kernels with its compiler, flags and locked disk cache, so they are available wherever
``torch.compile`` works on CPU. The first use on a machine takes 10 to 20 s. The kernels are called through ctypes. If
they cannot be built, :func:`load` logs the reason in one line, and torch's operators compute the same.
``MLA_COMPILE_NATIVE=0`` in the environment disables the kernels.

The design choices, with measured speeds in GFLOP/s of CPU time, for 2BSHT(2L+R) operations at L = 512 and R = 64.
Unless another core is named, the measurements are from one core with AVX-512 and AMX:

* **float32 with fused multiply-adds**: 132 at 16 heads with the cache in L2, 95 from memory. Scores and sums are
  vectors over query rows, so that the softmax needs no reduction inside a vector.
* **Operands stay in registers, and a few columns of the query in the first-level cache. From 64 query rows on, values
  are packed side by side**: 10 to 32 % faster on a core with only AVX2. That core then reaches 48 at 16 heads and 71 at
  128 heads, from memory. MKL's product of square matrices reaches 53 on it.
* **bfloat16 on AMX**: 290 at 16 heads, 540 at 128. Rows are used in place. Query and softmax weights are each split
  into two bfloat16 terms. The log-sum-exp is off by 3e-6 (in float32: 7e-7), which disappears when the result is
  rounded.
* **float32 on AMX**, with three bfloat16 terms per number and six products: 200 at 128 heads, where multiply-adds reach
  149. Small products are added first, and each tile has its own sum, so that the error is 3.4e-7 instead of 6.1e-7
  (multiply-adds: 4.9e-7). Up to 48 query rows, multiply-adds are used, because splitting the cached rows into terms
  costs more than AMX saves.
* **Values are rearranged 64 columns at a time**, in the first-level cache, and each tile of rows is loaded once for all
  terms of the other factor: 5 to 11 % less time than if a whole tile of keys is rearranged at once.
* **Scores of an indexer** with 64 heads of 128 columns, on a core without AMX: 96 in float32, 180 in bfloat16 with
  AVX512-BF16 (96 if bfloat16 is converted to float32).
* **The next tile is prefetched during the products of the current tile**: 8 to 18 % less time from memory, except for
  float32 on AMX, where it makes no difference. Spreading the prefetches over all scores of a tile of 66 keys saves
  another 3 to 15 % on a core with only AVX2, up to 16 heads.
* **Rows of a weight are prefetched 8 KiB ahead**, two rows side by side: on two cores with only AVX2, products of a few
  rows take 5 to 30 % less time, and short bfloat16 rows gain most. With AVX-512, rows below 8 KiB are prefetched 4 KiB
  ahead: 10 to 30 % less time for rows of 512 or 1024 bytes.
* **Integer codes are multiplied by bfloat16 rows as 16-bit integers**, two at a time: on two cores with only AVX2,
  products with packed codes take 20 % (one row) to 54 % (four) less time than in float32, and those with int8 codes
  and scales 25 %. Int8 codes without scales gain from four rows on, because reading them takes as long.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mla_compile.core import trusted
from mla_compile.core.counting import count
from mla_compile.kernels.call import DecodeCall, IndexCall

log = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "csrc" / "decode_attention.cpp"
# Inductor disables both for its generated code. These flags are placed after Inductor's own flags.
FLAGS = ("-ffp-contract=fast", "-ftree-loop-vectorize")
KINDS = {
    torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3, torch.bool: 4, torch.float8_e4m3fn: 5,
    torch.int8: 6,
}  # fmt: skip
_INT4 = 7  # the kind of packed codes, which have no dtype
CALL = struct.Struct("@49q2d")  # struct Call in csrc/call.h
INDEX_CALL = struct.Struct("@18qd")  # struct IndexCall in csrc/index.h
COLUMNS = 32
"""Groups of columns with a scale have a multiple of this width, the widest step of the kernel for a few rows."""
ROWS_CALL = struct.Struct("@20q")  # struct RowsCall in csrc/rows.h


@dataclass(frozen=True)
class Library:
    """The compiled kernels.

    Attributes:
        run: takes a packed ``Call`` and returns 0, or 1 if memory runs out.
        index: the same for a packed ``IndexCall``.
        rows: the same for a packed ``RowsCall``.
        float16: whether the compiler supports the type.
        amx: 0 never uses the tile registers, 1 uses them where that is faster, 2 wherever it is possible (for tests).
        path: the library's file.
    """

    run: Callable[[bytes], int]
    index: Callable[[bytes], int]
    rows: Callable[[bytes], int]
    float16: bool
    amx: int
    path: str


_lock = threading.Lock()
_offered: list[str] = []


def offer(path: str) -> None:
    """Make :func:`load` use the library at ``path`` instead of building one, unless a library is loaded already.

    The library must have been built from this source for this machine.
    """
    with _lock:
        _offered[:] = [path]


@functools.cache
def _load_once() -> Library | None:
    if os.environ.get("MLA_COMPILE_NATIVE", "1") == "0":
        log.info("native CPU kernel: switched off by MLA_COMPILE_NATIVE=0")
        return None
    try:
        library = library_of(trusted.load(_offered[0]) if _offered else _build())
        count("kernels", kind="native")
        return library
    except Exception as error:  # noqa: BLE001 - a missing or broken compiler fails in many ways, none of which is fatal
        lines = str(error).strip().split("\n")
        # the compiler's first error, which follows its command line
        reason = next((line for line in lines if "error:" in line), lines[0])
        count("kernels", kind="torch")
        count("fallbacks", reason="no native kernel")
        log.warning("native CPU kernel: not built, torch's operators are used (%s: %s)", type(error).__name__, reason)
        return None


def library_of(built: ctypes.CDLL) -> Library:
    """Return the kernels of a library that was built from :func:`source`."""
    entries = (built.mla_decode_attention, built.mla_index_scores, built.mla_few_rows)
    for entry in entries:
        entry.argtypes = [ctypes.c_char_p]
    features = built.mla_features()
    return Library(*entries, bool(features & 1), int(bool(features & 2)), built._name)


def load() -> Library | None:
    """Return the kernels, which the first call builds; None if they are disabled or that one build failed."""
    with _lock:
        return _load_once()


def _build() -> ctypes.CDLL:
    from torch._inductor.codecache import CppCodeCache  # imported on use: takes a second

    begin = time.time()

    class Checked(CppCodeCache):
        """Inductor's cache, in the folder that TORCHINDUCTOR_CACHE_DIR names, with our own checks before loading."""

        cache = {}  # noqa: RUF012 - a cache of this class, apart from torch's

        @staticmethod
        def _load_library_inner(path: str, key: str) -> ctypes.CDLL:
            return trusted.load(path, built_since=begin)

    try:
        library: ctypes.CDLL = Checked.load(source(), extra_flags=FLAGS)
    except trusted.NotWholeError as error:  # the process that built it ended before the file was complete
        Path(str(error)).unlink(missing_ok=True)
        library = Checked.load(source(), extra_flags=FLAGS)
    return library


def source() -> str:
    """Return the C++ source and its headers as one text, because Inductor names the library by a hash of the text."""

    def insert(match: re.Match[str]) -> str:
        if match[1] in done:
            return ""
        done.add(match[1])
        return expand((SOURCE.parent / match[1]).read_text())

    def expand(text: str) -> str:
        return re.sub(r'^#include "(.+)"$', insert, text.replace("#pragma once\n", ""), flags=re.MULTILINE)

    done: set[str] = set()
    return expand(SOURCE.read_text())


def takes(library: Library, *rows: Tensor | None) -> bool:
    """Whether the kernels support the dtypes of all these rows."""
    kinds = {of.dtype for of in rows if of is not None}
    return torch.float64 not in kinds and (torch.float16 not in kinds or library.float16)


def decode_attention(library: Library, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Compute :func:`mla_compile.kernels.cpu.decode.decode_attention`, for rows that :func:`takes` accepts.

    Raises :class:`MemoryError` if the scratch space (a few MB per thread, kept for later calls) cannot be allocated.
    """
    query, latent = _dense_rows(call.query), _dense_rows(call.latent)
    rope, values, mask = call.rope, call.values, call.mask
    B, S, H, _ = query.shape
    T, L = latent.shape[1:]
    table, table_at, table_b, page_bits = call.block_table, 0, 0, 0
    if table is not None:
        page_bits, T = T.bit_length() - 1, table.shape[1] * T
        table_at, table_b = table.data_ptr(), table.stride(0)
    query_b, query_s, query_h, _ = query.stride()
    latent_b, latent_t, _ = latent.stride()
    R = rope_at = rope_b = rope_t = values_at = values_b = values_t = 0
    Lv = L
    if rope is not None:
        rope = _dense_rows(rope)
        R, rope_at = rope.shape[2], rope.data_ptr()
        rope_b, rope_t, _ = rope.stride()
    if values is not None:
        values = _dense_rows(values)
        Lv, values_at = values.shape[2], values.data_ptr()
        values_b, values_t, _ = values.stride()
    mask_at = mask_b = mask_h = mask_s = mask_t = mask_kind = 0
    if mask is not None:
        mask_at, mask_kind = mask.data_ptr(), KINDS[mask.dtype]
        mask_b, mask_h, mask_s, mask_t = (
            stride if size > 1 else 0 for size, stride in zip(mask.shape, mask.stride(), strict=True)
        )
    indices, indices_at, indices_b, indices_s, k = call.indices, 0, 0, 0, -1
    if indices is not None:
        indices = _dense_rows(indices)
        indices_at, k = indices.data_ptr(), indices.shape[2]
        indices_b, indices_s, _ = indices.stride()
    lengths = None if call.seq_lens is None else call.seq_lens.contiguous()
    out = torch.empty((B, S, H, Lv), dtype=query.dtype)
    lse = torch.empty((B, S, H), dtype=torch.float32)
    scales, scales_at, scale_width = call.kv_scale, 0, L + R
    scale_strides: tuple[int, ...] = (0, 0, 0)
    if scales is not None:
        scales_at = scales.data_ptr()
        scale_strides = (*scales.stride(), 0, 0, 0)[:3]
        scale_width = L // call.groups if call.groups else L + R
    sinks = None if call.sinks is None else call.sinks.to(torch.float32)
    packed = CALL.pack(
        *(B, S, H, T, L, R, Lv),
        *(query.data_ptr(), query_b, query_s, query_h),
        *(latent.data_ptr(), latent_b, latent_t),
        *(rope_at, rope_b, rope_t),
        *(values_at, values_b, values_t),
        *(mask_at, mask_b, mask_h, mask_s, mask_t),
        0 if lengths is None else lengths.data_ptr(),
        *(out.data_ptr(), lse.data_ptr()),
        *(KINDS[query.dtype], KINDS[latent.dtype], mask_kind),
        *(call.causal, call.window, torch.get_num_threads(), library.amx),
        *(table_at, table_b, page_bits),
        *(indices_at, indices_b, indices_s, k),
        *(scales_at, *scale_strides, scale_width),
        KINDS[latent.dtype if rope is None else rope.dtype],
        0 if sinks is None else sinks.data_ptr(),
        *(call.scale, call.softcap),
    )
    if library.run(packed):
        raise MemoryError("mla_compile::decode_attention: no memory for the scratch space of the CPU kernel")
    return out, lse


def index_scores(library: Library, call: IndexCall) -> Tensor:
    """Compute :func:`mla_compile.kernels.cpu.index.index_scores`, for rows that :func:`takes` accepts and T above 0.

    Raises :class:`MemoryError` if the scratch space cannot be allocated.
    """
    query, keys = _dense_rows(call.query), _dense_rows(call.keys)
    (B, S, J, D), T = query.shape, keys.shape[1]
    weights = call.weights.to(torch.float32).contiguous()
    out = torch.empty((B, S, T), dtype=torch.float32)
    packed = INDEX_CALL.pack(
        *(B, S, J, T, D),
        *(query.data_ptr(), *query.stride()[:3]),
        *(keys.data_ptr(), *keys.stride()[:2]),
        *(weights.data_ptr(), out.data_ptr()),
        *(KINDS[query.dtype], KINDS[keys.dtype], torch.get_num_threads(), library.amx),
        call.scale,
    )
    if library.index(packed):
        raise MemoryError("mla_compile::index_scores: no memory for the scratch space of the CPU kernel")
    return out


def few_rows_product(
    library: Library,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
) -> Tensor:
    """Return ``x`` [G,M,K] times ``weight`` [G,O,K] plus ``bias`` [O], as [G,M,O] in the dtype of ``x``.

    ``x`` is float32 or bfloat16. The weight has the dtype of ``x``, or is int8; if ``x`` is float32, it may also be
    bfloat16. If ``scales`` [O,K/g] are given, in float32 or the dtype of ``x``, the weight [1,O,K] holds int8 codes of
    ``(weight - zeros) * scales``, where a scale belongs to g columns, a multiple of :data:`COLUMNS`. ``zeros`` [O,K/g]
    is int8; None means 0. Raises :class:`MemoryError` if the scratch space cannot be allocated.
    """
    x = _dense_rows(x)
    if 1 not in weight.stride()[1:] or scales is not None:
        weight = _dense_rows(weight)
    scales, zeros = (None if t is None else t.contiguous() for t in (scales, zeros))
    group = 0 if scales is None else weight.shape[2] // scales.shape[1]
    kinds = (KINDS[weight.dtype], group, KINDS[x.dtype if scales is None else scales.dtype])
    return _rows_product(library, x, weight.shape[1], weight, weight.stride(), kinds, bias, scales, zeros)


def packed_product(library: Library, x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x`` [1,M,K] times a weight of four bits plus ``bias`` [O], as [1,M,O] in bfloat16.

    ``packed`` is the result of :func:`mla_compile.kernels.packed.pack` for codes [O,K] and ``scales`` [O,K/g], where g
    is a multiple of :data:`COLUMNS`. Of ``scales``, only shape and dtype are read. ``x`` and ``bias`` are bfloat16.
    Raises :class:`MemoryError` if the scratch space cannot be allocated.
    """
    O, groups = scales.shape  # noqa: E741  the letter of the output's columns
    kinds = (_INT4, x.shape[2] // groups, KINDS[scales.dtype])
    return _rows_product(library, _dense_rows(x), O, packed.contiguous(), (0, 0, 0), kinds, bias)


def _rows_product(
    library: Library,
    x: Tensor,
    O: int,  # noqa: E741  the letter of the output's columns
    weight: Tensor,
    strides: tuple[int, ...],
    kinds: tuple[int, int, int],
    bias: Tensor | None,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
) -> Tensor:
    """Run the kernel. ``kinds``: that of the weight, the number of columns with one scale, and the kind of scales."""
    bias = None if bias is None else bias.contiguous()
    G, M, K = x.shape
    out = x.new_empty(G, M, O)
    weight_kind, group, scale_kind = kinds
    packed = ROWS_CALL.pack(
        *(G, M, O, K, x.data_ptr(), *x.stride()[:2], weight.data_ptr(), *strides, _address(bias), out.data_ptr()),
        *(KINDS[x.dtype], weight_kind, torch.get_num_threads()),
        *(group, _address(scales), _address(zeros), scale_kind),
    )
    if library.rows(packed):
        raise MemoryError("mla_compile: no memory for the scratch space of the CPU kernel for products of a few rows")
    return out


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _dense_rows(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()
