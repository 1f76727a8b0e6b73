"""K starts as zeros for all heads, heads last; both parts are assigned into slices, the shared one by broadcasting.
Legal."""

import torch

from tests.zoo.base import Absorbed, Usual, carried

EXPECTED = Absorbed()


class Attention(Usual):
    def join(self, k, r):
        d = self.dims
        whole = torch.zeros(k.shape[0], k.shape[2], d.H, d.N + d.R, dtype=k.dtype)
        whole[..., d.N :] = r[:, :, None, :]
        whole[..., : d.N] = k.transpose(1, 2)
        return whole.transpose(1, 2)


build = Attention
session = carried
