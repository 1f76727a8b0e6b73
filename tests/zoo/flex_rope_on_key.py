"""flex_attention over keys that are rotated after the up-projection. Illegal for K, whatever the score_mod."""

import torch
from torch.nn.attention.flex_attention import flex_attention

from tests.support.latent_layer import LatentLayer
from tests.zoo.base import InPart, carried, rope

EXPECTED = InPart("values", "position_dependent")


class Attention(LatentLayer):
    def attend(self, q, k, v):
        return flex_attention(q, rope(k, torch.arange(k.shape[-2])), v)


build = Attention
session = carried
