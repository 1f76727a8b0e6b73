"""The module that a :class:`tests.support.generator.Case` describes.

Called as ``module(x, positions, keep, state)``, it returns ``(y, *state)``: x [B,S,D], positions [S], keep [B,S,T]
(True: attend) or None, state a tuple of tensors. A module with a buffer cache keeps its state to itself.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import flash
from tests.support.flash import flash_attn_func
from tests.support.generator import Case

flash.register()


class GeneratedMLA(nn.Module):
    """The attention a case describes; weights are seeded by the case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = c = case
        generator = torch.Generator().manual_seed(c.seed)

        def weight(*shape: int, spread: float | None = None) -> nn.Parameter:
            scale = 1.0 / math.sqrt(shape[-1]) if spread is None else spread
            values = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
            return nn.Parameter(values, requires_grad=False)

        heads = c.H * c.groups * c.latents
        own = c.L * c.H if c.fault == "latent_per_head" else c.L
        latent = own * c.latents
        self.w_c = weight(latent, c.D)
        self.w_r = weight(c.R, c.D)
        self.w_q_down = weight(c.Q, c.D) if c.Q else None
        self.w_q = weight(heads * (c.N + c.R), c.Q or c.D, spread=1.3)
        self.w_k = weight(c.H, c.N, c.L)
        self.w_v = self.w_k if c.tied else weight(c.H, c.V, c.L)
        self.w_o = weight(c.D, heads * c.V)
        self.b_k, self.b_v = (weight(c.H, c.N), weight(c.H, c.V)) if c.bias else (None, None)
        self.lora_a, self.lora_b = (weight(2, c.L), weight(c.H * (c.N + c.V), 2)) if c.lora else (None, None)
        self.latent_vector = weight(own, spread=1.0)
        self.group_vectors = weight(c.latents, 1, own, spread=1.0)
        self.key_vector = weight(c.N, spread=1.0)
        self.key_heads = weight(c.H, 1, spread=1.0)
        self.sink = weight(c.H * c.groups, spread=1.0)
        self.kernel = weight(c.H * c.N, 1, 2)
        self.w_gate = weight(heads * c.V, c.D)
        self.beside_a, self.beside_b = weight(2, own), weight(c.H * (c.N + c.V), 2)
        self.beside_gate, self.beside_key = weight(1, own), weight(c.N, own)
        if c.weight == "dequant":
            for name, exact in (("k", self.w_k), ("v", self.w_v)):
                scale = exact.abs().amax(-1, keepdim=True) / 127 + 1e-6
                self.register_buffer(f"scale_{name}", scale)
                self.register_buffer(f"codes_{name}", (exact / scale).round().to(torch.int8))
        if c.cache in ("index_copy", "slice"):
            # Not zeros: what the mask hides must not reach the result.
            junk = torch.randn(c.B, c.capacity, latent + c.R, generator=generator, dtype=torch.float64)
            self.register_buffer("cache_c", junk[..., :latent].contiguous())
            self.register_buffer("cache_r", junk[..., latent:].contiguous())
        self.to(getattr(torch, c.dtype)).eval()

    def empty_state(self) -> tuple[Tensor, ...]:
        """What the first call takes as state."""
        c, latent = self.case, self.w_c.shape[0]
        if c.fault == "expanded_cache":
            return self.w_c.new_zeros(c.B, c.H, 0, c.N + c.R), self.w_c.new_zeros(c.B, c.H, 0, c.V)
        if c.cache == "joint":
            return (self.w_c.new_zeros(c.B, 0, latent + c.R),)
        if c.cache in ("tensors", "apart"):
            return self.w_c.new_zeros(c.B, 0, latent), self.w_c.new_zeros(c.B, 0, c.R)
        if c.cache == "head_axis":
            return self.w_c.new_zeros(c.B, 1, 0, latent), self.w_c.new_zeros(c.B, 1, 0, c.R)
        return (self.w_c.new_zeros(c.B, 0, c.D),) if c.cache == "none" else ()

    def forward(
        self, x: Tensor, positions: Tensor, keep: Tensor | None, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """x [B,S,D], positions [S], keep [B,S,T] or None, state as in :meth:`empty_state`."""
        c = self.case
        q = self._queries(x, positions)
        if c.fault == "expanded_cache":
            k, v = self._keys_values(*self._rows(x, positions), positions)
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
            state = (k, v)
        elif c.cache == "apart":
            k, v, state = self._joined_late(self._rows(x, positions), positions, state)
        else:
            latent, rope, state = self._cached(x, positions, state)
            everywhere = torch.arange(latent.shape[1], device=x.device)
            if c.rotate == "on_read":
                rope = self._rotate(rope, everywhere)
            if c.latents > 1:
                q, latent, rope, keep = self._by_groups(q, latent, rope, keep)
            k, v = self._keys_values(latent, rope, everywhere)
        if c.cut and keep is not None:  # the last place is never written to
            k, v, keep = k[:, :, :-1], v[:, :, :-1], keep[..., :-1]
        out, probs = self._attend(q, k, v, keep)
        if c.reads:  # the values of the first token, beside the attention
            out = out + 0.1 * v[:, :, :1].repeat_interleave(c.groups, 1)
        if c.latents > 1:
            out = out.unflatten(0, (-1, c.latents)).flatten(1, 2)
        out = out.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)
        if c.gate:
            out = out * torch.sigmoid(F.linear(x, self.w_gate))
        returned = ((probs,) if c.extra == "probs" else ()) + ((k,) if c.fault == "keys_returned" else ())
        return (self._linear("o", out, self.w_o), *state, *returned)

    def _linear(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The projection ``name`` of x [..., in]; another module may compute it otherwise."""
        return F.linear(x, weight, bias)

    def _by_groups(
        self, q: Tensor, latent: Tensor, rope: Tensor, keep: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The same where each group of heads, which has latents of its own, is a sequence of the batch."""
        groups = self.case.latents
        latent = latent.unflatten(-1, (groups, -1)).transpose(1, 2) * self.group_vectors
        rope = rope.unsqueeze(1).expand(-1, groups, -1, -1)
        keep = None if keep is None else keep.repeat_interleave(groups, 0)
        return q.unflatten(1, (groups, -1)).flatten(0, 1), latent.flatten(0, 1), rope.flatten(0, 1), keep

    # Queries, and the rows that are cached.

    def _queries(self, x: Tensor, positions: Tensor) -> Tensor:
        c = self.case
        if self.w_q_down is not None:
            x = self._linear("q_down", x, self.w_q_down)
        q = self._linear("q", x, self.w_q).unflatten(-1, (-1, c.N + c.R))
        if c.up == "unbind":
            q = torch.stack(q.unbind(2), 2)
        nope, rope = q.split([c.N, c.R], -1)
        rope = self._rotate(rope.transpose(1, 2), positions).transpose(1, 2)
        q = torch.cat([rope, nope] if c.join == "cat_reversed" else [nope, rope], -1)
        q = q * 0.7 if c.query_scale == "constant" else q
        if c.query_scale == "positions":
            q = q * (1 + positions.to(q.dtype)).log1p()[:, None, None]
        elif c.query_scale == "norm":
            q = F.rms_norm(q, q.shape[-1:], eps=1e-6)
        return q.transpose(1, 2)

    def _rows(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        c = self.case
        latent, rope = self._linear("kv_a", x, torch.cat([self.w_c, self.w_r])).split([self.w_c.shape[0], c.R], -1)
        if c.latent_norm:
            latent = F.rms_norm(latent, latent.shape[-1:], eps=1e-6)
        return latent, self._rotate(rope, positions) if c.rotate == "on_write" else rope

    def _cached(
        self, x: Tensor, positions: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        c = self.case
        if c.cache == "none":  # everything is computed from the hidden states of all tokens, each time
            x = torch.cat([state[0], x], 1)
            return (*self._rows(x, torch.arange(x.shape[1], device=x.device)), (x,))
        latent, rope = self._rows(x, positions)
        if c.cache == "joint":
            rows = torch.cat([state[0], torch.cat([latent, rope], -1)], 1)
            return rows[..., : latent.shape[-1]], rows[..., latent.shape[-1] :], (rows,)
        if c.cache == "tensors":
            new = torch.cat([state[0], latent], 1), torch.cat([state[1], rope], 1)
            return *new, new
        if c.cache == "head_axis":
            new = torch.cat([state[0], latent.unsqueeze(1)], 2), torch.cat([state[1], rope.unsqueeze(1)], 2)
            return new[0].squeeze(1), new[1].squeeze(1), new
        if c.cache == "index_copy":
            self.cache_c.index_copy_(1, positions, latent)
            self.cache_r.index_copy_(1, positions, rope)
        else:
            start = self.start
            self.cache_c[:, start : start + x.shape[1]] = latent
            self.cache_r[:, start : start + x.shape[1]] = rope
        return self.cache_c, self.cache_r, ()

    start = 0  # where a slice write begins: a Python number, as in code that counts tokens on the module

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates [..., T, R] by position."""
        c, width = self.case, x.shape[-1]
        return x if c.rope == "none" else rotate(x, positions, c.rope) if width else x

    # From rows to keys and values.

    def _joined_late(
        self, rows: tuple[Tensor, Tensor], positions: Tensor, past: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Keys and values of the cached tokens and of the new ones, made apart and joined; and what is cached."""
        cached = torch.arange(past[0].shape[1], device=positions.device)
        made = []
        for (latent, rope), at in [(past, cached), (rows, positions)] if len(cached) else [(rows, positions)]:
            rope = self._rotate(rope, at) if self.case.rotate == "on_read" else rope
            made.append(self._keys_values(latent, rope, at))
        k, v = (torch.cat(both, 2) for both in zip(*made, strict=True))
        return k, v, tuple(torch.cat(both, 1) for both in zip(past, rows, strict=True))

    def _keys_values(self, latent: Tensor, rope: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B,H,T,N+R] and values [B,H,T,V]."""
        c = self.case
        if c.latent_scale == "constant":
            latent = latent * 1.7
        elif c.latent_scale == "vector":
            latent = latent * self.latent_vector
        k, v = self._expand(latent)
        if c.beside != "none":
            k, v = self._beside(latent, k, v)
        if c.key_scale == "constant":
            k = k / 1.3
        elif c.key_scale == "vector":
            k = k * self.key_vector
        elif c.key_scale == "heads":
            k = k * self.key_heads
        k, v = self._faulty(k, v, positions)
        first = c.layout == "heads_first"
        if first:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        k = self._join(k, rope.unsqueeze(1 if first else 2), 1 if first else 2)
        return (k, v) if first else (k.transpose(1, 2), v.transpose(1, 2))

    def _expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """k [B,T,H,N] and v [B,T,H,V] from the latent."""
        c, (B, T, _) = self.case, latent.shape
        if c.fault == "latent_per_head":
            own = latent.view(B, T, c.H, c.L)
            return torch.einsum("bthl,hnl->bthn", own, self.w_k), torch.einsum("bthl,hvl->bthv", own, self.w_v)
        w_k, w_v = self._weight(self.w_k), self._weight(self.w_v)
        if c.up == "einsum":
            k, v = torch.einsum("btl,hnl->bthn", latent, w_k), torch.einsum("btl,hvl->bthv", latent, w_v)
        elif c.up == "batched":
            k = (latent.unsqueeze(1) @ w_k.transpose(1, 2)).transpose(1, 2)
            v = (latent.unsqueeze(1) @ w_v.transpose(1, 2)).transpose(1, 2)
        elif c.up == "raw":
            k = (latent @ w_k.reshape(-1, c.L).t()).view(B, T, c.H, c.N)
            v = (latent @ w_v.reshape(-1, c.L).t()).view(B, T, c.H, c.V)
        elif c.up == "two":
            k = self._linear("k", latent, w_k.flatten(0, 1)).unflatten(-1, (c.H, c.N))
            v = self._linear("v", latent, w_v.flatten(0, 1)).unflatten(-1, (c.H, c.V))
        elif c.up in ("select", "unbind"):  # keys and values are the two of one tensor
            kv = F.linear(latent, torch.stack([w_k, w_v]).flatten(0, 2)).view(B, T, 2, c.H, c.N)
            k, v = kv.unbind(2) if c.up == "unbind" else (kv[:, :, 0], kv.select(2, 1))
        else:
            return self._one_projection(latent, w_k, w_v)
        if self.lora_a is not None and self.lora_b is not None:
            b_k, b_v = self.lora_b.split([c.H * c.N, c.H * c.V])
            small = F.linear(latent, self.lora_a)
            k = k + 0.3 * F.linear(small, b_k).view(B, T, c.H, c.N)
            v = v + 0.3 * F.linear(small, b_v).view(B, T, c.H, c.V)
        return (k, v) if self.b_k is None or self.b_v is None else (k + self.b_k, v + self.b_v)

    def _beside(self, latent: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v with an image of other rows added: of a nonlinear branch, one with a gate, a key for all heads."""
        c = self.case
        if c.beside == "key":
            return k + torch.tanh(F.linear(latent, self.beside_key))[:, :, None], v
        rows = F.linear(latent, self.beside_a)
        more = F.linear(rows if c.beside == "gated" else torch.tanh(rows), self.beside_b).unflatten(-1, (c.H, -1))
        if c.beside == "gated":
            more = more * torch.sigmoid(F.linear(latent, self.beside_gate))[:, :, None]
        return k - more[..., : c.N], v + 0.5 * more[..., c.N :]

    def _one_projection(self, latent: Tensor, w_k: Tensor, w_v: Tensor) -> tuple[Tensor, Tensor]:
        """One linear for keys and values: per head [k|v], or all keys and then all values; or the other way round."""
        c, (B, T, _) = self.case, latent.shape
        weight, bias, widths = self._joined(w_k, w_v)
        kv = self._linear("kv", latent, weight, bias)
        if self.lora_a is not None and self.lora_b is not None:
            kv = kv + F.linear(F.linear(latent, self.lora_a), self.lora_b) * 0.3
        if c.up == "per_head":
            one, two = kv.view(B, T, c.H, -1).split(widths, -1)
        else:
            one, two = (p.view(B, T, c.H, -1) for p in kv.split([c.H * w for w in widths], -1))
        return (two, one) if c.values_first else (one, two)

    def _joined(self, w_k: Tensor, w_v: Tensor) -> tuple[Tensor, Tensor | None, list[int]]:
        """The weight and the bias of one linear for both, and how wide the first and the second of a head are."""
        c = self.case
        parts, biases = [w_k, w_v], [self.b_k, self.b_v]
        if c.values_first:
            parts, biases = parts[::-1], biases[::-1]
        widths = [p.shape[1] for p in parts]
        per_head = c.up == "per_head"
        weight = torch.cat(parts, 1).flatten(0, 1) if per_head else torch.cat([p.flatten(0, 1) for p in parts])
        bias = None
        if self.b_k is not None:
            bias = torch.cat(biases, 1).flatten() if per_head else torch.cat([b.flatten() for b in biases])
        return weight, bias, widths

    def _weight(self, weight: Tensor) -> Tensor:
        if self.case.weight == "dequant":
            codes, scale = (self.codes_k, self.scale_k) if weight is self.w_k else (self.codes_v, self.scale_v)
            return codes.to(weight.dtype) * scale
        return weight + 0.1 * weight.flip(0) if self.case.weight == "merged" else weight

    def _faulty(self, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """k [B,T,H,N], v [B,T,H,V] after the step that makes absorption illegal."""
        fault, (B, T, H, N) = self.case.fault, k.shape
        if fault == "rope_on_keys":
            k = rotate(k.transpose(1, 2), positions, "half").transpose(1, 2)
        elif fault == "norm_on_keys":
            k = F.rms_norm(k, (N,), eps=1e-6) if N > 1 else torch.tanh(k)
        elif fault == "tanh_on_keys":
            k = torch.tanh(k)
        elif fault == "silu_on_values":
            v = F.silu(v)
        elif fault == "roll_tokens":
            k = k.roll(1, 1)
        elif fault == "cumsum_tokens":
            k, v = k.cumsum(1), v.cumsum(1)
        elif fault == "conv_tokens":
            flat = F.pad(k.reshape(B, T, H * N).transpose(1, 2), (1, 0))
            k = F.conv1d(flat, self.kernel, groups=H * N).transpose(1, 2).reshape(B, T, H, N)
        return k, v

    def _join(self, k: Tensor, rope: Tensor, heads: int) -> Tensor:
        """k and the shared key (size 1 along ``heads``) along the last axis."""
        c = self.case
        if c.join == "assign":
            whole = k.new_empty(*k.shape[:-1], c.N + c.R)
            whole[..., : c.N] = k
            whole[..., c.N :] = rope
            return whole
        if c.share == "expand":
            rope = rope.expand(*k.shape[:-1], -1)
        elif c.share == "repeat":
            rope = rope.repeat(*[c.H if d == heads else 1 for d in range(4)])
        else:
            rope = rope.repeat_interleave(c.H, dim=heads)
        return torch.cat([rope, k] if c.join == "cat_reversed" else [k, rope], -1)

    # The core.

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """q [B,H G,S,N+R], k [B,H,T,N+R], v [B,H,T,V] -> out [B,H G,S,V], probabilities."""
        c = self.case
        factor = c.factor or 1.0 / math.sqrt(c.N + c.R)
        if c.core == "sdpa":
            return self._fused(q, k, v, keep, factor), q
        if c.groups > 1:
            k, v = (x[:, :, None].expand(-1, -1, c.groups, -1, -1).flatten(1, 2) for x in (k, v))
        if c.scale in ("query", "both"):
            q = q * (factor**0.5 if c.scale == "both" else factor)
        scores = self._product(q, k)
        if c.scale in ("scores", "both"):
            scores = scores * (factor**0.5 if c.scale == "both" else factor)
        elif c.scale == "divide":
            scores = scores / (1 / factor)
        if c.extra == "softcap":
            scores = 3.0 * torch.tanh(scores / 3.0)
        scores = self._masked(scores, keep, k)
        if c.scale == "after_mask":
            scores = scores * factor
        probs = self._softmax(scores).to(v.dtype)
        if c.core == "einsum_heads_last":
            return torch.einsum("bsht,bhtv->bhsv", probs, v), probs
        if c.core == "bmm":
            out = torch.bmm(probs, v.reshape(-1, *v.shape[2:]))
            return out.view(*q.shape[:3], -1), probs
        return (torch.einsum("bhst,bhtv->bhsv", probs, v) if c.core == "einsum" else probs @ v), probs

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, factor: float) -> Tensor:
        c = self.case
        scale = factor if c.scale == "argument" else 1.0 if c.scale == "query" else None
        q = q * factor if c.scale == "query" else q
        v = F.pad(v, (0, c.N + c.R - c.V)) if c.pad_values else v
        mask = None
        if keep is not None and c.mask in ("keep", "add", "add_min"):
            mask = self._axes(keep)
            mask = mask if c.mask == "keep" else self._additive(mask, q.dtype)
        if c.fault == "mask_from_keys":
            extra = (k[..., 0] * 0.5).repeat_interleave(c.groups, 1)[:, :, None]
            if mask is not None:
                extra = extra.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else mask + extra
            mask = extra
        causal = False  # by a branch: Dynamo breaks its graph where a comparison of symbolic sizes is used as a value
        if c.mask == "is_causal" and mask is None and q.shape[2] == k.shape[2]:
            causal = True
        if c.library == "flash" and mask is None:
            operands = (x.transpose(1, 2) for x in (q, k, v))
            return flash_attn_func(*operands, softmax_scale=scale, causal=causal).transpose(1, 2)[..., : c.V]
        if c.library == "xformers" and not causal:
            k, v = (x.repeat_interleave(c.groups, 1) for x in (k, v))
            if mask is not None:
                mask = self._additive(mask, q.dtype) if mask.dtype == torch.bool else mask
                mask = mask.expand(*q.shape[:3], k.shape[2])
            operands = (x.transpose(1, 2) for x in (q, k, v))
            attention = torch.ops.xformer.memory_efficient_attention_forward
            return attention(*operands, mask, 0.0, scale).transpose(1, 2)[..., : c.V]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, is_causal=causal, enable_gqa=c.groups > 1
        )
        return out[..., : c.V]

    def _product(self, q: Tensor, k: Tensor) -> Tensor:
        c = self.case
        if c.join == "sum" and c.R:
            parts = zip(q.split([c.N, c.R], -1), k.split([c.N, c.R], -1), strict=True)
            one, two = (self._one_product(a, b) for a, b in parts)
            return one + two
        return self._one_product(q, k)

    def _one_product(self, q: Tensor, k: Tensor) -> Tensor:
        core = self.case.core
        if core == "einsum_heads_last":
            return torch.einsum("bhsd,bhtd->bsht", q, k)
        if core == "einsum":
            return torch.einsum("bhsd,bhtd->bhst", q, k)
        if core == "bmm":
            return torch.bmm(q.reshape(-1, *q.shape[2:]), k.reshape(-1, *k.shape[2:]).transpose(1, 2))
        return q @ k.transpose(-1, -2)

    def _axes(self, keep: Tensor) -> Tensor:
        """keep [B,S,T] with the axes that the core's scores have, or fewer where one batch entry speaks for all."""
        c = self.case
        if c.core == "bmm":
            return keep.repeat_interleave(c.H * c.groups, 0)
        if not c.padded and c.mask_rank < 4 and c.core != "einsum_heads_last":
            return keep[0] if c.mask_rank == 2 else keep[:1]
        return keep.unsqueeze(2 if c.core == "einsum_heads_last" else 1)

    def _additive(self, keep: Tensor, dtype: torch.dtype) -> Tensor:
        hidden = torch.finfo(dtype).min if self.case.mask == "add_min" else -math.inf
        return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill(~keep, hidden)

    def _masked(self, scores: Tensor, keep: Tensor | None, k: Tensor) -> Tensor:
        c, kind = self.case, self.case.mask
        if c.fault == "mask_from_keys":
            bias = k[..., 0] * 0.5
            bias = bias.reshape(-1, 1, k.shape[2]) if c.core == "bmm" else bias[:, :, None]
            scores = scores + (bias.transpose(1, 2) if c.core == "einsum_heads_last" else bias)
        if keep is None:
            return scores
        keep = self._axes(keep)
        if kind in ("add", "add_min"):
            return scores + self._additive(keep, scores.dtype)
        if kind == "where":
            return torch.where(keep, scores, torch.finfo(scores.dtype).min)
        if kind == "compare":
            return scores.masked_fill(keep.to(scores.dtype) == 0, -math.inf)
        hidden = {"fill_min": torch.finfo(scores.dtype).min, "visible_fill": -5.0}.get(kind, -math.inf)
        return scores.masked_fill(~keep, hidden)

    def _softmax(self, scores: Tensor) -> Tensor:
        c = self.case
        if c.extra == "max":
            scores = scores - scores.amax(-1, keepdim=True)
        if c.softmax == "cast":
            scores = scores.float()
        if c.extra == "sink":
            column = self.sink.to(scores.dtype)
            column = column.repeat(c.B * c.latents)[:, None, None] if c.core == "bmm" else column[None, :, None, None]
            column = column.transpose(1, 2) if c.core == "einsum_heads_last" else column
            longer = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], -1)
            return longer.softmax(-1)[..., :-1]
        heads = {"bmm": 0, "einsum_heads_last": 2}.get(c.core, 1)
        return scores.softmax(heads if c.fault == "softmax_over_heads" else -1)


def rotate(x: Tensor, positions: Tensor, style: str) -> Tensor:
    """RoPE on [..., T, R]: ``half``, ``interleaved`` or ``complex``."""
    width = x.shape[-1]
    angle = positions.to(x.dtype)[:, None] * 10.0 ** -torch.arange(0, 1, 2 / width, dtype=x.dtype, device=x.device)
    if style == "complex":
        wide = x if x.dtype == torch.float64 else x.float()
        turn = torch.polar(torch.ones_like(angle, dtype=wide.dtype), angle.to(wide.dtype))
        pairs = torch.view_as_complex(wide.reshape(*x.shape[:-1], -1, 2).clone())
        return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)
    cos, sin = angle.cos(), angle.sin()
    if style == "half":
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
