"""One decode attention problem: its sizes, its random inputs, our call and the float64 truth.

A problem is paged: requests of different lengths over pages in random order. What no request owns (page tails, spare
pages) is NaN and unused slots of the block table are -1, so that whatever reads past a length is seen in the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mla_compile.kernels import chosen, reference
from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.plan import Device, Plan, plan
from mla_compile.kernels.triton.steps import read_mask_bytes

FP8 = torch.float8_e4m3fn
# Scores have a standard deviation of 1, so that a wrong score is seen; values are small, as in FlashMLA's own test,
# whose tolerances are absolute.
QUERY_SPREAD = 10.0
CACHE_SPREAD = 0.1


@dataclass(frozen=True)
class Shape:
    """Letters of mla_compile.core.dims; ``kv`` is the longest request, ``page`` None a contiguous cache [B,T,L+R].

    ``k`` is how many keys a list names for each query token, 0 where there are no lists. ``groups`` > 0: rows are bytes
    as FlashMLA packs them (L float8 values, so many float32 scales of them, rope in bfloat16), and ``cache`` is float8.
    """

    B: int
    kv: int
    H: int
    S: int = 1
    L: int = 512
    R: int = 64
    page: int | None = 64
    dtype: torch.dtype = torch.bfloat16
    cache: torch.dtype | None = None
    k: int = 0
    groups: int = 0

    @property
    def cache_dtype(self) -> torch.dtype:
        """The cache's dtype: the query's unless said otherwise."""
        return self.cache or self.dtype

    @property
    def row(self) -> int:
        """Bytes of a cached row."""
        return self.L + 4 * self.groups + 2 * self.R if self.groups else (self.L + self.R) * self.cache_dtype.itemsize

    @property
    def scale(self) -> float:
        """1/sqrt(L+R): the only one that every peer can be given."""
        return float((self.L + self.R) ** -0.5)

    @property
    def pages(self) -> int:
        """Slots of a request in the block table."""
        return max(1, -(-self.kv // (self.page or self.kv or 1)))

    def cost(self, tokens: int | None = None) -> tuple[int, int]:
        """Bytes that have to be moved (cache, query, output, each once) and FLOPs; ``tokens`` of all requests.

        Of lists, the rows of one for each request, and the list: those of other query tokens may name the same rows.
        """
        total = self.B * (self.k or self.kv) if tokens is None else tokens
        rows = self.B * self.S * self.H
        moved = total * self.row
        moved += rows * (2 * self.L + self.R) * self.dtype.itemsize + 4 * self.B * self.S * self.k
        return moved, 2 * self.S * self.H * total * (2 * self.L + self.R)

    def __str__(self) -> str:
        extra = "" if self.page == 64 else f" page{self.page}"
        extra += "" if (self.L, self.R) == (512, 64) else f" {self.L}+{self.R}"
        extra += "" if self.dtype == torch.bfloat16 else f" {str(self.dtype).removeprefix('torch.')}"
        extra += f" k{self.k}" if self.k else ""
        extra += "" if self.cache is None else f" cache {str(self.cache).removeprefix('torch.')}"
        extra += f" in rows of {self.row} bytes" if self.groups else ""
        return f"b{self.B} kv{self.kv} h{self.H} s{self.S}{extra}"


@dataclass
class Problem:
    """Inputs of one call. ``kv`` is [P,page,L+R] or, with ``table`` None, [B,T,L+R]; packed rows are uint8."""

    shape: Shape
    query: Tensor
    kv: Tensor
    table: Tensor | None
    lens: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def ours(self, own: Plan | None = None, **more: Any) -> tuple[Tensor, Tensor]:
        """Our public function on this problem: ``out``, ``lse``."""
        from mla_compile.kernels import decode

        options = {"scale": self.shape.scale, **self.options, **more}
        if own is not None:
            options["plan"] = own
        if self.table is None:
            latent, rope, scales = self.parts(self.kv)
            if scales is not None:
                options["kv_scale"] = scales
            return decode.decode_attention(self.query, latent, rope, seq_lens=self.lens, **options)
        return decode.paged_decode_attention(
            self.query, self.kv, self.table, self.lens, latent_width=self.shape.L, **options
        )

    def parts(self, kv: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Latent, rope and, of packed rows, the scales of groups: views of rows."""
        L, groups = self.shape.L, self.shape.groups
        if not groups:
            return kv[..., :L], kv[..., L:] if self.shape.R else None, None
        start = L + 4 * groups
        return kv[..., :L].view(FP8), kv[..., start:].view(torch.bfloat16), kv[..., L:start].view(torch.float32)

    def places(self) -> Tensor:
        """The lists as row numbers in the cache, int32 [B,S,k], as peers take them; -1 where no key is named."""
        at = self.options["indices"].long()
        named = (at >= 0) & (at < self.lens[:, None, None])
        at = at.masked_fill(~named, 0)
        batch = torch.arange(self.shape.B, device=at.device)[:, None, None]
        if self.table is None:
            at = batch * self.kv.shape[1] + at
        else:
            page = self.kv.shape[1]
            at = self.table.long()[batch, at // page] * page + at % page
        return at.masked_fill(~named, -1).int()

    def rows(self, capacity: int) -> Tensor:
        """The cache as [B,capacity,L+R], gathered; slots without a page read page 0, which no length reaches."""
        if self.table is None:
            return self.kv
        gathered = self.kv[self.table.clamp(min=0).long()]
        return gathered.reshape(self.shape.B, -1, gathered.shape[-1])[:, :capacity]

    def truth(self) -> tuple[Tensor, Tensor]:
        """kernels/reference.py in float64 on the same device: ``out`` [B,S,H,L] float64, ``lse`` [B,S,H] float64."""
        L, options = self.shape.L, dict(self.options)
        for name in ("num_splits", "deterministic", "plan"):
            options.pop(name, None)
        if self.shape.k:
            return self._truth_of_lists(options)
        latent, rope, of_groups = self.parts(self.rows(self.shape.kv))
        latent, rope = latent.to(torch.float64), None if rope is None else rope.to(torch.float64)
        scales = options.pop("kv_scale", None)
        if of_groups is not None:
            latent = latent * of_groups.repeat_interleave(L // self.shape.groups, -1).to(torch.float64)
        elif scales is not None:
            factor = self._by_row(scales).to(torch.float64) if scales.dim() else scales.to(torch.float64)
            latent, rope = latent * factor, None if rope is None else rope * factor
        call = DecodeCall(
            self.query.to(torch.float64), latent, rope, options.pop("values", None), options.pop("mask", None),
            scale=self.shape.scale, seq_lens=self.lens, **options,
        )  # fmt: skip
        return reference.decode_attention(call)

    def _truth_of_lists(self, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The same for lists alone, from their rows: all rows in float64 may not fit in memory."""
        L = self.shape.L
        latent, rope, scales = self.parts(self.kv)
        if scales is not None:
            options["kv_scale"] = scales
        call = DecodeCall(
            self.query, latent, rope, seq_lens=self.lens, block_table=self.table, scale=self.shape.scale, **options
        )
        few = chosen.gathered(call)
        few = few._replace(query=few.query.double(), latent=few.latent.double())
        out, lse = reference.decode_attention(few._replace(rope=None if few.rope is None else few.rope.double()))
        return out.view(*self.query.shape[:3], L), lse.view(self.query.shape[:3])

    def _by_row(self, scales: Tensor) -> Tensor:
        """Per-token scales [P,page] or [B,T] as [B,T,1]."""
        if self.table is None:
            return scales[..., None]
        gathered = scales[self.table.clamp(min=0).long()].reshape(self.shape.B, -1)
        return gathered[:, : self.shape.kv, None]

    def plan(self, kernel: str) -> Plan | None:
        """:func:`plan_of` this problem."""
        return plan_of(self.shape, self.query.device, kernel, self.options)


def plan_of(shape: Shape, device: torch.device, kernel: str, options: dict[str, Any]) -> Plan | None:
    """The plan that the library makes when it may (``gluon``) or may not (``triton``) use the Hopper kernel.

    ``gluon splits`` is the Hopper kernel with each request cut into splits, where the plan would have the batch cut
    on the device. None where the plan would not do it. Of ``options`` the tensors may lie on any device.
    """
    values, mask = options.get("values"), options.get("mask")
    listed = "indices" in options or shape.k
    if kernel != "triton" and listed and mask is not None and (mask.dtype != torch.bool or mask.shape[1] > 1):
        return None
    B, S, T = shape.B, shape.S, shape.kv if shape.page is None else shape.pages * shape.page
    entries = options["indices"].shape[2] if "indices" in options else shape.k
    if entries:  # as kernels/launch.py has it
        B, S, T = B * S, 1, entries
    made = plan(
        B=B, S=S, H=shape.H, L=shape.L, R=shape.R, T=T, query_dtype=shape.dtype, cache_dtype=shape.cache_dtype,
        page_size=shape.page, Lv=None if values is None else values.shape[-1], masked=mask is not None,
        mask_bytes=read_mask_bytes(mask), device=Device.of(device), splits=options.get("num_splits"),
        deterministic=options.get("deterministic", False), gluon=kernel != "triton", listed=bool(entries),
        window=options.get("window", 0), grouped=shape.groups > 0,
    )  # fmt: skip
    if kernel == "gluon splits":
        return replace(made, scheduled=False) if made.scheduled else None
    return made if made.kernel == kernel else None


def kernels_for(shape: Shape, device: torch.device, options: dict[str, Any]) -> dict[str, Plan]:
    """The plans of the kernels that take such a call here, by the names of :func:`plan_of`, the portable one first."""
    plans = {name: plan_of(shape, device, name, options) for name in ("triton", "gluon", "gluon splits")}
    return {name: made for name, made in plans.items() if made is not None}


def lists(shape: Shape, k: int, device: torch.device, seed: int = 8) -> Tensor:
    """int32 [B,S,k]: distinct keys of [0, kv) in any order for each query token, a tenth of them -1."""
    g = torch.Generator(device).manual_seed(seed)
    order = torch.rand(shape.B, shape.S, shape.kv, generator=g, device=device).argsort(-1)[..., :k].int()
    return order.masked_fill(torch.rand(order.shape, generator=g, device=device) < 0.1, -1)


def left_padded(lens: Sequence[int], kv: int, device: torch.device) -> Tensor:
    """A boolean mask [B,1,1,kv] that shows the last ``lens[b]`` tokens of request b."""
    first = kv - torch.tensor(lens, device=device)[:, None, None, None]
    return torch.arange(kv, device=device) >= first


def lengths(shape: Shape, how: str, generator: torch.Generator) -> Tensor:
    """int32 [B]: ``full``, ``varied`` (1..kv, one request full) or ``zeros`` (varied, every third one empty)."""
    lens = torch.full((shape.B,), shape.kv, dtype=torch.int32)
    if how != "full" and shape.kv > 1:
        lens[1:] = torch.randint(1, shape.kv + 1, (shape.B - 1,), generator=generator, dtype=torch.int32)
    if how == "zeros":
        lens[(0 if shape.B == 1 else 1) :: 3] = 0
    return lens


def problem(shape: Shape, device: torch.device, seed: int, *, how: str = "full", **options: Any) -> Problem:
    """Random inputs; spare pages and what lies past a length hold NaN. ``kv_scale`` per token is cut to the pages."""
    host = torch.Generator().manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    width = shape.L + shape.R

    def normal(spread: float, *size: int) -> Tensor:
        return spread * torch.randn(*size, generator=generator, device=device)

    of_cache = 1.0 if shape.cache_dtype == FP8 else CACHE_SPREAD

    lens = lengths(shape, how, host)
    query = normal(QUERY_SPREAD, shape.B, shape.S, shape.H, width).to(shape.dtype)
    if shape.page is None:
        kv = normal(of_cache, shape.B, shape.kv, width)
        past = torch.arange(shape.kv)[None, :] >= lens[:, None]
        kv[past.to(device)] = float("nan")
        return Problem(shape, query, stored(shape, kv), None, lens.to(device), options)
    used = -(-lens.long() // shape.page)
    spare = 3
    order = torch.randperm(int(used.sum()), generator=host) + spare
    table = torch.full((shape.B, shape.pages), -1, dtype=torch.int32)
    table[torch.arange(shape.pages)[None, :] < used[:, None]] = order.int()
    kv = normal(of_cache, int(used.sum()) + spare, shape.page, width)
    kv[:spare] = float("nan")
    ragged = (lens % shape.page != 0).nonzero().flatten()
    for b in ragged.tolist():
        kv[int(table[b, used[b] - 1]), int(lens[b]) % shape.page :] = float("nan")
    scales = options.get("kv_scale")
    if scales is not None and scales.dim():
        options["kv_scale"] = scales[: kv.shape[0]]
    return Problem(shape, query, stored(shape, kv), table.to(device), lens.to(device), options)


def stored(shape: Shape, kv: Tensor) -> Tensor:
    """Rows of float32 as a cache of this shape holds them."""
    if not shape.groups:
        return kv.to(shape.cache_dtype)
    latent = kv[..., : shape.L].unflatten(-1, (shape.groups, -1))
    scales = latent.abs().amax(-1) / 448  # e4m3's largest value
    values = (latent / scales[..., None]).flatten(-2).to(FP8)
    parts = (values, scales, kv[..., shape.L :].bfloat16())
    return torch.cat([x.contiguous().view(torch.uint8) for x in parts], -1)


@contextmanager
def poisoned() -> Iterator[None]:
    """Within, torch.empty is filled with NaN: an element that a kernel leaves unwritten is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled
