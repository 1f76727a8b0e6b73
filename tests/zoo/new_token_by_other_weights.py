"""The past comes from the latent cache, but the newest token's K and V are projected from the hidden state directly.
Illegal: the last row is an image by another matrix."""

import torch

from tests.zoo.base import Refused, Usual, carried

EXPECTED = Refused("unsupported_op")


class Attention(Usual):
    def __init__(self, dims):
        super().__init__(dims)
        self.direct = self.random.linear(dims.D, dims.H * (dims.N + dims.V))

    def forward(self, x, c_past, r_past):
        d = self.dims
        start = c_past.shape[1]
        c, r = self.append(x, c_past, r_past)
        k_past, v_past = self.expand(c_past)
        new = self.direct(x).view(x.shape[0], x.shape[1], d.H, d.N + d.V).transpose(1, 2)
        k, v = torch.cat([k_past, new[..., : d.N]], 2), torch.cat([v_past, new[..., d.N :]], 2)
        return self.finish(self.attend(self.queries(x, start), self.join(k, r), v)), c, r


build = Attention
session = carried
