"""K and V are allocated, and a loop writes head after head into them: `k[:, h, :, :N] = ...`. Legal: in the end
every head is written, and nothing is left of what was there before."""

from tests.zoo.base import Absorbed, Usual, carried

EXPECTED = Absorbed()


class Attention(Usual):
    def forward(self, x, c_past, r_past):
        d, start = self.dims, c_past.shape[1]
        c, r = self.append(x, c_past, r_past)
        (B, T), per_head = c.shape[:2], self.up.weight.view(d.H, d.N + d.V, d.L)
        k = c.new_empty(B, d.H, T, d.N + d.R)
        v = c.new_zeros(B, T, d.H, d.V)
        for h in range(d.H):
            k[:, h, :, : d.N] = c @ per_head[h, : d.N].T
            v[:, :, h] = c @ per_head[h, d.N :].T
        k[..., d.N :] = r[:, None]
        return self.finish(self.attend(self.queries(x, start), k, v.transpose(1, 2))), c, r


build = Attention
session = carried
