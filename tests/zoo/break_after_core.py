"""A value of the result is read in forward to choose what is done with it (a guard against overflow). Legal: the break
comes behind the attention."""

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, NotExported, carried

EXPECTED = Absorbed()
EXPORTED = NotExported("data-dependent")


class Attention(LatentLayer):
    def forward(self, x, c_past, r_past):
        y, c, r = super().forward(x, c_past, r_past)
        if y.abs().amax().item() > 1e6:
            y = y / y.abs().amax()
        return y, c, r


build = Attention
session = carried
