"""einops instead of view, transpose and expand, and its einsum for every product. Legal: the same operators."""

import torch
from einops import einsum, rearrange, repeat

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried, causal

EXPECTED = Absorbed()


class Attention(LatentLayer):
    def heads(self, kv):
        return rearrange(kv, "b t (h e) -> b h t e", h=self.dims.H)

    def join(self, k, r):
        return torch.cat([repeat(r, "b t r -> b h t r", h=self.dims.H), k], -1)

    def attend(self, q, k, v):
        q = torch.cat([q[..., self.dims.N :], q[..., : self.dims.N]], -1)
        scores = einsum(q, k, "b h s k, b h t k -> b h s t") * self.scale
        scores = scores.masked_fill(~causal(*scores.shape[-2:]), -torch.inf)
        return einsum(scores.softmax(-1), v, "b h s t, b h t v -> b h s v")


build = Attention
session = carried
