"""transformers 5 and what derives from DeepSeek's remote code: K is an empty tensor filled by two slice copies, Q too.
Legal; on a graph that is not functional there is no edge between the up-projection and the attention."""

import torch

from tests.zoo.base import Absorbed, Usual, carried

EXPECTED = Absorbed()


class Attention(Usual):
    def join(self, k, r):
        d = self.dims
        whole = k.new_empty(k.shape[0], d.H, k.shape[2], d.N + d.R)
        whole[:, :, :, : d.N] = k
        whole[:, :, :, d.N :] = r.unsqueeze(1)
        return whole

    def queries(self, x, start):
        q = super().queries(x, start)
        whole = torch.empty_like(q)
        whole[..., : self.dims.N], whole[..., self.dims.N :] = q[..., : self.dims.N], q[..., self.dims.N :]
        return whole


build = Attention
session = carried
