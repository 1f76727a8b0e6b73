"""flex_attention without a score_mod or a mask: all keys are seen. Legal."""

from torch.nn.attention.flex_attention import flex_attention

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import Absorbed, carried

EXPECTED = Absorbed()


class Attention(LatentLayer):
    def attend(self, q, k, v):
        return flex_attention(q, k, v, scale=self.scale)


build = Attention
session = carried
