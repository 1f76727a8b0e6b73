"""The kernels that benchmarks/gpu/offline.py compiles: calls on meta tensors, for every card, and what may spill."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from mla_compile.kernels.call import DecodeCall, IndexCall
from mla_compile.kernels.devices import PRESETS, Device
from mla_compile.kernels.hopper import steps as hopper_steps
from mla_compile.kernels.launch import chosen_plan
from mla_compile.kernels.plan import Plan
from mla_compile.kernels.triton.index_steps import index_step
from mla_compile.kernels.triton.step import Step
from mla_compile.kernels.triton.steps import steps
from mla_compile.kernels.tuned import table

# The AMD cards' LDS and bandwidth are from their datasheets; the capability says whose tiles they are given.
AMD = {
    "gfx942": Device("AMD Instinct MI300X", (8, 0), 304, 64 * 1024, 5.3e12),
    "gfx950": Device("AMD Instinct MI355X", (8, 0), 256, 160 * 1024, 8.0e12),
}
DEVICES = {name: PRESETS[name] for name in ("sm_80", "sm_90", "sm_100", "sm_120")} | AMD
CACHES = {"half": torch.bfloat16, "float8": torch.float8_e4m3fn, "float32": torch.float32}
NAMES = {"half": "bf16", "float8": "fp8", "float32": "fp32"}
B, T = 4, 4096
WINDOW = 512
CHOSEN = 2048  # keys of a list: DeepSeek-V3.2's
POOL = 1 << 17  # pages of a server's cache: more than 2^31 elements, so that places of listed rows take 64 bits


@dataclass(frozen=True)
class Case:
    """One kernel to compile."""

    arch: str
    label: str
    kernel: str  # name of the step
    rows: int = 16
    cache: str = "half"
    page: int = 0
    query: str | None = None  # "float32" beside a half cache
    mask: torch.dtype | None = None  # of a mask [B,1,1,T]: bool hides tokens, a number is added to their scores
    hopper: bool = False
    splits: int = 4  # 0: the plan's own, which on Hopper cuts a paged batch on the device
    listed: int = 0  # keys of a query token's list
    layers: int = 1  # whose pages lie side by side
    tokens: int = 1  # of a query
    sinks: bool = False
    softcap: float = 0.0
    window: int = 0
    scales: str = "one"  # of a float8 cache: one, one for each token, or (rows of 656 bytes) one for each group
    groups: int = 4  # of such a row's columns
    rope: int = 64  # 0: rows without a rotary part, keys and values at once, as DeepSeek-V4 has them
    form: tuple[int, bool] = (3, False)  # of the Hopper kernel: a plan's ``barriers`` and ``held``
    cluster: int = 1  # and its ``cluster``

    @property
    def tolerated(self) -> int:
        """Bytes of spill stores that are put up with, each for its reason."""
        if self.kernel == "attend" and self.rows == 32 and self.page:
            return 16  # 3.6 keeps three scalars of the block table outside the registers
        if self.arch == "sm_100" and self.rows > 32 and self.kernel == "attend" and self.cache == "half":
            return 4 if self.page and not self.listed else 0  # the same tile: one of them
        if self.arch == "sm_80" and self.rows > 32 and self.listed and self.cache == "half" and not self.page:
            return 120 if self.query else 8  # a list's entries beside 64 x 512 sums, in 3.6 twice as many as in 3.7
        if self.scales == "group" and self.listed and self.kernel == "attend":
            return 36  # places of a list beside the scales of their rows, most in 3.8; in 3.9 only on sm_90
        if self.arch == "sm_80" and self.rows > 32 and not self.rope and not self.listed:
            return 12  # the bounds of a window beside 64 x 512 sums, in 3.6
        if self.cluster > 1 and not self.splits:
            return 4  # a CTA's number beside a piece of the schedule, in 3.9
        if self.hopper and self.listed and not self.rope:
            return 4  # a number of the token beside the sums, outside the loop, in 3.9
        if self.cache == "float8" and self.form[1]:
            return 44  # the rotary query beside one scale and a piece of the schedule, in 3.6 to 3.8
        if self.arch == "sm_90" and self.rows > 32 and self.kernel == "attend" and self.mask:
            return 12  # a listed tile's bits, or an added mask's place, beside 64 x 512 sums; in 3.9 up to 4
        return 0

    @property
    def tolerated_local(self) -> int:
        """Loads and stores of local memory that are put up with."""
        import triton

        # Triton 3.9 keeps some of what describes a piece of the schedule outside the registers, with one scale of
        # float8 more, with scales of groups or the query in registers still more: three loads of those are in the
        # loops over blocks.
        newer = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
        few = (77 if self.scales == "group" or self.form[1] else 60) if self.cache == "float8" else 26
        if self.cluster > 1:
            few += 10  # a CTA's number
        if self.tolerated and self.hopper:
            return few  # what is spilled is among them
        return few if newer and self.hopper and not self.splits else 0

    def call(self) -> DecodeCall:
        """The call, on meta tensors."""
        dtype = CACHES[self.cache]
        query = torch.float32 if self.query else (torch.bfloat16 if self.cache == "float8" else dtype)
        outer, inner = (B * T // self.page, self.page) if self.page else (B, T)
        if self.listed and self.page:
            outer = POOL

        def empty(*shape: int, of: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=of, device="meta")

        if self.scales == "group":  # 512 values, their scales and 64 rotary ones in bfloat16, one after the other
            start = 512 + 4 * self.groups
            cache = empty(outer, self.layers, inner, start + 128, of=torch.uint8)[:, -1]
            latent, rope = cache[..., :512].view(dtype), cache[..., start:].view(torch.bfloat16)
            kv_scale = cache[..., 512:start].view(torch.float32)
        else:
            cache = empty(outer, self.layers, inner, 512 + self.rope, of=dtype)[:, -1]
            latent, rope = cache[..., :512], cache[..., 512:] if self.rope else None
            kv_scale = empty(*(() if self.scales == "one" else (outer, inner)), of=torch.float32)
        return DecodeCall(
            empty(B, self.tokens, self.rows, 512 + self.rope, of=query),
            latent,
            rope,
            mask=empty(B, 1, 1, T, of=self.mask) if self.mask else None,
            block_table=empty(B, T // self.page) if self.page else None,
            seq_lens=empty(B) if self.page else None,
            kv_scale=kv_scale if self.cache == "float8" else None,
            sinks=empty(self.rows, of=torch.float32) if self.sinks else None,
            indices=empty(B, self.tokens, self.listed) if self.listed else None,
            scale=0.1,
            causal=True,
            softcap=self.softcap,
            window=self.window,
            num_splits=self.splits,
        )

    def indexer(self) -> IndexCall:
        """A decode step of an indexer of as many heads as there are rows, on meta tensors."""
        shapes, dtype = ((B, 1, self.rows, 128), (B, T, 128)), CACHES[self.cache]
        query, keys = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
        return IndexCall(query, keys, torch.empty(B, 1, self.rows, device="meta"), 0.1)

    @property
    def device(self) -> Device:
        """What is compiled for."""
        return DEVICES[self.arch]

    def step(self) -> tuple[Step, Plan]:
        """The launch that this case is about. That of an indexer has no plan, and beside it stands an attention's."""
        if self.kernel == "index_scores":
            return index_step(self.indexer()), chosen_plan(replace(self, cache="half").call(), self.device)
        call, device = self.call(), self.device
        found = chosen_plan(call, device, gluon=self.hopper)
        if self.hopper:
            found = replace(found, barriers=self.form[0], held=self.form[1], cluster=self.cluster)
        every = hopper_steps.steps(call, found, device) if self.hopper else steps(call, found, device)
        return next(s for s in every if s.name == self.kernel), found


def cases() -> Iterator[Case]:
    """Every tuned row at the largest number of query rows it is for, contiguous and paged; then variants."""
    for arch, device in DEVICES.items():
        for cache in CACHES:
            known = [r for r in table() if (r.kernel, r.capability, r.cache) == ("triton", device.capability, cache)]
            for rows in sorted({r.max_rows or 128 for r in known}):
                for page in (0, 64):
                    label = f"{NAMES[cache]}, {rows} rows{f', page {page}' if page else ''}"
                    yield Case(arch, label, "attend", rows, cache, page)
        yield Case(arch, "bf16, 16 rows, page 16", "attend", 16, page=16)
        yield Case(arch, "bf16, 128 rows, mask", "attend", 128, mask=torch.bool)
        yield Case(arch, "bf16, 128 rows, added mask", "attend", 128, mask=torch.bfloat16)
        yield Case(arch, "bf16, 128 rows, fp32 query", "attend", 128, query="float32")
        for rows, page in itertools.product((16, 32, 128), (0, 64)):
            where = f", page {page}" if page else ""
            yield Case(arch, f"bf16, {rows} rows{where}, list", "attend", rows, page=page, listed=CHOSEN)
        listed = Case(arch, "", "attend", 128, listed=CHOSEN)
        yield replace(listed, label="bf16, 128 rows, list, mask", mask=torch.bool)
        yield replace(listed, label="bf16, 128 rows, list, added mask", mask=torch.bfloat16)
        yield replace(listed, label="bf16, 128 rows, list, fp32 query", query="float32")
        yield replace(listed, label="fp8, 128 rows, page 64, list", cache="float8", page=64)
        yield replace(listed, label="fp32, 128 rows, list", cache="float32")
        packed = Case(arch, "", "attend", cache="float8", page=64, scales="group")
        for rows in (16, 128):
            yield replace(packed, label=f"fp8, 656-byte rows, {rows} rows, page 64", rows=rows)
            yield replace(packed, label=f"fp8, 656-byte rows, {rows} rows, page 64, list", rows=rows, listed=CHOSEN)
        shared = Case(arch, "", "attend", 64, rope=0, sinks=True)
        yield replace(shared, label="bf16, 64 rows, no rope, sinks", window=128)
        yield replace(shared, label="bf16, 64 rows, no rope, sinks, list", listed=512)
        yield replace(shared, label="bf16, 64 rows, no rope, sinks, list, window", listed=512, window=WINDOW)
        yield Case(arch, "combine", "combine")
        yield Case(arch, "indexer, bf16, 64 heads", "index_scores", 64)
        yield Case(arch, "indexer, fp32, 64 heads", "index_scores", 64, "float32")
    yield Case("sm_90", "mask: scan", "scan_mask", mask=torch.bool)
    yield Case("sm_90", "mask: list", "list_tiles", mask=torch.bool)
    hopper = Case("sm_90", "", "mla_seesaw", 128, hopper=True)
    yield replace(hopper, label="Hopper, bf16, 1 split", splits=1)
    yield replace(hopper, label="Hopper, bf16")
    yield replace(hopper, label="Hopper, bf16, fp32 query", query="float32")
    yield replace(hopper, label="Hopper, bf16, mask", mask=torch.bool)
    yield replace(hopper, label="Hopper, bf16, mask, 1 split", mask=torch.bool, splits=1)
    yield replace(hopper, label="Hopper, bf16, 17 rows", rows=17)
    for page in (16, 32, 64):
        yield replace(hopper, label=f"Hopper, bf16, page {page}", page=page)
        yield replace(hopper, label=f"Hopper, bf16, page {page}, scheduled", page=page, splits=0)
    yield replace(hopper, label="Hopper, bf16, soft-cap", softcap=50.0)
    seen = replace(hopper, window=WINDOW, tokens=2)
    yield replace(seen, label="Hopper, bf16, window")
    yield replace(seen, label="Hopper, bf16, window, soft-cap, mask", softcap=50.0, mask=torch.bool)
    yield replace(seen, label="Hopper, bf16, page 16, window", page=16)
    yield replace(seen, label="Hopper, bf16, page 64, window, soft-cap, scheduled", softcap=50.0, page=64, splits=0)
    lists = replace(hopper, kernel="mla_seesaw_lists", listed=CHOSEN)
    for page in (0, 64):
        where = f", page {page}" if page else ""
        yield replace(lists, label=f"Hopper, bf16{where}, list", page=page)
        yield replace(lists, label=f"Hopper, bf16{where}, list, 1 split", page=page, splits=1)
    yield replace(lists, label="Hopper, bf16, page 64, two layers, list", page=64, layers=2)
    yield replace(lists, label="Hopper, bf16, list, mask", mask=torch.bool)
    yield replace(lists, label="Hopper, bf16, list, fp32 query", query="float32")
    yield replace(lists, label="Hopper, bf16, list, two tokens", tokens=2)
    yield replace(lists, label="Hopper, bf16, list, sinks, 1 split", sinks=True, splits=1)
    yield replace(lists, label="Hopper, bf16, list, window, soft-cap", window=WINDOW, softcap=50.0, tokens=2)
    fp8 = replace(hopper, kernel="mla_seesaw_fp8", cache="float8")
    yield replace(fp8, label="Hopper, fp8")
    yield replace(fp8, label="Hopper, fp8, 1 split", splits=1)
    yield replace(fp8, label="Hopper, fp8, page 1", page=1)
    yield replace(fp8, label="Hopper, fp8, page 64, scheduled", page=64, splits=0)
    yield replace(fp8, label="Hopper, fp8, page 64, scale per token, scheduled", page=64, splits=0, scales="token")
    yield replace(fp8, label="Hopper, fp8, page 64, two layers, scale per token", page=64, layers=2, scales="token")
    yield replace(fp8, label="Hopper, fp8, mask, scale per token", mask=torch.bool, scales="token")
    yield replace(fp8, label="Hopper, fp8, page 64, window, soft-cap, scale per token", page=64, window=WINDOW,
                  softcap=50.0, tokens=2, scales="token")  # fmt: skip
    rows656 = replace(fp8, page=64, scales="group")
    yield replace(rows656, label="Hopper, fp8, 656-byte rows, page 64")
    yield replace(rows656, label="Hopper, fp8, 656-byte rows, page 64, scheduled", splits=0)
    yield replace(rows656, label="Hopper, fp8, 656-byte rows, page 64, two layers, scheduled", splits=0, layers=2)
    yield replace(rows656, label="Hopper, fp8, 656-byte rows, contiguous, mask", page=0, mask=torch.bool)
    yield replace(rows656, label="Hopper, fp8, 8 groups, page 64, window, soft-cap", groups=8, window=WINDOW,
                  softcap=50.0, tokens=2)  # fmt: skip
    fp8_lists = replace(fp8, kernel="mla_seesaw_fp8_lists", listed=CHOSEN)
    yield replace(fp8_lists, label="Hopper, fp8, list")
    yield replace(fp8_lists, label="Hopper, fp8, page 64, scale per token, list", page=64, scales="token")
    yield replace(fp8_lists, label="Hopper, fp8, list, mask, scale per token", mask=torch.bool, scales="token")
    lists656 = replace(fp8_lists, page=64, scales="group")
    yield replace(lists656, label="Hopper, fp8, 656-byte rows, page 64, list")
    yield replace(lists656, label="Hopper, fp8, 656-byte rows, page 64, list, 1 split", splits=1)
    yield replace(lists656, label="Hopper, fp8, 656-byte rows, page 64, two layers, list", layers=2)
    yield replace(lists656, label="Hopper, fp8, 656-byte rows, contiguous, list", page=0)
    yield replace(lists656, label="Hopper, fp8, 8 groups, list, window, soft-cap", page=0, groups=8, window=WINDOW,
                  softcap=50.0, tokens=2)  # fmt: skip
    yield from without_rope(hopper, lists)
    yield from forms(hopper, lists, fp8)
    yield replace(hopper, label="Hopper, schedule", kernel="cut", page=64, splits=0)
    yield replace(hopper, label="Hopper, schedule: combine", kernel="combine_slots", page=64, splits=0)


def without_rope(hopper: Case, lists: Case) -> Iterator[Case]:
    """The Hopper kernel for rows that are keys and values at once: DeepSeek-V4's window, list, and other rows."""
    shared = {"rope": 0, "sinks": True, "rows": 64}
    plain, listed = replace(hopper, **shared), replace(lists, **shared, listed=512)
    yield replace(plain, label="Hopper, bf16, no rope, window, 1 split", window=128, splits=1)
    yield replace(plain, label="Hopper, bf16, no rope, mask", mask=torch.bool)
    yield replace(plain, label="Hopper, bf16, no rope, page 16", page=16)
    yield replace(plain, label="Hopper, bf16, no rope, page 64, window, scheduled", page=64, window=128, splits=0)
    yield replace(
        plain, label="Hopper, bf16, no rope, page 64, scheduled, 9 barriers", page=64, splits=0, form=(9, False)
    )
    yield replace(plain, label="Hopper, bf16, no rope, cluster of 2", rows=128, cluster=2)
    yield replace(listed, label="Hopper, bf16, no rope, list, 1 split", splits=1)
    yield replace(listed, label="Hopper, bf16, no rope, list, window", window=WINDOW)
    yield replace(listed, label="Hopper, bf16, no rope, page 64, two layers, list", page=64, layers=2)


def forms(hopper: Case, lists: Case, fp8: Case) -> Iterator[Case]:
    """What benchmarks/gpu/tune.py times the Hopper kernel against."""
    shared, both = "cluster of 2", "9 barriers, held query"
    for form, cluster, named in (
        ((9, False), 1, "9 barriers"), ((3, True), 1, "held query"), ((9, True), 1, both),
        ((3, False), 2, shared), ((9, False), 2, f"9 barriers, {shared}"), ((3, True), 2, f"held query, {shared}"),
        ((9, True), 2, f"{both}, {shared}"),
    ):  # fmt: skip
        half = replace(hopper, form=form, cluster=cluster)
        yield replace(half, label=f"Hopper, bf16, 1 split, {named}", splits=1)
        yield replace(half, label=f"Hopper, bf16, page 64, scheduled, {named}", page=64, splits=0)
        yield replace(half, label=f"Hopper, bf16, page 16, {named}", page=16)
        yield replace(half, label=f"Hopper, bf16, mask, {named}", mask=torch.bool)
    pair = replace(hopper, cluster=2, window=WINDOW, tokens=2)
    yield replace(pair, label="Hopper, bf16, window, soft-cap, mask, cluster of 2", softcap=50.0, mask=torch.bool)
    yield replace(pair, label="Hopper, bf16, page 64, window, scheduled, cluster of 2", page=64, splits=0)
    yield replace(lists, label="Hopper, bf16, page 64, list, held query", page=64, form=(3, True))
    yield replace(fp8, label="Hopper, fp8, page 64, scheduled, held query", page=64, splits=0, form=(3, True))
    yield replace(fp8, label="Hopper, fp8, 656-byte rows, page 64, held query", page=64, scales="group", form=(3, True))
