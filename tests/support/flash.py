"""Stand-ins for attention libraries: operators under the names and schemas that the libraries register, on the CPU.

Nothing is copied from the libraries: each operator is the formula of their documentation, in float64 or in the dtype it
is given, written with loops over single queries so that it shares no code with what it is compared with. The functions
around them (``flash_attn_func``, ...) take the arguments of those that users call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HUB = "_flash_attn2_0f1e2d3"
"""A namespace as the ``kernels`` package makes them, with the hash of a build at the end."""
VLLM = "_vllm_flash_attn3_4a5b6c7"
"""The namespace of version 3 as it is built for vLLM, which takes sinks."""


def truth(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool = False,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    from_first: bool = False,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence: q [S,H,D], k [T,h,D], v [T,h,V], bias [H,S,T], sinks [H]. Returns out [S,H,V] and lse [H,S]."""
    (S, H, _), (T, h, V) = q.shape, v.shape
    out, lse = q.new_zeros(S, H, V), q.new_full((H, S), float("-inf"), dtype=torch.float64)
    for s in range(S):
        place = s if from_first else s + T - S
        last = place if causal else T - 1 if right < 0 else place + right
        first = 0 if left < 0 else place - left
        seen = [t for t in range(T) if first <= t <= last]
        if not seen:
            continue
        for n in range(H):
            there = [t for t in seen if bias is None or bias[n, s, t] > float("-inf")]
            if not there:
                continue
            keys, values = k[there, n // (H // h)], v[there, n // (H // h)]
            scores = (keys.double() @ q[s, n].double()) * scale
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            scores = scores if bias is None else scores + bias[n, s, there].double()
            total = scores.logsumexp(0)
            total = total if sinks is None else torch.logaddexp(total, sinks.flatten()[n].double())
            out[s, n], lse[n, s] = ((scores - total).exp() @ values.double()).to(q.dtype), total
    return out, lse.float()


def dense(q: Tensor, k: Tensor, v: Tensor, used: Tensor | None = None, bias: Tensor | None = None, **how: Any) -> Any:
    """q [B,S,H,D], k [B,T,h,D]: the results of FlashAttention, out and lse [B,H,S]."""
    lengths = [k.shape[1]] * q.shape[0] if used is None else used.tolist()
    rows = [
        truth(q[i], k[i, :n], v[i, :n], bias=None if bias is None else bias.expand(q.shape[0], -1, -1, -1)[i], **how)
        for i, n in enumerate(lengths)
    ]
    return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows])


def packed(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, used: Tensor | None = None, **how: Any) -> Any:
    """q [total,H,D]: out, and lse [H,total]."""
    out, lse = q.new_zeros(*q.shape[:2], v.shape[-1]), q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)
    a, b = cu_q.tolist(), cu_k.tolist()
    for i in range(len(a) - 1):
        end = b[i + 1] if used is None else b[i] + int(used[i])
        part, sums = truth(q[a[i] : a[i + 1]], k[b[i] : end], v[b[i] : end], **how)
        out[a[i] : a[i + 1]], lse[:, a[i] : a[i + 1]] = part, sums
    return out, lse


def _like(q: Tensor, v: Tensor, lse: tuple[int | torch.SymInt, ...], more: int) -> tuple[Tensor, ...]:
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    rest = (q.new_empty(0), q.new_empty(2, dtype=torch.int64))[:more]
    return out, q.new_empty(lse, dtype=torch.float32), *rest


_DENSE = (
    "(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, int window_size_left, "
    "int window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_VARLEN = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, "
    "float dropout_p, float softmax_scale, bool causal, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False, Tensor? block_table=None, "
    "Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False) -> (Tensor, Tensor, Tensor, Tensor)"
)
_WITH_CACHE = (
    "(Tensor! q, Tensor! kcache, Tensor! vcache, Tensor? k_, Tensor? v_, Tensor? seqlens_k_, Tensor? rotary_cos_, "
    "Tensor? rotary_sin_, Tensor? cache_batch_idx_, Tensor? leftpad_k_, Tensor? block_table_, Tensor? alibi_slopes_, "
    "Tensor? out_, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
    "bool is_rotary_interleaved, int num_splits) -> (Tensor, Tensor)"
)
_THREE = (
    "(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0., bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> (Tensor, Tensor)"
)
_THREE_OF_VLLM = _THREE.replace("sm_margin=0)", "sm_margin=0, Tensor? s_aux=None)")
_XFORMERS = "(Tensor q, Tensor k, Tensor v, Tensor? b = None, float? p = 0.0, float? scale = None) -> Tensor"
_UNKNOWN = "(Tensor a, Tensor b, Tensor c, float factor) -> Tensor"


def _flash(q, k, v, dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, return_softmax):  # type: ignore[no-untyped-def]
    out, lse = dense(q, k, v, scale=softmax_scale, causal=causal, left=left, right=right, softcap=softcap)
    return out, lse, q.new_empty(0), q.new_zeros(2, dtype=torch.int64)


def _flash_varlen(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, softmax_scale, causal, left=-1, right=-1, softcap=0.0,
    alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # type: ignore[no-untyped-def] # fmt: skip
    how = {"scale": softmax_scale, "causal": causal, "left": left, "right": right, "softcap": softcap}
    out, lse = packed(q, k, v, cu_q, cu_k, seqused_k, **how)
    return out, lse, q.new_empty(0), q.new_zeros(2, dtype=torch.int64)


def _flash_with_cache(q, kcache, vcache, k, v, seqlens_k, *more):  # type: ignore[no-untyped-def]
    scale, causal, left, right, softcap = more[7:12]
    if k is not None:
        for i, n in enumerate(seqlens_k.tolist()):
            kcache[i, n : n + k.shape[1]], vcache[i, n : n + k.shape[1]] = k[i], v[i]
        seqlens_k = seqlens_k + k.shape[1]
    return dense(q, kcache, vcache, seqlens_k, scale=scale, causal=causal, left=left, right=right, softcap=softcap)


def _flash_three(q, k, v, *_, **given):  # type: ignore[no-untyped-def]
    how = {
        "scale": given["softmax_scale"] or q.shape[-1] ** -0.5,
        "causal": given["is_causal"],
        "left": given["window_size_left"],
        "right": given["window_size_right"],
        "softcap": given["softcap"],
        "sinks": given.get("s_aux"),
    }
    if given["cu_seqlens_q"] is not None:
        return packed(q, k, v, given["cu_seqlens_q"], given["cu_seqlens_k"], given["seqused_k"], **how)
    return dense(q, k, v, given["seqused_k"], **how)


def _xformers(q, k, v, b=None, p=0.0, scale=None):  # type: ignore[no-untyped-def]
    how = {"scale": q.shape[-1] ** -0.5 if scale is None else scale, "bias": b}
    if q.dim() == 3:
        how["bias"] = None if b is None else b[:, None]
        return dense(q[:, :, None], k[:, :, None], v[:, :, None], **how)[0][:, :, 0]
    return dense(q, k, v, **how)[0]


def _unknown(a, b, c, factor):  # type: ignore[no-untyped-def]
    return dense(a, b, c, scale=factor)[0]


def _keywords(schema: str, op: Callable[..., Any]) -> Callable[..., Any]:
    """``op`` with every argument after the tensors q, k and v by its name."""
    names = [part.split("=")[0].split()[-1] for part in schema[1 : schema.index(")", schema.rindex("="))].split(", ")]

    def called(*args: Any, **kwargs: Any) -> Any:
        defaults = dict.fromkeys(names[3:])
        defaults |= {"is_causal": False, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0}
        return op(*args[:3], **{**defaults, **dict(zip(names[3:], args[3:], strict=False)), **kwargs})

    return called


_libraries: list[torch.library.Library] = []


def register() -> None:
    """Registers all of them, once per process, where the libraries themselves are not there."""
    if _libraries:
        return
    flash = lambda q, k, v, *_: _like(q, v, (q.shape[0], q.shape[2], q.shape[1]), 2)  # noqa: E731
    short = lambda q, k, v, *_, **__: _like(q, v, (q.shape[0], q.shape[2], q.shape[1]), 0)  # noqa: E731
    three = lambda q, k, v, *_, **__: _like(q, v, (*q.shape[:-3], q.shape[-2], q.shape[-3]), 0)  # noqa: E731
    varlen = lambda q, k, v, *_, **__: _like(q, v, (q.shape[1], q.shape[0]), 2)  # noqa: E731
    one = lambda q, k, v, *_: q.new_empty(*q.shape[:-1], v.shape[-1])  # noqa: E731
    for namespace in ("flash_attn", HUB):
        _define(namespace, "_flash_attn_forward", _DENSE, _flash, flash)
        _define(namespace, "_flash_attn_varlen_forward", _VARLEN, _flash_varlen, varlen)
    _define(HUB, "fwd_kvcache", _WITH_CACHE, _flash_with_cache, short)
    _define("flash_attn_3", "fwd", _THREE, _keywords(_THREE, _flash_three), three)
    _define(VLLM, "fwd", _THREE_OF_VLLM, _keywords(_THREE_OF_VLLM, _flash_three), three)
    _define("xformer", "memory_efficient_attention_forward", _XFORMERS, _xformers, one)
    _define("house", "fast_attn", _UNKNOWN, _unknown, one)
    _define("house", "mix", _UNKNOWN, _unknown, one)


def _define(namespace: str, name: str, schema: str, op: Callable[..., Any], fake: Callable[..., Any]) -> None:
    if hasattr(getattr(torch.ops, namespace), name):
        return  # the library itself
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, op, "CPU")
    torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    _libraries.append(library)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, namespace: str = "flash_attn",
) -> Any:  # fmt: skip
    """The function of the library, as far as a forward goes."""
    op = getattr(torch.ops, namespace)._flash_attn_forward
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse, *_ = op(q, k, v, dropout_p, scale, causal, *window_size, softcap, alibi_slopes, False)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    """The function of the library for packed sequences."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, *_ = torch.ops.flash_attn._flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, scale, causal, *window_size,
        softcap, alibi_slopes, False, block_table,
    )  # fmt: skip
    return out


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    cache_seqlens: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """The function of the library, as built for the ``kernels`` package."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, _ = getattr(torch.ops, HUB).fwd_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens, None, None, None, None, None, None, None, scale, causal,
        *window_size, softcap, True, 0,
    )  # fmt: skip
    return out
