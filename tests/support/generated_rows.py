"""Random attentions over rows that all heads, or groups of heads, share: every choice written out, and a module of it.

What varies is what published code varies: sizes, how rows are copied to heads, what queries went through, which columns
are values, sinks, masks, and whether the rows lie in a window and a compressed memory, of which a list names some.
``fault`` puts one step where the heads share no row that is key and value.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEGAL = "none"
FAULTS = (
    "other_columns", "rows_per_head", "norm_of_keys", "norm_of_values", "shifted_values", "values_scaled_by_token",
    "one_head_apart", "gate_per_head", "values_by_other_heads", "rows_changed_between",
)  # fmt: skip
SPELLINGS = ("repeat_kv", "expand", "broadcast", "einsum", "sdpa", "gqa", "interleave")
MASKS = ("none", "causal", "padded", "added", "window", "finite")
LISTS = ("none", "scatter", "scatter_none", "where")


@dataclass(frozen=True)
class RowsCase:
    """One attention. Sizes are the letters of mla_compile.core.dims; W columns a row has, C rows are compressed."""

    B: int = 2
    S: int = 1  # ten in a prompt, whose window shows few of its keys
    T: int = 6
    H: int = 4
    G: int = 1
    W: int = 8
    C: int = 0
    k: int = 3
    spelling: str = "repeat_kv"
    queries: str = "normed"
    values: str = "equal"
    sinks: str = "none"
    float32: bool = False
    half: bool = False
    mask: str = "none"
    listed: str = "none"
    indexer: bool = False
    fault: str = LEGAL
    seed: int = 0

    def __repr__(self) -> str:
        shown = (f for f in fields(self) if getattr(self, f.name) != f.default)
        return f"RowsCase({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"


def rows_case(seed: int, *, legal: bool) -> RowsCase:
    """The case of this number."""
    pick = random.Random(seed).choice
    fault = LEGAL if legal else pick(FAULTS)
    G = 2 if fault == "values_by_other_heads" else pick([1, 1, 1, 2])
    spelling = pick(SPELLINGS)
    if G > 1 and fault in ("values_by_other_heads", "rows_per_head", "gate_per_head", "one_head_apart"):
        spelling = "repeat_kv"
    fused = spelling in ("sdpa", "gqa")
    C = pick([0, 2, 5, 9])
    mask = pick(MASKS)
    prompt = mask == "window" and pick([False, True])
    S = 1 if spelling == "einsum" and mask in ("none", "padded") else pick([1, 1, 1, 2, 3])
    return RowsCase(
        B=pick([1, 2, 3]),
        S=10 if prompt else S,
        T=30 if prompt else pick([2, 5, 8]),
        H=G * pick([2, 3, 4]),
        G=G,
        W=pick([4, 6, 8]),
        C=C,
        k=pick([1, 2, 4]),
        spelling="repeat_kv" if G > 1 and spelling in ("broadcast", "einsum") else spelling,
        queries=pick(["normed", "rotated", "both", "given"]),
        values="equal" if prompt else pick(["equal", "equal", "first", "last", "middle"]),
        sinks="none" if fused else pick(["none", "joined", "before", "below_top", "in_exponent", "in_sum"]),
        float32=not fused and pick([False, False, True]),
        half=pick([False, False, True]),
        mask="added" if fused and mask == "finite" else mask,
        listed=pick(LISTS) if C and (prompt or mask in ("none", "added", "padded")) else "none",
        indexer=pick([False, True]),
        fault=fault,
        seed=seed,
    )


class SharedRows(nn.Module):
    """Queries x [B,S,H,W], rows [B,G,T,W] and compressed rows [B,G,C,W] in; attended [B,H,S,V] out."""

    def __init__(self, case: RowsCase) -> None:
        super().__init__()
        self.case = case
        random_ = torch.Generator().manual_seed(case.seed)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=random_, dtype=torch.float64))

        self.sinks, self.gate, self.angle = weight(case.H), weight(case.H, case.W), weight(case.W // 2)
        self.index_weights = weight(2)

    def forward(self, x: Tensor, rows: Tensor, compressed: Tensor | None = None) -> Tensor:
        case = self.case
        window = rows
        rows = rows if compressed is None else torch.cat([window, compressed], 2)
        k, v = self._sides(rows)
        mask = self._mask(x, window, compressed)
        return self._attend(self._queries(x).transpose(1, 2), k, v, mask) * (1 if case.S else 0)

    def _queries(self, x: Tensor) -> Tensor:
        if self.case.queries in ("normed", "both"):
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        if self.case.queries in ("rotated", "both"):
            angle = (torch.arange(x.shape[1], dtype=x.dtype) + 3.0)[:, None, None] * self.angle
            a, b = x.chunk(2, -1)
            x = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
        return x

    def _sides(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        case, fault, half = self.case, self.case.fault, self.case.W // 2
        cut = {"equal": (0, case.W), "first": (0, half), "last": (half, case.W), "middle": (1, case.W - 1)}[case.values]
        k, v = rows, rows[..., cut[0] : cut[1]]
        if fault == "other_columns":
            k, v = rows[..., :half], rows[..., half:]
        if fault == "norm_of_keys":
            k = F.rms_norm(k, (case.W,))
        if fault == "norm_of_values":
            v = F.rms_norm(v, v.shape[-1:])
        if fault == "shifted_values":
            v = v.roll(1, 2)
        if fault == "values_scaled_by_token":
            v = v * torch.arange(1.0, v.shape[2] + 1, dtype=v.dtype)[:, None]
        if fault == "rows_changed_between":
            k = torch.cat([k[:, :, :1] * 1.5, k[:, :, 1:]], 2)
        if fault == "values_by_other_heads":  # of two groups, keys change from head to head, values after some
            return k.repeat(1, case.H // case.G, 1, 1), v.repeat_interleave(case.H // case.G, 1)
        k, v = self._copied(k), self._copied(v)
        if fault == "rows_per_head":
            k = k + torch.arange(case.H, dtype=k.dtype)[:, None, None]
        if fault == "gate_per_head":
            k = k * self.gate[:, None]
        if fault == "one_head_apart":
            k = torch.cat([k.expand(-1, case.H, -1, -1)[:, :-1], k[:, -1:].flip(2)], 1)
        return k, v

    def _copied(self, rows: Tensor) -> Tensor:
        """[B,G,T,W] as each spelling hands it to the products."""
        case, times = self.case, self.case.H // self.case.G
        if case.spelling == "interleave":
            return rows.repeat_interleave(times, 1)
        if case.spelling in ("repeat_kv", "sdpa"):
            B, G, T, W = rows.shape
            return rows[:, :, None].expand(B, G, times, T, W).reshape(B, case.H, T, W)
        if case.spelling == "expand" and case.G == 1:
            return rows.expand(-1, case.H, -1, -1)
        if case.spelling == "expand":
            return rows.repeat_interleave(times, 1)
        return rows

    def _mask(self, x: Tensor, window: Tensor, compressed: Tensor | None) -> Tensor | None:
        case = self.case
        S, T = case.S, window.shape[2]
        keep = torch.ones(case.B, 1, S, T, dtype=torch.bool)
        past = torch.arange(T)[None, :] <= torch.arange(T - S, T)[:, None]
        if case.mask in ("causal", "finite", "added"):
            keep = keep & past
        if case.mask == "window":
            keep = keep & past & (torch.arange(T)[None, :] > torch.arange(T - S, T)[:, None] - 3)
        if case.mask == "padded":
            keep = keep & (torch.arange(T)[None, :] >= torch.arange(case.B)[:, None])[:, None, None]
        if case.mask == "none" and case.listed == "none":
            return None
        hidden = torch.finfo(x.dtype).min if case.mask == "finite" else float("-inf")
        mask = torch.zeros(case.B, 1, S, T, dtype=x.dtype).masked_fill(~keep, hidden)
        if compressed is None:
            return mask
        if case.listed == "none":
            return F.pad(mask, (0, compressed.shape[2]))
        return torch.cat([mask, self._listed(x, compressed[:, 0])], -1)

    def _listed(self, x: Tensor, keys: Tensor) -> Tensor:
        case, C = self.case, keys.shape[1]
        if case.indexer:
            scores = torch.einsum("bsjw,bcw->bsjc", x[:, :, :2], keys).relu() * 0.3
            scores = (scores * self.index_weights[:, None]).sum(2)
        else:
            scores = torch.einsum("bsw,bcw->bsc", x[:, :, 0], keys)
        index = scores.topk(min(case.k, C), -1).indices
        if case.listed == "scatter":
            return x.new_full((case.B, 1, case.S, C), float("-inf")).scatter(-1, index[:, None], 0.0)
        index = torch.where(index >= C - 1, torch.full_like(index, -1), index)  # one of the last is taken off
        if case.listed == "where":
            named = (index[..., None] == torch.arange(C)).any(-2)
            return torch.where(named, 0.0, float("-inf")).to(x.dtype)[:, None]
        safe = torch.where(index >= 0, index, torch.full_like(index, C))
        bias = x.new_full((case.B, 1, case.S, C + 1), float("-inf"))
        bias.scatter_(-1, safe[:, None], 0.0)
        return bias[..., :C]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        case = self.case
        q, scale = q[..., : k.shape[-1]], case.W**-0.5
        if case.spelling in ("sdpa", "gqa"):
            return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=k.shape[1] != q.shape[1])
        bare = case.spelling == "einsum" and k.shape[1] == v.shape[1] == 1
        scores = torch.einsum("bhsw,btw->bhst", q, k[:, 0]) if bare else self._heads(q) @ self._keys(k).mT
        scores = scores.reshape(case.B, case.H, case.S, -1) * scale
        scores = scores if mask is None else scores + mask
        probs = self._softmax(scores).to(v.dtype)
        return torch.einsum("bhst,btv->bhsv", probs, v[:, 0]) if bare else self._heads(probs) @ self._keys(v)

    def _heads(self, x: Tensor) -> Tensor:
        return x

    def _keys(self, x: Tensor) -> Tensor:
        return x

    def _softmax(self, scores: Tensor) -> Tensor:
        case, dtype = self.case, torch.float32 if self.case.float32 else None
        if case.sinks == "none":
            return scores.softmax(-1, dtype=dtype)
        if case.sinks in ("in_exponent", "in_sum"):
            return self._sink_in_other_words(scores.to(dtype or scores.dtype), self.sinks.reshape(1, -1, 1, 1))
        sink = self.sinks.reshape(1, -1, 1, 1).expand(case.B, -1, case.S, -1)  # in float32 where scores are not
        first = case.sinks == "before"
        both = torch.cat([sink, scores] if first else [scores, sink], -1)
        if case.sinks == "below_top":
            both = both - both.max(-1, keepdim=True).values
        probs = both.softmax(-1, dtype=dtype)
        return probs[..., 1:] if first else probs[..., :-1]

    def _sink_in_other_words(self, scores: Tensor, sink: Tensor) -> Tensor:
        if self.case.sinks == "in_exponent":
            return (scores - torch.logaddexp(scores.logsumexp(-1, keepdim=True), sink.to(scores.dtype))).exp()
        top = torch.maximum(scores.amax(-1, keepdim=True), sink.to(scores.dtype))
        e = (scores - top).exp()
        return e / (e.sum(-1, keepdim=True) + (sink - top).exp())


def in_half(module: SharedRows) -> SharedRows:
    """``module`` in bfloat16, with sinks in float32, as models keep them."""
    sinks = module.sinks.data.float()
    module = module.to(torch.bfloat16)
    module.sinks = nn.Parameter(sinks)
    return module


def inputs_of(case: RowsCase, scale: float = 1.0) -> list[Tensor]:
    """Random queries and rows."""
    random_ = torch.Generator().manual_seed(case.seed + 1)
    shapes = [(case.B, case.S, case.H, case.W), (case.B, case.G, case.T, case.W)]
    shapes += [(case.B, case.G, case.C, case.W)] if case.C else []
    return [torch.randn(*shape, generator=random_, dtype=torch.float64) * scale for shape in shapes]
