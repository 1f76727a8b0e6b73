"""An if on a value of the latents, before they are expanded: a graph break in the middle of forward. Legal behind it."""

from tests.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, NotExported, carried

EXPECTED = Absorbed()
EXPORTED = NotExported("data-dependent")


class Attention(LatentLayer):
    def expand(self, c):
        if c.abs().max() > 100:
            c = c.clamp(-100, 100)
        return super().expand(c)


build = Attention
session = carried
