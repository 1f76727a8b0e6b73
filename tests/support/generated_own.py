"""Random attentions whose layer keeps K and V per head in memory of its own: how it is held, written, read, emptied."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.support.generated_module import GeneratedMLA
from tests.support.generator import FAULTS, LEGAL, Case, cases

HELD = ("buffer", "attribute", "dict", "made")
WRITTEN = ("slice", "copy", "index_copy", "index_put", "pairs", "slice_replaces", "index_copy_replaces")
EMPTIED = ("zero", "fill", "assign", "set", "first_call_zero", "first_call_set", "not")


@dataclass(frozen=True)
class OwnCase:
    """A case, and what becomes of its K and V.

    Attributes:
        held: a registered buffer, a plain attribute, an item of a dict, or made by the first call.
        written: the operator; or one that returns a copy, which replaces the tensor.
        heads_last: K is held as [B,T,H,N+R].
        more: sequences that there is room for, and are not used.
        joined: one tensor holds K and V side by side.
        whole: all of the memory is read, and masked; else its beginning.
        emptied: before the second session, or by the first call of each.
        back: the second session begins so many tokens before the end of the first, where it was not emptied.
    """

    case: Case
    held: str
    written: str
    heads_last: bool
    more: int
    joined: bool
    whole: bool
    emptied: str
    back: int


@st.composite
def own_cases(draw: st.DrawFn) -> OwnCase:
    def pick(*options: Any) -> Any:
        return draw(st.sampled_from(options))

    case = draw(cases())
    fault = case.fault if case.fault not in ("expanded_cache", "keys_returned") else LEGAL
    assert fault in (LEGAL, *FAULTS)
    masks = ("keep", "add", "add_min") if case.mask in ("none", "is_causal") else (case.mask,)
    case = replace(
        case, fault=fault, cache="tensors", rotate="on_write", cut=False, mask=pick(*masks), door="optimize",
        steps=2, chunk=min(case.chunk, 2), latents=1, reads=False,
    )  # fmt: skip
    written, held = pick(*WRITTEN), pick(*HELD)
    return OwnCase(
        case=case,
        held=held,
        written=written,
        # Two tensors of positions choose neighbouring axes.
        heads_last=draw(st.booleans()) or written == "pairs",
        more=0 if held == "made" and written == "pairs" else pick(0, 1, 2),
        joined=draw(st.booleans()),
        whole=draw(st.booleans()),
        emptied="assign" if held == "made" else pick(*EMPTIED),
        back=draw(st.integers(0, case.T + 2)),
    )


class OwnMLA(GeneratedMLA):
    """Called as ``module(x, start, keep)``: x [B,S,D], the number of tokens before them, keep [B,S,T]; returns y."""

    def __init__(self, own: OwnCase) -> None:
        super().__init__(own.case)
        self.own = own
        self.caches: Any = {} if own.held == "dict" else None
        self.put([None] * self.count if own.held == "made" else self.zeros())

    @property
    def count(self) -> int:
        return 1 if self.own.joined else 2

    def zeros(self) -> list[Tensor]:
        c, own = self.case, self.own
        widths = [c.N + c.R + c.V] if own.joined else [c.N + c.R, c.V]
        room = 2 * (c.T + c.steps * c.chunk) + 1
        outer = (c.B + own.more, room, c.H) if own.heads_last else (c.B + own.more, c.H, room)
        return [self.w_c.new_zeros(*outer, width) for width in widths]

    def put(self, caches: list[Any]) -> None:
        """The caches, where this layer holds them."""
        for index, cache in enumerate(caches):
            if self.own.held == "dict":
                self.caches[f"kv{index}"] = cache
            elif self.own.held == "buffer" and f"kv{index}" not in self._buffers:
                self.register_buffer(f"kv{index}", cache)
            else:
                setattr(self, f"kv{index}", cache)

    def held(self) -> list[Any]:
        if self.own.held == "dict":
            return [self.caches[f"kv{index}"] for index in range(self.count)]
        return [getattr(self, f"kv{index}") for index in range(self.count)]

    def empty(self) -> None:
        """Before another session."""
        if self.own.emptied == "assign":
            self.put([None] * self.count if self.own.held == "made" else self.zeros())
        self.clear(self.own.emptied)

    def clear(self, how: str) -> None:
        """Writes zeros over all of the memory, in one of three ways."""
        for cache in self.held() if how in ("zero", "fill", "set") else ():
            if how == "set":
                cache[...] = 0
            else:
                cache.zero_() if how == "zero" else cache.fill_(0)

    def forward(self, x: Tensor, start: int, keep: Tensor) -> Tensor:  # type: ignore[override]  # another protocol
        c = self.case
        B, S, _ = x.shape
        positions = torch.arange(start, start + S, device=x.device)
        q = self._queries(x, positions)
        k, v = self._keys_values(*self._rows(x, positions), positions)
        if self.held()[0] is None:
            self.put(self.zeros())
        if start == 0:
            self.clear(self.own.emptied.removeprefix("first_call_") if "first_call" in self.own.emptied else "not")
        new = [torch.cat([k, v], -1)] if self.own.joined else [k, v]
        found = [self._written(index, one, start) for index, one in enumerate(new)]
        k, v = found[0].split([c.N + c.R, c.V], -1) if self.own.joined else found
        out, _ = self._attend(q, k, v, keep if self.own.whole else keep[..., : start + S])
        return self._linear("o", out.transpose(1, 2).reshape(B, S, -1), self.w_o)

    @property
    def tokens(self) -> int:
        """The axis of a cache that counts tokens."""
        return 1 if self.own.heads_last else 2

    def _written(self, index: int, new: Tensor, start: int) -> Tensor:
        """What is read of a cache [B,H,T,W], with ``new`` [B,H,S,W] from position ``start`` on."""
        cache = self._write(self.held()[index], new, start)
        if self.own.written.endswith("replaces"):
            if self.own.held == "dict":
                self.caches[f"kv{index}"] = cache
            else:
                setattr(self, f"kv{index}", cache)
        return self._read(cache, len(new), start + new.shape[2])

    def _write(self, cache: Tensor, new: Tensor, start: int) -> Tensor:
        """``cache`` with the new tokens, or a copy that has them."""
        own, (B, _, S, _) = self.own, new.shape
        positions = torch.arange(start, start + S, device=new.device)
        new = new.transpose(1, 2) if own.heads_last else new
        at = (slice(None),) * (self.tokens - 1)
        if own.written == "slice":
            cache[(slice(B), *at, slice(start, start + S))] = new
        elif own.written == "copy":
            cache.narrow(0, 0, B).narrow(self.tokens, start, S).copy_(new)
        elif own.written == "index_copy":
            cache[:B].index_copy_(self.tokens, positions, new)
        elif own.written == "index_put":
            cache[(slice(B), *at, positions)] = new
        elif own.written == "pairs":
            cache[torch.arange(B)[:, None], positions[None].expand(B, -1)] = new
        elif own.written == "slice_replaces":
            cache = cache.slice_scatter(cache[:B].slice_scatter(new, self.tokens, start, start + S), 0, 0, B)
        else:
            cache = cache.slice_scatter(cache[:B].index_copy(self.tokens, positions, new), 0, 0, B)
        return cache

    def _read(self, cache: Tensor, sequences: int, length: int) -> Tensor:
        whole = self.own.whole
        read = cache[:sequences] if whole else cache.narrow(0, 0, sequences).narrow(self.tokens, 0, length)
        return read.transpose(1, 2) if self.own.heads_last else read


def visible(own: OwnCase, module: OwnMLA, start: int, count: int) -> Tensor:
    """[B,S,T], True where a query may see a key: causal, and not left padding."""
    case = own.case
    keys = torch.arange(module.zeros()[0].shape[module.tokens])
    keep = (keys <= torch.arange(start, start + count)[:, None]).expand(case.B, -1, -1)
    first = torch.arange(case.B) % 3 if case.padded else torch.zeros(case.B, dtype=torch.long)
    return keep & (keys >= first[:, None, None])
