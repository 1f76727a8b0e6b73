"""DeepSeek's RoPE: a table of complex numbers made once, sliced by position, `view_as_complex`, heads last. On the
shared key only: legal."""

import torch

from tests.zoo.base import CAPACITY, Absorbed, Usual, carried

EXPECTED = Absorbed()


def turn(x, table):
    pairs = torch.view_as_complex(x.contiguous().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table.view(1, x.size(1), 1, -1)).flatten(3)


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        freqs = 0.3 ** torch.arange(dims.R // 2, dtype=dims.dtype)
        angles = torch.outer(torch.arange(CAPACITY, dtype=dims.dtype), freqs)
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def append(self, x, c_past, r_past):
        table = self.freqs_cis[c_past.shape[1] : c_past.shape[1] + x.shape[1]]
        c, r = self.down(x).split([self.dims.L, self.dims.R], -1)
        r = turn(r.unsqueeze(2), table).squeeze(2)
        return torch.cat([c_past, self.norm(c)], 1), torch.cat([r_past, r], 1)

    def queries(self, x, start):
        d = self.dims
        q = self.q(x).view(x.shape[0], x.shape[1], d.H, d.N + d.R)
        q_nope, q_rope = q.split([d.N, d.R], -1)
        q_rope = turn(q_rope, self.freqs_cis[start : start + x.shape[1]])
        return torch.cat([q_nope, q_rope], -1).transpose(1, 2)


build = Attention
session = carried
