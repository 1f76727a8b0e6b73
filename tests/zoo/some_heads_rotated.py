"""The shared key is rotated for some heads and read as it is by the others (NoPE heads). All but these columns of the
keys is absorbed: they are not the same for all heads."""

import torch

from tests.zoo.base import InPart, Usual, carried, causal, rope

EXPECTED = InPart("keys and values", "per_head_rope")
G = 1


class Attention(Usual):
    def append(self, x, c_past, r_past):
        c, r = self.down(x).split([self.dims.L, self.dims.R], -1)
        return torch.cat([c_past, self.norm(c)], 1), torch.cat([r_past, r], 1)

    def join(self, k, r):
        turned = rope(r, torch.arange(r.shape[1]))
        shared = torch.stack([turned] * G + [r] * (k.shape[1] - G), 1)
        return torch.cat([k, shared], -1)

    def queries(self, x, start):
        d = self.dims
        q = self.q(x).view(x.shape[0], x.shape[1], d.H, d.N + d.R).transpose(1, 2)
        turned = rope(q[:, :G, :, d.N :], torch.arange(start, start + x.shape[1]))
        return torch.cat([q[..., : d.N], torch.cat([turned, q[:, G:, :, d.N :]], 1)], -1)

    def attend(self, q, k, v):
        scores = (q @ k.mT * self.scale).masked_fill(~causal(q.shape[2], k.shape[2]), float("-inf"))
        return scores.softmax(-1) @ v


build = Attention
session = carried
