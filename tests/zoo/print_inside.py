"""A logged shape, forgotten before the core: Dynamo breaks the graph there. Refused, with the break as reason."""

import logging

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, Refused, carried

EXPECTED = Refused("graph_break")
EXPORTED = Absorbed()


class Attention(LatentLayer):
    def attend(self, q, k, v):
        logging.getLogger("model").debug("keys %s", k.shape)
        return super().attend(q, k, v)


build = Attention
session = carried
