"""Vision habits: caches are [B,L,T] and the up-projection is `W @ c`, so that K comes out as [B,H,N,T], already
transposed for the scores. Legal."""

import torch

from tests.zoo.base import Absorbed, Carry, Layer, causal, rope

EXPECTED = Absorbed()


class Attention(Layer):
    def __init__(self, dims):
        super().__init__(dims)
        self.w_k = self.random.weight(dims.H, dims.N, dims.L)
        self.w_v = self.random.weight(dims.H * dims.V, dims.L)

    def forward(self, x, c_past, r_past):
        d = self.dims
        B, S, _ = x.shape
        positions = torch.arange(c_past.shape[2], c_past.shape[2] + S)
        c, r = self.down(x).split([d.L, d.R], -1)
        c = torch.cat([c_past, self.norm(c).transpose(1, 2)], 2)
        r = torch.cat([r_past, rope(r, positions).transpose(1, 2)], 2)
        T = c.shape[2]
        k = torch.matmul(self.w_k, c.unsqueeze(1))
        v = torch.matmul(self.w_v, c).view(B, d.H, d.V, T)
        k = torch.cat([k, r.unsqueeze(1).expand(-1, d.H, -1, -1)], dim=2)
        q = self.q(x).view(B, S, d.H, d.N + d.R).transpose(1, 2)
        q = torch.cat([q[..., : d.N], rope(q[..., d.N :], positions)], -1)
        scores = (q @ k * self.scale).masked_fill(~causal(S, T), float("-inf"))
        o = v @ scores.softmax(-1).transpose(2, 3)
        return self.out(o.permute(0, 3, 1, 2).reshape(B, S, d.H * d.V)), c, r


build = Attention


def session(module):
    d = module.dims
    return Carry(module, *(torch.zeros(d.B, w, 0, dtype=d.dtype) for w in (d.L, d.R)))
