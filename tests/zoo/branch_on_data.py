"""An if on a value of the latents, in the method that expands them: Dynamo then compiles that method by itself, and the
core gets K and V as inputs. Refused for that reason."""

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import NotExported, Refused, carried

EXPECTED = Refused("graph_break")
EXPORTED = NotExported("data-dependent")


class Attention(LatentLayer):
    def expand(self, c):
        if c.abs().max() > 100:
            c = c.clamp(-100, 100)
        return super().expand(c)


build = Attention
session = carried
