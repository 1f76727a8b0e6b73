"""Calls of the Triton kernels, built and compared with the float64 reference inside the interpreting process."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_compile.kernels import kinds, reference
from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.devices import PRESETS
from mla_compile.kernels.launch import chosen_plan
from mla_compile.kernels.plan import Plan
from mla_compile.kernels.triton.steps import dot_dtype
from tests.support import interpreter
from tests.support.lists import lists

FP8 = torch.float8_e4m3fn
# Relative RMS error, and largest error over the largest value, by the dtype of the products: weights and result are
# rounded to it once each (float32 products are exact in the interpreter; on a GPU they are tf32x3).
TOLERANCE = {torch.bfloat16: (2.6e-3, 8e-3), torch.float16: (4e-4, 1.5e-3), torch.float32: (1.5e-6, 6e-6)}
LSE_TOLERANCE = {torch.bfloat16: 2e-5, torch.float16: 2e-5, torch.float32: 2e-6}  # over 1 + |lse|


@dataclass(frozen=True)
class Case:
    """One call. ``lens`` are the requests' lengths; ``page`` 0 is a contiguous cache of ``T`` tokens."""

    lens: tuple[int, ...] = (70, 33)
    T: int = 96
    S: int = 1
    H: int = 4
    L: int = 64
    R: int = 16
    Lv: int | None = None
    dtype: torch.dtype = torch.bfloat16
    query_dtype: torch.dtype | None = None
    rope_dtype: torch.dtype | None = None
    page: int = 0
    joint: bool = True  # latent and rope are views of one cache, whose rows are 3 wider than they need be
    four: bool = False
    causal: bool = False
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    kv_scale: str | None = None  # tensor, token, or group: of 16 columns
    mask: str | None = None  # kind and axes: "bool B11T", "add 1HST", "lowest B1ST"
    k: int = 0  # entries of a list of keys for each query token; 0: no lists
    sees: str = "random"  # of the mask: random, left (padding), tail (of a static cache), holes, nothing
    splits: int = 1
    chunk: int | None = None
    block_m: int = 16
    block_n: int = 32
    least: int = 0
    query_size: float = 1.0
    row_size: float = 1.0
    scale: float = 0.2
    device: str = "sm_90"
    seed: int = 0
    garbage: float = float("nan")


def ids(case: Case) -> str:
    """What of a case differs from the default."""
    plain = Case()
    changed = {k: v for k, v in case.__dict__.items() if str(v) != str(getattr(plain, k))}
    return ",".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in changed.items()) or "plain"


def same(cases: list[Case]) -> pytest.MarkDecorator:
    """Runs a test for each case."""
    return pytest.mark.parametrize("case", cases, ids=ids)


@dataclass(frozen=True)
class Made:
    """A call, and the same one in float64 for the reference."""

    call: DecodeCall
    exact: DecodeCall


def _visible_by_mask(case: Case, g: torch.Generator) -> Tensor:
    """[b,h,s,t] bool, axes of size 1 where the mask is broadcast."""
    assert case.mask is not None
    sizes = [{"B": len(case.lens), "H": case.H, "S": case.S, "T": case.T}.get(x, 1) for x in case.mask.split()[1]]
    t = torch.arange(sizes[3])
    if case.sees == "left":
        return (t >= torch.tensor([100, 5][: sizes[0]])[:, None, None, None]).expand(sizes).clone()
    if case.sees == "tail":
        return (t < torch.tensor([37, 70][: sizes[0]])[:, None, None, None]).expand(sizes).clone()
    if case.sees == "holes":
        return ((t // 32) % 2 == 1).expand(sizes).clone()
    if case.sees == "nothing":
        return torch.zeros(sizes, dtype=torch.bool)
    return torch.rand(sizes, generator=g) < 0.5


def make(case: Case) -> Made:
    """The tensors of a case. Every row that no query sees holds ``garbage``, every unused table entry -1."""
    g = torch.Generator().manual_seed(case.seed)
    B, width = len(case.lens), case.L + case.R
    paged = case.page > 0
    lens = torch.tensor(case.lens, dtype=torch.int32)
    T = case.T if not paged else -(-case.T // case.page) * case.page
    case = replace(case, T=T)
    rows = case.row_size * torch.randn(B, T, width, generator=g)
    values = None if case.Lv is None else torch.randn(B, T, case.Lv, generator=g)
    query = case.query_size * torch.randn(B, case.S, case.H, width, generator=g)
    half = torch.bfloat16 if case.dtype == FP8 else case.dtype
    query = query.to(case.query_dtype or half)

    mask, sees = None, None
    if case.mask is not None:
        kind, sees = case.mask.split()[0], _visible_by_mask(case, g)
        added = torch.randn(sees.shape, generator=g)
        mask = {
            "bool": sees,
            "add": added.masked_fill(~sees, -torch.inf),
            "lowest": torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min),
            "half": added.bfloat16().masked_fill(~sees, -torch.inf),
        }[kind]
    seen = reference._visible(B, case.S, T, lens, case.window, torch.device("cpu"), causal=case.causal).expand(
        B, case.H, -1, -1
    )
    if sees is not None and not (case.k and "lowest" in case.mask):  # the keys of a list are weighed as they are
        seen = seen & sees
    indices = lists(B, case.S, T, case.k, seed=case.seed) if case.k else None
    if indices is not None:
        seen = seen & reference._named(indices, T)
    unread = ~seen.any(dim=2).any(dim=1)  # [B,T]

    stored = rows.to(case.dtype)
    rope_dtype = case.rope_dtype or case.dtype
    stored_rope = rows[..., case.L :].to(rope_dtype)
    scale = None
    if case.kv_scale == "tensor":
        scale = torch.tensor(0.37)
    elif case.kv_scale == "token":
        scale = torch.rand(B, T, generator=g) * 3 + 0.01
    elif case.kv_scale == "group":
        scale = (torch.rand(B, T, case.L // 16 + 1, generator=g) * 3 + 0.01)[..., 1:]
    factor = torch.ones(()).double() if scale is None else scale.double()
    if factor.dim():
        factor = factor[..., None] if factor.dim() == 2 else factor.repeat_interleave(16, -1)
    exact_rope = stored_rope.double() * (factor if rope_dtype == FP8 and case.R else 1.0)
    exact_latent = stored[..., : case.L].double() * factor
    if case.kv_scale == "group":  # rounded once, as the kernel says
        exact_latent = exact_latent.bfloat16().double()
    numbers: dict[str, Any] = {
        "scale": case.scale, "causal": case.causal, "softcap": case.softcap, "window": case.window
    }  # fmt: skip
    exact = DecodeCall(
        query.double(),
        exact_latent.masked_fill(unread[..., None], 0.0),
        exact_rope.masked_fill(unread[..., None], 0.0) if case.R else None,
        None if values is None else values.to(case.dtype).double(),
        _exact_mask(mask),
        lens,
        indices=indices,
        **numbers,
    )

    def dirty(x: Tensor) -> Tensor:
        bits = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
        return bits.masked_fill(unread[..., None], 0x7F if x.dtype.itemsize == 1 else case.garbage).view(x.dtype)

    stored, stored_rope = dirty(stored), dirty(stored_rope)
    if values is not None:
        values = dirty(values.to(case.dtype))
    if scale is not None and scale.dim():
        scale = scale.masked_fill(unread if scale.dim() == 2 else unread[..., None], torch.nan)
    table = None
    if paged:
        stored, stored_rope, table, scale = _paged(case, stored, stored_rope, scale, g)
    latent, rope = stored[..., : case.L], stored_rope
    if case.joint and rope_dtype == case.dtype:
        wide = torch.cat([stored.view(_moved(stored)), stored.view(_moved(stored))[..., :3]], dim=-1).view(stored.dtype)
        latent, rope = wide[..., : case.L], wide[..., case.L : width]
    else:
        latent, rope = _contiguous(latent), _contiguous(rope)
    sinks = torch.randn(case.H, generator=g) if case.sinks else None
    call = DecodeCall(
        query, latent, rope if case.R else None, values, mask, lens, sinks, scale, indices, block_table=table, **numbers
    )  # fmt: skip
    return Made(call, exact._replace(sinks=None if sinks is None else sinks.double()))


def _moved(x: Tensor) -> torch.dtype:
    """A dtype of the same size that torch.cat and indexing take on the CPU."""
    return torch.uint8 if x.dtype.itemsize == 1 else x.dtype


def _contiguous(x: Tensor) -> Tensor:
    return x.view(_moved(x)).contiguous().view(x.dtype)


def _paged(
    case: Case, stored: Tensor, rope: Tensor, scale: Tensor | None, g: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The rows spread over pages in random order; pages that belong to nobody hold garbage."""
    page, per = case.page, case.T // case.page
    needed = [-(-n // page) for n in case.lens]
    order = torch.randperm(sum(needed) + 3, generator=g)
    table = torch.full((len(case.lens), per), -1, dtype=torch.int32)

    def empty(x: Tensor) -> Tensor:
        shape = (len(order), page, *x.shape[2:])
        bits = torch.full(shape, 0x7F if x.dtype.itemsize == 1 else torch.nan, dtype=_moved(x))
        return bits.view(x.dtype)

    places = [empty(x) for x in (stored, rope)]
    scales = None if scale is None or scale.dim() == 0 else torch.full((len(order), page, *scale.shape[2:]), torch.nan)
    at = 0
    for b, count in enumerate(needed):
        for i in range(count):
            p = int(order[at])
            at += 1
            table[b, i] = p
            tokens = slice(i * page, (i + 1) * page)
            for place, x in zip(places, (stored, rope), strict=True):
                place.view(_moved(x))[p] = x.view(_moved(x))[b, tokens]
            if scales is not None and scale is not None:
                scales[p] = scale[b, tokens]
    return places[0], places[1], table, scale if scales is None else scales


def planned(case: Case) -> Plan:
    return Plan("triton", case.block_m, case.block_n, 4, 2, case.splits, case.chunk, 0)


def check(case: Case, plan: Plan | None = None) -> float:
    """Asserts that the kernels agree with the reference; returns the relative RMS error."""
    made = make(case)
    seen: dict[str, Tensor] = {}
    plan = plan or planned(case)
    out, lse = interpreter.run(made.call, plan, PRESETS[case.device], least=case.least, seen=seen)
    want, want_lse = reference.decode_attention(made.exact)
    compare(out, lse, want, want_lse, dot_dtype(made.call), case)
    if "work" in seen and case.sees in ("tail", "left"):
        tiles = -(-made.call.sizes.T // plan.block_n)
        assert int(seen["work"][5, 0, 0]) < tiles, "a tile that nobody sees is on the list"
    error: float = ((out.double() - want).norm() / want.norm().clamp(min=1e-30)).item()
    return error


def two_layers(case: Case) -> None:
    """Two calls of other queries and rows, with one schedule: the reference's result, and bit for bit their own."""
    layers = [make(replace(case, sees="tail", seed=seed)) for seed in (1, 2)]
    plan, device = planned(case), PRESETS[case.device]
    first = layers[0].call
    schedule = interpreter.schedule(first, plan, device)
    for made in layers:
        call = made.call._replace(mask=first.mask)
        seen: dict[str, Tensor] = {}
        given = call._replace(schedule=schedule.clone())
        out, lse = interpreter.run(given, plan, device, least=case.least, seen=seen)
        assert "work" not in seen, "a list of its own was allocated"
        assert torch.equal(given.schedule, schedule), "a call wrote into the schedule"
        alone = interpreter.run(call, plan, device, least=case.least)
        assert torch.equal(out, alone[0])
        assert torch.equal(lse, alone[1])
        want, want_lse = reference.decode_attention(made.exact._replace(mask=_exact_mask(first.mask)))
        compare(out, lse, want, want_lse, dot_dtype(call), case)


def launched_for_another_length(case: Case, tokens: tuple[int, ...], splits: int, dense: bool) -> set[Plan]:
    """Caches of several numbers of tokens, launched as the first was bound; returns the plans, which should be one.

    ``dense``: a cache's requests lie behind each other, else they are views of one buffer of fixed strides.
    """
    device, bound, plans = PRESETS[case.device], None, set()
    for T in tokens:
        made = make(replace(case, T=T, lens=tuple(min(n, T) for n in case.lens), seed=T, k=min(case.k, T)))
        given = made.call
        assert given.rope is not None
        room = torch.full((len(case.lens), T if dense else max(tokens) + 5, case.L + case.R), torch.nan).to(case.dtype)
        rows = room[:, :T, : case.L].copy_(given.latent), room[:, :T, case.L :].copy_(given.rope)
        call = given._replace(latent=rows[0], rope=rows[1], num_splits=splits)
        if given.kv_scale is not None and not dense:
            scales = torch.full((*room.shape[:2], *given.kv_scale.shape[2:]), torch.nan)
            call = call._replace(kv_scale=scales[:, :T].copy_(given.kv_scale))
        if min(case.lens) >= max(tokens):  # then T alone says where the keys end
            call = call._replace(seq_lens=None)
        form = kinds.grown(call)
        assert form is not None
        bound = bound or call
        first = kinds.grown(bound)
        assert first is not None
        assert first[:2] == form[:2], "another kind of call"
        plan = chosen_plan(call, device, most=form.most, gluon=False)
        plans.add(plan)
        out, lse = interpreter.run(call, plan, device, least=0 if splits else None, bound=bound)
        want, want_lse = reference.decode_attention(made.exact)
        compare(out, lse, want, want_lse, dot_dtype(call), case)
    return plans


def _exact_mask(mask: Tensor | None) -> Tensor | None:
    return mask if mask is None or mask.dtype == torch.bool else mask.double()


def compare(out: Tensor, lse: Tensor, want: Tensor, want_lse: Tensor, dot: torch.dtype, case: Case) -> None:
    assert out.shape == want.shape
    assert lse.shape == want_lse.shape
    assert bool(torch.isfinite(out).all())
    blind = want_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, blind)
    assert not out[blind].any()
    rms, largest = TOLERANCE[dot]
    if dot == torch.float32:
        rms, largest = rms * max(1.0, case.softcap), largest * max(1.0, case.softcap)
    if case.kv_scale and case.query_dtype != dot:  # query (and rope) are rounded to the products' dtype as well
        rms, largest = 1.7 * rms, 1.7 * largest
    error = out.double() - want
    assert error.norm() <= rms * want.norm(), f"relative RMS error {error.norm() / want.norm():.2e}"
    assert error.abs().max() <= largest * want.abs().max(), f"error {error.abs().max() / want.abs().max():.2e}"
    # Scores of a float32 query beside half precision rows carry the rounding of the query.
    rounded = case.query_dtype == torch.float32 and dot != torch.float32
    lse_error = ((lse - want_lse).abs() / (1 + want_lse.abs())).masked_fill(blind, 0.0).max()
    assert lse_error <= (2e-3 if rounded or case.kv_scale else LSE_TOLERANCE[dot]), f"lse error {lse_error:.2e}"


def check_planned(case: Case, splits: int, deterministic: bool) -> Plan:
    """The planner's own plan for the case's device, run."""
    call = make(case).call._replace(num_splits=splits, deterministic=deterministic)
    plan = chosen_plan(call, PRESETS[case.device], gluon=False)
    check(case, plan)
    return plan


def alone_and_together(case: Case, capacities: tuple[int, ...]) -> None:
    """Each request of a deterministic batch, by itself and with other room, gives the same bits."""
    plan = planned(case)
    assert plan.chunk is not None
    together = make(case).call
    out, lse = interpreter.run(together, replace(plan, splits=-(-(case.k or case.T) // plan.chunk)))
    for b in range(len(case.lens)):
        for capacity in capacities:
            own = _request(together, b, capacity)
            splits = max(1, -(-(case.k or own.sizes.T) // plan.chunk))
            own_out, own_lse = interpreter.run(own, replace(plan, splits=splits))
            assert torch.equal(own_out[0], out[b]), f"request {b} with room for {capacity}"
            assert torch.equal(own_lse[0], lse[b])


def _request(call: DecodeCall, b: int, capacity: int) -> DecodeCall:
    """Request b of a batch, its cache cut or continued with garbage to ``capacity`` tokens."""
    assert call.seq_lens is not None
    one = slice(b, b + 1)
    call = call._replace(indices=None if call.indices is None else call.indices[one])
    if call.block_table is not None:
        pages = -(-capacity // call.latent.shape[1])
        table = torch.full((1, pages), -1, dtype=torch.int32)
        kept = min(pages, call.block_table.shape[1])
        table[:, :kept] = call.block_table[one, :kept]
        return call._replace(query=call.query[one], block_table=table, seq_lens=call.seq_lens[one])

    def cut(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        room = torch.full((1, capacity, x.shape[2]), torch.nan, dtype=x.dtype)
        kept = min(capacity, x.shape[1])
        room[:, :kept] = x[one, :kept]
        return room

    latent = cut(call.latent)
    assert latent is not None
    return call._replace(query=call.query[one], latent=latent, rope=cut(call.rope), seq_lens=call.seq_lens[one])


def far_rows(paged: bool, listed: bool) -> None:
    """Rows beyond 2^31 elements, in memory that is reserved and never touched but for them."""
    L, R, H, page = 64, 16, 3, 16
    elements = (1 << 31) + (1 << 22)
    noreserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named from Python 3.13 on; Linux's number
    memory = mmap.mmap(-1, 2 * elements, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | noreserve)
    flat = torch.frombuffer(memory, dtype=torch.float16)
    g = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, H, L + R, generator=g).half()
    rows = torch.randn(40, L + R, generator=g).half()
    if paged:
        pages = elements // (page * (L + R))
        cache = flat[: pages * page * (L + R)].view(pages, page, L + R)
        chosen = [pages - 1, pages - 7, 3]
        cache[chosen] = torch.cat([rows, rows[:8]]).view(3, page, L + R)
        table = torch.tensor([chosen], dtype=torch.int32)
        lens = torch.tensor([40], dtype=torch.int32)
        call = DecodeCall.paged(query, cache[..., :L], cache[..., L:], table, lens, scale=0.2)
        assert chosen[0] * cache.stride(0) > 1 << 31
    else:  # 40 tokens, far apart: the product with the row's stride passes 2^31 inside the request
        stride = (1 << 31) // 39 + 8
        cache = flat.as_strided((1, 40, L + R), (0, stride, 1))
        cache[0] = rows
        call = DecodeCall(query, cache[..., :L], cache[..., L:], scale=0.2)
        assert 39 * stride > 1 << 31
    exact = DecodeCall(query.double(), rows[None, :, :L].double(), rows[None, :, L:].double(), scale=0.2)
    if listed:
        indices = lists(1, 1, 40, 30)
        call, exact = call._replace(indices=indices), exact._replace(indices=indices)
    out, lse = interpreter.run(call, Plan("triton", 16, 32, 4, 2, 2, None, 0), least=0)
    want, want_lse = reference.decode_attention(exact)
    compare(out, lse, want, want_lse, torch.float16, Case())


def counted(mask: Tensor, block_n: int, causal: bool, lens: tuple[int, ...]) -> list[list[int]]:
    """The tiles that the pre-pass lists for each request, for a call with this mask [B,H,S,T]."""
    B, H, S, T = mask.shape
    g = torch.Generator().manual_seed(0)
    call = DecodeCall(
        torch.randn(B, S, H, 24, generator=g).half(), torch.randn(B, T, 16, generator=g).half(),
        torch.randn(B, T, 8, generator=g).half(), mask=mask, seq_lens=torch.tensor(lens, dtype=torch.int32),
        scale=1.0, causal=causal,
    )  # fmt: skip
    seen: dict[str, Tensor] = {}
    interpreter.run(call, Plan("triton", 16, block_n, 4, 2, 1, None, 0), seen=seen)
    work = seen["work"]
    return [work[3, b, : int(work[5, b, 0])].tolist() for b in range(work.shape[1])]


def nan_in_a_visible_row(splits: int) -> tuple[bool, bool]:
    """Whether the NaN of a row that is seen shows in ``out`` and in ``lse``."""
    made = make(Case(splits=splits))
    latent = made.call.latent
    latent[0, 3, 0] = torch.nan
    out, lse = interpreter.run(made.call, planned(Case(splits=splits)))
    return bool(out[0].isnan().any()), bool(lse[0].isnan().all())


def every_fp8_value() -> Tensor:
    """What the kernel makes of the 256 bit patterns of e4m3, by its shifts.

    They are requests of one token of 16 columns. The two NaN have one each, for a score is that of all columns.
    """
    bits = torch.arange(256, dtype=torch.uint8)
    nan = bits & 127 == 127
    others = torch.nn.functional.pad(bits[~nan], (0, 2)).view(16, 16)
    latent = torch.cat([bits[nan][:, None].expand(2, 16), others])[:, None].view(FP8)
    query = torch.zeros(18, 1, 1, 16, dtype=torch.float16)
    call = DecodeCall(query, latent, kv_scale=torch.ones(()), scale=1.0)
    out, _ = interpreter.run(call, Plan("triton", 16, 16, 4, 2, 1, None, 0), PRESETS["sm_80"])
    values = torch.empty(256, dtype=out.dtype)
    values[nan], values[~nan] = out[:2, 0, 0, 0], out[2:].flatten()[:254]
    return values
