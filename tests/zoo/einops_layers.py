"""einops' Rearrange and EinMix as modules: the up-projection is one einsum with a weight [H,L,N+V]. Legal."""

from einops.layers.torch import EinMix, Rearrange

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


class Attention(LatentLayer):
    def __init__(self, dims):
        super().__init__(dims)
        d = dims
        self.mix = EinMix("b t l -> b t (h e)", weight_shape="h l e", h=d.H, l=d.L, e=d.N + d.V).to(d.dtype)
        self.mix.weight.data = self.random.tensor(*self.mix.weight.shape)
        self.split_heads = Rearrange("b t (h e) -> b h t e", h=d.H)

    def expand(self, c):
        return self.split_heads(self.mix(c)).split([self.dims.N, self.dims.V], -1)


build = Attention
session = carried
