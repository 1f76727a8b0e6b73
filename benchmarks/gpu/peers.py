"""Other implementations of the same attention, where they are at hand: installed, or under ``--peer name=path``.

No code of theirs is here: an adapter imports the peer (from ``path``, a folder or a file) and gives it a problem in the
layout it wants. What a peer cannot take is a :class:`SkipError` with the reason; what it returns is compared with ours
before it is timed. Layouts are prepared outside the timed call, as a server that uses the peer would keep them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.cases import FP8, Problem, Shape
from benchmarks.gpu.common import SkipError

Call = Callable[[], Tensor]
EXPANDED_LIMIT = 24 << 30  # bytes of K and V per head that are worth allocating


def _module(name: str, path: str | None, stubs: dict[str, dict[str, Any]] | None = None) -> Any:
    """The module ``name`` from the environment, or from ``path``: a file, or a folder to import it from."""
    if path is None:
        if importlib.util.find_spec(name.split(".")[0]) is None:
            raise SkipError(f"{name.split('.')[0]} is not installed and was not given by --peer")
        return importlib.import_module(name)
    place = Path(path).resolve()
    if not place.exists():
        raise SkipError(f"--peer: {place} does not exist")
    if place.is_dir():
        if str(place) not in sys.path:
            sys.path.append(str(place))
        return importlib.import_module(name)
    for stub, content in (stubs or {}).items():
        _stub(stub, content)
    own = f"peer_{place.stem}_{abs(hash(place))}"
    if own not in sys.modules:
        spec = importlib.util.spec_from_file_location(own, place)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[own] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[own])
    return sys.modules[own]


def _stub(name: str, content: dict[str, Any]) -> None:
    """A stand-in for what a single file of a large project imports from it, unless the project is there."""
    parts = name.split(".")
    if parts[0] not in sys.modules and importlib.util.find_spec(parts[0]) is not None:
        return
    for end in range(1, len(parts) + 1):
        module = ".".join(parts[:end])
        if module not in sys.modules:
            made = types.ModuleType(module)
            made.__path__ = []  # a package, so that what lies below it can be imported
            sys.modules[module] = made
    for key, value in content.items():
        setattr(sys.modules[name], key, value)


def _needs(condition: bool, what: str) -> None:
    if not condition:
        raise SkipError(what)


def _expanded(posed: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, keys and values per head, [B,H,S|T,*], and the mask: what a model that does not absorb attends with.

    The up-projection is random and its cost is not counted. Widths are DeepSeek's: 192 for keys, 128 for values.
    """
    s = posed.shape
    size = s.B * s.kv * s.H * (192 + 128) * s.dtype.itemsize
    _needs(size <= EXPANDED_LIMIT, f"the expanded cache would take {size / 2**30:.0f} GiB")
    _needs((s.L, s.R) == (512, 64), "only for 512+64")
    made = {"dtype": s.dtype, "device": posed.query.device}
    query = torch.randn(s.B, s.H, s.S, 192, **made)  # type: ignore[arg-type]
    keys = torch.randn(s.B, s.H, s.kv, 192, **made)  # type: ignore[arg-type]
    values = torch.randn(s.B, s.H, s.kv, 128, **made)  # type: ignore[arg-type]
    position = torch.arange(s.kv, device=posed.query.device)
    last = posed.lens[:, None].long() - s.S + torch.arange(s.S, device=posed.query.device)
    return query, keys, values, (position <= last[..., None])[:, None]


def sdpa(posed: Problem, _: str | None) -> Call:
    """PyTorch's scaled_dot_product_attention over expanded K and V. Its output is of other numbers: not compared."""
    query, keys, values, mask = _expanded(posed)
    if posed.shape.S == 1 and bool((posed.lens == posed.shape.kv).all()):
        return lambda: F.scaled_dot_product_attention(query, keys, values)  # no mask: the fast kernels are allowed
    return lambda: F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)


def flex(posed: Problem, _: str | None) -> Call:
    """PyTorch's FlexAttention over the latent rows as one shared key head, compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    s = posed.shape
    _needs(posed.query.is_cuda, "FlexAttention's decode kernel needs a GPU")
    rows = posed.rows(s.kv)[:, None]  # [B,1,T,L+R]
    lens = posed.lens
    query = posed.query.transpose(1, 2).contiguous()

    def visible(score: Tensor, b: Tensor, h: Tensor, i: Tensor, t: Tensor) -> Tensor:
        return torch.where(t <= lens[b] - s.S + i, score, -torch.inf)

    call = torch.compile(flex_attention)
    values = rows[..., : s.L].contiguous()
    keys = rows.contiguous()

    def run() -> Tensor:
        out: Tensor = call(query, keys, values, score_mod=visible, scale=s.scale, enable_gqa=True)
        return out.transpose(1, 2)

    return run


def flashmla(posed: Problem, path: str | None) -> Call:
    """The dense decode of deepseek-ai/FlashMLA."""
    s = posed.shape
    module = _module("flash_mla", path)
    _needs((s.page, s.L, s.R) == (64, 512, 64), "FlashMLA takes pages of 64 and 512+64 only")
    _needs(s.cache_dtype in (torch.bfloat16, torch.float16), "FlashMLA's dense kernel takes half precision only")
    metadata, splits = module.get_mla_metadata(posed.lens, s.S * s.H, 1)
    cache = posed.kv[:, :, None]

    def run() -> Tensor:
        out: Tensor = module.flash_mla_with_kvcache(
            posed.query, cache, posed.table, posed.lens, s.L, metadata, splits, softmax_scale=s.scale, causal=s.S > 1
        )[0]
        return out

    return run


def flashmla_sparse(posed: Problem, path: str | None) -> Call:
    """FlashMLA's sparse attention over half precision rows: the kernel it has for prompts, here for one token each."""
    s = posed.shape
    module = _module("flash_mla", path)
    _needs((s.L, s.R) == (512, 64) and s.cache_dtype == torch.bfloat16, "FlashMLA takes bfloat16 and 512+64 only")
    _needs(s.H in (64, 128), "FlashMLA takes 64 or 128 heads")
    rows, places = posed.kv.reshape(-1, 1, 576), posed.places().view(s.B * s.S, 1, s.k)
    query = posed.query.reshape(s.B * s.S, s.H, 576)

    def run() -> Tensor:
        out: Tensor = module.flash_mla_sparse_fwd(query, rows, places, s.scale)[0]
        return out.view(s.B, s.S, s.H, s.L)

    return run


def flashmla_fp8(posed: Problem, path: str | None) -> Call:
    """FlashMLA's sparse decode, which reads rows of 656 bytes in fp8."""
    s = posed.shape
    module = _module("flash_mla", path)
    _needs((s.page, s.L, s.R) == (64, 512, 64), "FlashMLA takes pages of 64 and 512+64 only")
    _needs(s.H in (64, 128), "FlashMLA takes 64 or 128 heads")
    _needs(s.groups == 4, "FlashMLA takes rows of 656 bytes only")
    cache, places = posed.kv.view(FP8)[:, :, None], posed.places()
    metadata, splits = module.get_mla_metadata(posed.lens, s.S * s.H, 1, num_heads_q=s.H, is_fp8_kvcache=True, topk=s.k)

    def run() -> Tensor:
        out: Tensor = module.flash_mla_with_kvcache(
            posed.query, cache, posed.table, posed.lens, s.L, metadata, splits, softmax_scale=s.scale,
            is_fp8_kvcache=True, indices=places,
        )[0]  # fmt: skip
        return out

    return run


def flashinfer(posed: Problem, path: str | None) -> Call:
    """FlashInfer's BatchMLAPagedAttentionWrapper; its plan is made once, outside the timed call."""
    s = posed.shape
    module = _module("flashinfer.mla", path)
    assert posed.table is not None
    assert s.page is not None
    device = posed.query.device
    used = (posed.lens + s.page - 1) // s.page
    starts = F.pad(used.cumsum(0), (1, 0)).int()
    indices = posed.table[torch.arange(s.pages, device=device) < used[:, None]].contiguous()
    wrapper = module.BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.int8, device=device))
    query_starts = torch.arange(s.B + 1, dtype=torch.int32, device=device) * s.S
    wrapper.plan(
        query_starts, starts, indices, posed.lens, s.H, s.L, s.R, s.page, s.S > 1, s.scale, s.dtype, s.cache_dtype
    )
    query = posed.query.reshape(s.B * s.S, s.H, -1)
    nope, rope = query[..., : s.L].contiguous(), query[..., s.L :].contiguous()
    latent, key = posed.kv[..., : s.L].contiguous(), posed.kv[..., s.L :].contiguous()

    def run() -> Tensor:
        out: Tensor = wrapper.run(nope, rope, latent, key, return_lse=False)
        return out.reshape(s.B, s.S, s.H, s.L)

    return run


def _one_token(posed: Problem) -> Tensor:
    _needs(posed.shape.S == 1, "takes one query token")
    return posed.query[:, 0].contiguous()


def vllm(posed: Problem, path: str | None) -> Call:
    """The triton_decode_attention.py of vLLM, splits as it chooses for a batch: 4."""
    platform = types.SimpleNamespace(is_rocm=lambda: False, is_cuda=lambda: True)
    import triton
    import triton.language as tl

    module = _module(
        "vllm.v1.attention.ops.triton_decode_attention", path,
        {"vllm.platforms": {"current_platform": platform}, "vllm.triton_utils": {"triton": triton, "tl": tl}},
    )  # fmt: skip
    s, query, splits = posed.shape, _one_token(posed), 4
    out = torch.empty(s.B, s.H, s.L, dtype=s.dtype, device=query.device)
    lse = torch.empty(s.B, s.H, dtype=torch.float32, device=query.device)
    parts = torch.empty(s.B, s.H, splits, s.L + 1, dtype=torch.float32, device=query.device)
    keys = posed.kv[:, :, None]
    more = {"is_mla": True} if _takes(module.decode_attention_fwd, "is_mla") else {}

    def run() -> Tensor:
        module.decode_attention_fwd(
            query, keys, keys[..., : s.L], out, lse, posed.table, posed.lens, parts, splits, s.scale, s.page, **more
        )
        return out[:, None]

    return run


def sglang(posed: Problem, path: str | None) -> Call:
    """SGLang's decode_attention.py: rows by index, at most 8 splits, its default."""
    utils = {"is_hip": lambda: False, "is_cuda": lambda: True, "is_gfx95_supported": lambda: False}
    stubs: dict[str, dict[str, Any]] = {"sglang.srt.utils": utils}
    module = _module("sglang.srt.layers.attention.triton_ops.decode_attention", path, stubs)
    s, query, splits = posed.shape, _one_token(posed), 8
    assert posed.table is not None
    assert s.page is not None
    device = query.device
    token = torch.arange(s.kv, device=device)
    slots = posed.table.long()[:, token // s.page] * s.page + token % s.page
    read, count = token < posed.lens[:, None], posed.lens
    if s.k:
        slots = posed.places()[:, 0]
        read, count = slots >= 0, (slots >= 0).sum(-1)
    indices = slots[read].contiguous()
    starts = F.pad(count.cumsum(0), (1, 0)).int()
    out = torch.empty(s.B, s.H, s.L, dtype=s.dtype, device=device)
    parts = torch.empty(s.B, s.H, splits, s.L, dtype=torch.float32, device=device)
    lses = torch.empty(s.B, s.H, splits, dtype=torch.float32, device=device)
    counts = torch.full((s.B,), splits, dtype=torch.int32, device=device)
    keys = posed.kv.reshape(-1, 1, s.L + s.R)
    scales = (1.0, 1.0) if _takes(module.decode_attention_fwd, "k_scale") else ()

    def run() -> Tensor:
        module.decode_attention_fwd(
            query, keys, keys[..., : s.L], out, starts, indices, parts, lses, counts, splits, s.scale, *scales
        )
        return out[:, None]

    return run


def flaggems(posed: Problem, path: str | None) -> Call:
    """FlagGems' fused/flash_mla.py; it always scales by 1/sqrt(L+R), as every problem here does."""
    stubs: dict[str, dict[str, Any]] = {
        "flag_gems.runtime": {
            "device": types.SimpleNamespace(name="cuda", vendor_name="nvidia"),
            "torch_device_fn": torch.cuda,
        },
        "flag_gems.utils": {"triton_lang_extension": None},
    }
    module = _module("flag_gems.fused.flash_mla", path, stubs)
    s = posed.shape
    _needs(s.dtype == torch.bfloat16, "takes bfloat16")
    query = _one_token(posed)[:, None]

    def run() -> Tensor:
        values = {
            "q": query, "block_table": posed.table, "blocked_k": posed.kv[:, :, None], "max_seqlen_pad": s.kv,
            "block_size": s.page, "b": s.B, "s_q": 1, "cache_seqlens": posed.lens, "h_q": s.H, "h_kv": 1,
            "d": s.L + s.R, "dv": s.L, "causal": True, "dtype": s.dtype,
        }  # fmt: skip
        out: Tensor = module.flash_mla(**{k: v for k, v in values.items() if _takes(module.flash_mla, k)})
        return out

    return run


def _takes(function: Any, name: str) -> bool:
    import inspect

    return name in inspect.signature(function).parameters


PEERS: dict[str, Callable[[Problem, str | None], Call]] = {
    "sdpa": sdpa,
    "flex": flex,
    "flashmla": flashmla,
    "flashmla sparse": flashmla_sparse,
    "flashmla fp8": flashmla_fp8,
    "flashinfer": flashinfer,
    "vllm": vllm,
    "sglang": sglang,
    "flaggems": flaggems,
}
OTHER_NUMBERS = ("sdpa",)  # works on expanded keys and values: its output is not comparable
OF_LISTS = ("flashmla sparse", "flashmla fp8")  # take lists of keys and nothing else; sglang takes both
FLEX_SHAPES = ((8, 4096, 128, 1), (1, 32768, 16, 1))  # each is compiled anew, which takes seconds


def where_timed(name: str, shape: Shape) -> None:
    """Raises :class:`SkipError` for a peer that is worth a few shapes only; a cache in one piece comes with a mask."""
    _needs(shape.page is not None, "timed over pages, without a mask")
    _needs(shape.R > 0, "the adapters are for rows with a rotary part")
    _needs(not shape.groups or name == "flashmla fp8", "takes no rows of bytes")
    if shape.k:
        _needs(name in (*OF_LISTS, "sglang"), "takes no lists of keys")
    else:
        _needs(name not in OF_LISTS, "takes lists of keys only")
    if name == "sdpa":
        _needs(shape.B * shape.kv <= 65536, "timed where B * kv is at most 65536")
    if name == "flex":
        _needs((shape.B, shape.kv, shape.H, shape.S) in FLEX_SHAPES, f"timed for B, kv, H, S of {FLEX_SHAPES}")
