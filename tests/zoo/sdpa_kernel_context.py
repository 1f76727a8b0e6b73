"""torch.nn.attention.sdpa_kernel around the core, to choose a backend. Legal: it changes no number that is promised."""

from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


class Attention(LatentLayer):
    def attend(self, q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            return super().attend(q, k, v)


build = Attention
session = carried
