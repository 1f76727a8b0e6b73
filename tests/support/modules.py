"""A small zoo of attention over a latent cache, in many spellings. All sizes differ unless a test asks otherwise.

``MLA(...)(x, c, r, mask)`` is the decode step of one layer: x [B,S,D] are the new tokens, c [B,T,L] the cached latents,
r [B,T,R] the cached rotary keys (None where R = 0). The result is [B,S,H*V]. Everything is float64 and seeded.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.programs import seeded

H, L, N, R, V, D = 3, 8, 6, 4, 5, 10


class MLA(nn.Module):
    """``up``, ``order``, ``share`` and ``core`` choose a spelling; they do not change the numbers."""

    def __init__(
        self,
        *,
        H: int = H,
        L: int = L,
        N: int = N,
        R: int = R,
        V: int = V,
        up: str = "joint",
        order: str = "nope_rope",
        share: str = "expand",
        core: str = "sdpa",
        bias: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.H, self.L, self.N, self.R, self.V = H, L, N, R, V
        self.up, self.order, self.share, self.core = up, order, share, core
        self.scale = scale or 1 / math.sqrt(N + R)
        self.w_q = _parameter(H * (N + R), D, seed=1, scale=D**-0.5 * 3)
        w_k, w_v = seeded(H, N, L, seed=2), seeded(H, V, L, seed=2 if up == "tied" else 3)
        b_k, b_v = seeded(H, N, seed=4), seeded(H, V, seed=5)
        if up in ("joint", "lora", "merged", "int8"):
            w, b = torch.cat([w_k, w_v], 1).flatten(0, 1), torch.cat([b_k, b_v], 1).flatten()
        else:
            w, b = torch.cat([w_k.flatten(0, 1), w_v.flatten(0, 1)]), torch.cat([b_k.flatten(), b_v.flatten()])
        self.w = nn.Parameter(w / math.sqrt(L))
        self.b = nn.Parameter(b) if bias else None
        if up in ("lora", "merged"):
            self.down, self.back = _parameter(2, L, seed=6, scale=L**-0.5), _parameter(H * (N + V), 2, seed=7)
        if up == "int8":
            self.row = nn.Parameter(self.w.detach().abs().amax(1, keepdim=True) / 127)
            self.register_buffer("w8", (self.w.detach() / self.row.detach()).round().to(torch.int8))

    # The steps, each of which a test may replace.

    def latent(self, c: Tensor) -> Tensor:
        return c

    def rotary(self, r: Tensor | None) -> Tensor | None:
        return r

    def expand(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """K without its rotary part [B,H,T,N] and V [B,H,T,V]."""
        H, N, V = self.H, self.N, self.V
        B, T = c.shape[:2]
        b_k, b_v = (None, None) if self.b is None else self.b.split([H * N, H * V])
        if self.up == "block":
            k, v = F.linear(c, self.w, self.b).split([H * N, H * V], dim=-1)
        elif self.up == "two":
            k, v = F.linear(c, self.w[: H * N], b_k), F.linear(c, self.w[H * N :], b_v)
        elif self.up == "param":
            k, v = c @ self.w[: H * N].T, c @ self.w[H * N :].T
            k, v = (k, v) if b_k is None else (k + b_k, v + b_v)
        elif self.up == "per_head":  # [B,1,T,L] @ [H,L,N]
            w_k, w_v = self.w.split([H * N, H * V])
            k, v = c.unsqueeze(1) @ w_k.view(H, N, -1).mT, c.unsqueeze(1) @ w_v.view(H, V, -1).mT
            return (k, v) if b_k is None else (k + b_k.view(H, 1, N), v + b_v.view(H, 1, V))
        elif self.up == "einsum":
            w_k, w_v = self.w.split([H * N, H * V])
            k = torch.einsum("btl,hnl->bhtn", c, w_k.view(H, N, -1))
            return k, torch.einsum("btl,hvl->bhtv", c, w_v.view(H, V, -1))
        elif self.up == "tied":
            k = v = F.linear(c, self.w[: H * N], b_k)
        else:
            kv = self._joint(c).view(B, T, H, N + V).transpose(1, 2)
            k, v = kv.split([N, V], dim=-1)
            return k, v
        return k.view(B, T, H, N).transpose(1, 2), v.view(B, T, H, V).transpose(1, 2)

    def _joint(self, c: Tensor) -> Tensor:
        if self.up == "lora":
            return F.linear(c, self.w, self.b) + 0.5 * F.linear(F.linear(c, self.down), self.back)
        if self.up == "merged":
            return F.linear(c, self.w + 0.5 * (self.back @ self.down), self.b)
        if self.up == "int8":
            return F.linear(c, self.w8.to(self.row.dtype) * self.row, self.b)
        return F.linear(c, self.w, self.b)

    def join(self, k: Tensor, r: Tensor | None) -> Tensor:
        """K with the rotary key that all heads share: [B,H,T,N+R]."""
        if r is None:
            return k
        B, H, T, N = k.shape
        R = r.shape[-1]
        r = r.view(B, 1, T, R)
        if self.share == "assign":
            whole = k.new_empty(B, H, T, N + R)
            at_r, at_k = (N, 0) if self.order == "nope_rope" else (0, R)
            whole[..., at_r : at_r + R] = r
            whole[..., at_k : at_k + N] = k
            return whole
        if self.share == "repeat":
            r = r.repeat(1, H, 1, 1)
        elif self.share == "interleave":
            r = r.repeat_interleave(H, dim=1)
        else:
            r = r.expand(B, H, T, R)
        return torch.cat([k, r] if self.order == "nope_rope" else [r, k], dim=-1)

    def query(self, x: Tensor) -> Tensor:
        B, S = x.shape[:2]
        q = F.linear(x, self.w_q).view(B, S, self.H, self.N + self.R).transpose(1, 2)
        if self.order == "rope_nope":
            q = q.roll(self.R, -1)
        return q

    def spoil(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What illegal variants do to the expanded keys and values."""
        return k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return CORES[self.core](q, k, v, mask, self.scale)

    def forward(self, x: Tensor, c: Tensor, r: Tensor | None = None, mask: Tensor | None = None) -> Any:
        k, v = self.expand(self.latent(c))
        k, v = self.spoil(self.join(k, self.rotary(r)), v)
        out = self.attend(self.query(x), k, v, mask)
        return self.finish(out, x)

    def finish(self, out: Any, x: Tensor) -> Any:
        return out.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)


def _parameter(*shape: int, seed: int, scale: float = 1.0) -> nn.Parameter:
    return nn.Parameter(seeded(*shape, seed=seed) * scale)


def inputs(
    B: int = 2, S: int = 1, T: int = 7, L: int = L, R: int = R, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """x, c, r (left out where R is 0)."""
    made = [seeded(B, S, D, seed=11), seeded(B, T, L, seed=12)]
    made += [seeded(B, T, R, seed=13)] if R else []
    return [m.to(dtype) for m in made]


def causal(S: int, T: int, *, lead: tuple[int, ...] = (1, 1)) -> Tensor:
    """Boolean, True where query s may see key t: the last query sees all."""
    return torch.ones(S, T, dtype=torch.bool).tril(T - S).expand(*lead, S, T)


def padded(B: int, S: int, T: int) -> Tensor:
    """Causal, and sequence i begins with i padding tokens: the first queries of a prefill then see no key."""
    return causal(S, T) & (torch.arange(T) >= torch.arange(B)[:, None])[:, None, None, :]


def additive(mask: Tensor, dtype: torch.dtype = torch.float64, lowest: float | None = None) -> Tensor:
    """The boolean mask as a number to add."""
    hidden = torch.finfo(dtype).min if lowest is None else lowest
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, hidden)


# Attention cores: fn(q [B,H,S,K], k [B,H,T,K], v [B,H,T,V], mask (boolean or None), scale) -> [B,H,S,V].


def sdpa(q, k, v, mask, scale):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def matmul(q, k, v, mask, scale):
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


def einsum(q, k, v, mask, scale):
    scores = torch.einsum("bhsk,bhtk->bhst", q, k) * scale
    if mask is not None:
        scores = scores + torch.where(mask, 0.0, float("-inf"))
    return torch.einsum("bhst,bhtv->bhsv", scores.softmax(-1), v)


def heads_last(q, k, v, mask, scale):
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    scores = torch.einsum("bshk,bthk->bsht", q, k) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask.transpose(1, 2), float("-inf"))
    return torch.einsum("bsht,bthv->bshv", scores.softmax(-1), v).transpose(1, 2)


def bmm(q, k, v, mask, scale):
    """Batch and heads merged into one axis."""
    B, H, S, _ = q.shape
    T = k.shape[2]
    q, k, v = (x.reshape(B * H, x.shape[2], x.shape[3]) for x in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)) * scale
    if mask is not None:
        scores = scores.view(B, H, S, T).masked_fill(~mask, float("-inf")).view(B * H, S, T)
    return torch.bmm(scores.softmax(-1), v).view(B, H, S, -1)


def two_products(q, k, v, mask, scale, N=N):
    """Scores of the part without and the part with rotation, added up."""
    q_nope, q_rope = q.split([N, q.shape[-1] - N], -1)
    k_nope, k_rope = k.split([N, k.shape[-1] - N], -1)
    scores = (q_nope @ k_nope.mT + torch.einsum("bhsr,btr->bhst", q_rope, k_rope[:, 0])) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


def in_float32(q, k, v, mask, scale):
    """As Hugging Face writes it: the softmax in float32, whatever the model's dtype."""
    scores = q @ k.mT * scale
    if mask is not None:
        scores = scores + additive_like(mask, scores)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def additive_like(mask, scores):
    lowest = torch.finfo(scores.dtype).min
    return torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, lowest)


def dropout_off(q, k, v, mask, scale):
    scores = q @ k.mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return F.dropout(scores.softmax(-1), 0.3, training=False) @ v


def padded_values(q, k, v, mask, scale):
    """V as wide as K for kernels that want that, cut off afterwards."""
    wide = F.pad(v, (0, k.shape[-1] - v.shape[-1]))
    return F.scaled_dot_product_attention(q, k, wide, attn_mask=mask, scale=scale)[..., : v.shape[-1]]


CORES = {
    "sdpa": sdpa,
    "matmul": matmul,
    "einsum": einsum,
    "heads_last": heads_last,
    "bmm": bmm,
    "two_products": two_products,
    "in_float32": in_float32,
    "dropout_off": dropout_off,
    "padded_values": padded_values,
}
UPS = ("joint", "block", "two", "param", "per_head", "einsum", "lora", "merged", "int8")
EXACT = tuple(c for c in CORES if c != "in_float32")


# Cores whose softmax is written out. Heads, scale and mask as in the others.


def exponentials(q, k, v, mask, scale):
    """The textbook: shifted by the largest score of a row."""
    scores = (q @ k.mT * scale).masked_fill(~mask, float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def exponentials_by_max(q, k, v, mask, scale):
    """``max`` with its indices, the sum without keepdim, a reciprocal."""
    scores = (q @ k.mT * scale).masked_fill(~mask, float("-inf"))
    weights = torch.exp(scores - scores.max(-1, keepdim=True).values)
    return (weights * weights.sum(-1).unsqueeze(-1).reciprocal()) @ v


def log_sum_exp(q, k, v, mask, scale):
    scores = (q @ k.mT * scale).masked_fill(~mask, float("-inf"))
    return torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) @ v


WRITTEN_OUT = {f.__name__: f for f in (exponentials, exponentials_by_max, log_sum_exp)}
