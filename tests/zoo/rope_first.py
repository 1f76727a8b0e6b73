"""The rotary part comes first everywhere: in the down-projection [rope|latent], in K and in Q. Legal."""

import torch

from tests.zoo.base import Absorbed, Usual, carried, rope

EXPECTED = Absorbed()


class Attention(Usual):
    def append(self, x, c_past, r_past):
        start = c_past.shape[1]
        r, c = torch.split(self.down(x), [self.dims.R, self.dims.L], dim=2)
        r = rope(r, torch.arange(start, start + x.shape[1]))
        return torch.cat((c_past, self.norm(c)), dim=1), torch.cat((r_past, r), dim=1)

    def join(self, k, r):
        return torch.cat([r.unsqueeze(1).repeat(1, k.size(1), 1, 1), k], dim=-1)

    def queries(self, x, start):
        d = self.dims
        q = self.q(x).view(x.shape[0], x.shape[1], d.H, d.R + d.N).transpose(1, 2)
        return torch.cat([rope(q[..., : d.R], torch.arange(start, start + x.shape[1])), q[..., d.R :]], -1)


build = Attention
session = carried
