"""A value is read after the core to choose what is done with the result. Legal: the break comes behind the attention."""

from tests.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, NotExported, carried

EXPECTED = Absorbed()
EXPORTED = NotExported("data-dependent")


class Attention(LatentLayer):
    def attend(self, q, k, v):
        o = super().attend(q, k, v)
        if o.abs().amax().item() > 1e6:
            o = o / o.abs().amax()
        return o


build = Attention
session = carried
