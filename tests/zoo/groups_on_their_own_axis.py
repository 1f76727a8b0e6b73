"""Grouped latent attention: groups of heads with a latent each, the group an axis of its own up to the output.
A group is a batch entry; the rotary key is shared by all groups."""

import torch

from tests.zoo.base import Absorbed, Carry, Usual, rope, rows

EXPECTED = Absorbed()
G = 2


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        d = dims
        self.q = self.random.linear(d.D, G * d.H * (d.N + d.R), scale=2.0)
        self.down = self.random.linear(d.D, G * d.L + d.R)
        self.k_up = self.random.weight(G, d.L, d.H, d.N)
        self.v_up = self.random.weight(G, d.L, d.H, d.V)
        self.out = self.random.linear(G * d.H * d.V, d.D)

    def forward(self, x, c_past, r_past):
        d, start = self.dims, c_past.shape[1]
        positions = torch.arange(start, start + x.shape[1])
        c, r = self.down(x).split([G * d.L, d.R], -1)
        c, r = torch.cat([c_past, c], 1), torch.cat([r_past, rope(r, positions)], 1)
        rows = c.unflatten(-1, (G, d.L))
        k, v = (torch.einsum("btgl,glhn->bghtn", rows, up) for up in (self.k_up, self.v_up))
        k = torch.cat([k, r[:, None, None].expand(-1, G, d.H, -1, -1)], -1)
        q = self.q(x).unflatten(-1, (G, d.H, -1)).permute(0, 2, 3, 1, 4)
        q = torch.cat([q[..., : d.N], rope(q[..., d.N :], positions)], -1)
        return self.out(self.attend(q, k, v).permute(0, 3, 1, 2, 4).flatten(2)), c, r

    def attend(self, q, k, v):
        mask = torch.arange(k.shape[3]) <= torch.arange(k.shape[3] - q.shape[3], k.shape[3])[:, None]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


build = Attention


def session(module):
    d = module.dims
    return Carry(module, *rows(module, G * d.L, d.R))
