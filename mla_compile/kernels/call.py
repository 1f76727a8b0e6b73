"""Records of the arguments of one operator call, used by ops, checks, the reference, and the CPU and GPU kernels."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

DENSE = "mla_compile::decode_attention"
PAGED = "mla_compile::paged_decode_attention"
SCHEDULE = "mla_compile::decode_schedule"
ALIKE = "mla_compile::weigh_alike"
INDEX = "mla_compile::index_scores"


class CallLetters(NamedTuple):
    """The sizes of a call, by letter. ``V`` is the width of the values; ``page`` is 0 for a contiguous cache."""

    B: int
    S: int
    H: int
    T: int
    L: int
    R: int
    V: int
    page: int


class DecodeCall(NamedTuple):
    """A call of decode attention. H query heads share one key ``[latent, rope]`` and one value ``latent`` per token.

    =============  ==================================================================================================
    query          [B,S,H,L+R] absorbed queries. Columns 0..L are multiplied by the latent, columns L..L+R by the
                   rotary key. The dtype is the cache's (half precision for an fp8 cache). Float32 is also allowed if
                   the cache is half precision or fp8, because an absorbed query can overflow float16
    latent         [B,T,L], any strides (never copied): float16, bfloat16, float32, float64, float8_e4m3fn
    rope           [B,T,R], or None if R = 0. The dtype is latent's. If latent is fp8, half precision is also allowed
                   (and on a CPU float32)
    values         [B,T,Lv], or None if the latent rows are the values
    mask           bool (True: attend) or float (added to the scaled scores), 4-D, broadcastable to [B,H,S,T]
    seq_lens       int32 [B]: keys from this position on are hidden. A length above T is treated as T. None: T
    sinks          float [H]: an additional score per head. It enters only the softmax's denominator
    kv_scale       float32 [], [B,T] or [B,T,G], any strides: the factor of fp8 rows (of rope only if rope is fp8).
                   With G, each group of L/G latent columns has its own scale. L/G is then a power of two, and rope
                   is not fp8
    indices        int32 [B,S,k]: query s sees only the keys that its k entries name (sparse attention). An entry that
                   is negative, or not below the length, names no key. The other entries of a query must be distinct.
                   None: all keys
    schedule       int64 [n]: the result of the operator decode_schedule for a call with equal mask, lengths, sizes,
                   dtypes and numbers. None: the call prepares its own data. Only a GPU reads the schedule. Its
                   contents are not checked: a schedule for another mask or other lengths makes the result wrong
    scale          the factor of the scores: 1/sqrt(N+R) as in the model before absorption, not 1/sqrt(L+R)
    causal         True: query s sees only keys t <= len - S + s, where len is seq_lens[b] or T. A mask also applies
    softcap        > 0: score = softcap * tanh(score / softcap), before the mask
    window         > 0: query s sees only keys t > len - S + s - window
    num_splits     number of parts into which each request's keys are divided; 0: the plan chooses
    deterministic  True: keys are divided at fixed places, so a request's result is independent of the rest of its batch
    =============  ==================================================================================================

    In a paged cache, token t of request b is row ``t % page`` of page ``block_table[b, t // page]``. These fields
    differ:

    =============  ==================================================================================================
    latent         [P,page,L]; page is a power of two up to 256
    rope           [P,page,R] or None
    values, mask   None
    seq_lens       int32 [B], at most maxpages * page; 0 is allowed
    kv_scale       float32 [], [P,page] or [P,page,G]
    block_table    int32 [B,maxpages]; entries at or past ceil(seq_lens[b] / page) are never read (-1 is customary)
    =============  ==================================================================================================

    The result is ``(out, lse)``. ``out`` [B,S,H,Lv] (Lv = L without ``values``) is contiguous, in query's dtype.
    ``lse`` [B,S,H] is the natural logarithm of the sum of the exponentials of the scores, without the sinks, in float32
    (float64 for a float64 cache). A query that sees no key gets ``out`` 0 and ``lse`` minus infinity.

    The fields are in the order of the dense operator's arguments, so ``DecodeCall(*args, **kwargs)`` describes a call
    of that operator. The record is a named tuple, because a frozen dataclass adds 1.2 us to every call.
    """

    query: Tensor
    latent: Tensor
    rope: Tensor | None = None
    values: Tensor | None = None
    mask: Tensor | None = None
    seq_lens: Tensor | None = None
    sinks: Tensor | None = None
    kv_scale: Tensor | None = None
    indices: Tensor | None = None
    schedule: Tensor | None = None
    block_table: Tensor | None = None
    scale: float = math.nan  # required by every function and operator; NaN shows that it was forgotten
    causal: bool = False
    softcap: float = 0.0
    window: int = 0
    num_splits: int = 0
    deterministic: bool = False

    @classmethod
    def paged(
        cls,
        query: Tensor,
        latent_pages: Tensor,
        rope_pages: Tensor | None,
        block_table: Tensor,
        seq_lens: Tensor,
        sinks: Tensor | None = None,
        kv_scale: Tensor | None = None,
        indices: Tensor | None = None,
        schedule: Tensor | None = None,
        **numbers: Any,
    ) -> DecodeCall:
        """Make a call over a paged cache. The arguments are in the order of the paged operator."""
        return cls(
            query, latent_pages, rope_pages, None, None, seq_lens, sinks, kv_scale, indices, schedule, block_table,
            **numbers,
        )  # fmt: skip

    @property
    def op(self) -> str:
        """The name of the called operator."""
        return DENSE if self.block_table is None else PAGED

    @property
    def summed(self) -> Tensor:
        """The rows whose weighted sum is the result: ``values``, or ``latent`` if ``values`` is None."""
        return self.latent if self.values is None else self.values

    @property
    def groups(self) -> int:
        """The number of groups of latent columns that have separate scales; 0 if there are no per-group scales."""
        return self.kv_scale.shape[2] if self.kv_scale is not None and self.kv_scale.dim() == 3 else 0

    @property
    def sizes(self) -> CallLetters:
        """The sizes of a checked call, by letter. In a paged cache, T is the capacity of a row of the block table."""
        B, S, H, _ = self.query.shape
        _, T, L = self.latent.shape
        page = 0
        if self.block_table is not None:
            page, T = T, self.block_table.shape[1] * T
        R = 0 if self.rope is None else self.rope.shape[2]
        return CallLetters(B, S, H, T, L, R, self.summed.shape[2], page)


class IndexCall(NamedTuple):
    """The scores with which the indexer of sparse attention ranks keys: weighted sums over J small heads.

        score[b,s,t] = sum_j weights[b,s,j] max(0, scale * sum_d query[b,s,j,d] keys[b,t,d])

    =============  ==================================================================================================
    query          [B,S,J,D], any strides: float16, bfloat16, float32 or float64
    keys           [B,T,D], any strides (never copied if rows are dense): query's dtype, or half precision if query
                   is float32
    weights        [B,S,J]: float16, bfloat16 or float32 (float64 if the keys are float64); may be negative
    scale          a factor; may be negative
    =============  ==================================================================================================

    The result is [B,S,T], contiguous, float32 (float64 for float64 keys). NaN stays NaN. Masks are added by the caller.
    The formula is equation 1 of DeepSeek-V3.2, arXiv 2512.02556.
    """

    query: Tensor
    keys: Tensor
    weights: Tensor
    scale: float

    @property
    def op(self) -> str:
        """The name of the called operator."""
        return INDEX


TENSORS = DecodeCall._fields.index("scale")  # the number of leading fields that are tensors; the others are numbers


def rows_at(rows: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return ``rows[first, second]``. Float8 rows are gathered as bytes."""
    if rows.dtype.itemsize == 1:
        return rows.view(torch.uint8)[first, second].view(rows.dtype)
    return rows[first, second]
