"""Attention operators of libraries, by their qualified names. No library is imported.

The tables contain only what a library documents: how an argument affects the scores, and at which key a diagonal is
aligned if there are more keys than queries. An argument name means the same in all of these libraries. A later release
with more arguments can therefore be read too, as long as the new arguments have their defaults. The sources are:

* FlashAttention 2 and 3 (``flash_attn``, ``flash_attn_3``): docstrings of ``flash_attn_func`` and
  ``flash_attn_with_kvcache``. This includes builds for vLLM and for Hugging Face's ``kernels`` package, whose
  namespaces end in the hash of a build. Builds for vLLM, which transformers uses too, take a sink of each head as
  ``s_aux``.
* xformers: docstring of ``memory_efficient_attention``. xformers itself never passes a diagonal that begins at
  the first key to FlashAttention, neither to its own build nor to torch's build.
* torch: ``CustomMaskType`` of the memory-efficient kernel. For other operators, the alignment of ``is_causal`` is not
  documented, so ``is_causal`` is only read if there are as many queries as keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal

_WORDS = {
    **dict.fromkeys(("q", "query"), "q"),
    **dict.fromkeys(("k", "key"), "k"),
    **dict.fromkeys(("v", "value"), "v"),
    **dict.fromkeys(("softmax_scale", "scale"), "scale"),
    **dict.fromkeys(("causal", "is_causal"), "causal"),
    **dict.fromkeys(("window_size_left", "window_left"), "left"),
    **dict.fromkeys(("window_size_right", "window_right"), "right"),
    "softcap": "softcap",
    **dict.fromkeys(("dropout_p", "p_dropout", "p"), "dropout"),
    **dict.fromkeys(("cu_seqlens_q", "cum_seq_q", "cu_seq_q"), "starts_q"),
    **dict.fromkeys(("cu_seqlens_k", "cum_seq_k", "cu_seq_k"), "starts_k"),
    **dict.fromkeys(("seqused_k", "seqlens_k", "cache_seqlens"), "used"),
    **dict.fromkeys(("b", "bias", "attn_bias", "attn_mask"), "bias"),
    "s_aux": "sinks",
}
"""The arguments that affect the result, each with this package's word for the argument."""

INERT = frozenset(
    (
        *("max_seqlen_q", "max_seqlen_k", "max_q", "max_k", "num_splits", "pack_gqa", "sm_margin", "enable_gqa"),
        *("scheduler_metadata", "deterministic", "zero_tensors", "use_kvsplit"),
        *("return_softmax", "return_debug_mask", "compute_log_sumexp"),
        *("is_rotary_interleaved", "rotary_interleaved"),
    )
)
"""Arguments that only say how to compute, or which further results to return. They may have any value.

The interleaving of rotations is included, because a call that rotates is refused for its rotary tables anyway.
"""


@dataclass(frozen=True)
class Fused:
    """One operator whose first or only result is ``softmax(scale q k + ...) v``.

    Attributes:
        heads_first: whether operands are [..., heads, tokens, width]. Otherwise they are [..., tokens, heads, width].
            If ``starts_q`` and ``starts_k`` are given, sequences are packed as [tokens, heads, width].
        diagonal: where ``causal`` and windows are aligned. ``"last"``: the last query is at the last key. ``"same"``:
            known only if there are as many queries as keys. ``"first"``: the first query is at the first key.
        words: meanings of arguments, by their names without trailing underscores.
    """

    heads_first: bool = False
    diagonal: Literal["last", "same", "first"] = "last"
    words: Mapping[str, str] = field(default_factory=lambda: _WORDS)


_FLASH = Fused()
# In operators with a cache, `k` and `v` (or `k_new` and `v_new`) are appended keys and values.
_WITH_CACHE = Fused(words={**_WORDS, "kcache": "k", "vcache": "v", "k": "appended", "v": "appended"})
_KEEPING_CACHE = Fused(words={**_WORDS, "k_new": "appended", "v_new": "appended"})
_OF_TORCH = Fused(heads_first=True, diagonal="same")

OF_TORCH_BY_NAME = Fused(heads_first=True, diagonal="first")
"""``scaled_dot_product_attention`` with ``is_causal`` and different numbers of queries and keys.

PyTorch's documentation aligns the lower triangular mask with the upper left corner.
"""

_NAMESPACES = ("flash_attn", "flash_attn_3", "_flash_attn*", "_vllm_flash_attn*", "_vllm_fa2_C", "_vllm_fa3_C")

OPERATORS: Mapping[str, Fused] = {
    **{f"{n}::_flash_attn_forward": _KEEPING_CACHE for n in _NAMESPACES},
    **{f"{n}::_flash_attn_varlen_forward": _FLASH for n in _NAMESPACES},
    **{f"{n}::fwd": _KEEPING_CACHE for n in _NAMESPACES},
    **{f"{n}::varlen_fwd": _FLASH for n in _NAMESPACES},
    **{f"{n}::fwd_kvcache": _WITH_CACHE for n in _NAMESPACES},
    "xformer::memory_efficient_attention_forward": _FLASH,
    "xformers_flash::flash_fwd": _FLASH,
    "xformers_flash3::flash_fwd": _FLASH,
    "aten::_efficient_attention_forward": Fused(words={**_WORDS, "custom_mask_type": "diagonal"}),
    "aten::_flash_attention_forward": _FLASH,
    "aten::_scaled_dot_product_flash_attention": _OF_TORCH,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _OF_TORCH,
    "aten::_scaled_dot_product_efficient_attention": _OF_TORCH,
    "aten::_scaled_dot_product_cudnn_attention": _OF_TORCH,
    "aten::_scaled_dot_product_fused_attention_overrideable": _OF_TORCH,
    "aten::_scaled_dot_product_attention_math_for_mps": _OF_TORCH,
    "aten::_scaled_dot_product_attention_math": OF_TORCH_BY_NAME,
    "torch_attn::_varlen_attn": Fused(diagonal="same", words={**_WORDS, "window_size": "window"}),
}
"""The operators by their qualified names, or by patterns of names."""


@cache
def operator_of(name: str) -> Fused | None:
    """Return the entry for an operator by its qualified name, ``namespace::name``; None if it is not listed."""
    if not name or name in OPERATORS:
        return OPERATORS.get(name)
    return next((known for pattern, known in OPERATORS.items() if fnmatchcase(name, pattern)), None)
